"""One iteration of overlap mode: each bucket of DDP is reduced, updated and gathered.

DDP's hook gives the moment at which the gradients of a bucket are ready. The owners of parameters do not depend on
DDP's buckets, so DDP may rebuild them, and the first backward pass already updates parameters.

For every bucket, in DDP's order, which is the same on all ranks::

    reduce    the wrapped hook's own future
    update    one partial step of the inner optimizer, on the bucket's leaves
    gather    the bucket's parameters, from their owners to all ranks

The inner optimizer works on *leaves*, tensors that share the parameters' memory, so that the user's `.grad` is not
touched while backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim import Optimizer

from zerostep.comm.agreement import describe_error
from zerostep.comm.transport import BucketMemory, Transport
from zerostep.errors import StepMismatchError
from zerostep.memory.bucket_memory import make_bucket_memories
from zerostep.plan.groups import Group, copy_options
from zerostep.plan.ownership import Ownership
from zerostep.plan.partition import restrict
from zerostep.step.ddp_hook import as_stored, in_backward_pass
from zerostep.step.inner_optimizers import PartialSteps
from zerostep.step.labels import recorded_range, stepping_in_backward
from zerostep.step.place import UNKNOWN, Place, Progress
from zerostep.step.step_status import FAILED, UNTOUCHED, UPDATED, PeerFailedError, compare_status
from zerostep.step.used_mask import pack_mask, union_of_masks

GradientCallback = Callable[[Sequence[Tensor], Sequence[Any]], None]


@dataclass(frozen=True)
class DdpBucketPlan:
    """The parameters of a DDP bucket that the optimizer holds, their positions in it, and the messages of a gather."""

    params: tuple[Tensor, ...]
    positions: tuple[int, ...]
    memories: tuple[BucketMemory, ...]
    fingerprint: int


@dataclass(frozen=True)
class ArrivedBucket:
    """A bucket of DDP whose reduction has begun. `used` is `None` where every parameter must have a gradient.

    `joined` if this rank has no inputs left, and this is its shadow pass.
    """

    index: int
    is_last: bool
    plan: DdpBucketPlan
    views: tuple[Tensor, ...]
    buffer: Tensor
    used: tuple[bool, ...] | None
    joined: bool = False

    def gradients(self, reduced: Tensor) -> list[Tensor]:
        """The gradients of our parameters in the reduced bucket, which may be in other memory than DDP's bucket."""
        flat = reduced.reshape(-1)
        shift = flat.storage_offset() - self.buffer.storage_offset()
        return [flat.as_strided(view.shape, view.stride(), view.storage_offset() + shift) for view in self.views]


ReducedBucket = tuple[ArrivedBucket, Tensor | Exception]
"""A bucket and its reduced gradients, or why they could not be reduced."""


@dataclass(frozen=True)
class StepFailure:
    """Why an iteration has failed, in words, and this rank's own error. `untouched` if no rank has updated anything."""

    text: str
    error: BaseException | None
    untouched: bool
    mismatch: bool = False


