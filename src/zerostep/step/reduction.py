"""Gradients on their way to their owners: what has arrived, what is under way, what is kept.

A *round* is one backward pass. Gradients are copied into the memory of their bucket as they come; a full bucket is
launched when those before it in layout order are launched too, and not before, because all ranks must launch in one
order. At most two buckets are under way: launching a third first finishes the oldest, of which only the owned part is
kept. What is still missing at the end is launched with zeros.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerostep.comm.exchange import Exchange, PendingReduce
from zerostep.plan.buckets import padded_size
from zerostep.plan.layout import Layout, Span
from zerostep.step.stats import PhaseTimer
from zerostep.tensors import Scratch

__all__ = ["Reduction", "ReductionPlan"]

_flatten: Callable[[list[Tensor]], Tensor] = torch._utils._flatten_dense_tensors
# Memory at the end of backward is the owned part plus what is under way.
_UNDER_WAY = 2
# Fewer elements than this cost less to copy than a call.
_SMALL = 1 << 14


@dataclass(frozen=True)
class ReductionPlan:
    """What a reduction needs to know: who owns what, how it travels and what each rank's gradient counts."""

    layout: Layout
    rank: int
    params: Sequence[Tensor]
    exchanges: Sequence[Exchange]
    dtypes: Sequence[torch.dtype]
    scale: float
    whole: bool


