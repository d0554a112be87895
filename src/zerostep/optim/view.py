"""The interface between an optimizer and a checkpoint; both optimizer classes provide it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zerostep.comm.agreement import agreed
from zerostep.comm.background import BackgroundSaves
from zerostep.comm.model_ranks import ModelRanks
from zerostep.comm.transport import Transport
from zerostep.dtensors import is_dtensor
from zerostep.plan.blocks import Block, block_of
from zerostep.plan.groups import Group
from zerostep.plan.layout import Layout
from zerostep.state.expected import GroupOptimizer
from zerostep.state.param_state import ParamState, SavedState

# Called with the saved state by parameter of each part, the global state, the options of the groups and the step. Reads
# all saved state that this rank needs, and returns a function that then replaces state and options. An error while
# reading leaves the state as it was; one in the returned function may leave it half replaced.
Restore = Callable[[Sequence[Mapping[int, SavedState]], Mapping[str, Any], Sequence[Group], int], Callable[[], None]]


@dataclass(frozen=True)
class ViewPart:
    """The parameters that one set of ranks divides, on one of these ranks.

    `rank` is a rank of `layout`. With replicas, several ranks share it, and only one of them `writes`. Group numbers of
    the layout are those of the optimizer, in all its parts.

    | field | meaning |
    |---|---|
    | `params` | the parameters of the layout |
    | `param_states` | this rank's live state by parameter: views, not copies |
    | `own_ranks` | the global ranks that divide them, if other ranks have other parameters in the same groups |
    """

    rank: int
    writes: bool
    layout: Layout
    params: Sequence[Tensor]
    param_states: Callable[[], Iterable[ParamState]]
    own_ranks: tuple[int, ...] | None = None

    @property
    def blocks(self) -> list[Block]:
        """What this rank's tensors are of the whole parameters."""
        return [block_of(param) for param in self.params]


@dataclass(frozen=True)
class OptimizerView:
    """An optimizer as a checkpoint sees it.

    | field | meaning |
    |---|---|
    | `control` | all ranks of the optimizer |
    | `model_ranks` | finds all ranks that hold a part of the model |
    | `parts` | what this rank holds, by the set of ranks that divides it |
    | `optimizer_names` | class name of each group's inner optimizer |
    | `ensure_complete` | wait for what is under way; raises if parameters and state are from different steps |
    | `global_state` | live state that belongs to no parameter |
    | `group_optimizer` | how to build the inner optimizer of a group, to find out which state it will have |
    | `loads_whole_state` | whether this rank needs the state of all parameters in a load, not only of what it owns |
    | `begin_load` | all ranks are about to replace the state together |
    | `mark_broken` | refuse further steps, with this message, until something is loaded |
    """

    control: Transport
    model_ranks: ModelRanks
    parts: Sequence[ViewPart]
    groups: Sequence[Group]
    optimizer_names: Sequence[str]
    step: int
    saves: BackgroundSaves
    ensure_complete: Callable[[], None]
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

    @property
    def crosses(self) -> bool:
        """Whether other ranks may hold other parameters, or other parts of them, than the ranks of the first part."""
        return len(self.parts) > 1 or any(is_dtensor(param) for part in self.parts for param in part.params)

    def everyone(self) -> Transport:
        """All ranks that hold a part of the model; a collective when it is first called."""
        return self.model_ranks.transport([param for part in self.parts for param in part.params])


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer of this package inside the wrappers of frameworks, or the argument if there is none."""
    inner = optimizer
    # A wrapper's own copies of our fields, if it has any, are of the time when it was made: look inside first.
    while (inside := getattr(inner, "optimizer", None)) is not None:
        inner = inside
    return inner if hasattr(inner, "optimizer_view") else optimizer


@contextmanager
def applying(view: OptimizerView, everyone: Transport, description: str) -> Iterator[None]:
    """In this block all ranks replace what they have read; if one fails, all raise and refuse to go on.

    A collective. Some ranks may have applied everything by then, others only a part.
    """
    view.begin_load()
    try:
        with agreed(everyone):
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
