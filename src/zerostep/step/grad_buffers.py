"""The memory of buckets that are being filled with gradients, before they are launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from zerostep.dtensors import local_of
from zerostep.plan.buckets import padded_size
from zerostep.step.reduction_plan import ReductionPlan, Run

_flatten: Callable[[list[Tensor]], Tensor] = torch._utils._flatten_dense_tensors
_dim, _dtype = attrgetter("ndim"), attrgetter("dtype")


class GradBuffers:
    """One buffer per bucket, made when the first gradient is written to it."""

    def __init__(self, plan: ReductionPlan) -> None:
        self._plan, self._bucket_of = plan, plan.bucket_of
        self._holdable, self._runs = b"", list[list[Run]]()
        self._buffers: dict[int, Tensor] = {}
        # Small gradients by bucket, held until it is launched. Their memory must not be reused before that.
        self._small: list[dict[int, Tensor]] = [{} for _ in plan.layout.buckets]

    def follow(self, holdable: bytes) -> None:
        """Note which gradients may be held, before a pass: parameters may have got other strides."""
        if holdable != self._holdable:
            self._holdable, self._runs = holdable, self._plan.runs(holdable)

    def add(self, param: int, grad: Tensor) -> None:
        """Copy a gradient into its bucket, scaled; a small one is held, to be copied with its neighbours later."""
        if grad.layout is not torch.strided:
            self._write(param, grad.to_dense())
        elif self._holdable[param]:
            self._small[self._bucket_of[param]][param] = grad
        else:
            self._write(param, grad)

    def hold(self, bucket: int, grads: Mapping[int, Tensor]) -> None:
        """The same for gradients of one bucket that may be held, if they are dense."""
        if all(grad.layout is torch.strided for grad in grads.values()):
            self._small[bucket].update(grads)
        else:
            for param, grad in grads.items():
                self.add(param, grad)

    def copy_held_back(self) -> None:
        """Copy the small gradients now, because their memory is about to be reused."""
        for bucket, small in enumerate(self._small):
            if small:
                self._write_small(bucket)

    def fill(self, bucket: int, written: Sequence[int]) -> Tensor:
        """The full buffer of a bucket, ready to be launched; parameters that are not in `written` count as zero."""
        memory = self._memory(bucket)
        self._write_small(bucket)
        if not all(map(written.__getitem__, self._plan.members[bucket])):
            for slot in self._plan.layout.buckets[bucket].slots:
                if not written[slot.param]:
                    memory[slot.span.start : slot.span.stop].zero_()
        return memory

    def drop(self, bucket: int) -> None:
        """Forget the buffer of a bucket that was launched."""
        del self._buffers[bucket]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers and of the gradients that wait."""
        waiting = sum(grad.nbytes for small in self._small for grad in small.values())
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
        like = local_of(self._plan.params[param])
        self._scale_into(place.as_strided(like.shape, like.stride(), place.storage_offset()), grad)

    @torch.no_grad()  # with create_graph=True gradients have graphs of their own
    def _write_small(self, bucket: int) -> None:
        """Copy neighbouring small gradients in one piece: two calls for a thousand of them."""
        small, self._small[bucket] = self._small[bucket], {}
        for params, span in self._runs[bucket] if small else ():
            run = [small[param] for param in params if param in small]
            if len(run) == len(params):
                self._scale_run_into(self._memory(bucket)[span.start : span.stop], run)
            else:
                for param in params:
                    if param in small:
                        self._write(param, small[param])

    def _scale_run_into(self, view: Tensor, grads: list[Tensor]) -> None:
        """Scale gradients into neighbouring places; contiguous ones straight into them, without memory in between."""
        if {view.dtype}.issuperset(map(_dtype, grads)) and all(map(Tensor.is_contiguous, grads)):
            if not {1}.issuperset(map(_dim, grads)):
                grads = [grad.view(-1) for grad in grads]
            torch.cat(grads, out=view)
            view.mul_(self._plan.scale)
        else:
            self._scale_into(view, _flatten(grads))

    def _scale_into(self, view: Tensor, grad: Tensor) -> None:
        if grad.dtype == view.dtype:
            torch.mul(grad, self._plan.scale, out=view)
        else:
            view.copy_(grad).mul_(self._plan.scale)
