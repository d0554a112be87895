"""The state of a `ShardedOptimizer`: collected on one rank, and replaced by a state dict or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from zerostep.comm.mesh import Ranks
from zerostep.comm.objects import gather_object
from zerostep.dtensors import local_of
from zerostep.plan.groups import CLASS_KEY, Group, class_of, options, own_options
from zerostep.plan.layout_planner import LayoutPlanner
from zerostep.state.consolidate import assemble, pack_groups, to_plain
from zerostep.state.dtensor_state import as_local_entry
from zerostep.state.expected import GroupOptimizer
from zerostep.state.leaf_state import LeafStates
from zerostep.state.load_state_dict import validate
from zerostep.state.missing import complete_state_dict, refuse_missing
from zerostep.state.param_state import DictState, SavedState, StateDict
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.step.training_step import TrainingStep

Groups = Callable[[], list[Group]]  # the user may replace the list


class ShardedState:
    """State dicts and checkpoints, for leaves that lie on all ranks."""

    def __init__(
        self, step: TrainingStep, inners: InnerOptimizers, groups: Groups, planner: LayoutPlanner, ranks: Ranks
    ) -> None:
        self._step, self._inners, self._groups, self._planner, self._ranks = step, inners, groups, planner, ranks
        self._buckets = step.engine.buckets
        self.leaves = LeafStates(self._buckets, inners)

    def collect(self, to: int) -> list[Any]:
        """Every rank's part of the state, on rank `to`; an empty list elsewhere. A collective."""

        def mine() -> dict[str, Any]:
            return {"by_parameter": to_plain(self.leaves.param_states()), "by_name": self._inners.named}

        return gather_object(self._ranks.shard_control(), mine, to)

    def consolidated(self, parts: Sequence[Any]) -> StateDict:
        """What was collected, as one state dict."""
        groups = [{k: v for k, v in group.items() if k != CLASS_KEY} for group in pack_groups(self._groups())]
        state: dict[Any, Any] = dict(assemble([part["by_parameter"] for part in parts], self._buckets.params))
        for part in reversed(parts):  # under a name, the lowest rank's value is kept
            state |= part["by_name"]
        return complete_state_dict(state, groups)

    def load_whole(self, state_dict: StateDict, allow_missing: bool) -> None:
        """Replace state and options by this rank's part of a state dict, or raise and change nothing."""
        optimizers = [self._inners.of(group) for group in range(len(self._groups()))]
        numbers, buckets = validate(state_dict, self._groups(), optimizers, {}), self._buckets
        if not allow_missing:
            refuse_missing(state_dict, numbers, buckets.layout.params, buckets.params, self.group_optimizer)
        entries = {numbers[key]: entry for key, entry in state_dict["state"].items() if key in numbers}
        saved = {number: as_local_entry(entry, buckets.params[number])[0] for number, entry in entries.items()}
        named = {key: value for key, value in state_dict["state"].items() if key not in numbers}
        chosen = [options(dict(group)) for group in state_dict["param_groups"]]
        self._step.engine.recover()
        states = {number: DictState(entry, local_of(buckets.params[number])) for number, entry in saved.items()}
        self.leaves.load(states, named, chosen)
        self._step.load_reference(saved, named, chosen)
        self._step.loaded(bool(saved))

    def prepare_restore(
        self, saved: Mapping[int, SavedState], named: Mapping[str, Any], options: Sequence[Group], step: int
    ) -> Callable[[], None]:
        """Read this rank's part of a checkpoint; the returned function replaces state and options by it."""
        replace_state = self.leaves.prepare(saved, dict(named), options, fresh=True)

        def apply() -> None:
            self._step.engine.recover()
            replace_state()
            compared = saved if self._step.verifies else {}
            whole = {number: {key: state.whole(key) for key in state.names()} for number, state in compared.items()}
            self._step.load_reference(whole, dict(named), options)
            self._step.loaded(bool(saved), step)

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
