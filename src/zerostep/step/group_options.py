"""Options of parameter groups that the user has changed since the last step, as ranks compare them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from torch import Tensor

from zerostep.comm.agreement import Fact
from zerostep.plan.groups import NOT_OF_CLASS, Group

_MOST_ELEMENTS = 8  # of a tensor whose value counts
_LEFT_OUT = object()
_NO_OPTIONS = frozenset({"params", "param_names"}) | NOT_OF_CLASS
_SCALARS = (type(None), bool, int, float, str)

_FIXED = (*_SCALARS, tuple)


class GroupOptions:
    """What the groups had when the last step was over, and what is new since.

    An optimizer may keep numbers of its own in its groups, which it changes in a step, and which may differ between
    ranks. So only what differs from what the last step has left is compared: that is the user's work. After a load
    everything is new.
    """

    def __init__(self) -> None:
        self._left: list[Group] = []
        self._new: list[Group] = []

    def forget(self) -> None:
        """A state was loaded: everything is new."""
        self._left = []

    def begin_step(self, groups: Sequence[Group]) -> int:
        """Note the options that a step is about to use; a positive number that differs where the new ones do."""
        self._new = [_new_in(group, left) for group, left in zip(groups, self._left_of(groups), strict=True)]
        entries = ((index, key, _text(new[key])) for index, new in enumerate(self._new) for key in sorted(new))
        return _digest(list(entries))

    def end_step(self, groups: Sequence[Group]) -> None:
        """Note the options that a step has left."""
        pairs = zip(groups, self._left_of(groups), strict=True)
        self._left = [{**left, **_new_in(group, left)} for group, left in pairs]

    def _left_of(self, groups: Sequence[Group]) -> list[Group]:
        """What the last step has left of each group: nothing of those that are new."""
        return self._left[: len(groups)] + [{} for _ in groups[len(self._left) :]]

    def changes(self, groups: Sequence[Group]) -> list[Fact]:
        """The options that are new since the last step, in words."""
        new = [_new_in(group, left) for group, left in zip(groups, self._left_of(groups), strict=True)]
        return [Fact(f"{key} of group {i}", _text(group[key])) for i, group in enumerate(new) for key in sorted(group)]

    def facts(self) -> list[Fact]:
        """The options that the step used, in words."""
        used = [{**left, **new} for left, new in zip(self._left_of(self._new), self._new, strict=True)]
        return [Fact(f"{key} of group {i}", _text(group[key])) for i, group in enumerate(used) for key in sorted(group)]


def options_digest(groups: Sequence[Group]) -> int:
    """A positive number that differs where options of the groups differ, as far as they can be compared."""
    return GroupOptions().begin_step(groups)


def _new_in(group: Group, left: Group) -> Group:
    """The options that have other values than in `left`. Called in each step, for what may be hundreds of groups."""
    found: Group = {}
    for key, value in group.items():
        before = left.get(key, _LEFT_OUT)
        # The same object, and one that nobody can change: nearly always.
        if (before is value and type(value) in _FIXED) or key in _NO_OPTIONS:
            continue
        plain = _plain(value)
        if plain is not _LEFT_OUT and not _same(before, plain):
            found[key] = plain
    return found


def _plain(value: Any) -> Any:
    """The value of an option; `_LEFT_OUT` for what has none, or none without waiting for an accelerator."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, (list, tuple)):
        if type(value) is tuple and all(type(item) in _SCALARS for item in value):
            return value
        items = tuple(_plain(item) for item in value)
        return _LEFT_OUT if any(item is _LEFT_OUT for item in items) else items
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() <= _MOST_ELEMENTS:
        return _plain(value.tolist())
    return _LEFT_OUT


def _same(left: Any, value: Any) -> bool:
    return (type(left) is type(value) and left == value) or (left is not _LEFT_OUT and _text(left) == _text(value))


def _text(value: Any) -> str:
    """The same text for equal numbers: 1 and 1.0 are one learning rate, but `True` is not a number."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return repr(float(value))
    return repr(value)


def _digest(entries: Sequence[Sequence[Any]]) -> int:
    return int.from_bytes(blake2b(json.dumps(entries).encode(), digest_size=7).digest(), "little") or 1
