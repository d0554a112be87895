"""One iteration of overlap mode: DDP's buckets come in, updated parameters go out.

DDP's hook says when the gradients of a bucket are ready; who owns which parameter was decided when the optimizer was
built. So DDP may rebuild its buckets, and the first backward pass already counts.

For every bucket, in the order of DDP and on all ranks alike::

    reduce    the wrapped hook's own future
    update    one step of the inner optimizer, with its groups narrowed to the bucket's leaves
    gather    the bucket's parameters, from their owners to all ranks

The inner optimizer works on *leaves*, tensors that share the parameters' memory, so that the user's `.grad` is
not touched while backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim import Optimizer

from zerostep.comm.agreement import first_failure
from zerostep.comm.transport import BucketMemory, Transport
from zerostep.memory.bucket_memory import make_bucket_memories
from zerostep.plan.groups import Group, copy_options, options
from zerostep.plan.ownership import Ownership
from zerostep.plan.partition import restrict
from zerostep.step.ddp_hook import as_stored
from zerostep.step.labels import stepping_in_backward, thread_range
from zerostep.step.used_mask import pack_mask, union_of_masks

__all__ = ["ArrivedBucket", "DdpBucketPlan", "GradientCallback", "OverlapPipeline"]

GradientCallback = Callable[[Sequence[Tensor], Sequence[Any]], None]

_UPDATED, _FAILED = 0, 1


@dataclass(frozen=True)
class DdpBucketPlan:
    """The parameters of a DDP bucket that the optimizer holds, their places in it, and how they travel."""

    params: tuple[Tensor, ...]
    places: tuple[int, ...]
    memories: tuple[BucketMemory, ...]
    fingerprint: int


@dataclass(frozen=True)
class ArrivedBucket:
    """A bucket of DDP whose reduction has begun. `used` is `None` where every parameter must have a gradient."""

    index: int
    is_last: bool
    plan: DdpBucketPlan
    views: tuple[Tensor, ...]
    buffer: Tensor
    used: tuple[bool, ...] | None

    def gradients(self, reduced: Tensor) -> list[Tensor]:
        """The gradients of our parameters in the reduced bucket, which need not lie where DDP's bucket lies."""
        flat = reduced.reshape(-1)
        shift = flat.storage_offset() - self.buffer.storage_offset()
        return [flat.as_strided(view.shape, view.stride(), view.storage_offset() + shift) for view in self.views]


