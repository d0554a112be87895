"""Bytes of gradients while backward runs: the optimizer's own reduction, on tensors without memory.

Gradients arrive in about the reverse of the model's order. The exchange counts what it is asked for and moves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zerostep.comm.codec import dtype_named
from zerostep.comm.exchange import NullExchange, PendingReduce
from zerostep.plan.buckets import padded_size
from zerostep.plan.layout import Bucket, Layout
from zerostep.plan.layout_planner import Settings
from zerostep.step.grad_sums import GradSums
from zerostep.step.labels import PhaseTimer
from zerostep.step.reduction import Reduction, SumSink
from zerostep.step.reduction_plan import ReductionPlan, small_on
from zerostep.tensors import Scratch
from zerostep.tools.planner.sources import meta_parameter


@dataclass(frozen=True)
class GradientBytes:
    """Bytes of gradients on one rank: at the worst moment of backward, at its end, and those that the step uses.

    None are left at the end of a backward pass that has updated the parameters.
    """

    peak: int
    end: int
    kept: int


def gradient_bytes(
    layout: Layout,
    rank: int,
    arrivals: Iterable[int],
    settings: Settings,
    on_host: bool,
    in_ddp: bool,
) -> GradientBytes:
    """One backward pass on one rank, whose gradients arrive in the order of `arrivals`.

    In DDP the gradients are in DDP's own memory, and none are held back by the reduction.
    """
    exchange = _CountingExchange(layout.world_size, rank, on_host)
    plan = _plan(layout, rank, settings.reduce_dtype, exchange)
    plan = replace(plan, small=0 if in_ddp else small_on(on_host))
    in_backward = settings.update == "backward"
    sink: SumSink = _DroppedSums(exchange) if in_backward else GradSums(plan)
    reduction = Reduction(plan, lambda part: part, PhaseTimer(), sink)
    reduction.begin()
    for param in arrivals:
        if layout.params[param].trainable:
            grad = torch.empty_like(plan.params[param])
            bucket = layout.buckets[plan.bucket_of[param]]
            exchange.expect(bucket, 0 if in_ddp else grad.nbytes, plan.held_back[param])
            reduction.arrive(param, grad)
    if in_backward:
        reduction.end()
        reduction.finish()
    return exchange.totals()


def _plan(layout: Layout, rank: int, reduce_dtype: torch.dtype | None, exchange: _CountingExchange) -> ReductionPlan:
    params = [meta_parameter(spec.shape, dtype_named(spec.dtype), spec.trainable) for spec in layout.params]
    dtypes = [reduce_dtype or dtype_named(bucket.dtype) for bucket in layout.buckets]
    return ReductionPlan(layout, rank, params, [exchange] * len(dtypes), dtypes, 1.0, whole=False)


class _CountingExchange(NullExchange):
    """Counts the bytes that a reduction allocates, holds in flight and keeps, as the real exchanges would."""

    def __init__(self, world_size: int, rank: int, on_host: bool) -> None:
        self._world, self._rank, self._on_host = world_size, rank, on_host
        self.blocks_host = on_host and world_size > 1
        self._bucket_scratch, self._receive_scratch = Scratch("meta"), Scratch("meta")
        self._held_back: Counter[int] = Counter()  # bytes of gradients, by the identity of their bucket
        self._written: set[int] = set()
        self._arriving = self._arrived = self._filling = self._kept = self._peak = 0
        self._in_flight: list[_CountingReduce] = []

    def expect(self, bucket: Bucket, nbytes: int, held_back: bool) -> None:
        """A gradient is about to arrive: it is held back, or lies beside its bucket's memory while it is copied."""
        self._arrived = 0 if held_back else nbytes
        if held_back:
            self._held_back[id(bucket)] += nbytes
            self._note()
        elif id(bucket) in self._written:
            self._note(nbytes)
        else:
            self._written.add(id(bucket))
            self._arriving = nbytes  # noted when the bucket's memory is allocated

    def totals(self) -> GradientBytes:
        """What was counted since the pass began."""
        parts = sum(each.part_bytes for each in self._in_flight)
        return GradientBytes(self._peak, self._kept + self._in_flight_bytes, self._kept + parts)

    @property
    def _in_flight_bytes(self) -> int:
        return sum(_nbytes(each.memory) + each.nbytes for each in self._in_flight)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The memory of a bucket, from a pool on the host."""
        if self._on_host:
            memory = self._bucket_scratch.allocate(numel, dtype)
        else:
            memory = torch.empty(numel, dtype=dtype, device="meta")
        self._filling += _nbytes(memory)
        self._note(self._arriving)
        self._arriving = 0
        return memory

    def free(self, memory: Tensor) -> None:
        """Return the memory of a reduced bucket to the pool."""
        self._bucket_scratch.free(memory)

    def reduce(self, memory: Tensor, bucket: Bucket) -> PendingReduce:
        """A bucket is launched: gradients that were held back have just been copied into one piece."""
        self._note(self._held_back[id(bucket)])
        del self._held_back[id(bucket)]
        self._filling -= _nbytes(memory)
        sum_size = memory.numel() if self._world == 1 else bucket.owned(self._rank).length
        pending = _CountingReduce(self, memory, sum_size, self._receive_buffers(memory, bucket))
        self._in_flight.append(pending)
        self._note(self._arrived)  # autograd holds the last gradient until the hook that launches has returned
        return pending

    def _receive_buffers(self, memory: Tensor, bucket: Bucket) -> list[Tensor]:
        """On the host one buffer per other rank; elsewhere the backend's output, which is as long as a padded part."""
        owned = bucket.owned(self._rank).length
        if self._world == 1 or not owned:
            return []
        if self._on_host:
            return [self._receive_scratch.allocate(owned, memory.dtype) for _ in range(self._world - 1)]
        padded = padded_size(bucket) != bucket.size
        return [memory.new_empty(memory.numel() // self._world if padded else owned)]

    def finish(self, pending: _CountingReduce) -> Tensor:
        """A bucket has been reduced: its sum is kept, and on the host its receive buffers go back to the pool."""
        if self._world > 1:
            self._note(pending.part_bytes if self._on_host else 0)
        self._in_flight.remove(pending)
        self._kept += pending.part_bytes
        if self._on_host:
            for buffer in pending.buffers:
                self._receive_scratch.free(buffer)
        return pending.memory.new_empty(pending.sum_size)

    def drop(self, nbytes: int) -> None:
        """A sum was used, and is not kept."""
        self._kept -= nbytes

    def _note(self, further: int = 0) -> None:
        spare = self._bucket_scratch.free_bytes + self._receive_scratch.free_bytes
        now = self._kept + self._in_flight_bytes + self._filling + self._held_back.total() + spare
        self._peak = max(self._peak, now + further)


class _DroppedSums:
    """Takes every sum and keeps none, as an update inside backward does."""

    def __init__(self, exchange: _CountingExchange) -> None:
        self._exchange = exchange

    def launched(self, bucket: int, params: Collection[int]) -> None:
        """Nothing to do before the sum is complete."""

    def memory_for(self, bucket: int) -> Tensor | None:
        """No memory is reused."""
        return None

    def take(self, bucket: int, part: Tensor) -> None:
        """The sum is used at once."""
        self._exchange.drop(part.nbytes)


@dataclass(frozen=True, eq=False)
class _CountingReduce:
    exchange: _CountingExchange
    memory: Tensor
    sum_size: int
    buffers: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(map(_nbytes, self.buffers))

    @property
    def part_bytes(self) -> int:
        return self.sum_size * self.memory.element_size()

    def finish(self, out: Tensor | None = None) -> Tensor:
        return self.exchange.finish(self)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of the storage, which a pool may have made larger than was asked for."""
    return tensor.untyped_storage().nbytes()
