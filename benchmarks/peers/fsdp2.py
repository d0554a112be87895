"""FSDP2 that keeps the parameters whole between forward and backward: each block and the root are sharded."""

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from benchmarks.peers.trainer import Factory, Loop, Options, Trainer, trainable


class _Sharded(Loop):
    def full_parameters(self) -> list[Tensor]:
        """Gather the parameters from all ranks; collective."""
        return [
            parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            for parameter in super().full_parameters()
        ]


def build(factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Shard what is trained; frozen parameters stay whole, so that they need not travel."""
    model = factory()
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    for module in (*_blocks(model), model):
        fully_shard(module, reshard_after_forward=False, ignored_params=frozen)
    return _Sharded(model, model, optimizer_class(trainable(model), **options))


def _blocks(model: nn.Module) -> list[nn.Module]:
    blocks = model.get_submodule("blocks")
    return [block for block in blocks.children() if trainable(block)]