class Reduction:
    """The gradients of this iteration. `kept` has the owned part of each bucket that was reduced so far.

    With `whole` gradients, `kept` has all of it.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        sum_replicas: Callable[[Tensor], Tensor],
        timer: PhaseTimer,
        on_pass_begin: Callable[[], None],
    ) -> None:
        self._plan, self._sum_replicas, self._timer, self._on_pass_begin = plan, sum_replicas, timer, on_pass_begin
        self._buffers: dict[int, Tensor] = {}
        self._small: dict[int, Tensor] = {}
        self._bucket_of = [plan.layout.place_of(param)[0] for param in range(len(plan.layout.params))]
        self._filled: set[int] = set()
        self._written: set[int] = set()
        self._stale: set[int] = set()
        self._trainable: list[bool] = []
        self._order: list[int] = []
        self._expected: dict[int, set[int]] = {}
        self._missing: dict[int, set[int]] = {}
        self._next = 0
        self._open = False
        self._in_flight: deque[tuple[int, int, PendingReduce, Tensor]] = deque()
        self._scratch = Scratch()
        self._reusable: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}
        self.used: set[int] = set()
        self.passes = 0

    # ------------------------------------------------------------------ a round

    def arrive(self, param: int, grad: Tensor | None, accumulate: bool) -> bool:
        """Take a gradient, which nobody else may change; `None` stands for one that this pass did not make.

        `held` tells that it comes on top of what is kept. Returns whether this was the last one of the round.
        """
        if not self._open:
            self._begin()
        elif param in self._filled or self._bucket_of[param] not in self._missing:
            # A further backward pass; or its bucket is on its way already.
            self.launch_missing()
            self._begin()
        bucket = self._bucket_of[param]
        if grad is not None:
            self._take(param, bucket, grad.detach())
            self._written.add(param)
            if not accumulate and param in self.used:
                self._finish_earlier_passes()
                self._stale.add(param)
            self.used.add(param)
        self._filled.add(param)
        missing = self._missing[bucket]
        missing.discard(param)
        return not missing and self._launch_full()

    def _take(self, param: int, bucket: int, grad: Tensor) -> None:
        """Large gradients are copied at once; small ones wait for their neighbours, and are copied together."""
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        if grad.numel() < _SMALL and grad.stride() == self._plan.params[param].stride() and grad.is_contiguous():
            self._small[param] = grad
        else:
            self._write(param, bucket, grad)

    def copy_waiting(self) -> None:
        """Copy what waits to be copied: its memory is about to be used for something else."""
        for bucket in {self._bucket_of[param] for param in self._small}:
            self._write_small(bucket)

    def launch_missing(self) -> None:
        """End the round: what is missing counts as zero."""
        if not self._open:
            self._begin()
        while self._next < len(self._order):
            self._launch()
        self._close()

    def finish(self, bucket: int | None = None) -> None:
        """Wait until a bucket that is under way is kept; all of them if none is named."""
        while self._in_flight and (bucket is None or any(bucket == flying[1] for flying in self._in_flight)):
            self._finish_oldest()

    @property
    def open(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._open

    def drop(self, params: Sequence[int] | None = None) -> None:
        """Drop the gradients of some parameters, or of all."""
        if params is None:
            self.finish()
            # Those that are under way at the end of backward have no part yet, and should not.
            used_elsewhere = self._order[-_UNDER_WAY:] if not self._plan.whole else list(self.sums)
            on_host = {bucket: part for bucket, part in self.sums.items() if part.device.type == "cpu"}
            # An inner optimizer may keep a gradient that it has seen.
            alone = _holders(torch.empty(0))
            self._reusable = {
                b: part for b, part in on_host.items() if b not in used_elsewhere and _holders(part) == alone
            }
            self.sums, self.used, self._stale = {}, set(), set()
        else:
            gone = self.used.intersection(params)
            if gone:
                self.finish()
            self._stale |= gone
            self.used.difference_update(params)

    def zero_stale(self) -> None:
        """Zero what is kept of gradients that were dropped and have not come again."""
        for bucket, sums in self.sums.items():
            self._clear_stale(bucket, sums)
        self._stale = set()

    def take_over(self, before: Reduction) -> None:
        """Take over what an earlier plan has kept; its buckets are the first of this one."""
        if before.open:
            before.launch_missing()
        before.finish()
        self.passes = before.passes
        self.sums, self.used, self._stale = before.sums, before.used, before._stale

    # ------------------------------------------------------------------ launching

    def _begin(self) -> None:
        self._on_pass_begin()
        trainable = [param.requires_grad for param in self._plan.params]
        if trainable != self._trainable:
            self._trainable = trainable
            slots = [[slot.param for slot in bucket.slots] for bucket in self._plan.layout.buckets]
            expected = {index: {param for param in members if trainable[param]} for index, members in enumerate(slots)}
            self._expected = {index: members for index, members in expected.items() if members}
            self._order = list(self._expected)
        self._missing = {index: set(members) for index, members in self._expected.items()}
        self._filled, self._written, self._next, self._open = set(), set(), 0, True

    def _close(self) -> None:
        self._open = False
        self._scratch.trim()
        for exchange in {id(exchange): exchange for exchange in self._plan.exchanges}.values():
            exchange.release_scratch()
        self.passes += 1

    def _launch_full(self) -> bool:
        while self._next < len(self._order) and not self._missing[self._order[self._next]]:
            self._launch()
        done = self._next == len(self._order)
        if done:
            self._close()
        return done

    def _launch(self) -> None:
        bucket = self._order[self._next]
        while len(self._in_flight) >= _UNDER_WAY:
            self._finish_oldest()
        memory = self._memory(bucket)
        self._write_small(bucket)
        for slot in self._plan.layout.buckets[bucket].slots:
            if slot.param not in self._written:
                memory[slot.span.start : slot.span.stop].zero_()
        with self._timer.phase("reduce", bucket):
            reducing = self._plan.exchanges[bucket].reduce(memory, self._plan.layout.buckets[bucket])
        self._in_flight.append((self.passes, bucket, reducing, memory))
        del self._buffers[bucket], self._missing[bucket]
        self._next += 1

    def _finish_oldest(self) -> None:
        _, bucket, reducing, memory = self._in_flight.popleft()
        with self._timer.waiting("reduce", bucket):
            part = self._sum_replicas(reducing.finish(self._reusable.pop(bucket, None)))
        self._add_sum(bucket, self._gathered(bucket, part, memory) if self._plan.whole else part)
        if self._plan.exchanges[bucket].blocks_host and not self._plan.whole:
            self._scratch.give(memory)

    def _finish_earlier_passes(self) -> None:
        while self._in_flight and self._in_flight[0][0] != self.passes:
            self._finish_oldest()

    def _gathered(self, bucket: int, part: Tensor, memory: Tensor) -> Tensor:
        """The whole of a reduced bucket, where everybody wants all gradients."""
        where = self._plan.layout.buckets[bucket]
        owned = where.owned(self._plan.rank)
        memory[owned.start : owned.stop].copy_(part)
        with self._timer.waiting("gather gradients", bucket):
            self._plan.exchanges[bucket].gather(memory, where).wait()
        return memory

    def _add_sum(self, bucket: int, part: Tensor) -> None:
        before = self.sums.get(bucket)
        if before is None:
            self.sums[bucket] = part
        else:
            self._clear_stale(bucket, before)
            before.add_(part)
        self._stale.difference_update(slot.param for slot in self._plan.layout.buckets[bucket].slots)

    # ------------------------------------------------------------------ memory

    def _memory(self, bucket: int) -> Tensor:
        if bucket not in self._buffers:
            where = self._plan.layout.buckets[bucket]
            device = self._plan.params[where.slots[0].param].device
            size, dtype = padded_size(where), self._plan.dtypes[bucket]
            on_host = device.type == "cpu"
            made = self._scratch.take(size, dtype) if on_host else torch.empty(size, dtype=dtype, device=device)
            self._buffers[bucket] = made
        return self._buffers[bucket]

    def _write(self, param: int, bucket: int, grad: Tensor) -> None:
        _, span = self._plan.layout.place_of(param)
        place = self._memory(bucket)[span.start : span.stop]
        like = self._plan.params[param]
        view = place.as_strided(like.shape, like.stride(), place.storage_offset())
        self._scale_into(view, grad)

    def _write_small(self, bucket: int) -> None:
        """Small neighbours go in one piece: two calls for a thousand of them."""
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

    def _clear_stale(self, bucket: int, sums: Tensor) -> None:
        if not self._stale:
            return
        where = self._plan.layout.buckets[bucket]
        start = 0 if self._plan.whole else where.owned(self._plan.rank).start
        for slot in where.slots:
            if slot.param in self._stale:
                span = slot.span.intersect(Span(start, start + sums.numel())).shift(-start)
                sums[span.start : span.stop].zero_()


def _holders(tensor: Tensor) -> int:
    """How many hold the memory of a tensor: the tensor itself, all views of it, and whoever counts them."""
    found: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return found
