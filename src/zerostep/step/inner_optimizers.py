"""The inner optimizers: ordinary torch optimizers over this rank's leaves, one per optimizer class."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerostep.memory.leaf import Leaf, clone_scalars, view_state
from zerostep.plan.groups import NOT_OF_CLASS, Group, OptimizerClass, class_of, options, own_options
from zerostep.step.named_state import NamedState, joined, kept, named_state, part_of
from zerostep.step.own_numbers import OwnNumbers

StateDict = dict[str, Any]

logger = logging.getLogger("zerostep")


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
        self._classes: list[OptimizerClass] = []
        inner_groups: dict[OptimizerClass, list[Group]] = {}
        for group, tensors in zip(groups, members, strict=True):
            self._classes.append(class_of(group, default_class))
            inner_groups.setdefault(self._classes[-1], []).append(_inner_group(group, tensors))
        # All groups of a class at once: what it notes of them in its constructor must be of all.
        for optimizer_class, together in inner_groups.items():
            self._make(optimizer_class, together)
        positions = {used: iter(optimizer.param_groups) for used, optimizer in self._all.items()}
        self._groups = [next(positions[used]) for used in self._classes]

    def _make(self, optimizer_class: OptimizerClass, groups: list[Group]) -> None:
        # The user's keyword options are for the default class; another class may not know them.
        defaults = self._defaults if optimizer_class is self._default_class else {}
        self._all[optimizer_class] = build_inner(optimizer_class, groups, defaults)

    def add(self, group: Group, tensors: Sequence[Tensor]) -> None:
        """Add an outer group; `pull` then gives it the options that its class has completed."""
        optimizer_class = class_of(group, self._default_class)
        inner_group = _inner_group(group, tensors)
        if optimizer_class in self._all:
            self._all[optimizer_class].add_param_group(inner_group)
        else:
            self._make(optimizer_class, [inner_group])
        self._groups.append(self._all[optimizer_class].param_groups[-1])
        self._classes.append(optimizer_class)

    def extend(self, group: int, tensors: Sequence[Tensor]) -> None:
        """Add tensors to an outer group."""
        self._groups[group]["params"].extend(tensors)

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the default class, if a group uses it."""
        optimizer = self._all.get(self._default_class)
        return {**(optimizer.defaults if optimizer is not None else {}), **self._defaults}

    @property
    def all(self) -> list[Optimizer]:
        """All inner optimizers."""
        return list(self._all.values())

    def of(self, group: int) -> Optimizer:
        """The optimizer of an outer group."""
        return self._all[self._classes[group]]

    def group(self, group: int) -> Group:
        """The inner group of an outer one, with its options and leaves."""
        return self._groups[group]

    def push_options(self, outer: Sequence[Group]) -> None:
        """Copy the options of the outer groups to the inner ones."""
        for theirs, ours in zip(outer, self._groups, strict=True):
            ours.update(own_options(theirs))

    def pull_options(self, outer: Sequence[Group]) -> None:
        """Copy the options of the inner groups to the outer ones."""
        for ours, theirs in zip(self._groups, outer, strict=True):
            theirs.update(own_options(ours))

    def state(self, leaf: Leaf) -> dict[str, Any] | None:
        """The live state of a leaf, if it has any yet."""
        entry: dict[str, Any] | None = self.of(leaf.group).state.get(leaf.tensor)
        return entry

    def replace(self, leaf: Leaf, parts: Sequence[Leaf]) -> None:
        """Put the parts of a split leaf in its place, each with its part of the state."""
        state, params = self.of(leaf.group).state, self._groups[leaf.group]["params"]
        position = next(index for index, tensor in enumerate(params) if tensor is leaf.tensor)
        params[position : position + 1] = [part.tensor for part in parts]
        entry = state.pop(leaf.tensor, None)
        if entry is not None:
            for part in parts:
                state[part.tensor] = clone_scalars(view_state(entry, leaf, part.fragments[0]))

    @property
    def named(self) -> NamedState:
        """The live state of all optimizers that is under names."""
        return joined([named_state(optimizer) for optimizer in self._all.values()])

    def load(
        self,
        states: Mapping[Tensor, Mapping[str, Any]],
        named: NamedState,
        chosen: Sequence[Group],
        fresh: bool = False,
    ) -> None:
        """Replace all state, by copies unless it is `fresh`, and take the options of the outer groups."""
        for number, optimizer in enumerate(self._all.values()):
            outer = [index for index, used in enumerate(self._classes) if self._all[used] is optimizer]
            ids: dict[Tensor, int] = {}
            groups = []
            for index, group in zip(outer, optimizer.param_groups, strict=True):
                for tensor in group["params"]:
                    ids[tensor] = len(ids)
                wanted = {key: value for key, value in chosen[index].items() if key not in NOT_OF_CLASS}
                groups.append({**wanted, "params": [ids[tensor] for tensor in group["params"]]})
            state: dict[Any, Any] = {ids[tensor]: states[tensor] for tensor in ids if tensor in states}
            state |= part_of(named, number, len(self._all))
            replace_state(optimizer, {"state": state, "param_groups": groups}, fresh)
            # Loading has made new group dicts, in the same order.
            for index, group in zip(outer, optimizer.param_groups, strict=True):
                self._groups[index] = group

    def begin(self) -> PartialSteps:
        """The partial steps of one step: all start from the options that the groups have now."""
        return PartialSteps(self._all.values(), self._groups)


