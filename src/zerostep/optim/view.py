"""The interface between an optimizer and a checkpoint; both optimizer classes provide it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zerostep.comm.agreement import agreed
from zerostep.comm.background import BackgroundSaves
from zerostep.comm.transport import Transport
from zerostep.plan.groups import Group
from zerostep.plan.layout import Layout
from zerostep.state.expected import GroupOptimizer
from zerostep.state.param_state import ParamState, SavedState

# Called with the saved state by parameter, the global state, the options of the groups and the step. Reads all saved
# state that this rank needs, and returns a function that then replaces state and options. An error while reading leaves
# the state as it was; one in the returned function may leave it half replaced.
Restore = Callable[[Mapping[int, SavedState], Mapping[str, Any], Sequence[Group], int], Callable[[], None]]


@dataclass(frozen=True)
class OptimizerView:
    """An optimizer as a checkpoint sees it.

    `rank` is a rank of `layout`. With replicas, several ranks of `everyone` share it, and only one of them `writes`.

    | field | meaning |
    |---|---|
    | `optimizer_names` | class name of each group's inner optimizer |
    | `ensure_complete` | wait for what is under way; raises if parameters and state are from different steps |
    | `param_states` | this rank's live state by parameter: views, not copies |
    | `global_state` | live state that belongs to no parameter |
    | `group_optimizer` | how to build the inner optimizer of a group, to find out which state it will have |
    | `loads_whole_state` | whether this rank needs the state of all parameters in a load, not only of what it owns |
    | `begin_load` | all ranks are about to replace the state together |
    | `mark_broken` | refuse further steps, with this message, until something is loaded |
    """

    everyone: Transport
    rank: int
    writes: bool
    layout: Layout
    params: Sequence[Tensor]
    groups: Sequence[Group]
    optimizer_names: Sequence[str]
    step: int
    saves: BackgroundSaves
    ensure_complete: Callable[[], None]
    param_states: Callable[[], Iterable[ParamState]]
    global_state: Callable[[], Mapping[str, Any]]
    group_optimizer: Callable[[int], GroupOptimizer]
    loads_whole_state: bool
    restore: Restore
    begin_load: Callable[[], None]
    mark_broken: Callable[[str], object]

    @property
    def named(self) -> bool:
        """Whether all groups have parameter names."""
        return all("param_names" in group for group in self.groups)


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer of this package inside the wrappers of frameworks, or the argument if there is none."""
    inner = optimizer
    # A wrapper's own copies of our fields, if it has any, are of the time when it was made: look inside first.
    while (inside := getattr(inner, "optimizer", None)) is not None:
        inner = inside
    return inner if hasattr(inner, "optimizer_view") else optimizer


@contextmanager
def applying(view: OptimizerView, description: str) -> Iterator[None]:
    """In this block all ranks replace what they have read; if one fails, all raise and refuse to go on.

    A collective. Some ranks may have applied everything by then, others only a part.
    """
    view.begin_load()
    try:
        with agreed(view.everyone):
            yield
    except BaseException as error:
        view.mark_broken(f"{description} failed half-way: {error}")
        raise


def view_of(optimizer: Any) -> OptimizerView:
    """Return the view of an optimizer, also inside a framework's wrapper; `TypeError` if it is not of this package."""
    make_view = getattr(unwrapped(optimizer), "optimizer_view", None)
    if make_view is None:
        raise TypeError(
            f"a {type(optimizer).__name__} has no shards to save or load: pass a zerostep.ShardedOptimizer or a "
            "zerostep.ZeroRedundancyOptimizer"
        )
    view: OptimizerView = make_view()
    return view
