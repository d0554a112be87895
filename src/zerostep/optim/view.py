"""What a checkpoint needs of an optimizer; both optimizer classes offer it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from zerostep.comm.background import BackgroundSaves
from zerostep.comm.transport import Transport
from zerostep.plan.groups import Group
from zerostep.plan.layout import Layout
from zerostep.state.param_state import ParamState, SavedState

__all__ = ["OptimizerView", "Restore", "view_of"]


class Restore(Protocol):
    """Reads all that this rank needs of what was saved, by number; what it returns then replaces state and options."""

    def __call__(
        self, saved: Mapping[int, SavedState], others: Mapping[str, Any], options: Sequence[Group], step: int
    ) -> Callable[[], None]:
        """Read; the returned callable replaces."""


@dataclass(frozen=True)
class OptimizerView:
    """An optimizer as a checkpoint sees it.

    `rank` is one of the layout's; where there are replicas, several ranks of `everyone` have it, and one of them
    `writes`. `shares` and `others` show the live state, and `settle` makes sure that it belongs to one step. After
    `spoil` the optimizer refuses to go on until something is loaded.
    """

    everyone: Transport
    rank: int
    writes: bool
    layout: Layout
    params: Sequence[Tensor]
    groups: Sequence[Group]
    kinds: Sequence[str]
    step: int
    saves: BackgroundSaves
    settle: Callable[[], None]
    shares: Callable[[], Iterable[ParamState]]
    others: Callable[[], Mapping[str, Any]]
    restore: Restore
    spoil: Callable[[str], None]

    @property
    def named(self) -> bool:
        """Whether parameters have names of their own."""
        return all("param_names" in group for group in self.groups)


def view_of(optimizer: Any) -> OptimizerView:
    """The optimizer's own answer; `TypeError` for one that is not ours."""
    found = getattr(optimizer, "optimizer_view", None)
    if found is None:
        raise TypeError(
            f"a {type(optimizer).__name__} has no shards to save or load: pass a zerostep.ShardedOptimizer or a "
            "zerostep.ZeroRedundancyOptimizer, not a wrapper around it"
        )
    view: OptimizerView = found()
    return view
