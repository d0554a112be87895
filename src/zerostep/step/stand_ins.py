"""What stands in `.grad` of parameters whose gradients were reduced: a `ShardedGradient`, or a whole sum."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from zerostep.dtensors import local_grad
from zerostep.step.bucket_shards import BucketShards
from zerostep.step.sharded_grad import ShardedGradient


class StandIns:
    """Puts stand-ins or sums into `.grad` and takes out what autograd or the user has put there.

    `ops` does what users do to a stand-in; it is held weakly, so that a parameter does not keep its optimizer alive.
    """

    def __init__(self, buckets: BucketShards, ops: ref[Any]) -> None:
        self._buckets, self._ops = buckets, ops
        self._stand_ins: dict[int, ShardedGradient] = {}
        # Parameters inside DDP whose stand-in was taken out, with what DDP has put there since.
        self._lifted: dict[int, Callable[[], Tensor | None]] = {}
        self._whole: dict[int, ref[Tensor]] = {}

    def place(self, params: Iterable[int]) -> None:
        """Replace `.grad`, which is only this rank's own gradient, or nothing."""
        all_params = self._buckets.params
        for index in params:
            if type(all_params[index].grad) is not ShardedGradient:
                self.place_one(index)

    def place_one(self, index: int) -> None:
        """The same for one parameter; called for each gradient."""
        param, stand_in = self._buckets.params[index], self._stand_ins.get(index)
        if stand_in is None:
            stand_in = self._stand_ins[index] = ShardedGradient(param, index, self._ops)
        stand_in.take_arrived()  # of a gradient that the user has replaced
        param.grad = stand_in

    def place_whole(self, index: int, grad: Tensor) -> None:
        """Set `.grad` to a whole sum, and remember that it is one: the user may edit it in place, or replace it."""
        before = self._buckets.params[index].grad
        further = before.take_arrived() if type(before) is ShardedGradient else None
        self._buckets.params[index].grad = grad if further is None else grad + further  # of a pass that has begun
        self._whole[index] = ref(grad)

    def take_grad(self, index: int) -> tuple[Tensor | None, bool]:
        """This rank's own gradient, if there is one, and whether it adds to one that was reduced before.

        That of a DTensor is brought to the parameter's placements, which may be a collective over its mesh.
        """
        param = self._buckets.params[index]
        grad = param.grad
        if type(grad) is not ShardedGradient:
            return None if grad is None else local_grad(grad, param), False
        if grad is not self._stand_ins.get(index):
            raise RuntimeError(
                "another ShardedOptimizer holds the gradient of this parameter: drop it before building a new one"
            )
        arrived = grad.take_arrived()
        return None if arrived is None else local_grad(arrived, param), True

    def take_all(self, params: Sequence[int]) -> list[Tensor | None]:
        """This rank's own gradients of some parameters, whose place stand-ins take."""
        all_params = self._buckets.params
        grads: list[Tensor | None] = [all_params[index].grad for index in params]
        if not {Tensor}.issuperset(map(type, grads)):
            grads = [self.take_grad(index)[0] for index in params]
        for index, grad in zip(params, grads, strict=True):
            stand_in = self._stand_ins.get(index)
            if grad is not None and (stand_in is None or stand_in.arrived is not None):
                self.place_one(index)
            elif grad is not None:
                all_params[index].grad = stand_in
        return grads

    @property
    def none_placed(self) -> bool:
        """Whether no parameter has a stand-in now."""
        return ShardedGradient not in set(map(type, [param.grad for param in self._buckets.params]))

    @property
    def untouched(self) -> bool:
        """Whether all parameters have stand-ins to which nothing was added: nothing was dropped or set by hand."""
        grads: list[Any] = [param.grad for param in self._buckets.params]
        return {ShardedGradient}.issuperset(map(type, grads)) and {None}.issuperset([grad.arrived for grad in grads])

    def keep_own_grad(self, index: int) -> None:
        """A gradient of a pass inside `no_sync()` has been added: its memory must not be autograd's."""
        grad = self._buckets.params[index].grad
        if type(grad) is ShardedGradient:
            grad.copy_arrived()

    def has_own_grad(self, index: int) -> bool:
        """Whether this rank has a gradient of its own for a parameter, which was not reduced yet."""
        grad = self._buckets.params[index].grad
        if grad is None or (index in self._whole and self._whole[index]() is grad):
            return False
        return type(grad) is not ShardedGradient or grad.arrived is not None

    def was_dropped(self, index: int) -> bool:
        """Whether the user has removed or replaced the stand-in of a parameter."""
        grad = self._buckets.params[index].grad
        if type(grad) is ShardedGradient:
            return False
        return grad is None or index not in self._lifted or self._lifted[index]() is not grad

    def all_dropped(self, params: Iterable[int]) -> list[int]:
        """Those of some parameters whose stand-in the user has removed or replaced. Called in each step for all."""
        all_params = self._buckets.params
        others = [index for index in params if type(all_params[index].grad) is not ShardedGradient]
        return [index for index in others if self.was_dropped(index)]

    def zero_own_grads(self) -> None:
        """Zero all gradients of this rank that were not reduced yet."""
        for param in self._buckets.params:
            own = param.grad.arrived if type(param.grad) is ShardedGradient else param.grad
            if own is not None:
                own.detach().zero_()

    # ------------------------------------------------------------------ DDP must find no stand-ins

    def lift(self, params: Iterable[int], needed: Collection[int]) -> None:
        """Take the stand-ins of these parameters out of `.grad`, because DDP is about to read and write it.

        Those that are `needed` get zeros instead: DDP counts them as used.
        """
        for index in params:
            param = self._buckets.params[index]
            if type(param.grad) is ShardedGradient:
                param.grad = torch.zeros_like(param) if index in needed else None
                self._lifted[index] = _nothing

    def put_back(self) -> None:
        """Put the stand-ins back that were lifted, where DDP has left no gradient of this rank."""
        for index in list(self._lifted):
            grad = self._buckets.params[index].grad
            if grad is None:
                self.place_one(index)
                del self._lifted[index]
            else:
                self._lifted[index] = ref(grad)

    def forget_lifted(self, params: Iterable[int] | None = None) -> None:
        """These gradients were reduced or dropped, or all: what stands in `.grad` now is what counts."""
        for index in list(self._lifted) if params is None else params:
            self._lifted.pop(index, None)


def _nothing() -> Tensor | None:
    return None