def build_inner(optimizer_class: OptimizerClass, groups: list[Group], defaults: Mapping[str, Any]) -> Optimizer:
    """Build an optimizer of groups of which some may be empty here; `ValueError` if it cannot have such groups."""
    try:
        return optimizer_class([dict(group) for group in groups], **defaults)
    except Exception as error:
        empty = [index for index, group in enumerate(groups) if not group["params"]]
        if empty and _can_be_built(optimizer_class, groups, defaults):
            name = getattr(optimizer_class, "__name__", optimizer_class)
            raise ValueError(
                f"{name} cannot be built on a rank that owns no parameter of some group, here of group {empty[0]} "
                f"({type(error).__name__}: {error}): use fewer groups, each with parameters for every rank, or use it "
                "without sharding"
            ) from error
        raise


def _can_be_built(optimizer_class: OptimizerClass, groups: Sequence[Group], defaults: Mapping[str, Any]) -> bool:
    """Whether it is the empty groups that an optimizer cannot be built with."""
    filled = [{**group, "params": group["params"] or [torch.zeros(1, requires_grad=True)]} for group in groups]
    try:
        optimizer_class(filled, **defaults)
    except Exception:
        return False
    return True


def _inner_group(group: Group, tensors: Sequence[Tensor]) -> Group:
    return {**own_options(group), "params": list(tensors)}


