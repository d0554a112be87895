"""Check a full `torch.optim` state dict before anything changes, and select the part that one rank owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zerostep.plan.groups import Group, options
from zerostep.plan.probe import PARAM_SHAPED
from zerostep.state.param_state import MASTER, StateDict


def validate(
    state_dict: Any, groups: Sequence[Group], inners: Sequence[Optimizer], live: Mapping[Tensor, Any]
) -> dict[Any, int]:
    """Check the whole state dict and return the parameter index of each of its ids; `ValueError` if it does not fit.

    `inners` has the inner optimizer of each group, `live` this rank's present state by parameter.
    """
    _check_keys(state_dict)
    saved_groups = state_dict["param_groups"]
    _check_groups(saved_groups, groups)
    index_of: dict[Any, int] = {}
    for index, saved_id in enumerate(chain.from_iterable(group["params"] for group in saved_groups)):
        index_of.setdefault(saved_id, index)
    params = list(chain.from_iterable(group["params"] for group in groups))
    inner_of = [inner for group, inner in zip(groups, inners, strict=True) for _ in group["params"]]
    if len(index_of) != len(set(params)):
        raise ValueError(f"the state dict numbers {len(index_of)} parameters, the optimizer has {len(set(params))}")
    for saved_id, entry in state_dict["state"].items():
        if saved_id in index_of or isinstance(saved_id, int):
            _check_entry(saved_id, entry, index_of)
            index = index_of[saved_id]
            _check_shapes(saved_id, entry, params[index], inner_of[index], live)
    for group_index, (group, inner) in enumerate(zip(saved_groups, inners, strict=True)):
        if type(inner) in PARAM_SHAPED:
            _check_complete(group_index, [state_dict["state"].get(saved_id, {}) for saved_id in group["params"]])
    return index_of


def _check_keys(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        got = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f'a state dict needs the keys "state" and "param_groups"; got {got}')
    if not isinstance(state_dict["state"], Mapping) or not isinstance(state_dict["param_groups"], (list, tuple)):
        raise ValueError('in a state dict "state" must be a dict and "param_groups" a list')
    for index, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(f'group {index} of the state dict has no key "params"')


def _check_groups(saved_groups: Sequence[Group], groups: Sequence[Group]) -> None:
    if len(saved_groups) != len(groups):
        raise ValueError(f"the state dict has {len(saved_groups)} parameter groups, the optimizer has {len(groups)}")
    for index, (theirs, ours) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(theirs["params"]) != len(ours["params"]):
            raise ValueError(
                f"group {index} of the state dict has {len(theirs['params'])} parameters, "
                f"the optimizer's has {len(ours['params'])}"
            )


def _check_entry(saved_id: Any, entry: Any, index_of: Mapping[Any, int]) -> None:
    if saved_id not in index_of:
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
        known: Any = param if type(inner) in PARAM_SHAPED else live.get(param, {}).get(key)
        both_tensors = isinstance(value, Tensor) and isinstance(known, Tensor)
        if both_tensors and value.numel() != 1 and value.shape != known.shape:
            raise ValueError(
                f"state {key!r} of parameter {saved_id!r} has shape {tuple(value.shape)}, "
                f"the parameter has shape {tuple(param.shape)}"
            )


def _check_complete(group_index: int, entries: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless all parameters of a group have the same state keys, or none; masters are optional."""
    keys = {frozenset(entry) - {MASTER} for entry in entries} - {frozenset()}
    if len(keys) > 1:
        partial = sorted(map(str, frozenset.union(*keys) - frozenset.intersection(*keys)))
        raise ValueError(
            f"in group {group_index} of the state dict some parameters have {partial} in their state, others do not"
        )


def local_part(state_dict: StateDict, index_of: Mapping[Any, int], owned: Sequence[Sequence[int]]) -> StateDict:
    """Return a state dict for the inner optimizer: the entries of the parameters in `owned`, indices by group.

    State under a name belongs to no parameter, and every rank keeps it.
    """
    id_of = {index: saved_id for saved_id, index in index_of.items()}
    members = [[id_of[index] for index in group] for group in owned]
    foreign = set(index_of) - set(chain.from_iterable(members))
    return {
        "state": {saved_id: entry for saved_id, entry in state_dict["state"].items() if saved_id not in foreign},
        "param_groups": [
            {**options(dict(group)), "params": list(ids)}
            for group, ids in zip(state_dict["param_groups"], members, strict=True)
        ],
    }
