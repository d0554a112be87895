"""What stands in `.grad` of parameters whose gradients were reduced: one `ShardedGradient` per parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import Tensor

from zerostep.step.bucket_shards import BucketShards
from zerostep.step.sharded_grad import ShardedGradient


class StandIns:
    """Puts stand-ins into `.grad` and takes out what autograd has added to them.

    `ops` does what users do to a stand-in; it is held weakly, so that a parameter does not keep its optimizer alive.
    """

    def __init__(self, buckets: BucketShards, ops: ref[Any]) -> None:
        self._buckets, self._ops = buckets, ops
        self._stand_ins: dict[int, ShardedGradient] = {}
        self._removed: set[int] = set()

    def place(self, params: Iterable[int]) -> None:
        """Replace `.grad`, which is only this rank's own gradient, or nothing."""
        for index in params:
            self.place_one(index)

    def place_one(self, index: int) -> None:
        """The same for one parameter; called for each gradient."""
        param, stand_in = self._buckets.params[index], self._stand_ins.get(index)
        if stand_in is None:
            stand_in = self._stand_ins[index] = ShardedGradient(param, index, self._ops)
        param.grad = stand_in

    def take_grad(self, index: int) -> tuple[Tensor | None, bool]:
        """The gradient that autograd has just made, and whether it adds to one that was reduced before."""
        grad = self._buckets.params[index].grad
        if not isinstance(grad, ShardedGradient):
            return grad, False
        if grad is not self._stand_ins.get(index):
            raise RuntimeError(
                "another ShardedOptimizer holds the gradient of this parameter: drop it before building a new one"
            )
        return grad.take_arrived(), True

    def remove(self, index: int) -> None:
        """Make room for DDP, which must find no stand-in when it accumulates; `was_removed` remembers it."""
        param = self._buckets.params[index]
        if isinstance(param.grad, ShardedGradient):
            self._removed.add(index)
            param.grad = None

    def was_removed(self, index: int) -> bool:
        """Whether a stand-in was removed for DDP, so that the next gradient adds to one that was reduced before."""
        return index in self._removed

    def forget_removed(self, index: int | None = None) -> None:
        """Forget that a stand-in was removed; all of them if none is named."""
        if index is None:
            self._removed.clear()
        else:
            self._removed.discard(index)
