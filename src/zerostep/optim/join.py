"""torch's `Join` for both optimizers: the events that ranks announce to each other, and the shadow of a joined rank.

A rank that has run out of inputs has *joined*; the others are *live*. Everything that the live ranks do together is an
event, and a few integers from every rank go ahead of it. torch calls the join hook of every joinable on a joined rank,
again and again, in place of the training loop. The *shadow* of an optimizer takes part in the events of the live ranks.
For a step, the lowest live rank sends it the options of the groups, which a scheduler may have changed, and the
gradients that it needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from zerostep.comm.codec import pack
from zerostep.comm.objects import receive_object, send_object
from zerostep.comm.transport import Transport
from zerostep.plan.groups import Group, copy_options, options

BACKWARD, STEP, CLIP, JOINED, JOINED_WITH_GRADIENTS, LEFT = range(6)
_LIVE = (BACKWARD, STEP, CLIP)


class JoinProtocol:
    """The messages of one optimizer inside a join context, on a companion of its transport.

    `needed` are the parameters whose whole gradients a joined rank needs. The optimizer, which owns this object, is
    held weakly.
    """

    def __init__(
        self,
        optimizer: Joinable,
        transport: Transport,
        groups: Callable[[], list[Group]],
        needed: Callable[[int], Sequence[Tensor]],
    ) -> None:
        self._optimizer, self._groups, self._needed = ref(optimizer), groups, needed
        self._companion = transport.companion()
        self._announced = self._someone_joined = False
        self._received: dict[str, Any] | None = None

    @property
    def companion(self) -> Transport:
        """The transport of these messages."""
        return self._companion

    @property
    def someone_joined(self) -> bool:
        """Whether some rank had joined at the last event."""
        return self._someone_joined

    def active(self) -> bool:
        """Whether the optimizer is inside a join context."""
        optimizer = self._optimizer()
        return optimizer is not None and optimizer._join_config.enable

    def end(self) -> None:
        """The context has ended; the next one needs announcements of its own."""
        self._announced = self._someone_joined = False

    def step(self) -> None:
        """On a live rank: a step begins. The lowest live rank sends the joined ones what they lack."""
        kinds = [row[0] for row in self._begin(STEP)]
        self._announced = False
        if self._companion.rank == kinds.index(STEP):
            for rank, kind in enumerate(kinds):
                if kind == JOINED:
                    send_object(self._companion, _gradients_and_options(self._needed(rank), self._groups()), rank)

    def next_event(self, status: int) -> list[int] | None:
        """On a joined rank: the row of the lowest live rank at the next event; `None` if no live rank is left.

        A `status` of `JOINED` asks for gradients and options, which come with a step.
        """
        rows = self._exchange(status)
        rank = next((rank for rank, row in enumerate(rows) if row[0] in _LIVE), None)
        if rank is None:
            return None
        wanted = rows[rank][0] == STEP and status == JOINED
        self._received = receive_object(self._companion, rank) if wanted else None
        return rows[rank]

    @contextmanager
    def received(self) -> Iterator[None]:
        """Inside, this rank has the options and gradients that the live ranks step with, if it asked for them."""
        if self._received is None:
            yield
            return
        copy_options(self._received["options"], self._groups())
        with _with_gradients(self._needed(self._companion.rank), self._received["gradients"]):
            yield

    def send_leave(self) -> None:
        """Send the last message: this rank has left the context."""
        self._exchange(LEFT)

    def _begin(self, kind: int, *values: float) -> list[list[int]]:
        """On a live rank: an event begins."""
        if not self._announced:
            self._announce()
            self._announced = True
        return self._exchange(kind, *values)

    def _announce(self) -> None:
        """torch's `Join` wants one announcement per iteration, from the first joinable."""
        Join.notify_join_context(self._optimizer())  # type: ignore[arg-type]

    def _exchange(self, kind: int, *values: float) -> list[list[int]]:
        rows = self._companion.all_gather_ints(self._row(kind, *values))
        self._someone_joined = any(row[0] not in _LIVE for row in rows)
        return rows

    def _row(self, kind: int, *values: float) -> list[int]:
        """What this rank sends: the kind of event, and what a shadow must know of it."""
        return [kind]


class JoinShadow(JoinHook):
    """The optimizer's part in torch's `Join` on a joined rank.

    Shadows run in a thread, beside those of other joinables, because no order between their messages and those of DDP's
    shadow is given. They wait there until the live ranks step, which these may do less often than they run forward.
    """

    def __init__(self, protocol: JoinProtocol) -> None:
        self._protocol = protocol
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zerostep-join")
        finalize(self, self._thread.shutdown, wait=False)
        self._shadows: list[Future[None]] = []
        self._no_live_rank = False

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined: wait for the thread, then back to ordinary steps."""
        self._shadows.append(self._thread.submit(self._leave_once))
        self._thread.shutdown(wait=True)
        self._leave()
        self._raise_errors()

    def _submit(self, status: int) -> Future[None]:
        """Shadow one more step in the thread, after those before it; errors of finished ones are raised here."""
        self._raise_errors()
        self._shadows.append(self._thread.submit(self._shadow_until_step, status))
        return self._shadows[-1]

    def _shadow_until_step(self, status: int) -> None:
        while not self._no_live_rank:
            event = self._protocol.next_event(status)
            self._no_live_rank = event is None
            if event is not None:
                self._do(event)
                if event[0] == STEP:
                    return

    def _leave_once(self) -> None:
        # Every rank sends exactly one last message: that of its oldest shadow which found no live rank, or this one.
        if not self._no_live_rank:
            self._protocol.send_leave()

    def _raise_errors(self) -> None:
        shadows, self._shadows = self._shadows, [shadow for shadow in self._shadows if not shadow.done()]
        for shadow in shadows:
            if shadow.done():
                shadow.result()

    @abstractmethod
    def _do(self, event: list[int]) -> None:
        """Take part in an event of the live ranks; runs in the thread."""

    @abstractmethod
    def _leave(self) -> None:
        """End the context on the optimizer."""


def _gradients_and_options(params: Sequence[Tensor], groups: Sequence[Group]) -> dict[str, Any]:
    grads = [None if param.grad is None else param.grad.detach().to_dense() for param in params]
    return {"gradients": grads, "options": [_sendable(options(group)) for group in groups]}


@contextmanager
def _with_gradients(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Iterator[None]:
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
