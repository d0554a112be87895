"""The state of a `ZeroRedundancyOptimizer`: whole parameters of this rank, taken apart and replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zerostep.dtensors import is_dtensor, local_of, whole_of
from zerostep.errors import CheckpointError
from zerostep.plan.groups import Group, copy_options, options
from zerostep.plan.layout import Span
from zerostep.state.dtensor_state import as_entry_of, as_local_entry
from zerostep.state.load_state_dict import local_part, validate
from zerostep.state.param_state import MASTER, ParamState, SavedState, StateDict, flat_per_element
from zerostep.step.inner_optimizers import replace_state
from zerostep.step.named_state import named_state


class ZeroState:
    """The inner optimizer's state. `index_of` has the index of each tensor that the inner optimizer holds."""

    def __init__(self, inner: Optimizer, groups: list[Group], index_of: Mapping[Tensor, int]) -> None:
        self._inner, self._groups, self._index_of = inner, groups, index_of

    @property
    def _owned(self) -> list[list[int]]:
        """The parameters that this rank owns, by group."""
        return [[self._index_of[param] for param in group["params"]] for group in self._inner.param_groups]

    def check(self, state_dict: Any, live: Mapping[Tensor, Any]) -> dict[Any, int]:
        """The index of each parameter in a whole state dict; `ValueError` if that does not fit."""
        return validate(state_dict, self._groups, [self._inner] * len(self._groups), live)

    def load_whole(self, state_dict: StateDict, numbers: Mapping[Any, int], has_state: bool) -> None:
        """Replace state and options by this rank's part of a checked state dict, or raise and change nothing."""
        if state_dict["state"] or has_state:
            replace_state(self._inner, local_part(self._with_blocks(state_dict, numbers), numbers, self._owned))
        else:
            # Some launchers load what state_dict() gave before the first step; some optimizers start with state.
            copy_options(deepcopy([options(group) for group in state_dict["param_groups"]]), self._inner.param_groups)
        copy_options(self._inner.param_groups, self._groups)

    def _with_blocks(self, state_dict: StateDict, numbers: Mapping[Any, int]) -> StateDict:
        """The state dict with the state of this rank's DTensor parameters as DTensors like them."""
        mine = {index: param for param, index in self._index_of.items() if is_dtensor(param)}
        owned, state = set(chain.from_iterable(self._owned)), dict(state_dict["state"])
        for key, index in numbers.items():
            if key in state and index in mine and index in owned:
                state[key] = as_entry_of(mine[index], *as_local_entry(state[key], mine[index]))
            elif key in state and index in owned:
                state[key] = {name: whole_of(value) for name, value in state[key].items()}
        return {**state_dict, "state": state}

    def global_state(self) -> dict[str, Any]:
        """State that the inner optimizer keeps under names of its own, and not by parameter."""
        return named_state(self._inner)

    def param_states(self, live: Mapping[Any, Any], index_of: Mapping[Tensor, int]) -> Iterator[ParamState]:
        """The state of each parameter that this rank owns; `live` is keyed by the user's parameters."""
        for param, entry in live.items():
            if isinstance(param, Tensor) and entry:
                if MASTER in entry:
                    raise CheckpointError(f"the optimizer keeps a state of its own under the reserved name {MASTER!r}")
                per_element = flat_per_element(entry, param)
                shared = {key: whole_of(value) for key, value in entry.items() if key not in per_element}
                yield ParamState(index_of[param], Span(0, local_of(param).numel()), per_element, shared)

    @staticmethod
    def _saved_entry(saved: SavedState, param: Tensor) -> dict[str, Any]:
        values = {key: saved.whole(key) for key in saved.names() if key != MASTER}
        return as_entry_of(param, values, [key for key in values if saved.is_per_element(key)])

    def prepare_restore(
        self, saved: Mapping[int, SavedState], global_state: Mapping[str, Any], options: Sequence[Group]
    ) -> Callable[[], None]:
        """Read this rank's part of a checkpoint; the returned function replaces state and options by it."""
        owned, params = self._owned, {index: param for param, index in self._index_of.items()}
        entries = {
            index: self._saved_entry(saved[index], params[index])
            for members in owned
            for index in members
            if index in saved
        }
        state: dict[Any, Any] = {index: entry for index, entry in entries.items() if entry}
        state |= global_state
        groups = [{**chosen, "params": members} for chosen, members in zip(options, owned, strict=True)]

        def apply() -> None:
            replace_state(self._inner, {"state": state, "param_groups": groups}, fresh=True)
            copy_options(self._inner.param_groups, self._groups)

        return apply
