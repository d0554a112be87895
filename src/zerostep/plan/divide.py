"""An existing layout for another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from zerostep.plan.assign import assign, atomic_bucket, largest_first, splittable_bucket
from zerostep.plan.layout import Bucket, Layout

__all__ = ["divide"]


def divide(layout: Layout, world_size: int) -> Layout:
    """The same parameters in the same buckets, for another number of ranks.

    Splittable parameters are divided evenly in each bucket; atomic ones have one owner each, chosen over all buckets.
    """
    owners = assign(largest_first(layout.params), [spec.numel for spec in layout.params], world_size)
    buckets = [part for bucket in layout.buckets for part in _divided(bucket, layout, owners, world_size)]
    return Layout(world_size, layout.params, tuple(buckets))


def _divided(bucket: Bucket, layout: Layout, owners: Mapping[int, int], world_size: int) -> list[Bucket]:
    """One bucket as up to two: atomic parameters are sorted by owner, so they need a bucket of their own."""
    members = [slot.param for slot in bucket.slots]
    atomic = [index for index in members if index in owners]
    splittable = [index for index in members if index not in owners]
    buckets = []
    if atomic:
        buckets.append(atomic_bucket(layout.params, atomic, owners, world_size))
    if splittable:
        size = sum(layout.params[index].numel for index in splittable)
        even_cuts = (size * rank // world_size for rank in range(world_size + 1))
        buckets.append(splittable_bucket(layout.params, splittable, even_cuts))
    return buckets
