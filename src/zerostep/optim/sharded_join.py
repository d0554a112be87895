"""Uneven inputs for `ShardedOptimizer`: a rank that has joined goes on with its share of the work.

Everything that the live ranks do together is an event: a backward pass of a bare module, a norm, a step. A few integers
from every rank go ahead of it. The shadow of a joined rank takes part in a backward pass with zeros, clips, and steps
on its own part. For a step it receives the options of the groups, which a scheduler may have changed, and, where
gradients are whole, those that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from struct import pack, unpack
from typing import Any
from weakref import finalize, ref

from torch import Tensor
from torch.distributed.algorithms.join import Join

from zerostep.comm.mesh import Ranks
from zerostep.comm.objects import receive_object, send_object
from zerostep.errors import InterruptedPassError
from zerostep.optim.join import JoinShadow, gradients_and_options, on_device, with_gradients
from zerostep.plan.groups import Group, copy_options
from zerostep.step.training_step import TrainingStep
from zerostep.step.used_mask import pack_mask, union_of_masks

BACKWARD, STEP, CLIP, JOINED, LEFT = range(5)
_LIVE = (BACKWARD, STEP, CLIP)


@dataclass(frozen=True)
class JoinEvent:
    """What a rank is about to do, with up to two numbers that belong to it.

    `passes` is the number of backward passes that the sums are from, `used` a mask of the parameters that have one.
    """

    kind: int
    used: Sequence[int]
    first: float = 0.0
    second: float = 0.0
    passes: int = 0

    def to_ints(self) -> list[int]:
        """The event as integers to send."""
        return [self.kind, *unpack("<qq", pack("<dd", self.first, self.second)), self.passes, *self.used]

    @staticmethod
    def from_ints(values: Sequence[int]) -> JoinEvent:
        """The event that `to_ints` wrote."""
        first, second = unpack("<dd", pack("<qq", *values[1:3]))
        return JoinEvent(values[0], values[4:], first, second, values[3])


class JoinProtocol:
    """The messages of one optimizer inside a join context, on a group of their own.

    The optimizer owns this object, which holds the optimizer weakly.
    """

    def __init__(
        self, optimizer: Any, step: TrainingStep, groups: Callable[[], list[Group]], in_ddp: bool, ranks: Ranks
    ) -> None:
        self._optimizer = ref(optimizer)
        self._step, self._groups, self._in_ddp = step, groups, in_ddp
        self._transport, self._positions = ranks.everyone.companion(), ranks.positions
        self._announced = False
        self._received: dict[str, Any] = {}

    @property
    def in_ddp(self) -> bool:
        """Whether DDP runs the backward passes, and has a shadow of its own for them."""
        return self._in_ddp

    @property
    def training_step(self) -> TrainingStep:
        """What the live ranks do, and joined ones shadow."""
        return self._step

    def active(self) -> bool:
        """Whether the optimizer is inside a join context."""
        optimizer = self._optimizer()
        return optimizer is not None and optimizer._join_config.enable

    def backward(self) -> None:
        """On a live rank: a backward pass begins."""
        if self.active():
            self._announce()
            self._exchange(JoinEvent(BACKWARD, self._used()))

    def clip(self, max_norm: float, norm_type: float) -> None:
        """On a live rank: the norm of all gradients is about to be computed, and clipped."""
        self._announce()
        self._exchange(JoinEvent(CLIP, self._used(), max_norm, norm_type, self._passes))

    def step(self) -> None:
        """On a live rank: a step begins. The lowest live rank sends the joined ones what they lack."""
        self._announce()
        kinds = [event.kind for event in self._exchange(JoinEvent(STEP, self._used(), passes=self._passes))]
        self._announced = False
        if self._transport.rank == kinds.index(STEP):
            for rank, kind in enumerate(kinds):
                if kind == JOINED:
                    send_object(self._transport, gradients_and_options(self._needed(rank), self._groups()), rank)

    def end(self) -> None:
        """The context has ended; the next one needs announcements of its own."""
        self._announced = False

    def next_event(self) -> JoinEvent | None:
        """On a joined rank: wait for what the live ranks do next; `None` if no live rank is left."""
        events = self._exchange(JoinEvent(JOINED, self._used()))
        rank = next((rank for rank, event in enumerate(events) if event.kind in _LIVE), None)
        if rank is None:
            return None
        if events[rank].kind == STEP:
            self._received = receive_object(self._transport, rank)
        return events[rank]

    def send_leave(self) -> None:
        """Send the last message: this rank has left the context."""
        self._exchange(JoinEvent(LEFT, self._used()))

    @contextmanager
    def received(self) -> Iterator[None]:
        """Inside, this rank has the options and gradients that the live ranks step with."""
        copy_options(self._received["options"], self._groups())
        with with_gradients(self._needed(self._transport.rank), self._received["gradients"]):
            yield

    @property
    def _passes(self) -> int:
        return self._step.engine.iteration.passes

    def _used(self) -> list[int]:
        """The parameters that have a gradient now, when the user has dropped others."""
        engine = self._step.engine
        return pack_mask([index in engine.sums.used for index in range(len(engine.buckets.params))])

    def _announce(self) -> None:
        """torch's `Join` wants one announcement per iteration, from the first joinable."""
        if not self._announced:
            try:
                Join.notify_join_context(self._optimizer())  # type: ignore[arg-type]
            except RuntimeError as error:  # another rank has no inputs, and the user wants an error for that
                raise InterruptedPassError(str(error)) from error
            self._announced = True

    def _exchange(self, event: JoinEvent) -> list[JoinEvent]:
        return [JoinEvent.from_ints(row) for row in self._transport.all_gather_ints(event.to_ints())]

    def _needed(self, rank: int) -> list[Tensor]:
        return self._step.whole_gradients_of(self._positions[rank], self._in_ddp)


class ShardedJoinHook(JoinShadow):
    """The optimizer's part in torch's `Join` on a joined rank. `leave` ends the context on the optimizer."""

    def __init__(self, protocol: JoinProtocol, leave: Callable[[], None]) -> None:
        super().__init__()
        self._protocol, self._step, self._leave = protocol, protocol.training_step, leave
        # A context that an exception has ended calls none of its hooks, but drops them.
        finalize(self, leave)
        self._joined = False

    def main_hook(self) -> None:
        """Shadow the live ranks until they have stepped, beside the shadows of other joinables."""
        if not self._joined:
            self._joined = True
            self._step.engine.stop_announcing()
        step = self._submit(self._shadow)
        if not self._step.engine.blocks_host:
            # In stream order one thread launches everything.
            step.result()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined."""
        self._end()
        self._leave()
        self._raise_errors()

    def _shadow(self) -> None:
        while not self._over:
            event = self._protocol.next_event()
            self._over = event is None
            if event is not None:
                self._do(event)
                if event.kind == STEP:
                    return

    def _do(self, event: JoinEvent) -> None:
        engine = self._step.engine
        params = engine.buckets.params
        used = [index for index, flag in enumerate(union_of_masks([event.used], len(params))) if flag]
        # DDP's own shadow, which brings the zeros of this rank, runs in another thread.
        engine.await_passes(event.passes)
        with on_device(params[0].device):
            if event.kind == BACKWARD:
                engine.shadow_backward(used)
                return
            engine.keep_only(used)
            if event.kind == CLIP:
                self._step.clip(event.first, event.second)
            else:
                with self._protocol.received():
                    self._step.shadow_step(self._protocol.in_ddp)

    def _send_leave(self) -> None:
        self._protocol.send_leave()
