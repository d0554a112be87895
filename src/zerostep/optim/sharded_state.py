"""The state of the groups that one set of ranks divides: collected on one rank, and replaced by another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from zerostep.comm.mesh import Ranks
from zerostep.comm.objects import gather_object
from zerostep.dtensors import local_of
from zerostep.plan.groups import Group, class_of, own_options
from zerostep.plan.layout_planner import LayoutPlanner
from zerostep.state.consolidate import assemble, to_plain
from zerostep.state.dtensor_state import as_local_entry
from zerostep.state.expected import GroupOptimizer
from zerostep.state.leaf_state import LeafStates
from zerostep.state.param_state import DictState, Entry, SavedState
from zerostep.step.step_part import StepPart

Groups = Callable[[], list[Group]]  # the user may replace the list


class ShardedState:
    """State dicts and checkpoints, for leaves that lie on all ranks."""

    def __init__(self, part: StepPart, groups: Groups, planner: LayoutPlanner, ranks: Ranks) -> None:
        self._part, self._inners, self._groups, self._planner, self._ranks = part, part.inners, groups, planner, ranks
        self._buckets = part.engine.buckets
        self.leaves = LeafStates(self._buckets, self._inners)

    def collect(self, to: int) -> list[Any]:
        """Every rank's part of the state, on rank `to`; an empty list elsewhere. A collective."""

        def mine() -> dict[str, Any]:
            return {"by_parameter": to_plain(self.leaves.param_states()), "by_name": self._inners.named}

        return gather_object(self._ranks.shard_control(), mine, to)

    def assembled(self, parts: Sequence[Any]) -> dict[int, Entry]:
        """What was collected, by parameter."""
        return assemble([part["by_parameter"] for part in parts], self._buckets.params)

    def prepare_load(
        self, saved: Mapping[int, Mapping[str, Any]], named: Mapping[str, Any], options: Sequence[Group]
    ) -> Callable[[], None]:
        """Read this rank's part of whole state, by parameter; the returned function replaces state and options."""
        params = self._buckets.params
        local = {number: as_local_entry(entry, params[number])[0] for number, entry in saved.items()}
        states = {number: DictState(entry, local_of(params[number])) for number, entry in local.items()}
        replace_state = self.leaves.prepare(states, dict(named), options)

        def apply() -> None:
            replace_state()
            self._part.load_reference(local, dict(named), options)

        return apply

    def prepare_restore(
        self, saved: Mapping[int, SavedState], named: Mapping[str, Any], options: Sequence[Group]
    ) -> Callable[[], None]:
        """Read this rank's part of a checkpoint; the returned function replaces state and options by it."""
        replace_state = self.leaves.prepare(saved, dict(named), options, fresh=True)

        def apply() -> None:
            replace_state()
            compared = saved if self._part.verifies else {}
            whole = {number: {key: state.whole(key) for key in state.names()} for number, state in compared.items()}
            self._part.load_reference(whole, dict(named), options)

        return apply

    def group_optimizer(self, group: int) -> GroupOptimizer:
        """The class and the options that make the state of a group's parameters."""
        planner, chosen = self._planner, self._groups()[group]
        optimizer_class = class_of(chosen, planner.default_class)
        constructor = planner.constructor_options(optimizer_class)
        return GroupOptimizer(optimizer_class, constructor, own_options(chosen), planner.settings.master_dtype)

    def nbytes(self) -> int:
        """Bytes of the inner optimizers' state on this rank."""
        return sum(optimizer_state_bytes(optimizer.state) for optimizer in self._inners.all)


def optimizer_state_bytes(state: Mapping[Any, Any]) -> int:
    """Bytes of all tensors in the state of an optimizer."""
    values = [value for entry in state.values() for value in (entry.values() if isinstance(entry, dict) else [entry])]
    return sum(local_of(value).nbytes for value in values if isinstance(value, Tensor))
