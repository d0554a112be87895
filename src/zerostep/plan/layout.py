"""Where every element of every parameter lives and which rank owns it: the plan that all other modules read.

A *bucket* is a one-dimensional address space of one dtype and device. Its *slots* say where each parameter lies,
its *cuts* where ownership changes from one rank to the next::

    address   0         8             20        26       34
    slots     |   w1    |     w2      |   b1    |   w3   |
    cuts      0              13                 26       34
    owner     |--- rank 0 ---|----- rank 1 -----| rank 2 |

Here `w2` is *splittable* (a cut falls inside it) and the others may be *atomic* (no cut ever falls inside). Whole
parameters, element ranges and any mixture of the two are the same type with different cuts.

Nothing here holds a tensor or needs a process group: a layout for thousands of ranks is built and tested in one
process.

=========== ==========================================================================================
Span        half-open range of elements
ParamSpec   a parameter without its tensor
Slot        the place of one parameter in a bucket
Bucket      slots and cuts
Layout      all buckets, with lookups by parameter and by rank
Fragment    the part of one parameter that one rank owns; derived, never stored
=========== ==========================================================================================
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of elements."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a span needs 0 <= start <= stop, got {self.start} and {self.stop}")

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def shift(self, by: int) -> Span:
        """The same range, moved by `by` elements."""
        return Span(self.start + by, self.stop + by)

    def intersect(self, other: Span) -> Span:
        """What both ranges cover; an empty range if they do not overlap."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter without its tensor.

    `device` is logical: the device type and the order of first use on this rank ("cuda:0" is the first CUDA device
    that the parameters live on), so that ranks which use different cards of one host have equal specs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    group: int = 0
    splittable: bool = False
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter, given by its index in `Layout.params`, in a bucket.

    `keeper` is the rank that owns a parameter without elements, which no cut can show; 0 for all others.
    """

    param: int
    span: Span
    keeper: int = 0


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of one parameter that one rank owns: `part` of the parameter lies at `place` of the bucket."""

    param: int
    rank: int
    bucket: int
    part: Span
    place: Span


@dataclass(frozen=True, slots=True)
class Bucket:
    """Slots that tile an address space, and world size + 1 cuts that divide it among the ranks."""

    dtype: str
    device: str
    trainable: bool
    slots: tuple[Slot, ...]
    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        end = 0
        for slot in self.slots:
            if slot.span.start != end:
                raise ValueError(f"slots must tile a bucket: one ends at {end}, the next starts at {slot.span.start}")
            end = slot.span.stop
        if len(self.cuts) < 2 or self.cuts[0] != 0 or self.cuts[-1] != end:
            raise ValueError(f"cuts must run from 0 to the bucket's {end} elements, got {self.cuts[:4]}...")
        if any(low > high for low, high in pairwise(self.cuts)):
            raise ValueError("cuts must not decrease")

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.cuts[-1]

    def owned(self, rank: int) -> Span:
        """The range that `rank` owns."""
        return Span(self.cuts[rank], self.cuts[rank + 1])

    def slots_of(self, rank: int) -> tuple[Slot, ...]:
        """The slots of which `rank` owns at least a part, in address order."""
        owned = self.owned(rank)
        first = bisect_right(self.slots, owned.start, key=lambda slot: slot.span.stop)
        last = bisect_left(self.slots, owned.stop, key=lambda slot: slot.span.start)
        filled = [slot for slot in self.slots[first:last] if slot.span.length]
        empty = [slot for slot in self.slots if not slot.span.length and slot.keeper == rank]
        return tuple(sorted([*filled, *empty], key=lambda slot: (slot.span.stop, slot.span.start)))

    def ranks_of(self, slot: Slot) -> range:
        """The ranks that own a part of a slot."""
        if not slot.span.length:
            return range(slot.keeper, slot.keeper + 1)
        return range(bisect_right(self.cuts, slot.span.start) - 1, bisect_left(self.cuts, slot.span.stop))


