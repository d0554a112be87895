"""The inner optimizers: ordinary torch optimizers, one for each class that the groups name, over this rank's leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerostep.memory.leaf import Leaf, clone_scalars, view_state
from zerostep.plan.groups import CLASS_KEY, Group, OptimizerClass, class_of, options, own_options

__all__ = ["InnerOptimizers", "PartialSteps", "commit"]

StateDict = dict[str, Any]

_HOST = torch.device("cpu")


class InnerOptimizers:
    """One optimizer per class. `members` gives the tensors of each outer group."""

    def __init__(
        self,
        groups: Sequence[Group],
        members: Sequence[Sequence[Tensor]],
        default_class: OptimizerClass,
        defaults: Mapping[str, Any],
    ) -> None:
        self._default_class, self._defaults = default_class, defaults
        self._all: dict[Any, Optimizer] = {}
        self._groups: list[Group] = []
        self._kinds: list[OptimizerClass] = []
        for group, tensors in zip(groups, members, strict=True):
            self.add(group, tensors)

    def add(self, group: Group, tensors: Sequence[Tensor]) -> None:
        """Add an outer group; the options that its class completes are there to be pulled."""
        kind = class_of(group, self._default_class)
        wanted = {**own_options(group), "params": list(tensors)}
        if kind in self._all:
            self._all[kind].add_param_group(wanted)
        else:
            # Options that are given for all groups are meant for the common class.
            self._all[kind] = kind([wanted], **(self._defaults if kind is self._default_class else {}))
        self._groups.append(self._all[kind].param_groups[-1])
        self._kinds.append(kind)

    def extend(self, group: int, tensors: Sequence[Tensor]) -> None:
        """Add tensors to an outer group that is there already."""
        self._groups[group]["params"].extend(tensors)

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the common class, as far as it is in use."""
        found = self._all.get(self._default_class)
        return {**(found.defaults if found is not None else {}), **self._defaults}

    @property
    def all(self) -> list[Optimizer]:
        """The optimizers themselves."""
        return list(self._all.values())

    def of(self, group: int) -> Optimizer:
        """The optimizer of an outer group."""
        return self._all[self._kinds[group]]

    def push(self, outer: Sequence[Group]) -> None:
        """Give the options of the outer groups to the inner ones."""
        for theirs, ours in zip(outer, self._groups, strict=True):
            ours.update(own_options(theirs))

    def pull(self, outer: Sequence[Group]) -> None:
        """Give the options of the inner groups to the outer ones."""
        for ours, theirs in zip(self._groups, outer, strict=True):
            theirs.update(own_options(ours))

    def state(self, leaf: Leaf) -> dict[str, Any] | None:
        """The live state of a leaf, if it has any yet."""
        found: dict[str, Any] | None = self.of(leaf.group).state.get(leaf.tensor)
        return found

    def replace(self, leaf: Leaf, parts: Sequence[Leaf]) -> None:
        """Put the parts of a split leaf in its place, each with its part of the state."""
        state, params = self.of(leaf.group).state, self._groups[leaf.group]["params"]
        place = next(index for index, tensor in enumerate(params) if tensor is leaf.tensor)
        params[place : place + 1] = [part.tensor for part in parts]
        entry = state.pop(leaf.tensor, None)
        if entry is not None:
            for part in parts:
                state[part.tensor] = clone_scalars(view_state(entry, leaf, part.fragments[0]))

    def load(self, states: Mapping[Tensor, Mapping[str, Any]], chosen: Sequence[Group], fresh: bool = False) -> None:
        """Replace all state by `states`, copied unless it is `fresh`, and take the options of the outer groups."""
        for optimizer in self._all.values():
            numbers: dict[Tensor, int] = {}
            groups = []
            for group in optimizer.param_groups:
                outer = next(number for number, found in enumerate(self._groups) if found is group)
                for tensor in group["params"]:
                    numbers[tensor] = len(numbers)
                wanted = {key: value for key, value in chosen[outer].items() if key != CLASS_KEY}
                groups.append({**wanted, "params": [numbers[tensor] for tensor in group["params"]]})
            state = {numbers[tensor]: states[tensor] for tensor in numbers if tensor in states}
            commit(optimizer, {"state": state, "param_groups": groups}, fresh)
            self._follow(optimizer)

    def _follow(self, optimizer: Optimizer) -> None:
        """Loading makes new group dicts, in the same order."""
        places = [number for number, kind in enumerate(self._kinds) if self._all[kind] is optimizer]
        for number, group in zip(places, optimizer.param_groups, strict=True):
            self._groups[number] = group

    # ------------------------------------------------------------------ partial steps

    def begin(self) -> PartialSteps:
        """The partial steps of one step: all start from the options that the groups have now."""
        return PartialSteps(self._all.values(), self._groups)


class PartialSteps:
    """One step in several parts: however many there are, options that a step changes change once."""

    def __init__(self, optimizers: Iterable[Optimizer], groups: Sequence[Group]) -> None:
        self._optimizers, self._groups = list(optimizers), groups
        self._before = [dict(group) for group in groups]
        self._after: dict[int, Group] = {}

    def step(self, leaves: Sequence[Leaf]) -> None:
        """Update some leaves, which have their gradients."""
        chosen: dict[int, list[Tensor]] = {}
        for leaf in leaves:
            chosen.setdefault(leaf.group, []).append(leaf.tensor)
        try:
            for number, group in enumerate(self._groups):
                group["params"] = chosen.get(number, [])
            for optimizer in self._optimizers:
                if any(group["params"] for group in optimizer.param_groups):
                    optimizer.step()
            self._after.update({number: options(self._groups[number]) for number in chosen})
        finally:
            for group, before in zip(self._groups, self._before, strict=True):
                group.clear()
                group.update(before)

    def end(self) -> None:
        """Leave behind the options that a step leaves behind."""
        for number, after in self._after.items():
            self._groups[number].update(after)


def commit(inner: Optimizer, part: StateDict, fresh: bool = False) -> None:
    """Replace all state of `inner` by copies, or by what is `fresh` and nobody else's; or leave it as it was."""
    before = inner.state, inner.param_groups
    params = dict(
        zip(
            chain.from_iterable(group["params"] for group in part["param_groups"]),
            chain.from_iterable(group["params"] for group in inner.param_groups),
            strict=True,
        )
    )
    devices = {saved_id: param.device for saved_id, param in params.items()}
    state = part["state"]
    copies = state if fresh else {key: _copy(entry, devices.get(key, _HOST)) for key, entry in state.items()}
    # Options that the dict does not know keep their values, as an older checkpoint's would.
    groups = [{**options(old), **new} for old, new in zip(inner.param_groups, part["param_groups"], strict=True)]
    try:
        inner.load_state_dict({"state": copies, "param_groups": groups})
    except Exception:
        inner.state, inner.param_groups = before
        raise


def _copy(value: Any, device: torch.device) -> Any:
    """`value` with every tensor cloned that the inner optimizer would otherwise share with the caller."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.device == device or value.numel() == 1 else value
    if isinstance(value, Mapping):
        return {key: _copy(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        copies: Callable[[Any], Any] = type(value)
        return copies(_copy(item, device) for item in value)
    return value
