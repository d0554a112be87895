"""Numbers that an optimizer keeps for all its tensors outside its groups, such as a counter of its steps.

They lie in attributes, or in its state under a name and not under a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_ABSENT = object()
_Numbers = tuple[dict[Any, Any], dict[Any, Any]]
"""Copies of the attributes that are numbers, and of the state under names."""


class OwnNumbers:
    """The numbers of one optimizer when a step began, which every part of the step must find."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._attributes: MutableMapping[Any, Any] = vars(optimizer)
        self._state: MutableMapping[Any, Any] = optimizer.state
        self._before = self._now()
        self._after: _Numbers | None = None

    def restore(self) -> None:
        """Keep what a part of the step has left, and go back to what it began with."""
        self._after = self._now()
        self._put(self._before)

    def end(self) -> None:
        """Take what the last part has left."""
        if self._after is not None:
            self._put(self._after)

    def _now(self) -> _Numbers:
        return _copies(self._attributes, nested=False), _copies(self._state, nested=True)

    def _put(self, wanted: _Numbers) -> None:
        for place, values, now in zip((self._attributes, self._state), wanted, self._now(), strict=True):
            for key in now.keys() - values.keys():
                del place[key]
            for key, value in values.items():
                place[key] = _put_into(place.get(key, _ABSENT), value)


def _copies(place: Mapping[Any, Any], nested: bool) -> dict[Any, Any]:
    found = {key: _copy(value, nested) for key, value in place.items() if isinstance(key, str)}
    return {key: value for key, value in found.items() if value is not _ABSENT}


def _copy(value: Any, nested: bool) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().clone()
    if isinstance(value, dict) and nested:
        items = {key: _copy(item, nested=False) for key, item in value.items()}
        return _ABSENT if any(item is _ABSENT for item in items.values()) else items
    return _ABSENT


def _put_into(present: Any, value: Any) -> Any:
    """The value, in the tensor or dict that is there: the optimizer or the user may hold it."""
    if isinstance(value, Tensor):
        if not isinstance(present, Tensor) or present.shape != value.shape:
            return value.clone()
        present.detach().copy_(value)
        return present
    if isinstance(value, dict):
        items = {key: _put_into(present[key] if _has(present, key) else _ABSENT, item) for key, item in value.items()}
        if isinstance(present, dict):
            present.clear()
            present.update(items)
            return present
        return items
    return value


def _has(present: Any, key: Any) -> bool:
    return isinstance(present, dict) and key in present
