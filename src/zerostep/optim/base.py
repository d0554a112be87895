"""The common base of both optimizers: state dicts of an optimizer whose state is divided among ranks.

`torch.distributed.checkpoint` must not handle such an optimizer by itself. It takes an optimizer without state on this
rank for a new one, and makes state by a step of its own, which may wait for other ranks for ever; and it takes the
state dict of each rank for the whole.
"""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from zerostep.comm.transport import calling
from zerostep.optim.inner_methods import InnerMethods
from zerostep.optim.proxies import delegate_if_proxy
from zerostep.plan.groups import all_params
from zerostep.state.audit import AuditReport, Audits, AuditSubject, audit
from zerostep.state.param_state import StateDict
from zerostep.step.health import Health

_DCP_ADVICE = "give zerostep.dcp_state(optimizer) to torch.distributed.checkpoint's save and load"
_ACCELERATE_ADVICE = (
    "call zerostep.integrations.accelerate.enable(accelerator) before accelerator.prepare(), or "
    "zerostep.integrations.transformers.enable(trainer) before trainer.train(), on all ranks"
)


class PartitionedOptimizer(Optimizer, Joinable):
    """An optimizer with a part of its state on every rank; state dicts have `torch.optim`'s own format."""

    rank: int
    world_size: int
    process_group: Any
    _health: Health
    _audits: Audits
    _all_state_dicts: list[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = (each for each in cls.__mro__[1:] if issubclass(each, PartitionedOptimizer))
        delegate_if_proxy(cls, next(bases))

    def _check_usable(self) -> None:
        """Raise if a step has failed half-way and nothing was loaded since."""
        self._health.check()

    @property
    def _all_params(self) -> list[Tensor]:
        return all_params(self.param_groups)

    @property
    @abstractmethod
    def _has_state(self) -> bool:
        """Whether there is state that a state dict must have."""

    @abstractmethod
    def _collect_state(self, to: int) -> list[Any]:
        """Every rank's part of the state, on rank `to`; an empty list on the others. A collective."""

    @abstractmethod
    def _consolidated(self) -> StateDict:
        """The collected parts as one state dict."""

    @abstractmethod
    def _load_whole(self, state_dict: StateDict, allow_missing: bool) -> None:
        """Replace state and options by this rank's part of a whole state dict, or raise and change nothing."""

    @property
    @abstractmethod
    def _inner_methods(self) -> InnerMethods | None:
        """The methods of the inner optimizers; `None` while there are none yet."""

    if (
        TYPE_CHECKING
    ):  # `__getattr__` would hide misspelt names; at run time these are there if the inner class has them

        def train(self, *args: Any, **kwargs: Any) -> Any:
            """`train()` of the inner optimizer's class, on all ranks."""

        def eval(self, *args: Any, **kwargs: Any) -> Any:
            """`eval()` of the inner optimizer's class, on all ranks."""

    else:

        def __getattr__(self, name: str) -> Any:
            """A public method that only the inner optimizer's class has, such as a schedule-free one's `train()`.

            All ranks call it. It runs on every rank's part, and then all parameters are sent to everyone.
            """
            methods = None if name.startswith("_") else self._inner_methods
            if methods is None or not methods.has(name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            return partial(methods.call, name)

    @calling("consolidate_state_dict")
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all ranks on group rank `to`, in host memory, for its next `state_dict()`.

        All ranks call it. The copy stays until the next consolidation or `release_state_dict()`.
        """
        self._check_usable()
        self._audits.finish()
        if not isinstance(to, int) or not 0 <= to < self.world_size:
            raise ValueError(f"`to` must be a rank of the group, 0 to {self.world_size - 1}; got {to!r}")
        self._all_state_dicts = []
        self._all_state_dicts = self._collect_state(to)

    def release_state_dict(self) -> None:
        """Free the consolidated state that this rank may hold."""
        self._all_state_dicts = []

    def state_dict(self) -> StateDict:
        """The whole state in `torch.optim`'s own format, on the recipient of the latest consolidation.

        Local: it never communicates. Before the first step there is no state yet, and any rank may call it.
        """
        refuse_dcp(type(self).__name__)
        self._check_usable()
        in_accelerate = calling_module() == "accelerate.optimizer"
        if not self._all_state_dicts and self._has_state:
            advice = _ACCELERATE_ADVICE if in_accelerate else _DCP_ADVICE
            raise RuntimeError(
                f"the optimizer state has not been consolidated on this rank: call "
                f"consolidate_state_dict(to={self.rank}) on all ranks first, or {advice}"
            )
        if in_accelerate and self.rank == 0:
            # Accelerate asks all ranks before the first step. Later Trainer asks one rank alone, and the others go on.
            warnings.warn(f"this optimizer cannot be saved or loaded yet: {_ACCELERATE_ADVICE}", stacklevel=2)
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._consolidated()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: StateDict, *, allow_missing: bool = False) -> None:
        """Take this rank's part of a full state dict, whatever optimizer or world size it comes from.

        Local, to be called on every rank. The whole dict is checked first; an error leaves everything as it was. The
        argument is neither changed nor shared. A dict that has the state of some trained parameters and not of others
        is refused, unless it is of this package and says that they had none; `allow_missing=True` starts them anew.
        """
        state_dict = state_dict.copy() if isinstance(state_dict, dict) else state_dict
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._load_whole(state_dict, allow_missing)
        self._all_state_dicts = []
        self._health.mark_recovered()
        self._health.count_local_load()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @abstractmethod
    def _audit_subject(self) -> AuditSubject:
        """What an audit compares, once all parameters are in place."""

    @calling("audit")
    def audit(self) -> AuditReport:
        """Compare over all ranks, bit for bit, what must be the same on them; all ranks call it.

        That is every parameter, masters and the parameters that they round to, the options of the groups and, on a mesh
        with replicas, the state that several ranks hold. Raises `AuditError`, on all ranks, with the name of the first
        tensor that differs and the ranks where it does. State that one rank alone holds is not seen.
        """
        self._refuse_joining()
        self._check_usable()
        self._audits.finish()
        return audit(self._audit_subject())

    def _audit_after_step(self, step: int) -> None:
        """Audit if `audit_every` says so; not in a join context, where some ranks may have left."""
        if not self._join_config.enable:
            self._audits.after_step(step, self._audit_subject)

    def _refuse_joining(self, remedy: str = "save, load or audit outside") -> None:
        if self._join_config.enable:
            raise RuntimeError(f"inside Join some ranks may have no inputs left, and would not come: {remedy}")

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


def refuse_dcp(class_name: str) -> None:
    """Raise if the caller of the function that calls this one is part of `torch.distributed.checkpoint`.

    That depends on nothing that ranks do not share, so all ranks raise, before anything has changed.
    """
    module = calling_module(3)
    if module == "torch.distributed.checkpoint" or module.startswith("torch.distributed.checkpoint."):
        raise RuntimeError(
            f"torch.distributed.checkpoint cannot handle a {class_name} by itself, for every rank has another part of "
            f'its state: {_DCP_ADVICE}, as in dcp.save({{"optim": zerostep.dcp_state(optimizer)}}, checkpoint_id=path)'
        )


def calling_module(depth: int = 2) -> str:
    """Return the name of the module that called the function that calls this one, or of a caller further up.

    A framework's wrapper, which only passes a call on, does not count.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_globals.get("__name__") == delegate_if_proxy.__module__:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
