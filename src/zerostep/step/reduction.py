"""Gradients to their owners while backward runs: what has arrived, what is in flight, which sums are done.

Each rank multiplies its gradients by 1/N before they are summed, so a sum is the average over the ranks.

A *pass* is one backward pass. Gradients are copied into the buffer of their bucket as they arrive; a full bucket is
launched when those before it in layout order are launched, and not before, because all ranks must launch in one order.
At most two buckets are in flight: launching a third first waits for the oldest, whose owned part goes to a `SumSink`.
Buckets that are not full at the end of the pass are launched with zeros in place of what is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from operator import and_
from typing import NamedTuple, Protocol

from torch import Tensor

from zerostep.comm.exchange import PendingReduce
from zerostep.step.grad_buffers import GradBuffers
from zerostep.step.labels import PhaseTimer
from zerostep.step.launch_order import LaunchTurns
from zerostep.step.reduction_plan import ReductionPlan

# Memory at the end of backward is the owned part of the gradients plus this many buckets.
MOST_IN_FLIGHT = 2


Collect = Callable[[Sequence[int]], Sequence[Tensor | None]]
# How a parameter has arrived: not yet, not yet and small enough to be only counted, taken, counted and not taken yet.
_EXPECTED, _COUNTABLE, _TAKEN, _COUNTED = range(4)
_TAKEN_STATES = (_TAKEN, _COUNTED)


class SumSink(Protocol):
    """What becomes of the sums. Called in the same order on all ranks, from the thread that runs the pass."""

    def launched(self, bucket: int, params: Collection[int]) -> None:
        """A bucket was launched, with gradients of these of its parameters."""

    def memory_for(self, bucket: int) -> Tensor | None:
        """Memory that the sum of a bucket may be written to, if there is some."""

    def take(self, bucket: int, part: Tensor) -> None:
        """The sum of a bucket is complete: this rank's part of it, or all of it if gradients are whole."""


class _InFlight(NamedTuple):
    """A launched bucket; keeps the memory alive that the exchange still reads."""

    bucket: int
    pending: PendingReduce
    memory: Tensor


