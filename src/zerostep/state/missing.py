"""Parameters without state in a state dict: those that never had a gradient, told from those whose entries were lost.

In `torch.optim`'s format both are entries that are not there. So a state dict of this package lists the former, beside
`"state"` and `"param_groups"`, where torch's own optimizers do not look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor

from zerostep.plan.groups import Group, options
from zerostep.plan.layout import ParamSpec
from zerostep.state.expected import GroupOptimizer, state_predictor
from zerostep.state.param_state import MASTER, StateDict

WITHOUT_STATE = "without_state"


def complete_state_dict(state: Mapping[Any, Any], groups: Sequence[Group]) -> StateDict:
    """Return a state dict that lists the parameters without state, unless there is state of all or of none."""
    found: StateDict = {"state": state, "param_groups": groups}
    members = list(dict.fromkeys(chain.from_iterable(group["params"] for group in groups)))
    without = [saved_id for saved_id in members if not _has_state(found, saved_id)]
    return {**found, WITHOUT_STATE: without} if 0 < len(without) < len(members) else found


def refuse_missing(
    state_dict: StateDict,
    index_of: Mapping[Any, int],
    specs: Sequence[ParamSpec],
    params: Sequence[Tensor],
    group_optimizer: Callable[[int], GroupOptimizer],
) -> None:
    """Raise `ValueError` if a state dict that has passed `validate` lacks state of a parameter that is trained here.

    Not if it has no state at all, as before the first step; not if it says that the parameter had none; and not if the
    group's optimizer, with the options of the state dict, keeps none for such a parameter.
    """
    if not any(_has_state(state_dict, saved_id) for saved_id in index_of):
        return
    saved_groups, without = state_dict["param_groups"], set(state_dict.get(WITHOUT_STATE, ()))

    def with_saved_options(group: int) -> GroupOptimizer:
        ours = group_optimizer(group)
        return replace(ours, group={**ours.group, **options(dict(saved_groups[group]))})

    expected = state_predictor(with_saved_options)
    for group, saved in enumerate(saved_groups):
        absent = [each for each in saved["params"] if not _has_state(state_dict, each) and each not in without]
        trained = [index_of[each] for each in absent if params[index_of[each]].requires_grad]
        missing = [index for index in trained if expected(specs[index]).exists]
        if missing:
            raise ValueError(
                f"the state dict has no state for {len(missing)} of the {len(saved['params'])} parameters of group "
                f"{group}, the first is {specs[missing[0]].name!r}: load the whole one, which state_dict() gives after "
                "consolidate_state_dict() on all ranks; or pass allow_missing=True, if these never had a "
                "gradient where it was saved, and their state may start anew"
            )


def _has_state(state_dict: StateDict, saved_id: Any) -> bool:
    return bool(set(state_dict["state"].get(saved_id) or ()) - {MASTER})
