"""Uneven inputs for the sharded optimizer: a rank that has run out of batches goes on with its share of the work.

Inside torch's `Join` everything that the live ranks do together is an event: a backward pass of a bare module, a norm,
a step. A word from every rank goes ahead of it. A joined rank answers in a thread, beside the shadows of other
joinables: it takes part in a backward pass with zeros, clips and steps on its own part. With a step it is lent the
options of the groups, which a scheduler may have changed, and, where gradients are whole, those that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from struct import pack, unpack
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

from torch import Tensor
from torch.distributed.algorithms.join import Join, JoinHook

from zerostep.comm.objects import receive_object, send_object
from zerostep.comm.transport import Transport
from zerostep.errors import InterruptedPassError
from zerostep.optim.join import gradients, on_device, portable
from zerostep.plan.groups import copy_options, options

if TYPE_CHECKING:
    from zerostep.optim.sharded import ShardedOptimizer

__all__ = ["JoinEvent", "JoinProtocol", "ShardedJoinHook"]

BACKWARD, STEP, CLIP, JOINED, LEFT = range(5)
_LIVE = (BACKWARD, STEP, CLIP)


@dataclass(frozen=True)
class JoinEvent:
    """What the live ranks are about to do, with up to two numbers that belong to it.

    `rounds` is how many backward passes the sums that it is about are from.
    """

    kind: int
    first: float = 0.0
    second: float = 0.0
    passes: int = 0

    def words(self) -> list[int]:
        """As it travels."""
        return [self.kind, *unpack("<qq", pack("<dd", self.first, self.second)), self.passes]

    @staticmethod
    def read(words: Sequence[int]) -> JoinEvent:
        """From what has travelled."""
        first, second = unpack("<dd", pack("<qq", *words[1:3]))
        return JoinEvent(words[0], first, second, words[3])


class JoinProtocol:
    """The words that go ahead of what the live ranks do."""

    def __init__(self, optimizer: ShardedOptimizer, transport: Transport) -> None:
        self._of, self._transport = ref(optimizer), transport.companion()
        self._announced = False
        self._borrowed: dict[str, Any] = {}

    @property
    def _optimizer(self) -> ShardedOptimizer:
        found = self._of()
        assert found is not None
        return found

    def backward(self, fresh: bool) -> None:
        """A live rank's backward pass begins; `fresh` if no gradients are kept to add to."""
        if not self._optimizer._join_config.enable:
            return
        self._announce()
        self._meet(JoinEvent(BACKWARD, float(fresh)))

    def clip(self, max_norm: float, norm_type: float) -> None:
        """A live rank is about to find the norm of all gradients, and to clip them."""
        self._announce()
        self._meet(JoinEvent(CLIP, max_norm, norm_type, self._passes))

    def step(self) -> None:
        """A live rank is about to step: the lowest one lends what the joined ones lack."""
        self._announce()
        kinds = [event.kind for event in self._meet(JoinEvent(STEP, passes=self._passes))]
        self._announced = False
        if self._transport.rank == kinds.index(STEP):
            for rank, kind in enumerate(kinds):
                if kind == JOINED:
                    send_object(self._transport, self._loan(rank), rank)

    def end(self) -> None:
        """A context is over; the next one wants announcements of its own."""
        self._announced = False

    def answer(self) -> JoinEvent | None:
        """A joined rank's word; the event that it belongs to, or `None` if no live rank is left."""
        events = self._meet(JoinEvent(JOINED))
        rank = next((rank for rank, event in enumerate(events) if event.kind in _LIVE), None)
        if rank is None:
            return None
        if events[rank].kind == STEP:
            self._borrowed = receive_object(self._transport, rank)
        return events[rank]

    def leave(self) -> None:
        """The word of a rank that waits for nobody any more."""
        self._meet(JoinEvent(LEFT))

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Inside, this rank has the options and gradients that the live ranks step with."""
        copy_options(self._borrowed["options"], self._optimizer.param_groups)
        mine = self._needed(self._transport.rank)
        with gradients(mine, self._borrowed["gradients"]):
            yield

    @property
    def _passes(self) -> int:
        return self._optimizer._running.reduction.passes

    def _announce(self) -> None:
        """Torch wants one announcement for each iteration, from whoever stands first."""
        if not self._announced:
            try:
                Join.notify_join_context(self._optimizer)
            except RuntimeError as error:  # another rank has no inputs, and the user wants to hear of that
                raise InterruptedPassError(str(error)) from error
            self._announced = True

    def _meet(self, event: JoinEvent) -> list[JoinEvent]:
        return [JoinEvent.read(row) for row in self._transport.all_gather_ints(event.words())]

    def _needed(self, rank: int) -> list[Tensor]:
        return self._optimizer._whole_gradients_of(rank)

    def _loan(self, rank: int) -> dict[str, Any]:
        found = [None if param.grad is None else param.grad.detach().to_dense() for param in self._needed(rank)]
        return {
            "gradients": found,
            "options": [portable(options(group)) for group in self._optimizer.param_groups],
        }


class ShardedJoinHook(JoinHook):
    """The optimizer's part in torch's `Join` on a rank that has run out of inputs."""

    def __init__(self, optimizer: ShardedOptimizer, events: JoinProtocol, context: int) -> None:
        self._optimizer, self._join, self._context = optimizer, events, context
        # A context that an exception has ended calls none of its hooks, but it lets go of them.
        finalize(self, _leave, ref(optimizer), context)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zerostep-join")
        finalize(self, self._thread.shutdown, wait=False)
        self._shadows: list[Future[None]] = []
        self._over = self._joined = False

    def main_hook(self) -> None:
        """Shadow the live ranks until they have stepped, beside whatever else is shadowed."""
        if not self._joined:
            self._joined = True
            self._optimizer._stop_announcing()
        self._raise_errors()
        self._shadows.append(self._thread.submit(self._shadow))
        if not self._optimizer._running.blocks_host:
            # In stream order one thread launches everything.
            self._shadows[-1].result()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined."""
        self._shadows.append(self._thread.submit(self._leave))
        self._thread.shutdown(wait=True)
        self._optimizer._leave_join_context(self._context)
        self._raise_errors()

    def _shadow(self) -> None:
        while not self._over:
            event = self._join.answer()
            self._over = event is None
            if event is not None:
                self._do(event)
                if event.kind == STEP:
                    return

    def _do(self, event: JoinEvent) -> None:
        # DDP's own shadow, which brings the zeros of this rank, runs in another thread.
        self._optimizer._running.await_passes(event.passes)
        with on_device(self._optimizer.join_device):
            if event.kind == BACKWARD:
                self._optimizer._shadow_backward(fresh=bool(event.first))
            elif event.kind == CLIP:
                self._optimizer._clip(event.first, event.second)
            else:
                with self._join.borrowed():
                    self._optimizer._shadow_step()

    def _leave(self) -> None:
        # Exactly one last word from every rank: its oldest shadow that nobody answered, or this one.
        if not self._over:
            self._join.leave()

    def _raise_errors(self) -> None:
        shadows, self._shadows = self._shadows, [shadow for shadow in self._shadows if not shadow.done()]
        for shadow in shadows:
            if shadow.done():
                shadow.result()


def _leave(optimizer: ref[ShardedOptimizer], context: int) -> None:
    found = optimizer()
    if found is not None:
        found._leave_join_context(context)
