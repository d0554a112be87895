"""Arithmetic of sets of moments, written as lists of half-open intervals. Times are microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Interval", "clip", "intersect", "join", "subtract", "total", "union"]


@dataclass(frozen=True, order=True)
class Interval:
    """From `start` up to, but not including, `stop`."""

    start: float
    stop: float

    @property
    def length(self) -> float:
        """How long it lasts; never negative."""
        return max(0.0, self.stop - self.start)

    def covers(self, other: Interval) -> bool:
        """Whether all of another interval lies in this one."""
        return self.start <= other.start and other.stop <= self.stop


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in at least one interval: sorted, apart from each other, none empty."""
    return join(intervals, 0.0)


def join(intervals: Iterable[Interval], gap: float) -> list[Interval]:
    """The union, with every gap of at most `gap` filled."""
    found = list[Interval]()
    for interval in sorted(interval for interval in intervals if interval.length):
        if found and interval.start <= found[-1].stop + gap:
            found[-1] = Interval(found[-1].start, max(found[-1].stop, interval.stop))
        else:
            found.append(interval)
    return found


def intersect(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in both."""
    ours, theirs = union(left), union(right)
    found, i, j = list[Interval](), 0, 0
    while i < len(ours) and j < len(theirs):
        both = Interval(max(ours[i].start, theirs[j].start), min(ours[i].stop, theirs[j].stop))
        if both.length:
            found.append(both)
        if ours[i].stop <= theirs[j].stop:
            i += 1
        else:
            j += 1
    return found


def subtract(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in the first and not in the second."""
    ours = union(left)
    return intersect(ours, _outside(union(right), ours[0].start, ours[-1].stop)) if ours else []


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The moments that lie in a window."""
    return intersect(intervals, [window])


def total(intervals: Iterable[Interval]) -> float:
    """How long all moments together last; those that lie in several intervals count once."""
    return sum(interval.length for interval in union(intervals))


def _outside(apart: Sequence[Interval], start: float, stop: float) -> list[Interval]:
    """What sorted intervals that are apart leave of the time between `start` and `stop`."""
    edges = [start, *(edge for interval in apart for edge in (interval.start, interval.stop)), stop]
    return [Interval(edges[place], edges[place + 1]) for place in range(0, len(edges), 2)]