@dataclass(frozen=True)
class Layout:
    """All buckets of a set of parameters, divided among `world_size` ranks."""

    world_size: int
    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        placed = [slot.param for bucket in self.buckets for slot in bucket.slots]
        if sorted(placed) != list(range(len(self.params))):
            raise ValueError(f"every one of the {len(self.params)} parameters needs exactly one slot")
        for bucket in self.buckets:
            self._check(bucket)

    def _check(self, bucket: Bucket) -> None:
        if len(bucket.cuts) != self.world_size + 1:
            raise ValueError(f"{self.world_size} ranks need {self.world_size + 1} cuts, got {len(bucket.cuts)}")
        for slot in bucket.slots:
            spec = self.params[slot.param]
            if (spec.dtype, spec.device, spec.trainable) != (bucket.dtype, bucket.device, bucket.trainable):
                raise ValueError(f"parameter {spec.name!r} is not of its bucket's dtype, device and trainability")
            if not 0 <= slot.keeper < self.world_size:
                raise ValueError(f"parameter {spec.name!r} is kept by rank {slot.keeper} of {self.world_size}")
            if slot.span.length != spec.numel:
                raise ValueError(f"parameter {spec.name!r} has {spec.numel} elements, its slot {slot.span.length}")
            if not spec.splittable and len(bucket.ranks_of(slot)) != 1:
                raise ValueError(f"a cut falls inside the atomic parameter {spec.name!r}")

    @cached_property
    def _slots(self) -> tuple[tuple[int, Slot], ...]:
        """For each parameter, the index of its bucket and its slot."""
        slots = {slot.param: (index, slot) for index, bucket in enumerate(self.buckets) for slot in bucket.slots}
        return tuple(slots[param] for param in range(len(self.params)))

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {spec.name: index for index, spec in enumerate(self.params)}

    def index_of(self, name: str) -> int:
        """The index of the parameter called `name`."""
        return self._indices[name]

    def place_of(self, param: int) -> tuple[int, Span]:
        """The index of the bucket that holds parameter `param`, and its range there."""
        bucket, slot = self._slots[param]
        return bucket, slot.span

    def owner_of(self, param: int) -> int:
        """The one rank that owns the whole of parameter `param`."""
        bucket, slot = self._slots[param]
        ranks = self.buckets[bucket].ranks_of(slot)
        if len(ranks) != 1:
            raise ValueError(f"parameter {self.params[param].name!r} is divided among ranks {list(ranks)}")
        return ranks[0]

    def fragments_of(self, param: int) -> tuple[Fragment, ...]:
        """The parts of parameter `param` with their owners, in element order."""
        bucket, slot = self._slots[param]
        return tuple(self._fragment(bucket, slot, rank) for rank in self.buckets[bucket].ranks_of(slot))

    def fragments(self, rank: int) -> Iterator[Fragment]:
        """What `rank` owns, bucket by bucket in address order."""
        for index in range(len(self.buckets)):
            yield from self.fragments_in(index, rank)

    def fragments_in(self, bucket: int, rank: int) -> list[Fragment]:
        """What `rank` owns in one bucket, in address order."""
        return [self._fragment(bucket, slot, rank) for slot in self.buckets[bucket].slots_of(rank)]

    def _fragment(self, bucket: int, slot: Slot, rank: int) -> Fragment:
        place = slot.span.intersect(self.buckets[bucket].owned(rank)) if slot.span.length else slot.span
        return Fragment(slot.param, rank, bucket, place.shift(-slot.span.start), place)

    def load(self, rank: int) -> int:
        """Number of elements that `rank` owns."""
        return sum(bucket.owned(rank).length for bucket in self.buckets)

    def to_json(self) -> str:
        """The layout as text; equal layouts give equal text."""
        params = [[p.name, p.shape, p.dtype, p.device, p.group, p.splittable, p.trainable] for p in self.params]
        buckets = [
            {
                "dtype": bucket.dtype,
                "device": bucket.device,
                "trainable": bucket.trainable,
                "params": [slot.param for slot in bucket.slots],
                "keepers": [slot.keeper for slot in bucket.slots if not slot.span.length],
                "cuts": bucket.cuts,
            }
            for bucket in self.buckets
        ]
        entries = {"world_size": self.world_size, "params": params, "buckets": buckets}
        return json.dumps(entries, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Layout:
        """The layout that `to_json` wrote; `ValueError` for any other text."""
        try:
            entries = json.loads(text)
            params = tuple(_param(*entry) for entry in _list(entries["params"]))
            buckets = tuple(_bucket(entry, params) for entry in _list(entries["buckets"]))
            return Layout(_count(entries["world_size"]), params, buckets)
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a layout: {error!r}") from error

    def digest(self) -> str:
        """The SHA-256 of the layout's JSON text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def tile(specs: Sequence[ParamSpec], order: Sequence[int], owners: Mapping[int, int] | None = None) -> tuple[Slot, ...]:
    """Slots for the parameters in `order`, without gaps; `owners` gives the keepers of those without elements."""
    sizes = [specs[index].numel for index in order]
    return tuple(
        Slot(index, Span(start, start + size), 0 if size or owners is None else owners[index])
        for index, size, start in zip(order, sizes, accumulate(sizes, initial=0), strict=False)
    )


def _param(name: Any, shape: Any, *rest: Any) -> ParamSpec:
    if [type(value) for value in (name, *rest)] != [str, str, str, int, bool, bool]:
        raise ValueError(f"not a layout: {[name, shape, *rest]} does not describe a parameter")
    return ParamSpec(name, tuple(_count(size) for size in _list(shape)), *rest)


def _bucket(entry: dict[str, Any], params: tuple[ParamSpec, ...]) -> Bucket:
    keepers = iter(_list(entry["keepers"]))
    order = [_count(param) for param in _list(entry["params"])]
    owners = {param: _count(next(keepers, None)) for param in order if not params[param].numel}
    if next(keepers, None) is not None:
        raise ValueError("not a layout: more keepers than parameters without elements")
    cuts = tuple(_count(cut) for cut in _list(entry["cuts"]))
    return Bucket(entry["dtype"], entry["device"], entry["trainable"], tile(params, order, owners), cuts)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"not a layout: {value!r} stands where a count is needed")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"not a layout: {value!r} stands where a list is needed")
    return value
