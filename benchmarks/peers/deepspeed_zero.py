"""DeepSpeed ZeRO-1 and ZeRO-2 with their defaults, on CPU tensors and the ranks' own Gloo group."""

import os
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.peers.trainer import Factory, Options, Trainer, size_of, size_of_state, trainable


class _Engine:
    def __init__(self, model: nn.Module, engine: Any) -> None:
        self._model = model
        self._engine = engine

    def step(self, batch: Tensor) -> None:
        self._engine.backward(self._engine(batch))
        self._engine.step()

    def settle(self) -> None:
        pass

    def full_parameters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._model.parameters()]

    def state_bytes(self) -> int:
        """The state, and the copies of this rank's parameters that the inner optimizer works on."""
        inner = self._engine.optimizer.optimizer
        copies = (parameter for group in inner.param_groups for parameter in group["params"])
        return size_of_state(inner) + size_of(copies)


def build(stage: int, factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Build an engine of that ZeRO stage around the user's own optimizer."""
    deepspeed = library()
    model = factory()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer_class(trainable(model), **options),
        config=_config(stage),
        dist_init_required=False,
    )
    return _Engine(model, engine)


def _config(stage: int) -> dict[str, Any]:
    # It would clip by default, which no other entry does. The batch size is for its own reports only.
    zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    return {**zero, "gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 1}


def library() -> Any:
    """Import it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    import deepspeed

    # Its shared-memory collectives serve inference only, yet a compiler would be started here to build them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
