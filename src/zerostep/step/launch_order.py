"""In which order the buckets of several reductions are launched: one order, the same on all ranks that share any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import ref


class Launching(Protocol):
    """A reduction, as far as the order of launches concerns it."""

    @property
    def launch_positions(self) -> list[int]:
        """The place in the model of each bucket of this pass, in launch order; backward comes to the largest first."""

    @property
    def next_is_full(self) -> bool:
        """Whether its next bucket is full."""

    def launch_next(self) -> None:
        """Launch its next bucket."""


class LaunchTurns:
    """Whose bucket is launched next, where several reductions, each over other ranks, belong to one backward pass.

    A rank without a gradient for one of them launches its buckets late. If the others went on meanwhile, two ranks
    could each wait for a bucket that the other has not launched. So all keep one order, which follows from the places
    of the buckets in the model, and a full bucket waits for its turn. Reductions are held weakly: they hold this.
    """

    def __init__(self, reductions: Sequence[Launching]) -> None:
        self._references: list[ref[Any]] = [ref(each) for each in reductions]
        self._order: list[int] = []
        self._next = 0

    def begin(self) -> None:
        """Begin a pass, after all reductions have."""
        first, *others = [self._reduction(number).launch_positions for number in range(len(self._references))]
        self._order, self._next = launch_order(first, others), 0

    @property
    def has_full(self) -> bool:
        """Whether the bucket whose turn it is is full."""
        return self._next < len(self._order) and self._reduction(self._order[self._next]).next_is_full

    def launch_full(self) -> None:
        """Launch buckets in turn while they are full."""
        while self.has_full:
            self._launch()

    def end(self) -> None:
        """Launch all that are left, in turn."""
        while self._next < len(self._order):
            self._launch()

    def _launch(self) -> None:
        self._reduction(self._order[self._next]).launch_next()
        self._next += 1  # only now: a launch that has failed is tried again

    def _reduction(self, number: int) -> Launching:
        reduction: Launching | None = self._references[number]()
        assert reduction is not None
        return reduction


def launch_order(first: Sequence[int], others: Sequence[Sequence[int]]) -> list[int]:
    """Which reduction launches at each turn, given the places in the model of their buckets in launch order.

    The first one is that of all ranks, so its buckets are on all ranks the same: each bucket of another one comes
    before the first of them that backward completes later, and where several do, in the order of the reductions. So
    any two ranks have those that both launch in the same order, whatever else each of them launches.
    """
    turns = [(turn, len(others) + 1, 0, 0) for turn in range(len(first))]
    for number, positions in enumerate(others, start=1):
        turn = 0
        for bucket, position in enumerate(positions):
            turn = max(turn, sum(place > position for place in first))
            turns.append((turn, number, bucket, number))
    return [reduction for *_, reduction in sorted(turns)]
