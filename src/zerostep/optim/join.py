"""What both optimizers share in torch's `Join`: shadows in a thread of their own, and gradients lent to joined ranks.

A rank that has run out of inputs has *joined*; the others are *live*. torch calls the join hook of every joinable on a
joined rank, again and again, in place of the training loop. The *shadow* of an optimizer takes part in the steps of the
live ranks. It runs in a thread, beside the shadows of other joinables, because no order between its messages and those
of DDP's shadow is given.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from zerostep.comm.codec import pack
from zerostep.plan.groups import Group, options


class JoinShadow(JoinHook):
    """A queue of shadow tasks. `_over` is true once no live rank is left."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zerostep-join")
        finalize(self, self._thread.shutdown, wait=False)
        self._shadows: list[Future[None]] = []
        self._over = False

    def _submit(self, task: Callable[..., None], *args: Any) -> Future[None]:
        """Run a task in the thread, after those before it; errors of finished ones are raised here."""
        self._raise_errors()
        self._shadows.append(self._thread.submit(task, *args))
        return self._shadows[-1]

    def _end(self) -> None:
        """All ranks have joined: wait for the thread."""
        self._shadows.append(self._thread.submit(self._leave_once))
        self._thread.shutdown(wait=True)

    def _leave_once(self) -> None:
        # Every rank sends exactly one last message: that of its oldest shadow which found no live rank, or this one.
        if not self._over:
            self._send_leave()

    @abstractmethod
    def _send_leave(self) -> None:
        """Send the last message: this rank has left the context."""

    def _raise_errors(self) -> None:
        shadows, self._shadows = self._shadows, [shadow for shadow in self._shadows if not shadow.done()]
        for shadow in shadows:
            if shadow.done():
                shadow.result()


def gradients_and_options(params: Sequence[Tensor], groups: Sequence[Group]) -> dict[str, Any]:
    """What a live rank sends to a joined one: whole gradients of `params`, and options that a scheduler may change."""
    grads = [None if param.grad is None else param.grad.detach().to_dense() for param in params]
    return {"gradients": grads, "options": [_sendable(options(group)) for group in groups]}


@contextmanager
def with_gradients(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Iterator[None]:
    """Inside, `params` have these gradients."""
    before = [param.grad for param in params]
    try:
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.to(param.device)
        yield
    finally:
        for param, grad in zip(params, before, strict=True):
            param.grad = grad


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make `device` current: the current accelerator belongs to a thread, and a new thread starts on the first one."""
    if device.type == "cpu":
        yield
    else:
        with torch.accelerator.device_index(device.index or 0):
            yield


def _sendable(group: Group) -> Group:
    """The options that can be sent; objects of any other type are the same on all ranks."""
    return {key: value for key, value in group.items() if _can_be_packed(value)}


def _can_be_packed(value: Any) -> bool:
    try:
        pack(value)
    except TypeError:
        return False
    return True
