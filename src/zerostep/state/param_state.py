"""What one rank has of each parameter's state, taken apart for a file, and put together again from what was saved.

State that has one number for each element of its parameter is *like* the parameter, and can be cut wherever the
parameter is. The rest, such as a step counter, belongs to every part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zerostep.memory.leaf import Leaf, view_state
from zerostep.plan.layout import Layout, Span
from zerostep.tensors import flat_alias, is_dense

__all__ = [
    "DictState",
    "ParamState",
    "SavedState",
    "entry_for",
    "fits_one_leaf",
    "is_per_element",
    "order_of",
    "param_states_of",
    "shaped",
]

Entry = dict[str, Any]

# Beside what the optimizer keeps, a checkpoint has the masters: parameters are too coarse to make them from.
MASTER = "master"

# What torch's own element-wise optimizers keep beside tensors that are shaped like the parameter.
_SCALARS = frozenset(["step", "mu_product", "eta", "mu", "ac"])


@dataclass(frozen=True)
class ParamState:
    """The state of the part of a parameter that one rank owns: what is like the parameter as flat tensors."""

    param: int
    part: Span
    per_element: Mapping[str, Tensor]
    shared: Mapping[str, Any]


def param_states_of(
    leaves: Iterable[tuple[Leaf, Entry]], layout: Layout, params: Sequence[Tensor]
) -> Iterator[ParamState]:
    """The shares of a rank whose state lies in leaves."""
    for leaf, state in leaves:
        for fragment in leaf.fragments:
            spec, param = layout.params[fragment.param], params[fragment.param]
            if spec.splittable and spec.numel:
                entry = view_state(state, leaf, fragment)
                names = [key for key, value in state.items() if _has_shape(value, leaf.tensor.shape)]
                like = {key: entry[key].reshape(-1) for key in names}
            else:
                entry, like = state, flat_per_element(state, param)
            yield ParamState(fragment.param, fragment.part, like, {k: v for k, v in entry.items() if k not in like})


def flat_per_element(entry: Entry, param: Tensor) -> dict[str, Tensor]:
    """What is like a whole parameter, flat, in the order of the parameter's memory."""
    return {key: _flat(value, param) for key, value in entry.items() if is_per_element(key, value, param)}


def is_per_element(key: str, value: Any, param: Tensor) -> bool:
    """Whether a piece of state has one number for each element; of a parameter without dimensions, names must tell."""
    return _has_shape(value, param.shape) and (param.dim() > 0 or key not in _SCALARS)


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions longer than one from the slowest to the fastest, in a dense tensor's memory."""
    dims, strides = [dim for dim, size in enumerate(tensor.shape) if size > 1], tensor.stride()
    return tuple(sorted(dims, key=lambda dim: -strides[dim])) if is_dense(tensor) else tuple(dims)


def shaped(flat: Tensor, param: Tensor) -> Tensor:
    """A tensor with the shape and strides of a parameter, made of elements in the order of its memory."""
    if param.is_contiguous() or not is_dense(param):
        return flat.view(param.shape)
    return flat.as_strided(param.shape, param.stride())


class SavedState(Protocol):
    """The state of one whole parameter as it was saved."""

    def names(self) -> list[str]:
        """The names of all its pieces."""

    def is_per_element(self, key: str) -> bool:
        """Whether a piece has one number for each element."""

    def elements(self, key: str, part: Span) -> Tensor:
        """Some elements of a piece that is like the parameter, flat, in the order of the parameter's memory now."""

    def whole(self, key: str) -> Any:
        """A piece as an unsharded optimizer has it."""


class DictState:
    """The state of a parameter from a state dict."""

    def __init__(self, entry: Mapping[str, Any], param: Tensor) -> None:
        self._entry, self._param = entry, param

    def names(self) -> list[str]:
        """The names of all its pieces."""
        return list(self._entry)

    def is_per_element(self, key: str) -> bool:
        """Whether a piece has one number for each element."""
        return is_per_element(key, self._entry[key], self._param)

    def elements(self, key: str, part: Span) -> Tensor:
        """Some elements of a piece that is like the parameter."""
        return _flat(self._entry[key], self._param)[part.start : part.stop]

    def whole(self, key: str) -> Any:
        """A piece as it is."""
        return self._entry[key]


def fits_one_leaf(leaf: Leaf, saved: Mapping[int, SavedState]) -> bool:
    """Whether the fragments of a leaf may share a state: all have the same keys, and the same where it is not like."""
    states = [saved.get(param) for param in leaf.params]
    first = states[0]
    if first is None or any(state is None for state in states):
        return all(state is None for state in states)
    rest = [key for key in first.names() if not first.is_per_element(key)]
    values = {key: first.whole(key) for key in rest}
    return all(
        set(state.names()) == set(first.names()) and all(_equal(state.whole(key), values[key]) for key in rest)
        for state in states[1:]
        if state is not None
    )


def entry_for(leaf: Leaf, saved: Mapping[int, SavedState]) -> Entry:
    """The state of a leaf of splittable parameters, whose fragments fit together."""
    first = saved[leaf.params[0]]
    return {
        key: _joined([saved[each.param].elements(key, each.part) for each in leaf.fragments])
        if first.is_per_element(key)
        else first.whole(key)
        for key in first.names()
    }


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _flat(value: Tensor, param: Tensor) -> Tensor:
    if not is_dense(param):
        return value.detach().contiguous().view(-1)
    if not is_dense(value) or order_of(value) != order_of(param):
        value = torch.empty_like(param, dtype=value.dtype, device=value.device).copy_(value)
    return flat_alias(value)


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return bool(torch.equal(one.cpu(), other.cpu()))
    return bool(one == other)
