"""What both optimizers are: one rank's part of a whole, whose state is put together only when somebody asks for it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

import torch
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from zerostep.optim.dcp_guard import ADVICE, refuse_dcp
from zerostep.state.param_state import StateDict

__all__ = ["PartitionedOptimizer"]


class PartitionedOptimizer(Optimizer, Joinable):
    """State dicts in `torch.optim`'s own format, with their hooks, of an optimizer that has a part on every rank."""

    rank: int
    world_size: int
    process_group: Any
    _has_state: bool
    _broken: str | None
    _all_state_dicts: list[Any]

    @abstractmethod
    def _check_usable(self) -> None:
        """Raise if a failure has left this optimizer in a state that must not be used."""

    @abstractmethod
    def _collected(self, to: int) -> list[Any]:
        """Every rank's part, on rank `to`; nothing on the others. A collective."""

    @abstractmethod
    def _whole(self) -> StateDict:
        """What was collected, as one state dict."""

    @abstractmethod
    def _take(self, state_dict: StateDict) -> None:
        """Replace state and options by this rank's part of a whole state dict, or raise and change nothing."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on group rank `to`, in host memory, for its next `state_dict()`.

        All ranks call it. The copy stays until the next consolidation or `release_state_dict()`.
        """
        self._check_usable()
        if not isinstance(to, int) or not 0 <= to < self.world_size:
            raise ValueError(f"`to` must be a rank of the group, 0 to {self.world_size - 1}; got {to!r}")
        self._all_state_dicts = []
        self._all_state_dicts = self._collected(to)

    def release_state_dict(self) -> None:
        """Free the consolidated state that this rank may hold."""
        self._all_state_dicts = []

    def state_dict(self) -> StateDict:
        """The whole state in `torch.optim`'s own format, on the recipient of the latest consolidation.

        Local: it never communicates. Before the first step there is no state yet, and any rank may ask.
        """
        refuse_dcp(type(self).__name__)
        self._check_usable()
        if not self._all_state_dicts and self._has_state:
            raise RuntimeError(
                f"the optimizer state has not been consolidated on this rank: call "
                f"consolidate_state_dict(to={self.rank}) on all ranks first, or {ADVICE}"
            )
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        found = self._whole()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, found)
            found = found if replaced is None else replaced
        return found

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take this rank's part of a full state dict, whatever optimizer or world size it comes from.

        Local, to be called on every rank. The whole dict is checked first; an error leaves everything as it was. The
        argument is neither changed nor shared.
        """
        found = state_dict.copy() if isinstance(state_dict, dict) else state_dict
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, found)
            found = found if replaced is None else replaced
        self._take(found)
        self._all_state_dicts, self._broken = [], None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _spoil(self, story: str) -> None:
        self._broken = story

    def _refuse_joining(self) -> None:
        if self._join_config.enable:
            raise RuntimeError(
                "inside Join some ranks may have no inputs left, and would not come: save or load outside"
            )

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of the first parameter."""

    @property
    def join_process_group(self) -> Any:
        """The process group of this optimizer."""
        return self.process_group

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: it belongs to a process group and to this rank's "
            "parameters. Build a new one and pass state_dict() to its load_state_dict()"
        )
