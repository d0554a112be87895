"""Arithmetic of sets of time, written as lists of half-open intervals in microseconds.

Results are sorted, disjoint and without empty intervals; arguments need not be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Interval:
    """From `start` up to, but not including, `stop`."""

    start: float
    stop: float

    @property
    def length(self) -> float:
        """The duration; never negative."""
        return max(0.0, self.stop - self.start)

    def covers(self, other: Interval) -> bool:
        """Return whether this interval contains all of another one."""
        return self.start <= other.start and other.stop <= self.stop


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the time in at least one interval."""
    return join(intervals, 0.0)


def join(intervals: Iterable[Interval], gap: float) -> list[Interval]:
    """Return the union, with every gap of at most `gap` filled."""
    joined = list[Interval]()
    for interval in sorted(interval for interval in intervals if interval.length):
        if joined and interval.start <= joined[-1].stop + gap:
            joined[-1] = Interval(joined[-1].start, max(joined[-1].stop, interval.stop))
        else:
            joined.append(interval)
    return joined


def intersect(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Return the time in both sets."""
    ours, theirs = union(left), union(right)
    common, i, j = list[Interval](), 0, 0
    while i < len(ours) and j < len(theirs):
        both = Interval(max(ours[i].start, theirs[j].start), min(ours[i].stop, theirs[j].stop))
        if both.length:
            common.append(both)
        if ours[i].stop <= theirs[j].stop:
            i += 1
        else:
            j += 1
    return common


def subtract(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Return the time in the first set and not in the second."""
    ours = union(left)
    return intersect(ours, _gaps(union(right), ours[0].start, ours[-1].stop)) if ours else []


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the time inside a window."""
    return intersect(intervals, [window])


def total(intervals: Iterable[Interval]) -> float:
    """Return the duration of the union: time in several intervals counts once."""
    return sum(interval.length for interval in union(intervals))


def _gaps(disjoint: Sequence[Interval], start: float, stop: float) -> list[Interval]:
    """Return the time between `start` and `stop` that sorted, disjoint intervals leave free."""
    edges = [start, *(edge for interval in disjoint for edge in (interval.start, interval.stop)), stop]
    return [Interval(edges[index], edges[index + 1]) for index in range(0, len(edges), 2)]
