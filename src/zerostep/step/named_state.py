"""State that an optimizer keeps under a name and not under a parameter, such as a counter of all its steps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zerostep.errors import CheckpointError

NamedState = dict[str, Any]


def named_state(optimizer: Optimizer) -> NamedState:
    """Return the live state under names; `CheckpointError` for a key that is neither a name nor a tensor."""
    warn_of_added(optimizer)
    state: Mapping[Any, Any] = optimizer.state
    for key in state:
        if not isinstance(key, (str, Tensor)):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps state under the key {key!r}, which is neither a parameter nor a "
                "name, so no state dict can hold it: use a string"
            )
    return {key: value for key, value in state.items() if isinstance(key, str)}


def warn_of_added(optimizer: Optimizer) -> None:
    """Warn of what a class adds to its state dict beside torch's two entries: it is not divided, and not saved."""
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    added = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"}))
    if added:
        warnings.warn(
            f"{type(optimizer).__name__} adds {', '.join(added)} to its state dict, which is not saved, and begins "
            "anew after a load",
            stacklevel=2,
        )


def joined(states: Sequence[NamedState]) -> NamedState:
    """The named state of several optimizers as one; with more than one, names begin with the optimizer's number."""
    if len(states) == 1:
        return dict(states[0])
    return {_qualified(number, name): value for number, state in enumerate(states) for name, value in state.items()}


def part_of(named: Mapping[str, Any], number: int, count: int) -> NamedState:
    """The named state of one of `count` optimizers, from what `joined` made."""
    if count == 1:
        return dict(named)
    start = _qualified(number, "")
    return {name.removeprefix(start): value for name, value in named.items() if name.startswith(start)}


def _qualified(number: int, name: str) -> str:
    return f"{number}.{name}"


def kept(optimizer: Optimizer, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """State that is about to be loaded, with the live values of names that it has not.

    A tensor under a name goes to the device of the live one.
    """
    live = {key: value for key, value in dict[Any, Any](optimizer.state).items() if isinstance(key, str)}
    return live | {key: _placed(value, live.get(key)) for key, value in state.items()}


def _placed(value: Any, live: Any) -> Any:
    return value.to(live.device) if isinstance(value, Tensor) and isinstance(live, Tensor) else value
