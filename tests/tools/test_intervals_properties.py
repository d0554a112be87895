"""Operations on intervals equal those on sets of integers."""

from collections.abc import Callable, Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zerostep.tools.tracing.intervals import Interval, clip, intersect, join, subtract, total, union

EDGE = st.integers(0, 30)
INTERVAL = st.builds(lambda a, b: Interval(float(a), float(b)), EDGE, EDGE)  # empty ones and backward ones too
INTERVALS = st.lists(INTERVAL, max_size=8)


def moments(intervals: Iterable[Interval]) -> set[int]:
    return {moment for each in intervals for moment in range(int(each.start), int(each.stop))}


def is_normal(intervals: list[Interval]) -> bool:
    """Sorted, apart and not empty."""
    pairs = pairwise(intervals)
    return all(each.start < each.stop for each in intervals) and all(a.stop < b.start for a, b in pairs)


@given(INTERVALS)
def test_union(intervals: list[Interval]) -> None:
    assert moments(union(intervals)) == moments(intervals)
    assert is_normal(union(intervals))
    assert total(intervals) == len(moments(intervals))


def check(operation: Callable[..., list[Interval]], expected: Callable[[set[int], set[int]], set[int]]) -> None:
    @given(INTERVALS, INTERVALS)
    def compare(left: list[Interval], right: list[Interval]) -> None:
        found = operation(left, right)
        assert moments(found) == expected(moments(left), moments(right))
        assert is_normal(found)

    compare()


def test_intersect() -> None:
    check(intersect, lambda left, right: left & right)


def test_subtract() -> None:
    check(subtract, lambda left, right: left - right)


@given(INTERVALS, INTERVAL)
def test_clip(intervals: list[Interval], window: Interval) -> None:
    assert moments(clip(intervals, window)) == moments(intervals) & moments([window])


@given(INTERVALS, st.integers(0, 10))
def test_join_fills_the_gaps_that_are_short_enough(intervals: list[Interval], gap: int) -> None:
    apart, joined = union(intervals), join(intervals, gap)
    gaps = [Interval(a.stop, b.start) for a, b in pairwise(apart)]
    filled = [each for each in gaps if each.length <= gap]
    assert moments(joined) == moments([*apart, *filled])
    assert is_normal(joined)


@given(INTERVAL, INTERVAL)
def test_covers(left: Interval, right: Interval) -> None:
    if right.length and left.length:
        assert left.covers(right) == (moments([right]) <= moments([left]))
