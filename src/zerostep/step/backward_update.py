"""Updates inside backward: `ShardedOptimizer(update="backward")`.

When the sum of a bucket is complete, its owners update it and launch its gather, while backward goes on with the next
buckets. No gradient is kept. Which parameters of a bucket some rank has used goes ahead of its sum in a small message;
only a rank that has not used all of them waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import Tensor

from zerostep.comm.exchange import Exchange
from zerostep.comm.transport import PendingInts, Transport
from zerostep.errors import InterruptedPassError
from zerostep.step.bucket_shards import BucketShards
from zerostep.step.inner_optimizers import InnerOptimizers, PartialSteps
from zerostep.step.labels import PhaseTimer, stepping_in_backward
from zerostep.step.scaled_sum import ScaledSum
from zerostep.step.update import Updater
from zerostep.step.used_mask import pack_mask, union_of_masks

_TOO_LATE = (
    'with update="backward" the parameters are updated inside backward(), and gradients are gone afterwards: drop '
    'them by zero_grad(). To clip, scale or read them, build the optimizer with update="step"'
)


class BackwardUpdate:
    """Takes the sums of a reduction, steps on each, and launches its gather.

    Runs on autograd's threads, inside hooks; the engine's lock keeps callers apart.
    """

    def __init__(self, buckets: BucketShards, updater: Updater, control: Exchange, timer: PhaseTimer) -> None:
        self._buckets, self._updater, self._control, self._timer = buckets, updater, control, timer
        self._inners: InnerOptimizers | None = None
        self._partial_steps: PartialSteps | None = None
        self._masks: dict[int, tuple[PendingInts, frozenset[int], bool]] = {}
        self._unread: list[PendingInts] = []
        self._failure: BaseException | None = None
        self._gathered: list[int] = []

    def begin(self, inners: InnerOptimizers) -> None:
        """Begin a step: all its parts start from the options that the groups have now."""
        self._inners, self._partial_steps, self._failure = inners, inners.begin(), None
        self._masks, self._unread, self._gathered = {}, [], []

    def abandon(self) -> None:
        """Update nothing more in this pass, but gather: the other ranks wait for it."""
        self._failure = self._failure or RuntimeError("a state was loaded inside of a step")

    def launched(self, bucket: int, params: Collection[int]) -> None:
        """Send which parameters of a bucket this rank has used."""
        members, params = [slot.param for slot in self._buckets.layout.buckets[bucket].slots], frozenset(params)
        complete = all(index in params or not self._buckets.params[index].requires_grad for index in members)
        with self._timer.phase("control", bucket):
            pending = self._control.start_all_gather_ints(pack_mask([index in params for index in members]))
        self._masks[bucket] = pending, params.intersection(members), complete

    def memory_for(self, bucket: int) -> Tensor | None:
        """No sum is kept, so no memory is reused."""
        return None

    def take(self, bucket: int, part: Tensor) -> None:
        """Step on a bucket and launch its gather, with old values after an error: the other ranks wait for it."""
        used = self._used_by_any(bucket)
        if not used:
            return
        assert self._inners is not None
        assert self._partial_steps is not None
        try:
            if self._failure is None:
                with stepping_in_backward():
                    self._updater.step_on({bucket: ScaledSum(part)}, self._inners, self._partial_steps, used)
        except BaseException as error:
            self._failure = error
        self._updater.launch([bucket])
        self._gathered.append(bucket)

    def _used_by_any(self, bucket: int) -> Collection[int]:
        pending, mine, complete = self._masks.pop(bucket)
        if complete:
            # The mask can add nothing. Its transfer must still end before the next step begins.
            if self._control.blocks_host:
                self._unread.append(pending)
            return mine
        slots = self._buckets.layout.buckets[bucket].slots
        with self._timer.waiting("control", bucket):
            used = union_of_masks(pending.wait(), len(slots))
        return {slot.param for slot, flag in zip(slots, used, strict=True) if flag}

    def end(self) -> BaseException | None:
        """End the step: groups take the options that its parts have left. The error of the update, if it failed."""
        assert self._partial_steps is not None
        if self._failure is None:
            self._partial_steps.step_rest()
        self._partial_steps.end()
        self._partial_steps = None
        gathered, self._gathered = self._gathered, []
        self._updater.make_late(gathered)
        unread, self._unread = self._unread, []
        with self._timer.waiting("control"):
            for pending in unread:
                pending.wait()
        return self._failure


class AppliedGradOps:
    """What stand-ins do whose gradients were applied inside backward: everything is refused."""

    def norms(self, params: Sequence[int], norm_type: float) -> list[Tensor]:
        """Refused."""
        raise _too_late()

    def edit(self, params: Sequence[int], change: Callable[[Tensor], Any]) -> None:
        """Refused."""
        raise _too_late()

    def unscale(self, params: Sequence[int], found_inf: Tensor, inverse: Tensor) -> None:
        """Refused."""
        raise _too_late()

    def total_norm(self, norm_type: float, others: Sequence[Any] = ()) -> Tensor:
        """Refused."""
        raise _too_late()

    def share_of_norm(self, norm_type: float) -> Tensor:
        """Refused."""
        raise _too_late()

    def scale(self, factor: Tensor) -> None:
        """Refused."""
        raise _too_late()

    @property
    def mesh_transports(self) -> Sequence[Transport]:
        """None: nothing is exchanged."""
        return ()

    def mark_non_finite(self, found_inf: Tensor) -> None:
        """Refused."""
        raise _too_late()

    def clear(self) -> None:
        """Refused."""
        raise _too_late()

    def drop_norms(self) -> None:
        """No norms are kept."""


def refuse_kept_gradients(kept: Iterable[str]) -> None:
    """Raise if gradients of the last step were not dropped: the next ones could not be added to them."""
    for name in kept:
        raise InterruptedPassError(
            f'the gradient of {name!r} was not dropped since the last step, and with update="backward" it cannot be '
            "added to: call zero_grad() before the first backward pass of each step"
        )


def _too_late() -> RuntimeError:
    return RuntimeError(_TOO_LATE)
