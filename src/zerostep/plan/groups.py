"""Parameter groups: checking what users pass, copying options between groups, and specs for a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerostep.dtensors import check_overlap, check_placements, is_dtensor, local_of
from zerostep.plan.layout import ParamSpec
from zerostep.tensors import is_dense

Group = dict[str, Any]
OptimizerClass = Callable[..., Optimizer]

CLASS_KEY = "optimizer_class"
GROUP_KEY = "process_group"

_WANTED = "params must be an iterable of tensors, of (name, tensor) pairs or of dicts (parameter groups)"
_NOT_OPTIONS = ("params", "param_names")
NOT_OF_CLASS = frozenset({CLASS_KEY, GROUP_KEY})
"""What a group says to the sharded optimizer, and not to its optimizer class; never part of a state dict."""


def normalise(params: Any) -> list[Group]:
    """Parameter groups as fresh dicts whose "params" are lists; iterators are consumed once, here."""
    entries = _entries(params)
    if not entries:
        raise ValueError("the parameter list is empty: pass model.parameters() of a model that has parameters")
    kinds = {_kind(entry) for entry in entries}
    if len(kinds) > 1 or "other" in kinds:
        types = ", ".join(sorted({torch.typename(entry) for entry in entries}))
        raise TypeError(f"{_WANTED}, all of one kind; got elements of type {types}")
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
    # Sets and single tensors are left as they are: torch raises its own errors for them, or accepts them.
    as_it_is = isinstance(params, (Tensor, set, frozenset)) or not isinstance(params, Iterable)
    return {**entry, "params": params if as_it_is else list(params)}


def refuse_sparse(params: Iterable[Tensor]) -> None:
    """Raise `ValueError` for sparse parameters: only dense ones can be divided and sent."""
    sparse = {param.type() for param in params if param.layout != torch.strided}
    if sparse:
        raise ValueError(f"only dense parameters can be sharded; got {', '.join(sorted(sparse))}: call .to_dense()")


def refuse_own_ranks(groups: Iterable[Group]) -> None:
    """Raise `ValueError` if a group names a process group of its own, in an optimizer that leaves sums to DDP."""
    if any(group.get(GROUP_KEY) is not None for group in groups):
        raise ValueError(
            "a parameter group has a process_group of its own, which ZeroRedundancyOptimizer cannot have, because DDP "
            "sums all gradients over one group: use ShardedOptimizer, with the module without DDP"
        )


def refuse_shared_memory(groups: Sequence[Group]) -> None:
    """Raise if two parameters lie over the same memory: each would get an owner, a place and state of its own."""
    named = zip(all_params(groups), _names(groups), strict=True)
    params = {id(param): (local_of(param), name) for param, name in named}
    dense = [(param, name) for param, name in params.values() if param.numel() and is_dense(param) and param.data_ptr()]
    end, before, device = 0, "", torch.device("cpu")
    for param, name in sorted(dense, key=lambda entry: (str(entry[0].device), entry[0].data_ptr())):
        if param.data_ptr() < end and device == param.device:
            raise ValueError(
                f"parameters {before!r} and {name!r} share memory, and would be updated apart from each other: use one "
                "nn.Parameter in both places"
            )
        end, before, device = param.data_ptr() + param.nbytes, name, param.device


def check_dtensors(groups: Sequence[Group], divided_by: Callable[[], Sequence[int]]) -> None:
    """Raise `ValueError` for DTensors that cannot be divided among the ranks `divided_by` in addition."""
    for param, name in zip(all_params(groups), _names(groups), strict=True):
        if is_dtensor(param):
            check_placements(name, param, divided_by())


def check_mesh_overlap(groups: Sequence[Group], everyone: Sequence[int]) -> None:
    """Raise `ValueError` for DTensors over some of the ranks `everyone` and others."""
    for param, name in zip(all_params(groups), _names(groups), strict=True):
        check_overlap(name, param, everyone)


def refuse_dtensors(groups: Sequence[Group], what: str, remedy: str) -> None:
    """Raise `ValueError` if some parameter is a DTensor."""
    for param, name in zip(all_params(groups), _names(groups), strict=True):
        if is_dtensor(param):
            raise ValueError(f"parameter {name!r} is a DTensor, which {what} cannot be used with: {remedy}")


def _names(groups: Sequence[Group]) -> list[str]:
    names = [name for group in groups for name in group.get("param_names", [None] * len(group["params"]))]
    return [f"param.{index}" if name is None else name for index, name in enumerate(names)]


def all_params(groups: Sequence[Group]) -> list[Tensor]:
    """All parameters, in the order of their indices."""
    return [param for group in groups for param in group["params"]]


def options(group: Group) -> Group:
    """A group without its parameters and their names."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def copy_options(source: Sequence[Group], target: Sequence[Group]) -> None:
    """Copy every option of each source group to the target group at the same position."""
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(options(from_group))


def subgroup(group: Group, positions: Sequence[int]) -> Group:
    """A copy of `group` with only the parameters at these positions."""
    part = {**group, "params": [group["params"][position] for position in positions]}
    if "param_names" in group:
        part["param_names"] = [group["param_names"][position] for position in positions]
    return part


def has_or_gets_grad(param: Tensor) -> bool:
    """Whether a step may change a parameter: torch's optimizers use a gradient that was made before it was frozen."""
    return param.requires_grad or param.grad is not None


def param_specs(
    groups: Sequence[Group], is_trainable: Callable[[Tensor], bool] = lambda param: param.requires_grad
) -> tuple[ParamSpec, ...]:
    """The specs of all parameters, each to be owned as a whole; of a DTensor, of what this rank holds.

    A parameter that is listed twice is trainable at its first position only, so that it is sent once.
    """
    devices, seen = dict[torch.device, str](), Counter[int]()
    specs: list[ParamSpec] = []
    for group_index, group in enumerate(groups):
        names = group.get("param_names", ())
        for position, param in enumerate(group["params"]):
            seen[id(param)] += 1
            specs.append(
                ParamSpec(
                    name=names[position] if names else f"param.{len(specs)}",
                    shape=tuple(local_of(param).shape),
                    dtype=str(param.dtype).removeprefix("torch."),
                    device=_device_name(param.device, devices),
                    group=group_index,
                    trainable=is_trainable(param) and seen[id(param)] == 1,
                )
            )
    return tuple(specs)


def _device_name(device: torch.device, names: dict[torch.device, str]) -> str:
    """The device type and a number in the order of first use, as in `ParamSpec.device`; kept in `names`."""
    used = sum(known.type == device.type for known in names)
    return names.setdefault(device, f"{device.type}:{used}")


def class_of(group: Group, default: OptimizerClass) -> OptimizerClass:
    """The optimizer class of a group: the one it names, or the default."""
    optimizer_class: OptimizerClass = group.get(CLASS_KEY, default)
    return optimizer_class


def own_options(group: Group) -> Group:
    """The options of a group for its optimizer class: without that class, its ranks, the parameters and their names."""
    return {key: value for key, value in options(group).items() if key not in NOT_OF_CLASS}


def without_params(group: Group) -> Group:
    """A copy of a group that has its options and no parameters."""
    return {**{key: value for key, value in group.items() if key != "param_names"}, "params": []}
