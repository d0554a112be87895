"""An existing layout for another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from zerostep.plan.layout import Bucket, Layout, Slot, Span
from zerostep.plan.partition import plan

__all__ = ["divide"]


def divide(layout: Layout, world_size: int) -> Layout:
    """The same parameters in the same buckets, for another number of ranks.

    Splittable parameters are divided evenly in each bucket; atomic ones have one owner each, chosen over all buckets.
    """
    whole = [number for number, spec in enumerate(layout.params) if not spec.splittable]
    planned = plan([layout.params[number] for number in whole], world_size)
    owners = {number: planned.owner_of(place) for place, number in enumerate(whole)}
    buckets = [part for bucket in layout.buckets for part in _divided(bucket, layout, owners, world_size)]
    return Layout(world_size, layout.params, tuple(buckets))


def _divided(bucket: Bucket, layout: Layout, owners: Mapping[int, int], world_size: int) -> list[Bucket]:
    """Whole parameters go in the order of their owners, so they need a bucket of their own."""
    members = [slot.param for slot in bucket.slots]
    whole = sorted((number for number in members if number in owners), key=lambda number: owners[number])
    loose = [number for number in members if number not in owners]
    sizes = [0] * world_size
    for number in whole:
        sizes[owners[number]] += layout.params[number].numel
    size = sum(layout.params[number].numel for number in loose)
    even = tuple(size * rank // world_size for rank in range(world_size + 1))
    return [
        replace(bucket, slots=_slots(numbers, layout, owners), cuts=cuts)
        for numbers, cuts in ((whole, tuple(accumulate(sizes, initial=0))), (loose, even))
        if numbers
    ]


def _slots(numbers: Sequence[int], layout: Layout, owners: Mapping[int, int]) -> tuple[Slot, ...]:
    sizes = [layout.params[number].numel for number in numbers]
    return tuple(
        Slot(number, Span(start, start + size), 0 if size else owners.get(number, 0))
        for number, size, start in zip(numbers, sizes, accumulate(sizes, initial=0), strict=False)
    )
