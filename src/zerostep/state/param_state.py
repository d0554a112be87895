"""One rank's part of each parameter's state, and the state of a leaf rebuilt from saved parts.

Per-element state has one value for each element of its parameter, and is cut wherever the parameter is cut. Shared
state, such as a step counter, belongs to every part of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zerostep.dtensors import local_of, whole_of
from zerostep.memory.leaf import Leaf, view_state
from zerostep.plan.layout import Layout, Span
from zerostep.tensors import flat_alias, is_dense

Entry = dict[str, Any]
StateDict = dict[str, Any]

# The key under which masters are saved beside the optimizer's own state: rounded parameters cannot restore them.
MASTER = "master"

# Scalars in the state of torch's own element-wise optimizers.
_SCALARS = frozenset(["step", "mu_product", "eta", "mu", "ac"])


@dataclass(frozen=True)
class ParamState:
    """The state of the part of a parameter that one rank owns; per-element state is flat, in memory order."""

    param: int
    part: Span
    per_element: Mapping[str, Tensor]
    shared: Mapping[str, Any]


def param_states_of(
    leaves: Iterable[tuple[Leaf, Entry]], layout: Layout, params: Sequence[Tensor]
) -> Iterator[ParamState]:
    """Yield the state of each fragment in a rank's leaves."""
    for leaf, state in leaves:
        for fragment in leaf.fragments:
            spec, param = layout.params[fragment.param], params[fragment.param]
            if spec.splittable and spec.numel:
                entry = view_state(state, leaf, fragment)
                names = [key for key, value in state.items() if _has_shape(value, leaf.tensor.shape)]
                per_element = {key: entry[key].reshape(-1) for key in names}
            else:
                entry, per_element = state, flat_per_element(state, param)
            shared = {key: whole_of(value) for key, value in entry.items() if key not in per_element}
            yield ParamState(fragment.param, fragment.part, per_element, shared)


def flat_per_element(entry: Entry, param: Tensor) -> dict[str, Tensor]:
    """Return the per-element state of a whole parameter, flat, in the order of the parameter's memory."""
    return {key: _flat(value, param) for key, value in entry.items() if is_per_element(key, value, param)}


def is_per_element(key: str, value: Any, param: Tensor) -> bool:
    """Whether a value has one number for each element; for a parameter without dimensions, the key decides."""
    return _has_shape(value, param.shape) and (param.dim() > 0 or key not in _SCALARS)


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions longer than one, from the slowest to the fastest in a dense tensor's memory."""
    dims, strides = [dim for dim, size in enumerate(tensor.shape) if size > 1], tensor.stride()
    return tuple(sorted(dims, key=lambda dim: -strides[dim])) if is_dense(tensor) else tuple(dims)


def shaped(flat: Tensor, param: Tensor) -> Tensor:
    """View flat elements, given in the order of a parameter's memory, in the parameter's shape and strides."""
    if param.is_contiguous() or not is_dense(param):
        return flat.view(param.shape)
    return flat.as_strided(param.shape, param.stride())


class SavedState(Protocol):
    """The state of one whole parameter as it was saved."""

    def names(self) -> list[str]:
        """The keys of all values."""

    def is_per_element(self, key: str) -> bool:
        """Whether a value has one number for each element."""

    def elements(self, key: str, part: Span) -> Tensor:
        """Return some elements of a per-element value, flat, in the order of the live parameter's memory."""

    def whole(self, key: str) -> Any:
        """Return a value as an unsharded optimizer has it."""


class DictState:
    """A parameter's entry in a state dict, as a `SavedState`."""

    def __init__(self, entry: Mapping[str, Any], param: Tensor) -> None:
        self._entry, self._param = entry, param

    def names(self) -> list[str]:
        """The keys of all values."""
        return list(self._entry)

    def is_per_element(self, key: str) -> bool:
        """Whether a value has one number for each element."""
        return is_per_element(key, self._entry[key], self._param)

    def elements(self, key: str, part: Span) -> Tensor:
        """Return some elements of a per-element value, flat, in the order of the parameter's memory."""
        return _flat(self._entry[key], self._param)[part.start : part.stop]

    def whole(self, key: str) -> Any:
        """Return a value as it is."""
        return self._entry[key]


def fits_one_leaf(leaf: Leaf, saved: Mapping[int, SavedState]) -> bool:
    """Whether the fragments of a leaf can share one state: equal keys, and equal values of all shared state."""
    states = [saved.get(param) for param in leaf.params]
    first = states[0]
    if first is None or any(state is None for state in states):
        return all(state is None for state in states)
    shared = {key: first.whole(key) for key in first.names() if not first.is_per_element(key)}
    return all(
        set(state.names()) == set(first.names()) and all(_equal(state.whole(key), shared[key]) for key in shared)
        for state in states[1:]
        if state is not None
    )


def entry_for(leaf: Leaf, saved: Mapping[int, SavedState]) -> Entry:
    """Return the state of a leaf of splittable parameters, for which `fits_one_leaf` is true."""
    first = saved[leaf.params[0]]
    return {
        key: _concat([saved[each.param].elements(key, each.part) for each in leaf.fragments])
        if first.is_per_element(key)
        else first.whole(key)
        for key in first.names()
    }


def _concat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _flat(value: Tensor, param: Tensor) -> Tensor:
    value, param = local_of(value), local_of(param)
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