class OverlapPipeline:
    """One iteration of overlap mode: what its buckets have done to the inner optimizer so far.

    `arrive` runs on the thread of backward, `process` where the bucket runner runs; each is called for one bucket after
    the other.
    """

    def __init__(
        self,
        inner: Optimizer,
        outer_groups: Sequence[Group],
        leaf_of: Mapping[Tensor, Tensor],
        ownership: Ownership,
    ) -> None:
        self._inner, self._outer_groups, self._leaf_of = inner, outer_groups, leaf_of
        self._layout, self._index_of = ownership.layout, ownership.index_of
        self._plans: dict[tuple[int, ...], DdpBucketPlan] = {}
        self._before: list[Group] = []
        self._after: list[Group] | None = None
        self._error: Exception | None = None
        self._used: dict[Tensor, bool] = {}
        self._callback: GradientCallback | None = None

    def arrive(self, bucket: GradBucket, used: Callable[[Tensor], bool] | None) -> ArrivedBucket:
        """Note a bucket before its reduction. `used` tells whether a parameter has a gradient on this rank."""
        plan, views = self._plan(bucket.parameters()), bucket.gradients()
        return ArrivedBucket(
            bucket.index(),
            bucket.is_last(),
            plan,
            tuple(as_stored(views[place], param) for place, param in zip(plan.places, plan.params, strict=True)),
            bucket.buffer(),
            None if used is None else tuple(used(param) for param in plan.params),
        )

    def process(
        self, arrived: ArrivedBucket, reduced: Tensor | Exception, transport: Transport, control: Transport
    ) -> None:
        """Update and gather one bucket; all ranks, in the order of the buckets.

        If the reduction or the update fails on one rank it fails on all, where ranks wait for each other on the host.
        The remaining buckets are then only gathered, so that no rank waits for a message that is never sent. The error
        is raised with the last bucket, because DDP waits for no bucket after a failed one, and parameters must not move
        once backward has returned.
        """
        if arrived.index == 0:
            self._begin()
        wanted = _used_by_any(arrived.used, len(arrived.plan.params), control)
        self._used.update(zip(arrived.plan.params, wanted, strict=True))
        failed_before = self._error is not None
        if not failed_before:
            with thread_range("update", arrived.index), stepping_in_backward():
                self._try_update(arrived, reduced, wanted)
        with thread_range("gather", arrived.index):
            status = _UPDATED if self._error is None else _FAILED
            statuses = transport.gather(arrived.plan.memories, status, arrived.plan.fingerprint)
        if any(statuses) and len(statuses) > 1 and not failed_before:
            self._error = first_failure(control, self._error)
        if arrived.is_last:
            if self._error is not None:
                raise self._error
            self._end()

    def set_callback(self, callback: GradientCallback | None) -> None:
        """Call `callback(params, gradients)` before each update."""
        self._callback = callback

    def was_used(self, param: Tensor) -> bool:
        """Whether some rank had a gradient for a parameter when its bucket was processed last."""
        return self._used.get(param, False)

    def _plan(self, params: Sequence[Tensor]) -> DdpBucketPlan:
        key = tuple(map(id, params))
        if key not in self._plans:
            places = tuple(place for place, param in enumerate(params) if param in self._index_of)
            known = tuple(params[place] for place in places)
            part = restrict(self._layout, [self._index_of[param] for param in known])
            memories = tuple(make_bucket_memories(part, known, as_views=False))
            self._plans[key] = DdpBucketPlan(known, places, memories, int(part.digest()[:15], 16))
        return self._plans[key]

    def _begin(self) -> None:
        """Begin an iteration: every partial step starts from the options that the user's groups have now."""
        copy_options(self._outer_groups, self._inner.param_groups)
        self._before, self._after, self._error = [dict(group) for group in self._inner.param_groups], None, None
        for param, leaf in self._leaf_of.items():
            if leaf.data_ptr() != param.data_ptr():
                leaf.data = param.data

    def _end(self) -> None:
        """End an iteration: keep the options that one step leaves behind, whatever the number of partial steps."""
        for group, after in zip(self._inner.param_groups, self._after or [], strict=bool(self._after)):
            group.update(after)
        copy_options(self._inner.param_groups, self._outer_groups)

    def _try_update(self, arrived: ArrivedBucket, reduced: Tensor | Exception, wanted: Sequence[bool]) -> None:
        leaves = []
        try:
            if isinstance(reduced, Exception):
                raise reduced
            grads = arrived.gradients(reduced)
            for param, grad, want in zip(arrived.plan.params, grads, wanted, strict=True):
                leaf = self._leaf_of.get(param)
                if want and leaf is not None:
                    leaf.grad = grad.to(leaf.dtype)
                    leaves.append((self._layout.params[self._index_of[param]].group, param, leaf))
            self._edit_gradients(leaves)
            if leaves or (arrived.is_last and self._after is None):
                self._partial_step(leaves)
        except Exception as error:
            self._error = error
        finally:
            for _, _, leaf in leaves:
                leaf.grad = None

    def _edit_gradients(self, leaves: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """The user's callback sees copies: `.grad` stays what DDP reduced."""
        if self._callback is not None and leaves:
            for _, _, leaf in leaves:
                leaf.grad = leaf.grad.clone() if leaf.grad is not None else None
            self._callback([param for _, param, _ in leaves], [leaf.grad for _, _, leaf in leaves])

    def _partial_step(self, leaves: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        groups = self._inner.param_groups
        for group in groups:
            group["params"] = []
        for number, _, leaf in leaves:
            groups[number]["params"].append(leaf)
        try:
            self._inner.step()
            self._after = [options(group) for group in groups]
        finally:
            for group, before in zip(groups, self._before, strict=True):
                group.clear()
                group.update(before)


def _used_by_any(used: Sequence[bool] | None, count: int, control: Transport) -> Sequence[bool]:
    """Which parameters some rank has used. One that no rank has used keeps its value and state."""
    if used is None:
        return (True,) * count
    return union_of_masks(control.all_gather_ints(pack_mask(used) or [0]), count)