class OverlapPipeline:
    """Updates and gathers DDP's buckets, iteration after iteration.

    `arrive` runs on the thread of backward, `process` on the thread or stream of the bucket runner; each is called for
    one bucket after the other.
    """

    def __init__(
        self,
        inner: Optimizer,
        outer_groups: Sequence[Group],
        leaf_of: Mapping[Tensor, Tensor],
        ownership: Ownership,
        progress: Progress,
        steps: Callable[[], int],
    ) -> None:
        self._progress, self._steps = progress, steps
        self._inner, self._outer_groups, self._leaf_of = inner, outer_groups, leaf_of
        self._layout, self._index_of = ownership.layout, ownership.index_of
        self._plans: dict[tuple[int, ...], DdpBucketPlan] = {}
        self._partial_steps = PartialSteps([inner], inner.param_groups)
        self._error: BaseException | None = None
        self._failure: StepFailure | None = None
        self._place = Place(0, 0, UNKNOWN, UNKNOWN)
        self._used: dict[Tensor, bool] = {}
        self._callback: GradientCallback | None = None
        self._is_untouched = True

    def arrive(self, bucket: GradBucket, used: Callable[[Tensor], bool] | None) -> ArrivedBucket:
        """Describe a bucket before its reduction. `used` is whether a parameter has a gradient on this rank."""
        plan, views = self._plan(bucket.parameters()), bucket.gradients()
        return ArrivedBucket(
            bucket.index(),
            bucket.is_last(),
            plan,
            tuple(
                as_stored(views[position], param) for position, param in zip(plan.positions, plan.params, strict=True)
            ),
            bucket.buffer(),
            None if used is None else tuple(used(param) for param in plan.params),
            joined=not in_backward_pass(),
        )

    def process(self, batch: Sequence[ReducedBucket], transport: Transport, control: Transport) -> None:
        """Update some buckets and gather them together; all ranks, in the order of the buckets.

        If a reduction or an update fails on one rank it fails on all, where ranks wait for each other on the host. The
        remaining buckets are then only gathered, so that no rank waits for a message that is never sent, and nothing
        moves once backward has returned.
        """
        first, last = batch[0][0], batch[-1][0]
        if first.index == 0:
            self._begin(first.joined)
        failed_before, status = self._failure is not None, FAILED
        for arrived, reduced in batch:
            wanted = _used_by_any(arrived.used, len(arrived.plan.params), control)
            self._used.update(zip(arrived.plan.params, wanted, strict=True))
            if not failed_before and self._error is None:
                transport.presence.at("update", arrived.index)
                with recorded_range("update", arrived.index), stepping_in_backward():
                    status = self._try_update(arrived, reduced, wanted)
        memories = [memory for arrived, _ in batch for memory in arrived.plan.memories]
        transport.presence.at("gather", first.index)
        with recorded_range("gather", first.index):
            rows = transport.gather(memories, self.row(status), sum(arrived.plan.fingerprint for arrived, _ in batch))
        if not failed_before:
            exchanged = transport.exchanges_status(memories)
            self._failure = self._judge(first, rows, control) if exchanged else self._own_failure(first, transport)
        if last.is_last and self._failure is None:
            self._partial_steps.end()
            copy_options(self._inner.param_groups, self._outer_groups)

    @property
    def failure(self) -> StepFailure | None:
        """Why this iteration has failed, if it has."""
        return self._failure

    def row(self, status: int) -> list[int]:
        """What this rank tells the others."""
        return [status, *self._place.to_ints()]

    def _judge(self, arrived: ArrivedBucket, rows: Sequence[Sequence[int]], control: Transport) -> StepFailure | None:
        before = self._steps() - self._progress.steps
        try:
            compare_status(rows, before, self._progress.facts, control.all_gather_ints, self._error)
        except (PeerFailedError, StepMismatchError) as found:
            untouched = arrived.index == 0 and all(row[0] == UNTOUCHED for row in rows)
            return StepFailure(str(found), self._error, untouched, isinstance(found, StepMismatchError))
        return None

    def _own_failure(self, arrived: ArrivedBucket, transport: Transport) -> StepFailure | None:
        """Where the host waits for nobody, or in a world of one."""
        if self._error is None:
            return None
        step = self._steps() + 1
        text = f"rank {transport.rank} failed in its local update of step {step}: {describe_error(self._error)}"
        untouched = transport.world_size == 1 and arrived.index == 0 and self._is_untouched
        return StepFailure(text, self._error, untouched)

    def set_callback(self, callback: GradientCallback | None) -> None:
        """Call `callback(params, gradients)` before each update."""
        self._callback = callback

    def was_used(self, param: Tensor) -> bool:
        """Whether some rank had a gradient for a parameter when its bucket was processed last."""
        return self._used.get(param, False)

    def _plan(self, params: Sequence[Tensor]) -> DdpBucketPlan:
        key = tuple(map(id, params))
        if key not in self._plans:
            positions = tuple(position for position, param in enumerate(params) if param in self._index_of)
            known = tuple(params[position] for position in positions)
            part = restrict(self._layout, [self._index_of[param] for param in known])
            memories = tuple(make_bucket_memories(part, known, as_views=False))
            self._plans[key] = DdpBucketPlan(known, positions, memories, int(part.digest()[:15], 16))
        return self._plans[key]

    def _begin(self, joined: bool) -> None:
        """Begin an iteration: every partial step starts from the options that the user's groups have now."""
        self._progress.begin_step(self._outer_groups)
        self._place = self._progress.place(UNKNOWN, joined)
        copy_options(self._outer_groups, self._inner.param_groups)
        self._partial_steps = PartialSteps([self._inner], self._inner.param_groups)
        self._error = self._failure = None
        self._is_untouched = True
        for param, leaf in self._leaf_of.items():
            if leaf.data_ptr() != param.data_ptr():
                leaf.data = param.data

    def _try_update(self, arrived: ArrivedBucket, reduced: Tensor | Exception, wanted: Sequence[bool]) -> int:
        leaves: list[tuple[int, Tensor, Tensor]] = []
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
            self._is_untouched = False
            if leaves:
                self._partial_steps.step((group, leaf) for group, _, leaf in leaves)
            if arrived.is_last:
                self._partial_steps.step_rest()
        except BaseException as error:  # KeyboardInterrupt, too, leaves a step half done
            self._error = error
            return UNTOUCHED if self._is_untouched else FAILED
        finally:
            for _, _, leaf in leaves:
                leaf.grad = None
        return UPDATED

    def _edit_gradients(self, leaves: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Show copies of the gradients to the user's callback: `.grad` stays what DDP reduced."""
        if self._callback is not None and leaves:
            for _, _, leaf in leaves:
                leaf.grad = leaf.grad.clone() if leaf.grad is not None else None
            self._callback([param for _, param, _ in leaves], [leaf.grad for _, _, leaf in leaves])


def _used_by_any(used: Sequence[bool] | None, count: int, control: Transport) -> Sequence[bool]:
    """Which parameters some rank has used. One that no rank has used keeps its value and state."""
    if used is None:
        return (True,) * count
    return union_of_masks(control.all_gather_ints(pack_mask(used) or [0]), count)
