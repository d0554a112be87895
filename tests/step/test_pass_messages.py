"""What ranks send at the end of a backward pass: messages, their union, and what makes them disagree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerostep.errors import StepMismatchError
from zerostep.step.pass_messages import PassMessage, used_by_any

patient = settings(deadline=None)

_INT64 = st.integers(0, 2**62)


def _row(step: int = 3, passes: int = 1, loads: int = 0, used: Sequence[bool] = (True, False)) -> list[int]:
    return PassMessage(step, passes, loads, used).to_ints()


# Round trip and union.


@patient
@given(_INT64, _INT64, _INT64, st.lists(st.booleans(), max_size=200))
def test_a_message_of_one_rank_says_what_it_has_used(step: int, passes: int, loads: int, used: list[bool]) -> None:
    row = PassMessage(step, passes, loads, used).to_ints()
    assert row[:3] == [step, passes, loads]
    assert all(-(2**63) <= value < 2**63 for value in row)
    assert used_by_any([row], len(used)) == {index for index, flag in enumerate(used) if flag}


@patient
@given(st.integers(0, 150).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1)))
def test_what_some_rank_has_used_counts(masks: list[list[bool]]) -> None:
    rows = [_row(used=mask) for mask in masks]
    assert len({len(row) for row in rows}) == 1  # an all-gather of integers needs equally many of each rank
    assert used_by_any(rows, len(masks[0])) == {index for mask in masks for index, flag in enumerate(mask) if flag}


# Where ranks disagree.


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            [_row(step=3), _row(step=4)],
            "rank 0 is at step 14, backward pass 2, rank 1 is at step 15, backward pass 2; ",
        ),
        (
            [_row(passes=1), _row(passes=1), _row(passes=2)],
            "ranks 0, 1 are at step 14, backward pass 2, rank 2 is at step 14, backward pass 3; ",
        ),
        ([_row(), _row(loads=1)], "rank 0 has loaded a state dict 0 times, rank 1 has loaded a state dict 1 time; "),
    ],
    ids=["steps", "passes", "loads"],
)
def test_ranks_at_different_places_are_named(rows: list[list[int]], text: str) -> None:
    with pytest.raises(StepMismatchError) as caught:
        used_by_any(rows, 2, before=10)
    assert text in str(caught.value)
    assert "on all ranks" in str(caught.value)


def test_used_parameters_may_differ() -> None:
    assert used_by_any([_row(used=[True, False]), _row(used=[False, True])], 2) == {0, 1}
