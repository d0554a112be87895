"""A full `torch.optim` state dict into one rank's inner optimizer: validate everything, then commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerostep.plan.groups import Group, options
from zerostep.plan.probe import PARAM_SHAPED
from zerostep.state.param_state import MASTER

__all__ = ["local_part", "validate"]

StateDict = dict[str, Any]

_HOST = torch.device("cpu")


def validate(
    state_dict: Any, groups: Sequence[Group], inners: Sequence[Optimizer], live: Mapping[Tensor, Any]
) -> dict[Any, int]:
    """Check the whole dict against all parameters; the numbers of its parameter ids. `ValueError` if it cannot fit.

    `inners` has the inner optimizer of each group.
    """
    _check_keys(state_dict)
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ValueError(f"the state dict has {len(saved)} parameter groups, the optimizer has {len(groups)}")
    for number, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        if len(theirs["params"]) != len(ours["params"]):
            raise ValueError(
                f"group {number} of the state dict has {len(theirs['params'])} parameters, "
                f"the optimizer's has {len(ours['params'])}"
            )
    numbers: dict[Any, int] = {}
    for place, saved_id in enumerate(chain.from_iterable(group["params"] for group in saved)):
        numbers.setdefault(saved_id, place)
    params = list(chain.from_iterable(group["params"] for group in groups))
    kinds = [inner for group, inner in zip(groups, inners, strict=True) for _ in group["params"]]
    if len(numbers) != len(set(params)):
        raise ValueError(f"the state dict numbers {len(numbers)} parameters, the optimizer has {len(set(params))}")
    for saved_id, entry in state_dict["state"].items():
        if saved_id in numbers or isinstance(saved_id, int):
            _check_entry(saved_id, entry, numbers)
            number = numbers[saved_id]
            _check_shapes(saved_id, entry, params[number], kinds[number], live)
    for number, (group, inner) in enumerate(zip(saved, inners, strict=True)):
        if type(inner) in PARAM_SHAPED:
            _check_complete(number, [state_dict["state"].get(saved_id, {}) for saved_id in group["params"]])
    return numbers


def _check_keys(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f'a state dict needs the keys "state" and "param_groups"; got {found}')
    if "shard" in state_dict:
        raise ValueError("this is the state of one rank: give those of all ranks to zerostep.merge_shards() first")
    if not isinstance(state_dict["state"], Mapping) or not isinstance(state_dict["param_groups"], (list, tuple)):
        raise ValueError('in a state dict "state" must be a dict and "param_groups" a list')
    for number, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(f'group {number} of the state dict has no key "params"')


def _check_entry(saved_id: Any, entry: Any, numbers: Mapping[Any, int]) -> None:
    if saved_id not in numbers:
        raise ValueError(f"the state dict holds state for parameter {saved_id!r}, which is in none of its groups")
    if not isinstance(entry, Mapping):
        raise ValueError(
            f"the state of parameter {saved_id!r} is {entry!r}, not a dict: load a complete state dict that no other "
            "optimizer has taken apart"
        )


def _check_shapes(
    saved_id: Any, entry: Mapping[str, Any], param: Tensor, inner: Optimizer, live: Mapping[Tensor, Any]
) -> None:
    for key, value in entry.items():
        if type(inner) in PARAM_SHAPED:
            known: Any = param
        else:
            known = live[param].get(key) if param in live else None
        if (
            isinstance(value, Tensor)
            and isinstance(known, Tensor)
            and value.numel() != 1
            and value.shape != known.shape
        ):
            raise ValueError(
                f"state {key!r} of parameter {saved_id!r} has shape {tuple(value.shape)}, "
                f"the parameter has shape {tuple(param.shape)}"
            )


def _check_complete(number: int, entries: Sequence[Mapping[str, Any]]) -> None:
    """All parameters of a group keep the same things, or nothing at all; masters aside, which all may have."""
    keys = {frozenset(entry) - {MASTER} for entry in entries} - {frozenset()}
    if len(keys) > 1:
        partial = sorted(map(str, frozenset.union(*keys) - frozenset.intersection(*keys)))
        raise ValueError(
            f"in group {number} of the state dict some parameters have {partial} in their state, others do not"
        )


def local_part(state_dict: StateDict, numbers: Mapping[Any, int], owned: Sequence[Sequence[int]]) -> StateDict:
    """The entries of the parameters in `owned`, numbers by group, as a state dict for the inner optimizer."""
    ids = {number: saved_id for saved_id, number in numbers.items()}
    members = [[ids[number] for number in group] for group in owned]
    foreign = set(numbers) - set(chain.from_iterable(members))
    return {
        # What an optimizer keeps under other names than its parameters' belongs to every rank.
        "state": {saved_id: entry for saved_id, entry in state_dict["state"].items() if saved_id not in foreign},
        "param_groups": [
            {**options(dict(group)), "params": list(ids_of_group)}
            for group, ids_of_group in zip(state_dict["param_groups"], members, strict=True)
        ],
    }
