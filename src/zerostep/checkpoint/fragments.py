"""State that lies in leaves, as one `torch.optim` state dict, and back.

A leaf may hold fragments of several parameters, and a parameter may lie in the leaves of several ranks. What is shaped
like the leaf is cut up or put together by element; everything else, such as a step counter, belongs to each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerostep.buffers import flat_alias
from zerostep.layout import Fragment, Layout
from zerostep.leaves import Leaf, view_state

__all__ = ["assemble", "entries", "entry_for", "fits_one_leaf"]

Entry = dict[str, Any]

# What torch's own element-wise optimizers keep beside tensors that are shaped like the parameter.
_SCALARS = frozenset(["step", "mu_product", "eta", "mu", "ac"])


def entries(leaves: Iterable[tuple[Leaf, Entry]], layout: Layout) -> list[dict[str, Any]]:
    """What one rank has of each parameter: its number, the part, whether it is cut, and the state."""
    found = []
    for leaf, state in leaves:
        for fragment in leaf.fragments:
            splittable = layout.params[fragment.param].splittable
            entry = view_state(state, leaf, fragment) if splittable else state
            found.append(
                {
                    "param": fragment.param,
                    "part": [fragment.part.start, fragment.part.stop],
                    "cut": [key for key, value in state.items() if splittable and _like(value, leaf.tensor)],
                    "state": dict(entry),
                }
            )
    return found


def assemble(shares: Iterable[Sequence[Mapping[str, Any]]], params: Sequence[Tensor]) -> dict[int, Entry]:
    """The state of all whole parameters, from what every rank has."""
    found: dict[int, Entry] = {}
    for share in reversed(list(shares)):
        for item in share:
            _put(found.setdefault(item["param"], {}), item, params[item["param"]])
    return dict(sorted(found.items()))


def _put(entry: Entry, item: Mapping[str, Any], param: Tensor) -> None:
    start, stop = item["part"]
    for key, value in item["state"].items():
        if key not in item["cut"]:
            entry[key] = value
            continue
        if key not in entry:
            entry[key] = torch.empty_like(param, dtype=value.dtype, device="cpu")
        flat_alias(entry[key])[start:stop].copy_(value.reshape(-1))


def fits_one_leaf(leaf: Leaf, saved: Mapping[int, Entry], params: Sequence[Tensor]) -> bool:
    """Whether the fragments of a leaf may share a state: all have the same keys, and the same where it is not cut."""
    found = [saved.get(fragment.param, {}) for fragment in leaf.fragments]
    first = found[0]
    return all(
        entry.keys() == first.keys()
        and all(_is_cut(key, entry[key], params[index]) or _equal(entry[key], first[key]) for key in entry)
        for index, entry in zip(leaf.params[1:], found[1:], strict=True)
    )


def entry_for(leaf: Leaf, saved: Mapping[int, Entry], params: Sequence[Tensor]) -> Entry:
    """The state of a leaf of splittable parameters, from that of whole ones."""
    index = leaf.params[0]
    return {
        key: _cat([_stretch(saved[f.param][key], params[f.param], f) for f in leaf.fragments])
        if _is_cut(key, value, params[index])
        else value
        for key, value in saved[index].items()
    }


def _is_cut(key: str, value: Any, param: Tensor) -> bool:
    """Whether a piece of state has one number for each element; of a parameter without dimensions, names must tell."""
    return isinstance(value, Tensor) and value.shape == param.shape and (param.dim() > 0 or key not in _SCALARS)


def _stretch(value: Tensor, param: Tensor, fragment: Fragment) -> Tensor:
    """The elements of a fragment, in the order of the parameter's memory."""
    if value.stride() != param.stride():
        value = torch.empty_like(param, dtype=value.dtype, device="cpu").copy_(value)
    return flat_alias(value)[fragment.part.start : fragment.part.stop]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0].clone()


def _like(value: Any, leaf: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == leaf.shape


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return bool(torch.equal(one.cpu(), other.cpu()))
    return bool(one == other)
