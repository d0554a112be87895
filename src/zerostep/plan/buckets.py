"""A layout of many buckets from parameter specs, in the order in which backward fills them.

Backward visits parameters in about the reverse of the model's order, so buckets are filled from the end of the model: a
full one is sent while backward goes on. Every bucket is divided among all ranks, so that each rank has its part of
gradients and state whatever part of the model is trained. Splittable parameters are cut wherever that needs; atomic
ones have buckets of their own, whose owners are chosen over the whole model, by bytes of state and by work. The
splittable ones then level what the atomic ones left uneven.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zerostep.plan.assign import assign, atomic_bucket, loads_of, pour, splittable_bucket
from zerostep.plan.layout import Bucket, Layout, ParamSpec

# Parts of at least _LONG elements start at multiples of _ALIGNMENT, where vector instructions are fastest.
_ALIGNMENT = 64
_LONG = 256 * _ALIGNMENT
# Sizes in bytes that are no multiple of this misalign the parameters behind them.
_FAST_BYTES = 16
# A parameter is small if a bucket has room for more than this many of its size.
_SMALL_RATIO = 64
# A bucket filled to this fraction is closed.
_CLOSING_FRACTION = 0.75
# The last two buckets have at most a half and a quarter of the bytes of the others; listed from the last one on.
_LAST_DIVISORS = (4, 2)


@dataclass(frozen=True, slots=True)
class Cost:
    """What owning a parameter costs: bytes of state, and the work of its update where that is not negligible."""

    state: int
    work: int = 0


def plan_buckets(
    specs: Sequence[ParamSpec],
    world_size: int,
    bucket_bytes: int,
    itemsizes: Sequence[int],
    costs: Sequence[Cost],
    positions: Sequence[int] | None = None,
    least_bytes: int = 0,
) -> Layout:
    """Divide `specs` among `world_size` ranks, in buckets of about `bucket_bytes`.

    `itemsizes` and `costs` have an entry for each spec. So has `positions`, the position of each parameter in the
    model, if that is not the order of the specs. The last parameters of the model come first. Buckets of fewer than
    `least_bytes` are joined with others, where there are some of their kind.
    """
    if world_size < 1 or bucket_bytes < 1:
        raise ValueError(f"a layout needs at least one rank and one byte, got {world_size} and {bucket_bytes}")
    owners = _owners(specs, costs, world_size)
    shares = _shares(specs, costs, owners, world_size)
    ordered = _bucket_members(
        specs, itemsizes, costs, (bucket_bytes, least_bytes), range(len(specs)) if positions is None else positions
    )
    buckets = [
        (
            _cut_bucket(specs, members, itemsizes[members[0]], shares, world_size)
            if specs[members[0]].splittable
            else _whole_bucket(specs, members, owners, world_size)
        )
        for members in ordered
    ]
    return Layout(world_size, tuple(specs), tuple(buckets))


def extend(layout: Layout, further: Layout) -> Layout:
    """Both layouts as one: `layout` unchanged, followed by the parameters and buckets of `further`."""
    shift = len(layout.params)
    moved = [
        replace(bucket, slots=tuple(replace(slot, param=slot.param + shift) for slot in bucket.slots))
        for bucket in further.buckets
    ]
    return Layout(layout.world_size, layout.params + further.params, (*layout.buckets, *moved))


def padded_size(bucket: Bucket) -> int:
    """The number of elements to allocate so that all ranks have equally long parts.

    The bucket's own size if it is not cut evenly; only the last parts of an evenly cut bucket are short.
    """
    part = even_part(bucket)
    return bucket.size if part is None else part * (len(bucket.cuts) - 1)


def even_part(bucket: Bucket) -> int | None:
    """The length of every rank's part if only the last parts are shorter; `None` if the bucket is not cut evenly."""
    world, longest, size = len(bucket.cuts) - 1, bucket.cuts[1], bucket.size
    # Else a whole parameter of rank 0, with empty parts of the others behind it, would count as cut evenly.
    if not longest or longest != _even_length(size, world):
        return None
    full = size // longest
    starts, ends = tuple(range(0, full * longest + 1, longest)), (size,) * (world - full)
    return longest if bucket.cuts == starts + ends else None


def _owners(specs: Sequence[ParamSpec], costs: Sequence[Cost], world_size: int) -> dict[int, int]:
    """The owner of each atomic parameter, assigned from the costliest to the cheapest, frozen ones last."""
    atomic = [index for index, spec in enumerate(specs) if not spec.splittable]
    state = sum(costs[index].state for index in atomic) or 1
    work = sum(costs[index].work for index in atomic) or 1
    weights = [cost.state / state + cost.work / work for cost in costs]
    order = sorted(atomic, key=lambda index: (not specs[index].trainable, -weights[index], index))
    return assign(order, weights, world_size)


def _shares(
    specs: Sequence[ParamSpec], costs: Sequence[Cost], owners: dict[int, int], world_size: int
) -> list[int] | None:
    """The bytes of splittable state for each rank so that all state is level; `None` if it is to be cut evenly."""
    trained = ((rank, costs[index].state) for index, rank in owners.items() if specs[index].trainable)
    loads = loads_of(trained, world_size)
    splittable = sum(cost.state for spec, cost in zip(specs, costs, strict=True) if spec.splittable and spec.trainable)
    return None if len(set(loads)) == 1 or not splittable else pour(splittable, loads)


