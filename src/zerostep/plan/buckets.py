"""From parameter specs to a layout of many buckets, in the order in which backward fills them.

Backward visits parameters in about the reverse of the model's order, so buckets are filled from the end: as soon as one
is full it can travel, while backward goes on. Every bucket is divided among all ranks, so that whatever part of the
model is trained, each rank has its share of gradients and state. Splittable parameters are cut wherever that needs;
atomic ones have buckets of their own, whose owners are chosen over the whole model, by bytes of state and by work. The
splittable ones then level what the atomic ones left uneven.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from itertools import accumulate

from zerostep.plan.layout import Bucket, Layout, ParamSpec, Slot, Span
from zerostep.plan.partition import pour

__all__ = ["Cost", "even_part", "extend", "fill", "padded_size"]

# Parts that are long enough start where vector instructions like it.
_ALIGNMENT = 64
_LONG = 256 * _ALIGNMENT
_FAST_BYTES = 16
_MANY = 64
_ALMOST = 0.75
_SMALL_AT_THE_END = (4, 2)


@dataclass(frozen=True, slots=True)
class Cost:
    """What owning a parameter means: the bytes of its state, and the work of its update where that is worth a count."""

    state: int
    work: int = 0


def fill(
    specs: Sequence[ParamSpec],
    world_size: int,
    bucket_bytes: int,
    itemsizes: Sequence[int],
    costs: Sequence[Cost],
    places: Sequence[int] | None = None,
) -> Layout:
    """Divide `specs` among `world_size` ranks, in buckets of about `bucket_bytes`.

    `itemsizes` and `costs` have an entry for each spec, and `places` too: where each stands in the model, if that is
    not the order of the specs. The last parameters of the model come first.
    """
    if world_size < 1 or bucket_bytes < 1:
        raise ValueError(f"a layout needs at least one rank and one byte, got {world_size} and {bucket_bytes}")
    owners = _owners(specs, costs, world_size)
    shares = _shares(specs, costs, owners, world_size)
    groups = _fill(specs, itemsizes, costs, bucket_bytes, range(len(specs)) if places is None else places)
    buckets = [
        (
            _cut(specs, members, itemsizes[members[0]], shares, world_size)
            if specs[members[0]].splittable
            else _whole(specs, members, owners, world_size)
        )
        for members in groups
    ]
    return Layout(world_size, tuple(specs), tuple(buckets))


def extend(layout: Layout, further: Layout) -> Layout:
    """Both layouts as one, with the parameters and buckets of `further` behind; those of `layout` stay as they are."""
    shift = len(layout.params)
    moved = [
        replace(bucket, slots=tuple(replace(slot, param=slot.param + shift) for slot in bucket.slots))
        for bucket in further.buckets
    ]
    return Layout(layout.world_size, layout.params + further.params, (*layout.buckets, *moved))


def padded_size(bucket: Bucket) -> int:
    """How many elements memory needs so that all ranks have equally long parts; the bucket's own size if they cannot.

    Only the last parts of an evenly cut bucket may be short.
    """
    part = even_part(bucket)
    return bucket.size if part is None else part * (len(bucket.cuts) - 1)


def even_part(bucket: Bucket) -> int | None:
    """The length that the parts of all ranks have, where only the last ones are short; `None` if there is none."""
    world, longest, size = len(bucket.cuts) - 1, bucket.cuts[1], bucket.size
    # One whole parameter of the first rank looks like a long part with short ones behind it, and is none.
    if not longest or longest != _even_part(size, world):
        return None
    full = size // longest
    starts, ends = tuple(range(0, full * longest + 1, longest)), (size,) * (world - full)
    return longest if bucket.cuts == starts + ends else None


def _owners(specs: Sequence[ParamSpec], costs: Sequence[Cost], world_size: int) -> dict[int, int]:
    """An owner for each atomic parameter: the costliest first, to the rank with the least; frozen ones after all."""
    atomic = [index for index, spec in enumerate(specs) if not spec.splittable]
    state = sum(costs[index].state for index in atomic) or 1
    work = sum(costs[index].work for index in atomic) or 1
    weight = {index: costs[index].state / state + costs[index].work / work for index in atomic}
    heap = [(0.0, rank) for rank in range(world_size)]
    heapify(heap)
    owners = {}
    for index in sorted(atomic, key=lambda index: (not specs[index].trainable, -weight[index], index)):
        load, rank = heap[0]
        owners[index] = rank
        heapreplace(heap, (load + weight[index], rank))
    return owners


def _shares(
    specs: Sequence[ParamSpec], costs: Sequence[Cost], owners: dict[int, int], world_size: int
) -> list[int] | None:
    """How the splittable parameters are divided, in bytes of state; `None` for evenly."""
    loads = [0] * world_size
    for index, rank in owners.items():
        if specs[index].trainable:
            loads[rank] += costs[index].state
    loose = sum(costs[index].state for index, spec in enumerate(specs) if spec.splittable and spec.trainable)
    return None if len(set(loads)) == 1 or not loose else pour(loose, loads)


def _fill(
    specs: Sequence[ParamSpec],
    itemsizes: Sequence[int],
    costs: Sequence[Cost],
    bucket_bytes: int,
    places: Sequence[int],
) -> list[list[int]]:
    """The members of each bucket; a bucket comes as early as its last gradient does."""
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    sizes = [spec.numel * itemsize for spec, itemsize in zip(specs, itemsizes, strict=True)]
    rates = {spec.group: cost.state / spec.numel for spec, cost in zip(specs, costs, strict=True) if spec.numel}
    for index in sorted(range(len(specs)), key=lambda index: places[index], reverse=True):
        spec = specs[index]
        # Every stretch of a bucket must cost the same, so that equal parts do.
        rate = rates.get(spec.group, 0.0) if spec.splittable else 0.0
        # Whole parameters go by owner, so those of odd sizes cannot simply go last.
        odd = not spec.splittable and _is_odd(sizes[index])
        # Norms and biases may come much later than the weights beside them, which should not have to wait.
        small = sizes[index] * _MANY < bucket_bytes
        alike[spec.device, spec.dtype, spec.trainable, spec.splittable, rate, odd, small].append(index)
    done = [members for kind in alike.values() for members in _divide(kind, sizes, bucket_bytes)]
    return sorted(done, key=lambda members: (not specs[members[0]].trainable, -min(places[each] for each in members)))


def _divide(members: list[int], sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Full buckets, but small ones at the end: nothing is left to hide behind when the last gradients come, nor when
    the next forward pass begins, which needs the same parameters first.
    """
    if sum(sizes[index] for index in members) <= bucket_bytes:
        return [members]
    small = list[list[int]]()
    for part in _SMALL_AT_THE_END:
        if members:
            end = _cut_off(members, sizes, bucket_bytes // part)
            small.insert(0, members[end:])
            members = members[:end]
    return [*_full(members, sizes, bucket_bytes), *small]


def _cut_off(members: Sequence[int], sizes: Sequence[int], room: int) -> int:
    """Where the last bucket begins: it has at least one member, and as many as there is room for."""
    end = len(members) - 1
    room -= sizes[members[end]]
    while end and sizes[members[end - 1]] <= room:
        end -= 1
        room -= sizes[members[end]]
    return end


def _full(members: Sequence[int], sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """A bucket that is almost full is closed: the little that would still go in may come much later."""
    found: list[list[int]] = []
    filled = bucket_bytes
    for index in members:
        if filled >= _ALMOST * bucket_bytes or filled + sizes[index] > bucket_bytes:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += sizes[index]
    return found


def _cut(
    specs: Sequence[ParamSpec], members: Sequence[int], itemsize: int, shares: Sequence[int] | None, world_size: int
) -> Bucket:
    """A bucket of splittable parameters; those of one group are neighbours, those of odd sizes behind the others."""
    order = sorted(members, key=lambda index: (_is_odd(specs[index].numel * itemsize), specs[index].group, index))
    slots = _slots(specs, order, {})
    size = slots[-1].span.stop
    return _bucket(specs[order[0]], slots, _even(size, world_size) if shares is None else _proportional(size, shares))


def _whole(specs: Sequence[ParamSpec], members: Sequence[int], owners: dict[int, int], world_size: int) -> Bucket:
    """A bucket of atomic parameters, in the order of their owners."""
    order = sorted(members, key=lambda index: (owners[index], specs[index].group, index))
    parts = [0] * world_size
    for index in order:
        parts[owners[index]] += specs[index].numel
    return _bucket(specs[order[0]], _slots(specs, order, owners), tuple(accumulate(parts, initial=0)))


def _is_odd(size: int) -> bool:
    """Behind a parameter of such a size, others would lie where fast kernels do not like them."""
    return size % _FAST_BYTES != 0


def _slots(specs: Sequence[ParamSpec], order: Sequence[int], owners: dict[int, int]) -> tuple[Slot, ...]:
    ends = accumulate((specs[index].numel for index in order), initial=0)
    return tuple(
        Slot(index, Span(end, end + specs[index].numel), 0 if specs[index].numel else owners.get(index, 0))
        for index, end in zip(order, ends, strict=False)
    )


def _bucket(kind: ParamSpec, slots: tuple[Slot, ...], cuts: tuple[int, ...]) -> Bucket:
    return Bucket(kind.dtype, kind.device, kind.trainable, slots, cuts)


def _even(size: int, world_size: int) -> tuple[int, ...]:
    """Equal parts; the last ones may be shorter."""
    part = _even_part(size, world_size)
    return tuple(min(size, rank * part) for rank in range(world_size + 1))


def _even_part(size: int, world_size: int) -> int:
    part = -(-size // world_size)
    return part if part < _LONG else -(-part // _ALIGNMENT) * _ALIGNMENT


def _proportional(size: int, shares: Sequence[int]) -> tuple[int, ...]:
    total = sum(shares)
    return tuple(size * end // total for end in accumulate(shares, initial=0))
