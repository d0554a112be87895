"""Uneven inputs: a rank that has run out of batches goes on updating and sending its shard.

torch's `Join` runs the shadow of every joinable on a joined rank. For the optimizer that shadow is a step, and its
trouble is gradients: the joined rank computes none, and those that DDP reduces for it never reach `.grad`. So each
step inside the context begins with a word from every rank, and once some have joined, the lowest live rank lends them
the gradients of their shards and the options of its groups, which a scheduler may have changed.

Three things let the optimizer stand anywhere in the list of joinables. Those steps run over a group of their own, the
companion, and their shadows run beside the other shadows, in a thread: no order between their messages and DDP's is
needed. Shadows wait in a queue until the live ranks really step, which they may do less often than they run forward.
And where the optimizer stands first, the duty to announce each iteration passes to the DDP module, whose messages come
first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, finalize

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from zerostep.comm.codec import pack
from zerostep.comm.objects import receive_object, send_object
from zerostep.comm.transport import Transport
from zerostep.plan.groups import Group, copy_options, options
from zerostep.step.grad_snapshot import GradSnapshot

if TYPE_CHECKING:
    from zerostep.optim.zero import ZeroRedundancyOptimizer

__all__ = ["ZeroJoin", "ZeroJoinHook", "gradients", "on_device", "portable"]

_LIVE, _JOINED, _JOINED_WITH_GRADIENTS, _LEFT = 0, 1, 2, 3


class ZeroJoin:
    """What one optimizer needs inside a join context."""

    def __init__(self, transport: Transport, owned: Callable[[int], Sequence[Tensor]], groups: list[Group]) -> None:
        self.companion = transport.companion()
        self._owned, self._groups = owned, groups
        self._snapshot = GradSnapshot()
        self.enter()

    def enter(self) -> None:
        """A new context begins."""
        self.someone_joined = False
        self.follows_ddp = False
        self.snapshot_gradients()

    def snapshot_gradients(self) -> None:
        """Remember the gradients of this rank's shard, so as to notice when somebody sets others."""
        self._snapshot.take(self._shard())

    def gradients_were_set(self) -> bool:
        """Whether an earlier join hook has put gradients into this rank's shard for this iteration."""
        # DDP's shadow may write into gradients that view its buckets: those are not meant for this rank's step.
        return not self.follows_ddp and bool(self._snapshot.new_in(self._shard()))

    def lend(self) -> None:
        """A live rank's word, and its gradients where a joined rank needs them."""
        words = self._meet(_LIVE)
        if self.companion.rank == words.index(_LIVE):
            for rank, word in enumerate(words):
                if word == _JOINED:
                    send_object(self.companion, self._loan(rank), rank)

    @contextmanager
    def borrow(self, own: bool) -> Iterator[bool]:
        """A joined rank's word. Inside, its shard has the gradients that the live ranks step with.

        False if no live rank is left to step with.
        """
        words = self._meet(_JOINED_WITH_GRADIENTS if own else _JOINED)
        if own or _LIVE not in words:
            yield _LIVE in words
            return
        loan = receive_object(self.companion, words.index(_LIVE))
        copy_options(loan["options"], self._groups)
        with gradients(self._shard(), loan["gradients"]):
            yield True

    def leave(self) -> None:
        """The word of a rank that waits for nobody any more."""
        self._meet(_LEFT)

    def _shard(self) -> Sequence[Tensor]:
        return self._owned(self.companion.rank)

    def _meet(self, word: int) -> list[int]:
        words = [row[0] for row in self.companion.all_gather_ints([word])]
        self.someone_joined = any(found != _LIVE for found in words)
        return words

    def _loan(self, rank: int) -> dict[str, Any]:
        found = [None if param.grad is None else param.grad.detach().to_dense() for param in self._owned(rank)]
        return {"gradients": found, "options": [portable(options(group)) for group in self._groups]}


class ZeroJoinHook(JoinHook):
    """The optimizer's part in torch's `Join` on a rank that has run out of inputs."""

    def __init__(self, zero: ZeroRedundancyOptimizer, uneven: ZeroJoin) -> None:
        self._zero, self._uneven = zero, uneven
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zerostep-join")
        self._shadows: list[Future[None]] = []
        self._over = False
        self._before: tuple[DistributedDataParallel, Any] | None = None
        see = WeakMethod(self._see_ddp)
        self._handle = register_module_forward_pre_hook(lambda *args: (hook := see()) and hook(*args))
        finalize(self, self._handle.remove)  # a context that is disabled, or left by an error, runs no post hook

    def main_hook(self) -> None:
        """Shadow one step of the live ranks, without announcing an iteration."""
        idle = all(shadow.done() for shadow in self._shadows)
        own = idle and self._uneven.gradients_were_set()
        self._raise_errors()
        self._shadows.append(self._thread.submit(self._shadow, own))
        if own:
            # The gradients are there for this iteration only.
            self._shadows[-1].result()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined: back to ordinary steps."""
        self._shadows.append(self._thread.submit(self._leave))
        self._thread.shutdown(wait=True)
        self._handle.remove()
        if self._before is not None:
            # A rank without inputs has seen no forward pass: what its module does from here on must be the same.
            self._before[0]._join_config = self._before[1]
        self._zero._leave_join_context()
        self._raise_errors()

    def _shadow(self, own: bool) -> None:
        if self._over:
            return
        with on_device(self._zero.join_device), self._uneven.borrow(own) as stepping:
            if stepping:
                self._zero._shadow_step()
        self._over = not stepping
        self._uneven.snapshot_gradients()

    def _leave(self) -> None:
        # Exactly one last word from every rank: its oldest shadow that nobody answered, or this one.
        if not self._over:
            self._uneven.leave()

    def _raise_errors(self) -> None:
        shadows, self._shadows = self._shadows, [shadow for shadow in self._shadows if not shadow.done()]
        for shadow in shadows:
            if shadow.done():
                shadow.result()

    def _see_ddp(self, module: nn.Module, args: Any) -> None:
        """The first forward pass of the DDP module that holds our parameters, before its first message."""
        if not isinstance(module, DistributedDataParallel) or not module._join_config.enable:
            return
        if {id(param) for param in module.parameters()}.isdisjoint(map(id, self._zero._all_params)):
            return
        self._handle.remove()
        self._uneven.follows_ddp = True
        if self._zero._join_config.is_first_joinable:
            self._before = module, module._join_config
            module._join_config = module._join_config._replace(is_first_joinable=True)
            self._zero._join_config = self._zero._join_config._replace(is_first_joinable=False)


@contextmanager
def gradients(params: Sequence[Tensor], wanted: Sequence[Tensor | None]) -> Iterator[None]:
    """Inside, `params` have these gradients."""
    before = [param.grad for param in params]
    try:
        for param, grad in zip(params, wanted, strict=True):
            param.grad = None if grad is None else grad.to(param.device)
        yield
    finally:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """The current accelerator is a thread's own; a new thread starts on the first one."""
    if device.type == "cpu":
        yield
    else:
        with torch.accelerator.device_index(device.index or 0):
            yield


def portable(group: Group) -> Group:
    """The options that can travel; any other kind is the same on all ranks or nobody's business."""
    return {key: value for key, value in group.items() if _travels(value)}


def _travels(value: Any) -> bool:
    try:
        pack(value)
    except TypeError:
        return False
    return True
