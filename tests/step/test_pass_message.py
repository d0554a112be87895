"""What ranks send at the end of a backward pass: messages, their union, and what makes them disagree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zerostep.errors import StepMismatchError
from zerostep.plan.groups import Group
from zerostep.step.pass_message import UNKNOWN, PassMessage, options_digest, used_by_any

patient = settings(deadline=None)

_INT64 = st.integers(0, 2**62)


def _row(step: int = 3, passes: int = 1, options: int = 17, used: Sequence[bool] = (True, False)) -> list[int]:
    return PassMessage(step, passes, options, used).to_ints()


# Round trip and union.


@patient
@given(_INT64, _INT64, st.integers(1, 2**56 - 1), st.lists(st.booleans(), max_size=200))
def test_a_message_of_one_rank_says_what_it_has_used(step: int, passes: int, options: int, used: list[bool]) -> None:
    row = PassMessage(step, passes, options, used).to_ints()
    assert row[:3] == [step, passes, options]
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
    ("rows", "values"),
    [
        ([_row(step=3), _row(step=4)], "{0: (3, 1), 1: (4, 1)}"),
        ([_row(passes=1), _row(passes=1), _row(passes=2)], "{0: (3, 1), 1: (3, 1), 2: (3, 2)}"),
        ([_row(step=3, options=UNKNOWN), _row(step=4)], "{0: (3, 1), 1: (4, 1)}"),
    ],
    ids=["steps", "passes", "the step of a rank whose options do not count"],
)
def test_ranks_at_different_places_are_named(rows: list[list[int]], values: str) -> None:
    with pytest.raises(StepMismatchError, match="step and pass") as caught:
        used_by_any(rows, 2)
    assert values in str(caught.value)
    assert "call backward() and step() equally often on all ranks" in str(caught.value)


def test_ranks_with_different_options_are_named() -> None:
    rows = [_row(options=17), _row(options=UNKNOWN), _row(options=18)]
    with pytest.raises(StepMismatchError, match="options of the parameter groups") as caught:
        used_by_any(rows, 2)
    assert "0: (17,)" in str(caught.value) and "2: (18,)" in str(caught.value)
    assert re.search(r"\b1: \(", str(caught.value)) is None  # a rank that has joined knows nothing of options
    assert "change learning rates and other options on all ranks alike" in str(caught.value)


@pytest.mark.parametrize("options", [[17, UNKNOWN, 17], [UNKNOWN, UNKNOWN], [UNKNOWN, 5]])
def test_unknown_options_agree_with_all(options: list[int]) -> None:
    assert used_by_any([_row(options=each) for each in options], 2) == {0}


def test_used_parameters_may_differ() -> None:
    assert used_by_any([_row(used=[True, False]), _row(used=[False, True])], 2) == {0, 1}


# The digest of options.


def _groups(**changes: Any) -> list[Group]:
    plain = {"lr": 0.1, "betas": (0.9, 0.999), "amsgrad": False, "foreach": None, "name": "body", "steps": 3}
    first = {"params": [nn.Parameter(torch.zeros(2))], **plain, **changes}
    return [first, {"params": [], **plain, "lr": 0.2}]


def test_equal_options_have_equal_digests() -> None:
    assert options_digest(_groups()) == options_digest(_groups())
    assert options_digest([dict(reversed(group.items())) for group in _groups()]) == options_digest(_groups())


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 0.1 + 2**-55},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"betas": (0.9, 0.99)},
        {"betas": (0.9,)},
        {"amsgrad": True},
        {"amsgrad": None},
        {"maximize": True},
        {"name": "head"},
        {"steps": 4},
        {"steps": "3"},
        {"further": 1},
        {"several": [1.0, "a"]},
    ],
    ids=str,
)
def test_every_changed_option_changes_the_digest(changes: dict[str, Any]) -> None:
    assert options_digest(_groups(**changes)) != options_digest(_groups())


def test_options_of_each_group_count_for_that_group() -> None:
    first, second = _groups()
    digests = {options_digest(groups) for groups in ([first, second], [second, first], [first], [first, first], [])}
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("lr", [torch.tensor(0.1), torch.tensor(0.2)]),
        ("betas", [(torch.tensor(0.9), 0.99), (torch.tensor(0.8), 0.99)]),
        ("schedule", [lambda step: step, lambda step: -step]),
        ("further", [object(), object()]),
        ("foreach", [None, True]),
        ("set_up", [False, True]),
        ("buffer", [[[None, 1.0], [2, 0.5]], [[None, None], [2, 0.5]]]),
        ("params", [[nn.Parameter(torch.zeros(1))], [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]]),
        ("param_names", [["a"], ["b"]]),
        ("optimizer_class", [torch.optim.SGD, torch.optim.Adam]),
    ],
)
def test_tensors_and_objects_are_left_out(key: str, values: list[Any]) -> None:
    """Tensors may be on an accelerator, and what is not plain has no text that is the same on all ranks."""
    first, second = (options_digest(_groups(**{key: value})) for value in values)
    assert first == second


@patient
@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.floats() | st.text(), max_size=5))
def test_a_digest_is_a_positive_integer_that_can_be_sent(options: dict[str, Any]) -> None:
    assert UNKNOWN < options_digest([{"params": [], **options}]) < 2**62
