"""Ours: the sharded optimizer that reduces the gradients of a bare model itself, or is the hook of a DDP one."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from benchmarks.peers.trainer import Factory, Loop, Options, Trainer


class _Sharded(Loop):
    def __init__(self, model: nn.Module, wrapped: nn.Module, optimizer: Any, clips: bool) -> None:
        super().__init__(model, wrapped, optimizer)
        self.clips = clips

    def _clip(self, max_norm: float) -> None:
        self._optimizer.clip_grad_norm_(max_norm)

    def settle(self) -> None:
        """Wait for parameters on their way."""
        self._optimizer.synchronize()

    def full_parameters(self) -> list[Tensor]:
        """Return the parameters once they have arrived."""
        self.settle()
        return super().full_parameters()


@dataclass(frozen=True)
class Sharded:
    """How to build it: when parameters are waited for and updated, under DDP or not, with which kernels and sums."""

    gather: Literal["step", "forward"]
    under_ddp: bool = False
    fused: bool = False
    bucket_mb: float | None = None
    reduction: Literal["scatter", "all"] = "scatter"
    update: Literal["step", "backward"] = "step"
    compiled: bool = False

    def build(self, factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
        """Build it, otherwise with its defaults."""
        model = factory()
        wrapped: nn.Module = DDP(model) if self.under_ddp else model
        chosen = {**options, "fused": True} if self.fused else options
        ours = {
            "gather": self.gather,
            "bucket_mb": self.bucket_mb,
            "reduction": self.reduction,
            "update": self.update,
            "compile": self.compiled,
        }
        optimizer = _class()(wrapped, optimizer_class, **ours, **chosen)
        return _Sharded(model, wrapped, optimizer, clips=self.update == "step")


def _class() -> Any:
    import zerostep

    return zerostep.ShardedOptimizer  # type: ignore[attr-defined,unused-ignore]
