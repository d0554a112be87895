"""Options of parameter groups as ranks compare them: the user's changes, and nothing that an optimizer keeps there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zerostep.plan.groups import Group
from zerostep.step.group_options import GroupOptions, options_digest

patient = settings(deadline=None)


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
        {"amsgrad": 0},
        {"lr": torch.tensor(0.25)},
        {"foreach": False},
        {"name": "head"},
        {"steps": 4},
        {"steps": "3"},
        {"further": 1},
        {"nested": [[1.0, "a"], [2.0, "b"]]},
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
        ("lr", [torch.zeros(9), torch.ones(9)]),
        ("lr", [torch.empty(1, device="meta"), torch.empty(2, device="meta")]),
        ("schedule", [lambda step: step, lambda step: -step]),
        ("further", [object(), object()]),
        ("params", [[nn.Parameter(torch.zeros(1))], [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]]),
        ("param_names", [["a"], ["b"]]),
        ("optimizer_class", [torch.optim.SGD, torch.optim.Adam]),
    ],
)
def test_tensors_and_objects_are_left_out(key: str, values: list[Any]) -> None:
    """Tensors may be on an accelerator or large, and what is not plain has no text that is the same on all ranks."""
    first, second = (options_digest(_groups(**{key: value})) for value in values)
    assert first == second


@patient
@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.floats() | st.text(), max_size=5))
def test_a_digest_is_a_positive_integer_that_can_be_sent(options: dict[str, Any]) -> None:
    assert 0 < options_digest([{"params": [], **options}]) < 2**62


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), ((0, 1), [0.0, 1.0]), (torch.tensor(0.5), 0.5)], ids=str)
def test_equal_numbers_have_one_digest(one: Any, other: Any) -> None:
    assert options_digest(_groups(lr=one)) == options_digest(_groups(lr=other))


def test_what_a_step_has_changed_does_not_count() -> None:
    """Two ranks whose optimizers keep other numbers in their groups, and whose users do the same."""
    here, there = GroupOptions(), GroupOptions()
    for lr in (0.1, 0.1, 0.05):
        digests = {options.begin_step(_groups(lr=lr, estimate=own)) for options, own in ((here, 1.0), (there, 1.0))}
        assert len(digests) == 1
        here.end_step(_groups(lr=lr, estimate=2.0))
        there.end_step(_groups(lr=lr, estimate=3.0))
        assert here.begin_step(_groups(lr=0.7, estimate=2.0)) == there.begin_step(_groups(lr=0.7, estimate=3.0))
        assert here.begin_step(_groups(lr=0.7, estimate=2.0)) != there.begin_step(_groups(lr=0.8, estimate=3.0))
        for options in (here, there):
            options.end_step(_groups(lr=lr, estimate=1.0))


def test_after_a_load_everything_counts() -> None:
    options = GroupOptions()
    first = options.begin_step(_groups())
    options.end_step(_groups())
    assert options.begin_step(_groups()) != first
    options.forget()
    assert options.begin_step(_groups()) == first