def _bucket_members(
    specs: Sequence[ParamSpec],
    itemsizes: Sequence[int],
    costs: Sequence[Cost],
    limits: tuple[int, int],
    positions: Sequence[int],
) -> list[list[int]]:
    """The members of each bucket, the buckets sorted by the expected time of their last gradient, frozen ones last."""
    bucket_bytes, least_bytes = limits
    sizes = [spec.numel * itemsize for spec, itemsize in zip(specs, itemsizes, strict=True)]
    rates = {spec.group: cost.state / spec.numel for spec, cost in zip(specs, costs, strict=True) if spec.numel}

    def kind(index: int) -> tuple[object, ...]:
        """Parameters of different kinds may not share a bucket."""
        spec = specs[index]
        # All elements of a bucket must cost the same, so that equal parts do.
        rate = rates.get(spec.group, 0.0) if spec.splittable else 0.0
        # Whole parameters are sorted by owner, so those that misalign others cannot simply go last.
        misaligns = not spec.splittable and _misaligns(sizes[index])
        return spec.device, spec.dtype, spec.trainable, spec.splittable, rate, misaligns

    def launch_order(members: list[int]) -> tuple[bool, int]:
        return not specs[members[0]].trainable, -min(positions[index] for index in members)

    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for index in sorted(range(len(specs)), key=lambda index: positions[index], reverse=True):
        # Gradients of norms and biases may come much later than those of the weights beside them, which must not wait.
        small = sizes[index] * _SMALL_RATIO < bucket_bytes
        alike[*kind(index), small].append(index)
    by_kind: defaultdict[tuple[object, ...], list[list[int]]] = defaultdict(list)
    for (*key, _), members in alike.items():
        by_kind[*key] += _by_size(members, sizes, bucket_bytes)
    joined = (_joined(sorted(each, key=launch_order), sizes, least_bytes) for each in by_kind.values())
    return sorted((members for buckets in joined for members in buckets), key=launch_order)


def _joined(buckets: Sequence[list[int]], sizes: Sequence[int], least_bytes: int) -> list[list[int]]:
    """Buckets in launch order; each that is too small goes with the next one, and the last one with that before it."""
    found = list[list[int]]()
    waiting = list[int]()
    for members in buckets:
        waiting = [*waiting, *members]
        if sum(sizes[index] for index in waiting) >= least_bytes:
            found.append(waiting)
            waiting = []
    if waiting:
        found[-1:] = [[*(found[-1] if found else []), *waiting]]
    return found


def _by_size(members: list[int], sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """`members` cut into full buckets, with smaller ones at the end.

    No computation is left to overlap with when the last gradients come, nor when the next forward pass begins, which
    needs the same parameters first.
    """
    if sum(sizes[index] for index in members) <= bucket_bytes:
        return [members]
    small = list[list[int]]()
    for divisor in _LAST_DIVISORS:
        if members:
            start = _last_bucket_start(members, sizes, bucket_bytes // divisor)
            small.insert(0, members[start:])
            members = members[:start]
    return [*_full_buckets(members, sizes, bucket_bytes), *small]


def _last_bucket_start(members: Sequence[int], sizes: Sequence[int], most_bytes: int) -> int:
    """Where the last bucket begins: it has at least one member, and as many as fit into `most_bytes`."""
    start = len(members) - 1
    left = most_bytes - sizes[members[start]]
    while start and sizes[members[start - 1]] <= left:
        start -= 1
        left -= sizes[members[start]]
    return start


def _full_buckets(members: Sequence[int], sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Buckets of at most `bucket_bytes`, closed when almost full: the next gradient may come much later."""
    buckets: list[list[int]] = []
    filled = bucket_bytes
    for index in members:
        if filled >= _CLOSING_FRACTION * bucket_bytes or filled + sizes[index] > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += sizes[index]
    return buckets


def _cut_bucket(
    specs: Sequence[ParamSpec], members: Sequence[int], itemsize: int, shares: Sequence[int] | None, world_size: int
) -> Bucket:
    """A bucket of splittable parameters: those that misalign others last, those of one group side by side."""
    order = sorted(members, key=lambda index: (_misaligns(specs[index].numel * itemsize), specs[index].group, index))
    size = sum(specs[index].numel for index in order)
    cuts = _even_cuts(size, world_size) if shares is None else _proportional_cuts(size, shares)
    return splittable_bucket(specs, order, cuts)


def _whole_bucket(
    specs: Sequence[ParamSpec], members: Sequence[int], owners: dict[int, int], world_size: int
) -> Bucket:
    """A bucket of atomic parameters, sorted by owner, then by group."""
    order = sorted(members, key=lambda index: (specs[index].group, index))
    return atomic_bucket(specs, order, owners, world_size)


def _misaligns(size: int) -> bool:
    """Whether parameters behind one of `size` bytes would start where fast kernels cannot run."""
    return size % _FAST_BYTES != 0


def _even_cuts(size: int, world_size: int) -> tuple[int, ...]:
    """Cuts for equal parts; the last ones may be shorter."""
    part = _even_length(size, world_size)
    return tuple(min(size, rank * part) for rank in range(world_size + 1))


def _even_length(size: int, world_size: int) -> int:
    part = -(-size // world_size)
    return part if part < _LONG else -(-part // _ALIGNMENT) * _ALIGNMENT


def _proportional_cuts(size: int, shares: Sequence[int]) -> tuple[int, ...]:
    total = sum(shares)
    return tuple(size * end // total for end in accumulate(shares, initial=0))
