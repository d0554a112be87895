"""Uneven inputs for `ZeroRedundancyOptimizer`: a rank that has joined goes on updating and sending its shard.

The joined rank computes no gradients, and those that DDP reduces for it never reach `.grad`. So each step inside the
context begins with one integer from every rank, and once some have joined, the lowest live rank sends them the
gradients of their shards and the options of its groups.

The optimizer may stand anywhere in the list of joinables. Its steps run over a group of their own, the companion.
Shadows wait in a queue until the live ranks really step, which they may do less often than they run forward. And where
the optimizer stands first, the duty to announce each iteration passes to the DDP module, whose messages come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from zerostep.comm.objects import receive_object, send_object
from zerostep.comm.transport import Transport
from zerostep.optim.join import JoinShadow, gradients_and_options, on_device, with_gradients
from zerostep.plan.groups import Group, copy_options
from zerostep.step.grad_snapshot import GradSnapshot
from zerostep.step.weak import weakly

_LIVE, _JOINED, _JOINED_WITH_GRADIENTS, _LEFT = 0, 1, 2, 3


class ZeroJoin:
    """The messages of one optimizer inside a join context."""

    def __init__(self, transport: Transport, owned: Callable[[int], Sequence[Tensor]], groups: list[Group]) -> None:
        self.companion = transport.companion()
        self._owned, self._groups = owned, groups
        self._snapshot = GradSnapshot()
        self.enter()

    def enter(self) -> None:
        """A new context begins."""
        self._someone_joined = self._follows_ddp = False
        self.snapshot_gradients()

    def leave(self) -> None:
        """The context has ended: back to ordinary steps."""
        self._someone_joined = False

    @property
    def someone_joined(self) -> bool:
        """Whether some rank has joined, so that steps run over the companion."""
        return self._someone_joined

    def follow_ddp(self) -> None:
        """DDP's shadow runs beside this one; what it writes into gradients is not meant for this rank's step."""
        self._follows_ddp = True

    def snapshot_gradients(self) -> None:
        """Remember the gradients of this rank's shard, so as to notice new ones."""
        self._snapshot.take(self._shard())

    def gradients_were_set(self) -> bool:
        """Whether an earlier join hook has put gradients into this rank's shard for this iteration."""
        return not self._follows_ddp and bool(self._snapshot.new_in(self._shard()))

    def lend(self) -> None:
        """On a live rank, before a step: the lowest one sends gradients to joined ranks that have none."""
        statuses = self._exchange(_LIVE)
        if self.companion.rank == statuses.index(_LIVE):
            for rank, status in enumerate(statuses):
                if status == _JOINED:
                    send_object(self.companion, gradients_and_options(self._owned(rank), self._groups), rank)

    @contextmanager
    def borrow(self, own: bool) -> Iterator[bool]:
        """On a joined rank: inside, its shard has the gradients that the live ranks step with.

        Yields false if no live rank is left to step with. `own` says that the shard has gradients already.
        """
        statuses = self._exchange(_JOINED_WITH_GRADIENTS if own else _JOINED)
        if own or _LIVE not in statuses:
            yield _LIVE in statuses
            return
        received = receive_object(self.companion, statuses.index(_LIVE))
        copy_options(received["options"], self._groups)
        with with_gradients(self._shard(), received["gradients"]):
            yield True

    def send_leave(self) -> None:
        """Send the last message: this rank has left the context."""
        self._exchange(_LEFT)

    def _shard(self) -> Sequence[Tensor]:
        return self._owned(self.companion.rank)

    def _exchange(self, status: int) -> list[int]:
        statuses = [row[0] for row in self.companion.all_gather_ints([status])]
        self._someone_joined = any(each != _LIVE for each in statuses)
        return statuses


@dataclass(frozen=True)
class ZeroShadow:
    """What the join hook does to its optimizer.

    `holds` is whether a DDP module trains the optimizer's parameters. `hand_over` lets it announce iterations, and
    returns whether the optimizer did so before. `leave` ends the context.
    """

    step: Callable[[], None]
    holds: Callable[[nn.Module], bool]
    hand_over: Callable[[], bool]
    leave: Callable[[], None]
    device: Callable[[], torch.device]


class ZeroJoinHook(JoinShadow):
    """The optimizer's part in torch's `Join` on a joined rank."""

    def __init__(self, shadow: ZeroShadow, join: ZeroJoin) -> None:
        super().__init__()
        self._shadow, self._join = shadow, join
        self._handed_over: tuple[DistributedDataParallel, Any] | None = None
        self._handle = register_module_forward_pre_hook(weakly(self._see_ddp))
        finalize(self, self._handle.remove)  # a context that is disabled, or left by an error, runs no post hook

    def main_hook(self) -> None:
        """Shadow one step of the live ranks, without announcing an iteration."""
        idle = all(shadow.done() for shadow in self._shadows)
        own = idle and self._join.gradients_were_set()
        step = self._submit(self._shadow_step, own)
        if own:
            # The gradients are there for this iteration only.
            step.result()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined: back to ordinary steps."""
        self._end()
        self._handle.remove()
        if self._handed_over is not None:
            # A rank without inputs has seen no forward pass: what its module does from here on must be the same.
            self._handed_over[0]._join_config = self._handed_over[1]
        self._shadow.leave()
        self._raise_errors()

    def _shadow_step(self, own: bool) -> None:
        if self._over:
            return
        with on_device(self._shadow.device()), self._join.borrow(own) as stepping:
            if stepping:
                self._shadow.step()
        self._over = not stepping
        self._join.snapshot_gradients()

    def _send_leave(self) -> None:
        self._join.send_leave()

    def _see_ddp(self, module: nn.Module, args: Any) -> None:
        """The first forward pass of the DDP module that trains our parameters, before its first message."""
        if not isinstance(module, DistributedDataParallel) or not module._join_config.enable:
            return
        if not self._shadow.holds(module):
            return
        self._handle.remove()
        self._join.follow_ddp()
        if self._shadow.hand_over():
            self._handed_over = module, module._join_config
            module._join_config = module._join_config._replace(is_first_joinable=True)