class PartialSteps:
    """One step in several parts. However many there are, options and other numbers that a step changes change once.

    `groups` are all groups of `optimizers`. As in one step of the whole, the options of all groups change, also of
    those that have no tensors on this rank or in this step.
    """

    def __init__(self, optimizers: Iterable[Optimizer], groups: Sequence[Group]) -> None:
        self._groups = groups
        # Each optimizer with the indices of its groups.
        self._optimizers = [(optimizer, _indices(optimizer.param_groups, groups)) for optimizer in optimizers]
        self._numbers = {id(optimizer): OwnNumbers(optimizer) for optimizer, _ in self._optimizers}
        self._before = [dict(group) for group in groups]
        # A step may change a tensor in place, which must start every part with the same value.
        self._values = [_tensor_options(group) for group in groups]
        self._after: dict[int, Group] = {}
        self._with_tensors: set[int] = set()

    def step(self, tensors: Iterable[tuple[int, Tensor]]) -> None:
        """Update some tensors, which have their gradients; each comes with the index of its group."""
        chosen: dict[int, list[Tensor]] = {}
        for index, tensor in tensors:
            chosen.setdefault(index, []).append(tensor)
        for optimizer, indices in self._optimizers:
            if indices & chosen.keys():
                self._run(optimizer, indices, chosen)
        self._with_tensors |= chosen.keys()

    def step_rest(self) -> None:
        """Step those optimizers without tensors that no part has stepped: the options of their groups change."""
        for optimizer, indices in self._optimizers:
            if not indices & self._after.keys():
                try:
                    self._run(optimizer, indices, {})
                except Exception as error:  # not every class can step without tensors; nothing was updated
                    logger.debug("%s cannot step without tensors: %s", type(optimizer).__name__, error)

    def _run(self, optimizer: Optimizer, indices: set[int], chosen: Mapping[int, list[Tensor]]) -> None:
        try:
            for index in indices:
                self._groups[index]["params"] = chosen.get(index, [])
            optimizer.step()
            # A group without tensors counts only where no part has tensors for it: a class may skip such groups.
            for index in indices & (chosen.keys() | indices - self._with_tensors):
                self._after[index] = {**options(self._groups[index]), **_tensor_options(self._groups[index])}
        finally:
            self._restore()
            self._numbers[id(optimizer)].restore()

    def _restore(self) -> None:
        """Give the groups their tensors and the options that they began with, after an error, too."""
        for group, before, values in zip(self._groups, self._before, self._values, strict=True):
            group.clear()
            group.update(before)
            for key, value in values.items():
                before[key].detach().copy_(value)

    def end(self) -> None:
        """Give the groups the options that the partial steps have left, and the optimizers their numbers."""
        for numbers in self._numbers.values():
            numbers.end()
        for index, after in self._after.items():
            group, before = self._groups[index], self._before[index]
            group.update(after)
            # The user may hold the tensor, to change it.
            for key, value in self._values[index].items():
                if isinstance(after.get(key), Tensor) and after[key].shape == value.shape:
                    group[key] = before[key]
                    before[key].detach().copy_(after[key])


def _indices(some: Sequence[Group], groups: Sequence[Group]) -> set[int]:
    known = set(map(id, some))
    return {index for index, group in enumerate(groups) if id(group) in known}


def _tensor_options(group: Group) -> Group:
    return {key: value.detach().clone() for key, value in options(group).items() if isinstance(value, Tensor)}


def replace_state(optimizer: Optimizer, state_dict: StateDict, fresh: bool = False) -> None:
    """Replace all state of an optimizer, or raise and change nothing.

    The tensors are copied, unless they are `fresh`: made for this call, and used by nothing else. State under a name
    that the dict does not have stays: some classes have it from the start.
    """
    before = optimizer.state, optimizer.param_groups
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not fresh:
        saved_ids, params = (
            chain.from_iterable(g["params"] for g in each) for each in (groups, optimizer.param_groups)
        )
        devices = {saved_id: param.device for saved_id, param in zip(saved_ids, params, strict=True)}
        state = {key: _copy(entry, devices.get(key)) for key, entry in state.items()}
    # Options that the dict does not know keep their values, as an older checkpoint's would.
    groups = [{**options(old), **new} for old, new in zip(optimizer.param_groups, groups, strict=True)]
    try:
        optimizer.load_state_dict({"state": kept(optimizer, state), "param_groups": groups})
    except Exception:
        # A subclass's `__setstate__` may fail after the state was set.
        optimizer.state, optimizer.param_groups = before
        raise


def _copy(value: Any, device: torch.device | None) -> Any:
    """`value` with every tensor cloned that the optimizer, on this device, would otherwise share with the caller."""
    if isinstance(value, Tensor):
        return value.detach().clone() if device in (None, value.device) or value.numel() == 1 else value
    if isinstance(value, Mapping):
        return {key: _copy(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item, device) for item in value)
    return value
