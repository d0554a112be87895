"""Uneven inputs: a rank that has run out of batches goes on updating and sending its shard.

torch's `Join` runs the shadow of every joinable on a joined rank. For the optimizer that shadow is a step, and its
trouble is gradients: the joined rank computes none, and those that DDP reduces for it never reach `.grad`. So each
step inside the context begins with a word from every rank, and once some have joined, the lowest live rank lends them
the gradients of their shards.

Two things let the optimizer stand anywhere in the list of joinables. Those steps run over a group of their own, the
companion, and their shadow runs beside the other shadows, in a thread: no order between their messages and DDP's is
needed. And where the optimizer stands first, the duty to announce each iteration passes to the DDP module, whose
messages come first.
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

from zerostep import stream
from zerostep.marks import GradientMarks
from zerostep.transport import Transport

if TYPE_CHECKING:
    from zerostep.zero import ZeroRedundancyOptimizer

__all__ = ["ShadowHook", "UnevenInputs"]

_LIVE, _JOINED_WITHOUT_GRADIENTS, _JOINED_WITH_GRADIENTS = 0, 1, 2


class UnevenInputs:
    """What one optimizer needs inside a join context."""

    def __init__(self, transport: Transport, owned: Callable[[int], Sequence[Tensor]]) -> None:
        self.companion = transport.companion()
        self.someone_joined = False
        self._owned = owned
        self._marks = GradientMarks()
        self.follows_ddp = False

    def mark_gradients(self) -> None:
        """Remember the gradients of this rank's shard, so as to notice when somebody sets others."""
        self._marks.set(self._shard())

    def gradients_were_set(self) -> bool:
        """Whether an earlier join hook has put gradients into this rank's shard for this iteration."""
        # DDP's shadow may write into gradients that view its buckets: those are not meant for this rank's step.
        return not self.follows_ddp and bool(self._marks.new_in(self._shard()))

    def lend(self) -> None:
        """A live rank's word, and its gradients where a joined rank needs them."""
        needy, lender = self._meet(_LIVE)
        if self.companion.rank == lender:
            for rank in needy:
                self._send_gradients(rank)

    @contextmanager
    def borrow(self, own: bool) -> Iterator[None]:
        """A joined rank's word; inside, its shard has the gradients that the live ranks step with."""
        _, lender = self._meet(_JOINED_WITH_GRADIENTS if own else _JOINED_WITHOUT_GRADIENTS)
        if own:
            yield
            return
        params = self._shard()
        before = [param.grad for param in params]
        try:
            for param, grad in zip(params, self._receive_gradients(lender), strict=True):
                param.grad = grad
            yield
        finally:
            for param, grad in zip(params, before, strict=True):
                param.grad = grad

    def _shard(self) -> Sequence[Tensor]:
        return self._owned(self.companion.rank)

    def _meet(self, word: int) -> tuple[list[int], int]:
        """The ranks that need gradients, and the rank that lends them."""
        words = [row[0] for row in self.companion.all_gather_ints([word])]
        self.someone_joined = any(found != _LIVE for found in words)
        needy = [rank for rank, found in enumerate(words) if found == _JOINED_WITHOUT_GRADIENTS]
        return needy, words.index(_LIVE)

    def _send_gradients(self, rank: int) -> None:
        params = self._owned(rank)
        stream.send_bytes(self.companion, bytes(param.grad is not None for param in params), rank)
        stream.send(self.companion, [_like(param, param.grad) for param in params if param.grad is not None], rank)

    def _receive_gradients(self, lender: int) -> list[Tensor | None]:
        params = self._shard()
        present = stream.receive_bytes(self.companion, len(params), lender)
        found = [torch.empty_like(param) if there else None for param, there in zip(params, present, strict=True)]
        stream.receive(self.companion, [grad for grad in found if grad is not None], lender)
        return found


class ShadowHook(JoinHook):
    """The optimizer's part in torch's `Join` on a rank that has run out of inputs."""

    def __init__(self, zero: ZeroRedundancyOptimizer, uneven: UnevenInputs) -> None:
        self._zero, self._uneven = zero, uneven
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zerostep-join")
        self._pending: Future[None] | None = None
        self._before: tuple[DistributedDataParallel, Any] | None = None
        see = WeakMethod(self._see_ddp)
        self._handle = register_module_forward_pre_hook(lambda *args: (hook := see()) and hook(*args))
        finalize(self, self._handle.remove)  # a context that is disabled, or left by an error, runs no post hook

    def main_hook(self) -> None:
        """Shadow one step of the live ranks, without announcing an iteration."""
        self._finish()
        own = self._uneven.gradients_were_set()
        if own:
            self._shadow(own)
        else:
            # A shadow of DDP that stands later in the list must run while this one waits for the live ranks' step.
            self._pending = self._thread.submit(self._shadow, own)

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined: back to ordinary steps."""
        self._finish()
        self._handle.remove()
        self._thread.shutdown()
        if self._before is not None:
            # A rank without inputs has seen no forward pass: what its module does from here on must be the same.
            self._before[0]._join_config = self._before[1]
        self._zero._leave_join_context()

    def _shadow(self, own: bool) -> None:
        with _on_device(self._zero.join_device), self._uneven.borrow(own):
            self._zero._shadow_step()
        self._uneven.mark_gradients()

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

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
def _on_device(device: torch.device) -> Iterator[None]:
    """The current accelerator is a thread's own; a new thread starts on the first one."""
    if device.type == "cpu":
        yield
    else:
        with torch.accelerator.device_index(device.index or 0):
            yield


def _like(param: Tensor, grad: Tensor | None) -> Tensor:
    """`grad` in the memory order in which the other rank allocates it."""
    assert grad is not None
    here = torch.empty_like(param)
    return grad.detach() if grad.stride() == here.stride() else here.copy_(grad)
