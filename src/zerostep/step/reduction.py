"""Gradients to their owners while backward runs: what has arrived, what is in flight, which sums are done.

Each rank multiplies its gradients by 1/N before they are summed, so a sum is the average over the ranks.

A *pass* is one backward pass. Gradients are copied into the buffer of their bucket as they arrive; a full bucket is
launched when those before it in layout order are launched, and not before, because all ranks must launch in one order.
At most two buckets are in flight: launching a third first waits for the oldest, of which only the owned part is kept.
Buckets that are not full at the end of the pass are launched with zeros in place of what is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from zerostep.comm.exchange import PendingReduce
from zerostep.plan.layout import Span
from zerostep.step.grad_buffers import GradBuffers
from zerostep.step.labels import PhaseTimer
from zerostep.step.reduction_plan import ReductionPlan

# Memory at the end of backward is the owned part of the gradients plus this many buckets.
_MOST_IN_FLIGHT = 2


class _InFlight(NamedTuple):
    """A launched bucket; keeps the memory alive that the exchange still reads."""

    backward_pass: int
    bucket: int
    pending: PendingReduce
    memory: Tensor


class Reduction:
    """The gradients of one step, over one or several backward passes.

    Runs on whatever thread autograd calls hooks from; the engine's lock keeps callers apart.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        sum_replicas: Callable[[Tensor], Tensor],
        timer: PhaseTimer,
        on_pass_begin: Callable[[], None],
    ) -> None:
        self._sum_replicas, self._timer, self._on_pass_begin = sum_replicas, timer, on_pass_begin
        self._in_flight: deque[_InFlight] = deque()
        self._sums: dict[int, Tensor] = {}
        self._used: set[int] = set()
        self._stale: set[int] = set()  # parameters in `_sums` whose gradient was dropped since
        self._passes = 0
        self._open = False
        self._use(plan)

    def _use(self, plan: ReductionPlan) -> None:
        self._plan, self._buffers = plan, GradBuffers(plan)
        self._arrived: set[int] = set()
        self._written: set[int] = set()
        self._trainable: list[bool] = []
        self._expected: dict[int, frozenset[int]] = {}
        self._missing: dict[int, set[int]] = {}
        self._order: list[int] = []
        self._next = 0
        self._reusable: dict[int, Tensor] = {}

    def extend(self, plan: ReductionPlan) -> None:
        """Go on with a plan that has further buckets behind those of the present one."""
        if self._open:
            self.launch_missing()
        self.finish()
        self._use(plan)

    # ------------------------------------------------------------------ what there is

    @property
    def sums(self) -> Mapping[int, Tensor]:
        """This rank's part of each reduced bucket, by bucket; all of it if gradients are whole."""
        return self._sums

    @property
    def used(self) -> Collection[int]:
        """The parameters that have a gradient in this step."""
        return self._used

    @property
    def passes(self) -> int:
        """Backward passes that have ended in this step."""
        return self._passes

    @property
    def open(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._open

    @property
    def nbytes(self) -> int:
        """Bytes of sums, of memory kept for the next ones, of buckets filled or in flight, and of receive buffers."""
        in_flight = sum(each.memory.untyped_storage().nbytes() + each.pending.nbytes for each in self._in_flight)
        kept = (part.untyped_storage() for part in [*self._sums.values(), *self._reusable.values()])
        return sum({storage._cdata: storage.nbytes() for storage in kept}.values()) + in_flight + self._buffers.nbytes

    # ------------------------------------------------------------------ one pass

    def arrive(self, param: int, grad: Tensor | None, accumulate: bool) -> bool:
        """Take a gradient, or `None` for a parameter without one in this pass; whether this was the pass's last one.

        The gradient's memory must not change afterwards. `accumulate` adds it to the sums of earlier passes; without
        it, those of this parameter are dropped.
        """
        bucket = self._plan.bucket_of[param]
        if not self._open:
            self._begin()
        elif param in self._arrived or bucket not in self._missing:
            # A further backward pass has begun, or the parameter's bucket is in flight already.
            self.launch_missing()
            self._begin()
        if grad is not None:
            self._buffers.add(param, grad.detach())
            self._written.add(param)
            if not accumulate and param in self._used:
                self._finish_earlier_passes()
                self._stale.add(param)
            self._used.add(param)
        self._arrived.add(param)
        missing = self._missing[bucket]
        missing.discard(param)
        return not missing and self._launch_full()

    def copy_held_back(self) -> None:
        """Copy gradients that are still held, because their memory is about to be reused."""
        self._buffers.copy_held_back()

    def launch_missing(self) -> None:
        """End the pass: launch all remaining buckets, with zeros for gradients that have not arrived."""
        if not self._open:
            self._begin()
        while self._next < len(self._order):
            self._launch()
        self._end()

    def finish(self, bucket: int | None = None) -> None:
        """Wait until a bucket is no longer in flight; all of them if none is named."""
        while self._in_flight and (bucket is None or any(bucket == each.bucket for each in self._in_flight)):
            self._finish_oldest()

    # ------------------------------------------------------------------ between passes

    def mark_used(self, params: Iterable[int]) -> None:
        """Count parameters as used because another rank has a gradient for them."""
        self._used.update(params)

    def replace_used(self, params: Iterable[int]) -> None:
        """Count exactly these parameters as used."""
        self._used = set(params)

    def reset_passes(self) -> None:
        """Begin to count the passes of the next step."""
        self._passes = 0

    def take_sums(self) -> dict[int, Tensor]:
        """Hand over all sums; none are left here."""
        sums, self._sums = self._sums, {}
        return sums

    def drop(self, params: Iterable[int]) -> None:
        """Drop the gradients of some parameters."""
        dropped = self._used.intersection(params)
        if dropped:
            self.finish()
        self._stale |= dropped
        self._used -= dropped

    def drop_all(self) -> None:
        """Drop all gradients; memory of sums on the host is kept for the next ones."""
        self.finish()
        # Buckets that are in flight at the end of backward have no sum yet, and get memory of their own.
        last = self._order[-_MOST_IN_FLIGHT:] if not self._plan.whole else list(self._sums)
        on_host = {bucket: part for bucket, part in self._sums.items() if part.device.type == "cpu"}
        # An inner optimizer may keep a reference to a gradient that it was given: such memory is not reused.
        alone = _references(torch.empty(0))
        self._reusable = {b: part for b, part in on_host.items() if b not in last and _references(part) == alone}
        self._sums, self._used, self._stale = {}, set(), set()

    def zero_stale(self) -> None:
        """Zero the sums of gradients that were dropped and did not arrive again."""
        for bucket, part in self._sums.items():
            self._zero_stale(bucket, part)
        self._stale = set()

    # ------------------------------------------------------------------ launching

    def _begin(self) -> None:
        self._on_pass_begin()
        trainable = [param.requires_grad for param in self._plan.params]
        if trainable != self._trainable:
            self._trainable, self._expected = trainable, self._plan.trained(trainable)
            self._order = list(self._expected)
        self._missing = {index: set(members) for index, members in self._expected.items()}
        self._arrived, self._written, self._next, self._open = set(), set(), 0, True

    def _end(self) -> None:
        self._open = False
        for exchange in {id(exchange): exchange for exchange in self._plan.exchanges}.values():
            exchange.release_scratch()
        self._passes += 1

    def _launch_full(self) -> bool:
        while self._next < len(self._order) and not self._missing[self._order[self._next]]:
            self._launch()
        done = self._next == len(self._order)
        if done:
            self._end()
        return done

    def _launch(self) -> None:
        """Launch the next bucket. The order of launches must be the same on all ranks."""
        bucket = self._order[self._next]
        while len(self._in_flight) >= _MOST_IN_FLIGHT:
            self._finish_oldest()
        memory = self._buffers.fill(bucket, self._written)
        with self._timer.phase("reduce", bucket):
            pending = self._plan.exchanges[bucket].reduce(memory, self._plan.layout.buckets[bucket])
        # Only now: if the launch failed, the bucket can be launched again with what was written to it.
        self._buffers.drop(bucket)
        self._in_flight.append(_InFlight(self._passes, bucket, pending, memory))
        del self._missing[bucket]
        self._next += 1

    def _finish_oldest(self) -> None:
        _, bucket, pending, memory = self._in_flight.popleft()
        exchange = self._plan.exchanges[bucket]
        with self._timer.waiting("reduce", bucket):
            part = self._sum_replicas(pending.finish(self._reusable.pop(bucket, None)))
        self._add_sum(bucket, self._gathered(bucket, part, memory) if self._plan.whole else part)
        if exchange.blocks_host and not self._plan.whole:
            exchange.free(memory)

    def _finish_earlier_passes(self) -> None:
        while self._in_flight and self._in_flight[0].backward_pass != self._passes:
            self._finish_oldest()

    def _gathered(self, bucket: int, part: Tensor, memory: Tensor) -> Tensor:
        """The whole of a reduced bucket, from the parts of all owners."""
        where = self._plan.layout.buckets[bucket]
        owned = where.owned(self._plan.rank)
        memory[owned.start : owned.stop].copy_(part)
        with self._timer.waiting("gather gradients", bucket):
            self._plan.exchanges[bucket].gather(memory, where).wait()
        return memory

    def _add_sum(self, bucket: int, part: Tensor) -> None:
        before = self._sums.get(bucket)
        if before is None:
            self._sums[bucket] = part
        else:
            self._zero_stale(bucket, before)
            before.add_(part)
        self._stale.difference_update(slot.param for slot in self._plan.layout.buckets[bucket].slots)

    def _zero_stale(self, bucket: int, part: Tensor) -> None:
        if not self._stale:
            return
        where = self._plan.layout.buckets[bucket]
        start = 0 if self._plan.whole else where.owned(self._plan.rank).start
        for slot in where.slots:
            if slot.param in self._stale:
                span = slot.span.intersect(Span(start, start + part.numel())).shift(-start)
                part[span.start : span.stop].zero_()


def _references(tensor: Tensor) -> int:
    """How many references there are to the storage of a tensor: its own, those of its views, and that of the caller."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
