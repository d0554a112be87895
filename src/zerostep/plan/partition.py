"""From parameter specs to a layout: who owns what.

Atomic parameters go whole to the rank with the smallest load, the largest first, group by group; that is the order
of torch's own optimizer, so a migrated job keeps its owners. Where neighbours travel together, they go in the given
order instead, after the few that are too large for that, so that every stretch of them is shared evenly. Splittable
parameters are then poured over the ranks like water, so that they level what the atomic ones left uneven. All atomic
is sharding by parameter, all splittable is sharding by element, and Muon matrices beside AdamW embeddings are simply
both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate

from zerostep.plan.layout import Bucket, Layout, ParamSpec, Slot, Span

__all__ = ["plan", "pour", "restrict"]


def plan(specs: Sequence[ParamSpec], world_size: int, in_order: bool = False) -> Layout:
    """Divide `specs` among `world_size` ranks: the same answer on every rank, whatever is trainable.

    `in_order` shares every stretch of neighbours evenly, as far as whole parameters allow, and not only the whole.
    """
    if world_size < 1:
        raise ValueError(f"a layout needs at least one rank, got {world_size}")
    sizes = [spec.numel for spec in specs]
    owners, loads = _assign(specs, sizes, world_size, in_order)
    buckets = [_atomic_bucket(specs[m[0]], m, sizes, owners, world_size) for m in _alike(specs, list(owners))]
    loose = [index for index, spec in enumerate(specs) if spec.splittable]
    for members in _alike(specs, loose):
        shares = pour(sum(sizes[i] for i in members), loads)
        loads = [load + share for load, share in zip(loads, shares, strict=True)]
        buckets.append(_bucket(specs[members[0]], members, sizes, shares, {}))
    return Layout(world_size, tuple(specs), tuple(buckets))


def restrict(layout: Layout, members: Sequence[int]) -> Layout:
    """A layout of some whole parameters of another one, in the given order, with the owners they have there."""
    specs = [layout.params[index] for index in members]
    owners = {place: layout.owner_of(index) for place, index in enumerate(members)}
    sizes = [spec.numel for spec in specs]
    kinds = _alike(specs, range(len(specs)))
    buckets = [_atomic_bucket(specs[kind[0]], kind, sizes, owners, layout.world_size) for kind in kinds]
    return Layout(layout.world_size, tuple(specs), tuple(buckets))


def pour(amount: int, loads: Sequence[int]) -> list[int]:
    """How much each rank gets of `amount` elements so that the totals come as level as possible."""
    order = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
    below, wet = 0, 0
    for wet, rank in enumerate(order, start=1):
        below += loads[rank]
        if wet == len(order) or loads[order[wet]] * wet - below >= amount:
            break
    level, extra = divmod(amount + below, wet)
    shares = [0] * len(loads)
    for place, rank in enumerate(sorted(order[:wet])):
        shares[rank] = level - loads[rank] + (place < extra)
    return shares


def _assign(
    specs: Sequence[ParamSpec], sizes: Sequence[int], world_size: int, in_order: bool
) -> tuple[dict[int, int], list[int]]:
    """Owners of the atomic parameters, in the order of assignment, and the load of every rank."""
    heap = [(0, rank) for rank in range(world_size)]
    heapify(heap)
    owners = {}
    for index in _in_order(specs, sizes, world_size) if in_order else _largest_first(specs, sizes):
        load, rank = heap[0]
        owners[index] = rank
        heapreplace(heap, (load + sizes[index], rank))
    loads = [load for load, _ in sorted(heap, key=lambda entry: entry[1])]
    return owners, loads


def _largest_first(specs: Sequence[ParamSpec], sizes: Sequence[int]) -> list[int]:
    atomic = [index for index, spec in enumerate(specs) if not spec.splittable]
    return sorted(atomic, key=lambda index: (specs[index].group, -sizes[index]))


def _in_order(specs: Sequence[ParamSpec], sizes: Sequence[int], world_size: int) -> list[int]:
    """As given, but in each group first those of more than half a fair share, so that the others can level them."""
    totals = Counter[int]()
    for spec, size in zip(specs, sizes, strict=True):
        totals[spec.group] += size
    found = _largest_first(specs, sizes)
    large = {index for index in found if 2 * world_size * sizes[index] > totals[specs[index].group]}
    return sorted(found, key=lambda index: (specs[index].group, (0, -sizes[index]) if index in large else (1, index)))


def _alike(specs: Sequence[ParamSpec], members: Sequence[int]) -> list[list[int]]:
    """`members` grouped into those that may share a bucket, in the order of first appearance."""
    found: defaultdict[tuple[str, str, bool], list[int]] = defaultdict(list)
    for index in members:
        spec = specs[index]
        found[spec.device, spec.dtype, spec.trainable].append(index)
    return sorted(found.values(), key=min)


def _atomic_bucket(
    kind: ParamSpec, members: list[int], sizes: Sequence[int], owners: dict[int, int], world_size: int
) -> Bucket:
    shares = [0] * world_size
    for index in members:
        shares[owners[index]] += sizes[index]
    order = sorted(members, key=lambda index: owners[index])
    return _bucket(kind, order, sizes, shares, owners)


def _bucket(
    kind: ParamSpec, members: Sequence[int], sizes: Sequence[int], shares: Sequence[int], owners: Mapping[int, int]
) -> Bucket:
    ends = accumulate((sizes[index] for index in members), initial=0)
    slots = tuple(
        Slot(index, Span(end, end + sizes[index]), 0 if sizes[index] else owners.get(index, 0))
        for index, end in zip(members, ends, strict=False)
    )
    return Bucket(kind.dtype, kind.device, kind.trainable, slots, tuple(accumulate(shares, initial=0)))
