"""One `torch.optim` state dict from the parts of all ranks.

`collect` and `merge` serve an optimizer whose ranks own whole parameters, `to_plain` and `assemble` one whose ranks own
parts of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerostep.comm.objects import gather_object
from zerostep.comm.transport import Transport
from zerostep.dtensors import is_dtensor, local_of
from zerostep.plan.groups import Group, all_params
from zerostep.state.dtensor_state import as_entry_of, as_local_entry
from zerostep.state.missing import complete_state_dict
from zerostep.state.param_state import Entry, ParamState, StateDict, shaped
from zerostep.step.named_state import warn_of_added
from zerostep.tensors import flat_alias

# ---------------------------------------------------------------------- ranks that own whole parameters


def collect(transport: Transport, inner: Optimizer, index_of: Mapping[Tensor, int], to: int) -> list[StateDict]:
    """Return the state dict of every rank's inner optimizer on rank `to`, keyed by parameter index; `[]` elsewhere."""
    return gather_object(transport, lambda: _indexed(inner, index_of), to)


def _indexed(inner: Optimizer, index_of: Mapping[Tensor, int]) -> StateDict:
    warn_of_added(inner)
    state_dict = inner.state_dict()
    global_index = {
        local: index_of[param]
        for packed, group in zip(state_dict["param_groups"], inner.param_groups, strict=True)
        for local, param in zip(packed["params"], group["params"], strict=True)
    }
    params, per_element = {index: param for param, index in index_of.items()}, dict[int, list[str]]()
    state: dict[Any, Any] = {global_index.get(key, key): value for key, value in state_dict["state"].items()}
    for index in global_index.values():
        if index in state and is_dtensor(params[index]):
            state[index], per_element[index] = as_local_entry(state[index], params[index])
    owned = [[global_index[local] for local in packed["params"]] for packed in state_dict["param_groups"]]
    groups = [{"params": members} for members in owned]
    return {"state": state, "param_groups": groups, "per_element": per_element}


def merge(state_dicts: Sequence[StateDict], groups: Sequence[Group]) -> StateDict:
    """Return what the unsharded optimizer's `state_dict()` would return, and which parameters have no state."""
    # Reversed: of state that every rank has, such as state under a name, the lowest rank's value is kept.
    entries = [item for state_dict in reversed(state_dicts) for item in state_dict["state"].items()]
    params = all_params(groups)
    blocks = {index: keys for state_dict in state_dicts for index, keys in state_dict["per_element"].items()}
    # Parameters by index first, then state under a name.
    state = dict(sorted(dict(entries).items(), key=lambda item: (isinstance(item[0], str), item[0])))
    whole = {key: as_entry_of(params[key], each, blocks[key]) if key in blocks else each for key, each in state.items()}
    return complete_state_dict(whole, pack_groups(groups))


def pack_groups(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with indices in place of parameters; a parameter listed twice keeps its first index."""
    index_of: dict[Tensor, int] = {}
    for index, param in enumerate(chain.from_iterable(group["params"] for group in groups)):
        index_of.setdefault(param, index)
    return [{**_copy_names(group), "params": [index_of[param] for param in group["params"]]} for group in groups]


def _copy_names(group: Group) -> Group:
    return {key: list(value) if key == "param_names" else value for key, value in group.items()}


# ---------------------------------------------------------------------- ranks that own parts of parameters


def to_plain(param_states: Iterable[ParamState]) -> list[dict[str, Any]]:
    """Convert a rank's state into nested plain values and tensors, which can be sent to another rank."""
    return [
        {
            "param": state.param,
            "part": [state.part.start, state.part.stop],
            "per_element": dict(state.per_element),
            "shared": dict(state.shared),
        }
        for state in param_states
    ]


def assemble(ranks: Iterable[Sequence[Mapping[str, Any]]], params: Sequence[Tensor]) -> dict[int, Entry]:
    """Return the state of all whole parameters by index, from what `to_plain` gave on every rank, in rank order."""
    entries: dict[int, Entry] = {}
    per_element: dict[int, set[str]] = {}
    for items in reversed(list(ranks)):  # of shared state, the lowest rank's value is kept
        for item in items:
            index = item["param"]
            _add_part(entries.setdefault(index, {}), item, local_of(params[index]))
            per_element.setdefault(index, set()).update(item["per_element"])
    return {index: as_entry_of(params[index], entries[index], per_element[index]) for index in sorted(entries)}


def _add_part(entry: Entry, item: Mapping[str, Any], param: Tensor) -> None:
    start, stop = item["part"]
    entry.update(item["shared"])
    for key, value in item["per_element"].items():
        if key not in entry:
            entry[key] = shaped(torch.empty(param.numel(), dtype=value.dtype), param)
        flat_alias(entry[key])[start:stop].copy_(value)