class Reduction:
    """The buckets of one backward pass at a time: filled, launched, in flight.

    `collect` takes gradients that were counted from where they are. Runs on whatever thread autograd calls hooks from;
    the engine's lock keeps callers apart.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        sum_replicas: Callable[[Tensor], Tensor],
        timer: PhaseTimer,
        sink: SumSink,
        collect: Collect = lambda params: [None for _ in params],
    ) -> None:
        self._sum_replicas, self._timer, self._sink, self._collect = sum_replicas, timer, sink, collect
        self._in_flight: deque[_InFlight] = deque()
        self._turns: LaunchTurns | None = None
        self._use(plan)

    def take_turns(self, turns: LaunchTurns) -> None:
        """From now on, launch buckets only in turn with those of other reductions."""
        self._turns = turns

    def _use(self, plan: ReductionPlan) -> None:
        self._plan, self._buffers = plan, GradBuffers(plan)
        self._bucket_of = plan.bucket_of
        # A byte per parameter: how it has arrived in this pass, and whether it has brought a gradient.
        self._states, self._written = bytearray(len(plan.params)), bytearray(len(plan.params))
        self._trainable: list[bool] = []
        self._expected: dict[int, frozenset[int]] = {}
        self._missing: dict[int, int] = {}  # how many parameters of each bucket that is not launched
        self._order: list[int] = []
        self._next = 0

    def extend(self, plan: ReductionPlan) -> None:
        """Go on with a plan that has further buckets behind those of the present one; no pass may be open."""
        self.finish()
        self._use(plan)

    # ------------------------------------------------------------------ one pass

    def begin(self) -> bool:
        """Begin a pass: no gradient has arrived, no bucket is launched. Whether other parameters are trainable now."""
        trainable = [param.requires_grad for param in self._plan.params]
        changed, holdable = trainable != self._trainable, self._plan.holdable()
        self._buffers.follow(holdable)
        if changed:
            self._trainable, self._expected = trainable, self._plan.trained(trainable)
            self._order = list(self._expected)
        self._missing = {index: len(members) for index, members in self._expected.items()}
        # Those that may be held are only counted.
        counted = map(and_, map(and_, trainable, holdable), self._plan.countable)
        self._states, self._written, self._next = bytearray(counted), bytearray(len(trainable)), 0
        return changed

    def is_taken(self, param: int) -> bool:
        """Whether this pass can take no further gradient of a parameter."""
        return self._states[param] in _TAKEN_STATES or self._bucket_of[param] not in self._missing

    def count(self, param: int) -> bool:
        """Note that a small gradient has arrived, and leave it where it is until its bucket is launched.

        False if it must be passed to `arrive`. Called for each gradient, so `launch_full` is left to the caller.
        """
        bucket = self._bucket_of[param]
        missing = self._missing.get(bucket)
        if missing is None or self._states[param] != _COUNTABLE:
            return False
        self._states[param], self._missing[bucket] = _COUNTED, missing - 1
        return True

    def is_counted(self, param: int) -> bool:
        """Whether a gradient was counted, and is still where it was."""
        return self._states[param] == _COUNTED

    def arrive(self, param: int, grad: Tensor | None) -> None:
        """Take a gradient, or `None` for a parameter without one in this pass; a full bucket is launched.

        The gradient's memory must not change before its bucket is launched.
        """
        if grad is not None:
            self._buffers.add(param, grad.detach())
            self._written[param] = 1
        if self._trainable[param] and self._states[param] not in _TAKEN_STATES:
            self._missing[self._bucket_of[param]] -= 1
        self._states[param] = _TAKEN
        self.launch_full()

    @property
    def next_is_full(self) -> bool:
        """Whether the next bucket is full. Threads of other devices may launch it meanwhile."""
        number, order = self._next, self._order
        return number < len(order) and self._missing.get(order[number]) == 0

    @property
    def has_full(self) -> bool:
        """Whether a bucket is full whose turn it is."""
        return self.next_is_full if self._turns is None else self._turns.has_full

    def launch_full(self) -> None:
        """Launch the next bucket while it is full."""
        if self._turns is not None:
            self._turns.launch_full()
            return
        while self.next_is_full:
            self.launch_next()

    @property
    def launch_positions(self) -> list[int]:
        """The place in the model of each bucket of this pass, in launch order: that of its first parameter there."""
        return [self._plan.first_position(bucket) for bucket in self._order]

    def copy_held_back(self) -> None:
        """Copy gradients that are still held, because their memory is about to be reused."""
        self._buffers.copy_held_back()

    def missing(self) -> list[int]:
        """The trainable parameters that have not arrived in this pass."""
        open_members = (self._expected[bucket] for bucket, count in self._missing.items() if count)
        return sorted(param for members in open_members for param in members if not self.is_taken(param))

    @property
    def written(self) -> set[int]:
        """The parameters that have brought a gradient in this pass."""
        return set(compress(range(len(self._written)), self._written))

    @property
    def trainable_count(self) -> int:
        """How many parameters may have a gradient in this pass."""
        return sum(self._trainable)

    def end(self) -> None:
        """End the pass: launch all remaining buckets, with zeros for gradients that have not arrived."""
        if self._turns is not None:
            self._turns.end()
        while self._next < len(self._order):
            self.launch_next()

    def release_scratch(self) -> None:
        """Release memory that exchanges keep for reuse: no bucket will be launched for a while."""
        for exchange in {id(exchange): exchange for exchange in self._plan.exchanges}.values():
            exchange.release_scratch()

    def finish(self) -> None:
        """Wait until no bucket is in flight."""
        while self._in_flight:
            self._finish_oldest()

    def finish_bucket(self, bucket: int) -> None:
        """Wait until a bucket is no longer in flight."""
        while any(bucket == each.bucket for each in self._in_flight):
            self._finish_oldest()

    @property
    def nbytes(self) -> int:
        """Bytes of gradients that wait for their bucket, of buckets filled or in flight, and of receive buffers."""
        in_flight = sum(each.memory.untyped_storage().nbytes() + each.pending.nbytes for each in self._in_flight)
        return in_flight + self._buffers.nbytes + sum(map(self._grad_bytes, self._counted()))

    def _counted(self) -> list[int]:
        return [param for param, state in enumerate(self._states) if state == _COUNTED]

    def _grad_bytes(self, param: int) -> int:
        return self._plan.layout.params[param].numel * self._plan.params[param].dtype.itemsize

    # ------------------------------------------------------------------ launching

    def launch_next(self) -> None:
        """Launch the next bucket. The order of launches must be the same on all ranks."""
        bucket = self._order[self._next]
        while len(self._in_flight) >= MOST_IN_FLIGHT:
            self._finish_oldest()
        self._collect_counted(bucket)
        memory = self._buffers.fill(bucket, self._written)
        with self._timer.phase("reduce", bucket):
            pending = self._plan.exchanges[bucket].reduce(memory, self._plan.layout.buckets[bucket])
        # Only now: if the launch failed, the bucket can be launched again with what was written to it.
        self._buffers.drop(bucket)
        self._in_flight.append(_InFlight(bucket, pending, memory))
        del self._missing[bucket]
        self._next += 1
        self._sink.launched(bucket, [param for param in self._expected[bucket] if self._written[param]])

    def _collect_counted(self, bucket: int) -> None:
        """Hold the gradients of a bucket that were only counted. Some may be gone: hooks of the user may drop them."""
        counted = [param for param in self._plan.members[bucket] if self._states[param] == _COUNTED]
        found = zip(counted, self._collect(counted), strict=True) if counted else ()
        kept = {param: grad for param, grad in found if grad is not None}
        self._buffers.hold(bucket, kept)
        for param in counted:
            self._states[param] = _TAKEN
        for param in kept:
            self._written[param] = 1

    def _finish_oldest(self) -> None:
        bucket, pending, memory = self._in_flight.popleft()
        exchange = self._plan.exchanges[bucket]
        with self._timer.waiting("reduce", bucket):
            part = self._sum_replicas(pending.finish(self._sink.memory_for(bucket)))
        whole = self._gathered(bucket, part, memory) if self._plan.whole else part
        if exchange.blocks_host and not self._plan.whole:
            exchange.free(memory)
        self._sink.take(bucket, whole)

    def _gathered(self, bucket: int, part: Tensor, memory: Tensor) -> Tensor:
        """The whole of a reduced bucket, from the parts of all owners."""
        where = self._plan.layout.buckets[bucket]
        owned = where.owned(self._plan.rank)
        memory[owned.start : owned.stop].copy_(part)
        with self._timer.waiting("gather gradients", bucket):
            self._plan.exchanges[bucket].gather(memory, where).wait()
        return memory
