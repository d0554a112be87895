"""Uneven inputs for `ZeroRedundancyOptimizer`: a rank that has joined goes on updating and sending its shard.

The joined rank computes no gradients, and those that DDP reduces for it never reach `.grad`. So it asks for those of
its shard, unless an earlier join hook has set some. A step is the only event.

The optimizer may stand anywhere in the list of joinables. Once some rank has joined, its steps run over the companion.
And where the optimizer stands first, the duty to announce each iteration passes to the DDP module, whose messages come
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from zerostep.optim.join import JOINED, JOINED_WITH_GRADIENTS, JoinProtocol, JoinShadow, on_device
from zerostep.step.grad_snapshot import GradSnapshot
from zerostep.step.weak import weakly


@dataclass(frozen=True)
class ZeroShadow:
    """What the join hook does to its optimizer.

    `shard` are the parameters that this rank owns. `holds` is whether a DDP module trains the optimizer's parameters.
    `hand_over` lets it announce iterations, and returns whether the optimizer did so before. `leave` ends the context.
    """

    step: Callable[[], None]
    shard: Callable[[], Sequence[Tensor]]
    holds: Callable[[nn.Module], bool]
    hand_over: Callable[[], bool]
    leave: Callable[[], None]
    device: Callable[[], torch.device]


class ZeroJoinHook(JoinShadow):
    """The optimizer's part in torch's `Join` on a joined rank."""

    def __init__(self, shadow: ZeroShadow, protocol: JoinProtocol) -> None:
        super().__init__(protocol)
        self._shadow, self._snapshot, self._follows_ddp = shadow, GradSnapshot(), False
        self.snapshot_gradients()
        self._handed_over: tuple[DistributedDataParallel, Any] | None = None
        self._handle = register_module_forward_pre_hook(weakly(self._see_ddp))
        finalize(self, self._handle.remove)  # a context that is disabled, or left by an error, runs no post hook

    def snapshot_gradients(self) -> None:
        """Remember the gradients of this rank's shard, so as to notice new ones."""
        self._snapshot.take(self._shadow.shard())

    def main_hook(self) -> None:
        """Shadow one step of the live ranks, without announcing an iteration."""
        idle = all(shadow.done() for shadow in self._shadows)
        own = idle and self._gradients_were_set()
        step = self._submit(JOINED_WITH_GRADIENTS if own else JOINED)
        if own:
            # The gradients are there for this iteration only.
            step.result()

    def _gradients_were_set(self) -> bool:
        """Whether an earlier join hook has put gradients into this rank's shard for this iteration."""
        return not self._follows_ddp and bool(self._snapshot.new_in(self._shadow.shard()))

    def _do(self, event: list[int]) -> None:
        with on_device(self._shadow.device()), self._protocol.received():
            self._shadow.step()
        self.snapshot_gradients()

    def _leave(self) -> None:
        self._handle.remove()
        if self._handed_over is not None:
            # A rank without inputs has seen no forward pass: what its module does from here on must be the same.
            self._handed_over[0]._join_config = self._handed_over[1]
        self._shadow.leave()

    def _see_ddp(self, module: nn.Module, args: Any) -> None:
        """The first forward pass of the DDP module that trains our parameters, before its first message."""
        if not isinstance(module, DistributedDataParallel) or not module._join_config.enable:
            return
        if not self._shadow.holds(module):
            return
        self._handle.remove()
        # DDP's shadow runs beside this one; what it writes into gradients is not meant for this rank's step.
        self._follows_ddp = True
        if self._shadow.hand_over():
            self._handed_over = module, module._join_config
            module._join_config = module._join_config._replace(is_first_joinable=True)
