"""The steps that all planners share: greedy owners of whole parameters, levelling by elements, buckets from an order.

`partition` and `buckets` plan with them; they differ in order, weights and cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapreplace
from itertools import accumulate

from zerostep.plan.layout import Bucket, ParamSpec, Slot, tile


def assign(order: Iterable[int], weights: Sequence[float], world_size: int) -> dict[int, int]:
    """The owner of each parameter in `order`: the rank with the smallest load so far, the lowest of equal ones.

    The result lists the parameters in the order of assignment.
    """
    if world_size < 1:
        raise ValueError(f"a layout needs at least one rank, got {world_size}")
    heap: list[tuple[float, int]] = [(0, rank) for rank in range(world_size)]
    owners = {}
    for index in order:
        load, rank = heap[0]
        owners[index] = rank
        heapreplace(heap, (load + weights[index], rank))
    return owners


def largest_first(specs: Sequence[ParamSpec]) -> list[int]:
    """The atomic parameters, group by group, the largest of each group first."""
    atomic = [index for index, spec in enumerate(specs) if not spec.splittable]
    return sorted(atomic, key=lambda index: (specs[index].group, -specs[index].numel))


def loads_of(owned: Iterable[tuple[int, int]], world_size: int) -> list[int]:
    """The load of each rank, from pairs of a rank and the weight of something that it owns."""
    loads = [0] * world_size
    for rank, weight in owned:
        loads[rank] += weight
    return loads


def pour(amount: int, loads: Sequence[int]) -> list[int]:
    """How much each rank gets of `amount` elements so that the totals come as level as possible."""
    order = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
    below, filled = 0, 0
    for filled, rank in enumerate(order, start=1):
        below += loads[rank]
        if filled == len(order) or loads[order[filled]] * filled - below >= amount:
            break
    level, extra = divmod(amount + below, filled)
    shares = [0] * len(loads)
    for position, rank in enumerate(sorted(order[:filled])):
        shares[rank] = level - loads[rank] + (position < extra)
    return shares


def atomic_bucket(
    specs: Sequence[ParamSpec], members: Sequence[int], owners: Mapping[int, int], world_size: int
) -> Bucket:
    """A bucket of whole parameters, sorted by owner; those of one owner keep the order of `members`."""
    order = sorted(members, key=lambda index: owners[index])
    loads = loads_of(((owners[index], specs[index].numel) for index in order), world_size)
    return _bucket(specs[order[0]], tile(specs, order, owners), accumulate(loads, initial=0))


def splittable_bucket(specs: Sequence[ParamSpec], members: Sequence[int], cuts: Iterable[int]) -> Bucket:
    """A bucket of splittable parameters in the given order; rank 0 keeps those without elements."""
    return _bucket(specs[members[0]], tile(specs, members), cuts)


def _bucket(member: ParamSpec, slots: tuple[Slot, ...], cuts: Iterable[int]) -> Bucket:
    return Bucket(member.dtype, member.device, member.trainable, slots, tuple(cuts))
