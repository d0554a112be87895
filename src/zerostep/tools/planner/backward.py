"""What gradients take while backward runs: `Reduction` played through with sizes alone.

Gradients come in about the reverse of the model's order, are copied into their bucket, and the bucket sets out when it
is full and all before it have. At most two are under way; of one that has arrived, the owned part is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from zerostep.plan.buckets import padded_size
from zerostep.plan.layout import Bucket, Layout
from zerostep.step.reduction import _SMALL, _UNDER_WAY

__all__ = ["Course", "Terms", "play"]


@dataclass(frozen=True)
class Course:
    """Bytes of gradients on one rank: at the worst moment, when backward ends, and those that remain for the step."""

    peak: int
    end: int
    kept: int


@dataclass(frozen=True)
class Terms:
    """How gradients travel: the dtype of the sums, if another; through host memory; and whether the pass `absorbs`
    small ones at once, which otherwise wait for their neighbours.
    """

    reduce_dtype: torch.dtype | None
    on_host: bool
    absorbs: bool


def play(layout: Layout, rank: int, arrivals: Iterable[int], terms: Terms) -> Course:
    """One backward pass on one rank, whose gradients come in the order of `arrivals`."""
    found = _Pass(layout, rank, terms)
    for param in arrivals:
        if layout.params[param].trainable:
            found.arrive(param)
    return Course(found.peak, found.kept + sum(found.flying), found.kept + sum(found.parts))


@dataclass
class _Pool:
    """`Scratch`: memory that was given back, and is taken again if it is not too large. Sizes of it."""

    free: list[int] = field(default_factory=list)

    def take(self, size: int) -> int:
        fitting = [each for each in self.free if size <= each <= 2 * size]
        if not fitting:
            return size
        self.free.remove(min(fitting))
        return min(fitting)


class _Pass:
    def __init__(self, layout: Layout, rank: int, terms: Terms) -> None:
        self._layout, self._rank, self._dtype = layout, rank, terms.reduce_dtype
        self._alone, self._on_host, self._absorbs = layout.world_size == 1, terms.on_host, terms.absorbs
        trained = [index for index, bucket in enumerate(layout.buckets) if bucket.trainable]
        self._missing = {index: len(layout.buckets[index].slots) for index in trained}
        self._order, self._next = trained, 0
        self._filling: dict[int, int] = {}
        self._small: dict[int, dict[int, int]] = {}
        self._padded = {index: padded_size(layout.buckets[index]) for index in trained}
        self._memory, self._rooms = _Pool(), _Pool()
        self._under_way: deque[tuple[int, int, list[int]]] = deque()
        self.kept = self.peak = 0

    @property
    def flying(self) -> list[int]:
        """What each bucket under way takes."""
        return [memory + sum(rooms) for _, memory, rooms in self._under_way]

    @property
    def parts(self) -> list[int]:
        """What will be kept of each bucket under way."""
        return [self._part(bucket) for bucket, _, _ in self._under_way]

    def arrive(self, param: int) -> None:
        bucket, span = self._layout.place_of(param)
        size = span.length * getattr(torch, self._layout.params[param].dtype).itemsize
        if span.length < _SMALL and not self._absorbs:
            self._small.setdefault(bucket, {})[param] = size
            self._note()
        else:
            self._fill(bucket)
            self._note(0 if self._absorbs else size)
        self._missing[bucket] -= 1
        while self._next < len(self._order) and not self._missing[self._order[self._next]]:
            self._launch(self._order[self._next])
            self._next += 1

    def _fill(self, bucket: int) -> None:
        if bucket not in self._filling:
            size = self._padded[bucket] * self._itemsize(bucket)
            self._filling[bucket] = self._memory.take(size) if self._on_host else size

    def _launch(self, bucket: int) -> None:
        while len(self._under_way) >= _UNDER_WAY:
            self._land()
        self._fill(bucket)
        self._note(sum(self._small.get(bucket, {}).values()))  # small neighbours are copied into one piece first
        self._small.pop(bucket, None)
        self._under_way.append((bucket, self._filling.pop(bucket), self._room(bucket)))
        self._note()

    def _room(self, bucket: int) -> list[int]:
        """Where others' gradients are received; where a backend receives them, one sum."""
        if self._alone or not self._part(bucket):
            return []
        if not self._on_host:
            return [self._sum_room(bucket) * self._itemsize(bucket)]
        return [self._rooms.take(self._part(bucket)) for _ in range(self._layout.world_size - 1)]

    def _sum_room(self, bucket: int) -> int:
        where, world = self._where(bucket), self._layout.world_size
        padded = self._padded[bucket] != where.size
        return self._padded[bucket] // world if padded else where.owned(self._rank).length

    def _land(self) -> None:
        bucket, memory, rooms = self._under_way.popleft()
        if self._alone:
            self.kept += memory
            return
        part = self._part(bucket)
        self._note(memory + sum(rooms) + (part if self._on_host else 0))
        self.kept += part
        if self._on_host:
            self._memory.free.append(memory)
            self._rooms.free += rooms

    def _note(self, further: int = 0) -> None:
        waiting = sum(sum(sizes.values()) for sizes in self._small.values())
        spare = sum(self._memory.free) + sum(self._rooms.free)
        now = self.kept + sum(self.flying) + sum(self._filling.values()) + waiting + spare
        self.peak = max(self.peak, now + further)

    def _part(self, bucket: int) -> int:
        where = self._where(bucket)
        owned = self._padded[bucket] if self._alone else where.owned(self._rank).length
        return owned * self._itemsize(bucket)

    def _where(self, bucket: int) -> Bucket:
        return self._layout.buckets[bucket]

    def _itemsize(self, bucket: int) -> int:
        dtype: torch.dtype = self._dtype or getattr(torch, self._where(bucket).dtype)
        return dtype.itemsize
