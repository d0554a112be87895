"""A layout of few buckets from parameter specs: one bucket for each dtype, device and trainability.

Atomic parameters go whole to the rank with the smallest load, the largest first, group by group. That is the order of
torch's ZeroRedundancyOptimizer, so a migrated job keeps its owners. With `in_order` most of them go in the given order
instead, so that every range of neighbours is divided evenly, not only the whole. Splittable parameters are then divided
so that they level what the atomic ones left uneven. All atomic is sharding by parameter, all splittable is sharding by
element; Muon matrices beside AdamW embeddings are a mixture.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from zerostep.plan.assign import assign, atomic_bucket, largest_first, loads_of, pour, splittable_bucket
from zerostep.plan.layout import Bucket, Layout, ParamSpec


def plan(
    specs: Sequence[ParamSpec], world_size: int, in_order: bool = False, weighed: Sequence[ParamSpec] | None = None
) -> Layout:
    """Divide `specs` among `world_size` ranks: the same layout on every rank, whatever is trainable.

    Owners are chosen by the sizes of `weighed`, if given: the whole parameters of which `specs` are blocks.
    """
    sizes, weighed = [spec.numel for spec in specs], specs if weighed is None else weighed
    order = _mostly_in_order(weighed, world_size) if in_order else largest_first(weighed)
    owners = assign(order, [spec.numel for spec in weighed], world_size)
    buckets = [atomic_bucket(specs, members, owners, world_size) for members in _alike(specs, owners)]
    loads = loads_of(((rank, sizes[index]) for index, rank in owners.items()), world_size)
    splittable = [index for index, spec in enumerate(specs) if spec.splittable]
    for members in _alike(specs, splittable):
        shares = pour(sum(sizes[index] for index in members), loads)
        loads = [load + share for load, share in zip(loads, shares, strict=True)]
        buckets.append(splittable_bucket(specs, members, accumulate(shares, initial=0)))
    return Layout(world_size, tuple(specs), tuple(buckets))


def restrict(layout: Layout, members: Sequence[int]) -> Layout:
    """A layout of some whole parameters of another one, in the given order, with the owners they have there."""
    specs = [layout.params[index] for index in members]
    owners = {position: layout.owner_of(index) for position, index in enumerate(members)}
    buckets = [atomic_bucket(specs, alike, owners, layout.world_size) for alike in _alike(specs, owners)]
    return Layout(layout.world_size, tuple(specs), tuple(buckets))


def divide(layout: Layout, world_size: int) -> Layout:
    """The same parameters in the same buckets, for another number of ranks.

    Splittable parameters are divided evenly in each bucket; atomic ones have one owner each, chosen over all buckets.
    """
    owners = assign(largest_first(layout.params), [spec.numel for spec in layout.params], world_size)
    buckets = [part for bucket in layout.buckets for part in _divided(bucket, layout, owners, world_size)]
    return Layout(world_size, layout.params, tuple(buckets))


def _mostly_in_order(specs: Sequence[ParamSpec], world_size: int) -> list[int]:
    """Atomic parameters as given, but in each group first those of more than half an even share, largest first.

    The others can then level what the large ones leave uneven.
    """
    totals = Counter[int]()
    for spec in specs:
        totals[spec.group] += spec.numel

    def key(index: int) -> tuple[int, int, int]:
        spec = specs[index]
        is_large = 2 * world_size * spec.numel > totals[spec.group]
        return (spec.group, 0, -spec.numel) if is_large else (spec.group, 1, index)

    return sorted(largest_first(specs), key=key)


def _alike(specs: Sequence[ParamSpec], members: Iterable[int]) -> list[list[int]]:
    """`members` grouped into those that may share a bucket, in the order of first appearance."""
    alike: defaultdict[tuple[str, str, bool], list[int]] = defaultdict(list)
    for index in members:
        spec = specs[index]
        alike[spec.device, spec.dtype, spec.trainable].append(index)
    return sorted(alike.values(), key=min)


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
