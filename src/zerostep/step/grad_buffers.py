"""The memory of buckets that are being filled with gradients, before they are launched."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zerostep.plan.buckets import padded_size
from zerostep.step.reduction_plan import ReductionPlan

_flatten: Callable[[list[Tensor]], Tensor] = torch._utils._flatten_dense_tensors


class GradBuffers:
    """One buffer per bucket, made when the first gradient is written to it."""

    def __init__(self, plan: ReductionPlan) -> None:
        self._plan = plan
        self._buffers: dict[int, Tensor] = {}
        # Small gradients, held until their bucket is launched. Their memory must not be reused before that.
        self._small: dict[int, Tensor] = {}

    def add(self, param: int, grad: Tensor) -> None:
        """Copy a gradient into its bucket, scaled; a small one is kept and copied with its neighbours later."""
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        if self._plan.held_back[param] and grad.stride() == self._plan.params[param].stride() and grad.is_contiguous():
            self._small[param] = grad
        else:
            self._write(param, grad)

    def copy_held_back(self) -> None:
        """Copy the small gradients now, because their memory is about to be reused."""
        for bucket in {self._plan.bucket_of[param] for param in self._small}:
            self._write_small(bucket)

    def fill(self, bucket: int, written: set[int]) -> Tensor:
        """The full buffer of a bucket, ready to be launched; parameters that are not in `written` count as zero."""
        memory = self._memory(bucket)
        self._write_small(bucket)
        for slot in self._plan.layout.buckets[bucket].slots:
            if slot.param not in written:
                memory[slot.span.start : slot.span.stop].zero_()
        return memory

    def drop(self, bucket: int) -> None:
        """Forget the buffer of a bucket that was launched."""
        del self._buffers[bucket]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers and of the gradients that wait."""
        waiting = sum(grad.nbytes for grad in self._small.values())
        return waiting + sum(memory.untyped_storage().nbytes() for memory in self._buffers.values())

    def _memory(self, bucket: int) -> Tensor:
        if bucket not in self._buffers:
            where = self._plan.layout.buckets[bucket]
            device, dtype = self._plan.params[where.slots[0].param].device, self._plan.dtypes[bucket]
            self._buffers[bucket] = self._plan.exchanges[bucket].allocate(padded_size(where), dtype, device)
        return self._buffers[bucket]

    def _write(self, param: int, grad: Tensor) -> None:
        bucket, span = self._plan.layout.place_of(param)
        place = self._memory(bucket)[span.start : span.stop]
        like = self._plan.params[param]
        self._scale_into(place.as_strided(like.shape, like.stride(), place.storage_offset()), grad)

    def _write_small(self, bucket: int) -> None:
        """Copy neighbouring small gradients in one piece: two calls for a thousand of them."""
        run, start, stop = list[Tensor](), 0, 0
        for slot in self._plan.layout.buckets[bucket].slots if self._small else ():
            grad = self._small.pop(slot.param, None)
            if grad is None:
                continue
            if run and slot.span.start != stop:
                self._write_run(bucket, run, start, stop)
                run = []
            start = start if run else slot.span.start
            run.append(grad)
            stop = slot.span.stop
        if run:
            self._write_run(bucket, run, start, stop)

    def _write_run(self, bucket: int, run: list[Tensor], start: int, stop: int) -> None:
        self._scale_into(self._memory(bucket)[start:stop], _flatten(run))

    def _scale_into(self, view: Tensor, grad: Tensor) -> None:
        if grad.dtype == view.dtype:
            torch.mul(grad, self._plan.scale, out=view)
        else:
            view.copy_(grad).mul_(self._plan.scale)
