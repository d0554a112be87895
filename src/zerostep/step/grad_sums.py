"""The reduced gradients of a step, kept until they are dropped: a sum per bucket, and the parameters that have one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from zerostep.plan.layout import Span
from zerostep.step.reduction import MOST_IN_FLIGHT
from zerostep.step.reduction_plan import ReductionPlan
from zerostep.step.scaled_sum import ScaledSum


class GradSums:
    """This rank's part of each reduced bucket, added up over the passes of a step; all of it if gradients are whole."""

    def __init__(self, plan: ReductionPlan) -> None:
        self._plan = plan
        self._parts: dict[int, ScaledSum] = {}
        self._used: set[int] = set()
        self._reusable: dict[int, Tensor] = {}

    def extend(self, plan: ReductionPlan) -> None:
        """Go on with a plan that has further buckets."""
        self._plan = plan

    @property
    def parts(self) -> Mapping[int, Tensor]:
        """The sums, by bucket."""
        return {bucket: part.settled() for bucket, part in self._parts.items()}

    def part(self, bucket: int) -> Tensor | None:
        """The sum of one bucket, if there is one."""
        return self._parts[bucket].settled() if bucket in self._parts else None

    def scaled(self, bucket: int) -> ScaledSum:
        """The sum of one bucket with the factor that is left to do."""
        return self._parts[bucket]

    def scale(self, buckets: Iterable[int], factor: Tensor) -> None:
        """Multiply the sums of some buckets, when they are used."""
        for bucket in buckets:
            self._parts[bucket].scale(factor)

    @property
    def used(self) -> Collection[int]:
        """The parameters that have a gradient in this step."""
        return self._used

    @property
    def used_buckets(self) -> list[int]:
        """The buckets of the used parameters, in launch order."""
        return sorted(set(map(self._plan.bucket_of.__getitem__, self._used)))

    @property
    def nbytes(self) -> int:
        """Bytes of the sums, and of memory kept for the next ones."""
        parts = [part.unsettled for part in self._parts.values()]
        kept = (part.untyped_storage() for part in [*parts, *self._reusable.values()])
        return sum({storage._cdata: storage.nbytes() for storage in kept}.values())

    # ------------------------------------------------------------------ what the reduction calls

    def launched(self, bucket: int, params: Collection[int]) -> None:
        """Nothing to do before the sum is complete."""

    def memory_for(self, bucket: int) -> Tensor | None:
        """The memory of a sum that was dropped."""
        return self._reusable.pop(bucket, None)

    def take(self, bucket: int, part: Tensor) -> None:
        """Add the sum of a pass to those of earlier ones."""
        if bucket in self._parts:
            self._parts[bucket].settled().add_(part)
        else:
            self._parts[bucket] = ScaledSum(part)

    # ------------------------------------------------------------------ which parameters count

    def use(self, params: Iterable[int]) -> None:
        """Count parameters as used: some rank has a gradient for them."""
        self._used.update(params)

    def use_only(self, params: Iterable[int]) -> None:
        """Count exactly these parameters as used."""
        self._used = set(params)

    def take_all(self) -> dict[int, Tensor]:
        """Hand over all sums; none are left here."""
        parts, self._parts = self.parts, {}
        return dict(parts)

    def drop(self, params: Iterable[int]) -> None:
        """Drop the gradients of some parameters. Nothing of an ended pass may be in flight."""
        dropped = self._used.intersection(params)
        self._used -= dropped
        buckets = {self._plan.bucket_of[param] for param in dropped}.intersection(self._parts)
        slots = {bucket: self._plan.layout.buckets[bucket].slots for bucket in buckets}
        unused = [bucket for bucket in buckets if not any(slot.param in self._used for slot in slots[bucket])]
        for bucket in buckets.difference(unused):
            self._zero(bucket, dropped)
        self._release(unused)

    def drop_all(self) -> None:
        """Drop all gradients."""
        self._reusable = {}
        self._release(list(self._parts))
        self._used = set()

    def _release(self, buckets: Iterable[int]) -> None:
        """Drop sums; their memory is kept for the next ones if it is on the host, and of no use to anybody else."""
        # Buckets that are in flight at the end of backward have no sum yet, and get memory of their own.
        last = set(self._parts) if self._plan.whole else set(sorted(self._parts)[-MOST_IN_FLIGHT:])
        # An inner optimizer may keep a reference to a gradient that it was given: such memory is not reused.
        alone = _references(torch.empty(0))
        for bucket in buckets:
            part = self._parts.pop(bucket).unsettled
            if bucket not in last and part.device.type == "cpu" and _references(part) == alone:
                self._reusable[bucket] = part

    def _zero(self, bucket: int, dropped: Collection[int]) -> None:
        """Zero the sums of dropped gradients."""
        where, part = self._plan.layout.buckets[bucket], self._parts[bucket].settled()
        start = 0 if self._plan.whole else where.owned(self._plan.rank).start
        for slot in where.slots:
            if slot.param in dropped:
                span = slot.span.intersect(Span(start, start + part.numel())).shift(-start)
                part[span.start : span.stop].zero_()


def _references(tensor: Tensor) -> int:
    """How many references there are to the storage of a tensor: its own, those of its views, and that of the caller."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
