"""FairScale: OSS, which shards the state, under ShardedDDP, which reduces each gradient to its owner."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from benchmarks.peers.trainer import Factory, Loop, Options, Trainer, trainable


class _Sharded(Loop):
    def step(self, batch: Tensor) -> None:
        """Zero, forward, backward, step."""
        # Gradients are views of its buckets. Set to none, as is torch's habit today, they leave them: the buckets would
        # send the first step's gradients for ever.
        self._optimizer.zero_grad(set_to_none=False)
        self._wrapped(batch).backward()
        self._optimizer.step()


def build(factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Build both with their defaults."""
    oss, sharded_ddp = library()
    model = factory()
    optimizer = oss(trainable(model), optimizer_class, **options)
    return _Sharded(model, sharded_ddp(model, optimizer), optimizer)


def library() -> tuple[Any, Any]:
    """Import it: the optimizer and the wrapper."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    return OSS, ShardedDataParallel
