"""Options of parameter groups that the user has changed since the last step, as ranks compare them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from torch import Tensor

from zerostep.comm.agreement import Fact
from zerostep.plan.groups import Group, own_options

_MOST_ELEMENTS = 8  # of a tensor whose value counts
_LEFT_OUT = object()
_Key = tuple[int, str]


class GroupOptions:
    """What the groups had when the last step was over, and what is new since.

    An optimizer may keep numbers of its own in its groups, which it changes in a step, and which may differ between
    ranks. So only what differs from what the last step has left is compared: that is the user's work. After a load
    everything is new.
    """

    def __init__(self) -> None:
        self._left: dict[_Key, Any] | None = None
        self._now: dict[_Key, Any] = {}

    def forget(self) -> None:
        """A state was loaded: everything is new."""
        self._left = None

    def begin_step(self, groups: Sequence[Group]) -> int:
        """Note the options that a step is about to use; a positive number that differs where the new ones do."""
        self._now = dict(_comparable(groups))
        left = self._left or {}
        new = [key for key, value in self._now.items() if not _same(left.get(key, _LEFT_OUT), value)]
        return _digest([[*key, _text(self._now[key])] for key in sorted(new)])

    def end_step(self, groups: Sequence[Group]) -> None:
        """Note the options that a step has left."""
        self._left = dict(_comparable(groups))

    def changes(self, groups: Sequence[Group]) -> list[Fact]:
        """The options that are new since the last step, in words."""
        left, now = self._left or {}, dict(_comparable(groups))
        new = sorted(key for key, value in now.items() if not _same(left.get(key, _LEFT_OUT), value))
        return [Fact(f"{key} of group {index}", _text(now[index, key])) for index, key in new]

    def facts(self) -> list[Fact]:
        """The options that the step used, in words."""
        return [Fact(f"{key} of group {index}", _text(self._now[index, key])) for index, key in sorted(self._now)]


def options_digest(groups: Sequence[Group]) -> int:
    """A positive number that differs where options of the groups differ, as far as they can be compared."""
    return GroupOptions().begin_step(groups)


def _comparable(groups: Sequence[Group]) -> Iterator[tuple[_Key, Any]]:
    for index, group in enumerate(groups):
        for key, value in own_options(group).items():
            found = _plain(value)
            if found is not _LEFT_OUT:
                yield (index, key), found


def _plain(value: Any) -> Any:
    """The value of an option; `_LEFT_OUT` for what has none, or none without waiting for an accelerator."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return _LEFT_OUT if any(item is _LEFT_OUT for item in items) else items
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() <= _MOST_ELEMENTS:
        return value.tolist()
    return _LEFT_OUT


def _same(left: Any, value: Any) -> bool:
    return (type(left) is type(value) and left == value) or (left is not _LEFT_OUT and _text(left) == _text(value))


def _text(value: Any) -> str:
    """The same text for equal numbers: 1 and 1.0 are one learning rate, but `True` is not a number."""
    if isinstance(value, list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return repr(float(value))
    return repr(value)


def _digest(entries: Sequence[Sequence[Any]]) -> int:
    return int.from_bytes(blake2b(json.dumps(entries).encode(), digest_size=7).digest(), "little") or 1
