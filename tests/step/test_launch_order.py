"""The one order in which buckets of several reductions are launched."""

import random

import pytest

from zerostep.step.launch_order import LaunchTurns, launch_order


def test_a_bucket_comes_before_the_first_shared_one_that_backward_completes_later() -> None:
    # Backward comes to the largest place first: shared buckets at 9, 5 and 0, others at 7 and 2.
    assert launch_order([9, 5, 0], [[7, 2]]) == [0, 1, 0, 1, 0]
    assert launch_order([9, 5, 0], [[12], [12, 3]]) == [1, 2, 0, 0, 2, 0]
    assert launch_order([], [[3, 1]]) == [1, 1]
    assert launch_order([3, 1], [[]]) == [0, 0]


def test_buckets_of_one_reduction_keep_their_order() -> None:
    assert launch_order([9, 5, 0], [[2, 7]]) == [0, 0, 1, 1, 0]  # the second waits for the first


@pytest.mark.parametrize("seed", range(50))
def test_any_two_ranks_have_what_both_launch_in_one_order(seed: int) -> None:
    """Four ranks with experts in pairs of two kinds, at places that differ between the pairs: no cycle of waits."""
    chosen = random.Random(seed)
    shared = sorted(chosen.sample(range(40), 6), reverse=True)
    sets = [[(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    places = {ranks: [chosen.randrange(40) for _ in range(chosen.randrange(5))] for kind in sets for ranks in kind}
    orders = []
    for rank in range(4):
        own = [next(ranks for ranks in kind if rank in ranks) for kind in sets]
        named, counts = [], [0, 0, 0]
        for reduction in launch_order(shared, [places[ranks] for ranks in own]):
            named.append(((), *own)[reduction] + ("bucket", counts[reduction]))
            counts[reduction] += 1
        orders.append(named)
    _refuse_cycles(orders)


def _refuse_cycles(orders: list[list[tuple[object, ...]]]) -> None:
    """Launch whatever is next on all ranks that have it; without a cycle everything gets launched."""
    left = [list(order) for order in orders]
    while any(left):
        heads = [order[0] for order in left if order]
        ready = [head for head in heads if all(order[0] == head for order in left if head in order)]
        assert ready, f"these wait for each other: {heads}"
        for order in left:
            if ready[0] in order:
                order.remove(ready[0])


class Buckets:
    """A reduction with a bucket at each place, which are full or not."""

    def __init__(self, places: list[int], log: list[str], name: str) -> None:
        self.launch_positions, self._log, self._name = places, log, name
        self.full, self._next = set[int](), 0

    @property
    def next_is_full(self) -> bool:
        return self._next in self.full

    def launch_next(self) -> None:
        self._log.append(f"{self._name}{self._next}")
        self._next += 1


def test_a_full_bucket_waits_for_its_turn() -> None:
    log = list[str]()
    shared, experts = Buckets([9, 5], log, "shared"), Buckets([7], log, "expert")
    turns = LaunchTurns([shared, experts])
    turns.begin()
    experts.full.add(0)
    turns.launch_full()
    assert log == []
    shared.full.add(0)
    turns.launch_full()
    assert log == ["shared0", "expert0"]
    turns.end()
    assert log == ["shared0", "expert0", "shared1"]
