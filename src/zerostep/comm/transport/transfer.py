"""Transfers under way: starting one, waiting for it, and errors that name the other rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from zerostep.comm.transport.presence import Presence
from zerostep.errors import TransportError

_NOBODY = Presence()  # for transfers that belong to no optimizer
# How long a transport that is dropped waits for its messages under way.
_CLOSING_SECONDS = 10


@dataclass(eq=False)
class Transfer:
    """A transfer under way. It keeps alive the memory that the backend still reads or writes.

    `unfinished` is the set, kept by a transport, of the transfers for which `wait` has not been called yet. It holds
    this one too, so that dropping a transfer without waiting does not free its memory. `errors` has the errors of the
    transport so far; `presence` is told what this rank waits for.
    """

    work: Any
    memory: Tensor
    description: str
    unfinished: set[Transfer] | None = None
    errors: list[str] | None = None
    presence: Presence = _NOBODY

    def wait(self) -> Tensor:
        """Wait for the transfer (on an accelerator: make the current stream wait) and return its memory."""
        # Before the wait, which may raise: a failed transfer has nothing left to wait for.
        if self.unfinished is not None:
            self.unfinished.discard(self)
        presence = self.presence
        presence.begin_wait(self.description)
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _described(error, self.description, self.errors, presence) from error
        finally:
            presence.end_wait()
        return self.memory

    def noted_by(self, presence: Presence) -> Transfer:
        """This transfer; whoever waits for it tells `presence`."""
        self.presence = presence
        return self


def start(
    call: Callable[[], Any],
    memory: Tensor,
    description: str,
    unfinished: set[Transfer] | None = None,
    errors: list[str] | None = None,
    presence: Presence = _NOBODY,
) -> Transfer:
    """Start a transfer. A peer that is lost by now raises here, one that is lost later in `Transfer.wait`."""
    with _describing_errors(description, errors, presence), _unrecorded(memory):
        transfer = Transfer(call(), memory, description, unfinished, errors, presence)
    if unfinished is not None:
        unfinished.add(transfer)
    return transfer


@contextmanager
def _unrecorded(memory: Tensor) -> Iterator[None]:
    """Hide transfers of host memory from profilers.

    The backend's thread ends such a record. If the profiler has stopped by then, that would write into freed memory.
    """
    if memory.device.type != "cpu" or not torch._C._autograd._profiler_enabled():
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def finish_in_order(transfers: Iterable[Callable[[], None]], limit: int) -> None:
    """Call what `transfers` yields, each after it has started a transfer, with at most `limit` of them under way."""
    in_flight = deque[Callable[[], None]]()
    for finish in transfers:
        in_flight.append(finish)
        if len(in_flight) == limit:
            in_flight.popleft()()
    while in_flight:
        in_flight.popleft()()


def wait_all(transfers: set[Transfer]) -> None:
    """Wait for all transfers under way, for some seconds together, and ignore errors.

    Without the limit a peer that is lost, or that failed before it sent, would block this process for ever.
    """
    end = time.monotonic() + _CLOSING_SECONDS
    while transfers:
        left = max(end - time.monotonic(), 0.001)
        with suppress(RuntimeError):
            transfers.pop().work.wait(timedelta(seconds=left))


@contextmanager
def _describing_errors(description: str, errors: list[str] | None, presence: Presence) -> Iterator[None]:
    """Raise a backend's errors as `TransportError` with `description`, which names the rank: theirs name a socket."""
    try:
        yield
    except RuntimeError as error:
        raise _described(error, description, errors, presence) from error


def _described(error: RuntimeError, description: str, errors: list[str] | None, presence: Presence) -> TransportError:
    if errors is not None:
        errors.append(description)
    return TransportError(f"{description} failed: {error}{presence.lost(description)}")


class FirstError:
    """Collects the `TransportError`s of its `with` blocks and keeps the first, so that later transfers still run."""

    def __init__(self) -> None:
        self._first: TransportError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, TransportError):
            return False
        self._first = self._first or error
        return True

    def raise_if_any(self) -> None:
        """Raise the first error, if there was one."""
        if self._first is not None:
            raise self._first


class CompletedWork:
    """The work handle of a transfer that needs no network."""

    def wait(self) -> None:
        """Return at once."""
