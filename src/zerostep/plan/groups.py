"""Parameter groups: what users may pass, how options move between groups, and their specs for a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerostep.plan.layout import ParamSpec

__all__ = [
    "CLASS_KEY",
    "Group",
    "OptimizerClass",
    "all_params",
    "class_of",
    "copy_options",
    "normalise",
    "options",
    "own_options",
    "param_specs",
    "refuse_sparse",
    "share",
]

Group = dict[str, Any]
OptimizerClass = Callable[..., Optimizer]

CLASS_KEY = "optimizer_class"

_WANTED = "params must be an iterable of tensors, of (name, tensor) pairs or of dicts (parameter groups)"
_NOT_OPTIONS = ("params", "param_names")


def normalise(params: Any) -> list[Group]:
    """Parameter groups as fresh dicts whose "params" are lists; iterators are consumed once, here."""
    entries = _entries(params)
    if not entries:
        raise ValueError("the parameter list is empty: pass model.parameters() of a model that has parameters")
    kinds = {_kind(entry) for entry in entries}
    if len(kinds) > 1 or "other" in kinds:
        found = ", ".join(sorted({torch.typename(entry) for entry in entries}))
        raise TypeError(f"{_WANTED}, all of one kind; got elements of type {found}")
    return [_group(entry) for entry in entries] if kinds == {"dict"} else [{"params": entries}]


def _entries(params: Any) -> list[Any]:
    if isinstance(params, Tensor):
        raise TypeError(f"{_WANTED}; got a single {torch.typename(params)}: put it into a list")
    if isinstance(params, (set, frozenset)):
        raise TypeError(f"{_WANTED} in a fixed order; got a {type(params).__name__}, whose order differs between ranks")
    if isinstance(params, Mapping) or not isinstance(params, Iterable):
        raise TypeError(f"{_WANTED}; got a {torch.typename(params)}")
    return list(params)


def _kind(entry: Any) -> str:
    if isinstance(entry, Tensor):
        return "tensor"
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], Tensor):
        return "named"
    return "dict" if isinstance(entry, dict) else "other"


def _group(entry: Group) -> Group:
    if "params" not in entry:
        raise ValueError(f'every parameter group needs the key "params"; one has only {sorted(map(str, entry))}')
    params = entry["params"]
    # Sets and single tensors are left for torch to judge.
    as_it_is = isinstance(params, (Tensor, set, frozenset)) or not isinstance(params, Iterable)
    return {**entry, "params": params if as_it_is else list(params)}


def refuse_sparse(params: Iterable[Tensor]) -> None:
    """Only dense parameters can be divided and sent."""
    sparse = {param.type() for param in params if param.layout != torch.strided}
    if sparse:
        raise ValueError(f"only dense parameters can be sharded; got {', '.join(sorted(sparse))}: call .to_dense()")


def all_params(groups: Sequence[Group]) -> list[Tensor]:
    """All parameters in the order that numbers them."""
    return [param for group in groups for param in group["params"]]


def options(group: Group) -> Group:
    """A group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def copy_options(source: Sequence[Group], target: Sequence[Group]) -> None:
    """Copy every option of each source group to the target group at the same position."""
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(options(from_group))


def share(group: Group, members: Sequence[int]) -> Group:
    """A copy of `group` that holds only the parameters at `members`, positions in the group."""
    found = {**group, "params": [group["params"][i] for i in members]}
    if "param_names" in group:
        found["param_names"] = [group["param_names"][i] for i in members]
    return found


def param_specs(groups: Sequence[Group]) -> tuple[ParamSpec, ...]:
    """The specs of all parameters, each to be owned as a whole.

    A parameter that a group lists twice is trainable at its first place only, so that it travels once.
    """
    ordinals, seen = _DeviceNames(), Counter[int]()
    specs: list[ParamSpec] = []
    for number, group in enumerate(groups):
        names = group.get("param_names", ())
        for place, param in enumerate(group["params"]):
            seen[id(param)] += 1
            specs.append(
                ParamSpec(
                    name=names[place] if names else f"param.{len(specs)}",
                    shape=tuple(param.shape),
                    dtype=str(param.dtype).removeprefix("torch."),
                    device=ordinals.name(param.device),
                    group=number,
                    trainable=param.requires_grad and seen[id(param)] == 1,
                )
            )
    return tuple(specs)


class _DeviceNames:
    """Logical names of devices: the kind and the order of first use."""

    def __init__(self) -> None:
        self._names: dict[torch.device, str] = {}

    def name(self, device: torch.device) -> str:
        if device not in self._names:
            used = sum(known.type == device.type for known in self._names)
            self._names[device] = f"{device.type}:{used}"
        return self._names[device]


def class_of(group: Group, default: OptimizerClass) -> OptimizerClass:
    """The optimizer class of a group: the one it names, or the common one."""
    found: OptimizerClass = group.get(CLASS_KEY, default)
    return found


def own_options(group: Group) -> Group:
    """The options of a group, without the class that reads them."""
    return {key: value for key, value in options(group).items() if key != CLASS_KEY}
