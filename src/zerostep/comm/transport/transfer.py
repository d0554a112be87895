"""Transfers under way, and what is said when one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from zerostep.errors import TransportError

__all__ = ["CompletedWork", "FirstError", "Transfer", "start", "wait_all"]

_PARTING_SECONDS = 10


@dataclass(frozen=True, eq=False)
class Transfer:
    """A transfer under way. It keeps the memory alive that the backend still reads or writes.

    `others` are all that nobody has waited for yet, this one included.
    """

    work: Any
    memory: Tensor
    description: str
    others: set[Transfer] = field(default_factory=set)

    def wait(self) -> Tensor:
        """Wait for the transfer (on an accelerator: make the current stream wait) and return its memory."""
        self.others.discard(self)
        with _describing_errors(self.description):
            self.work.wait()
        return self.memory


def start(call: Callable[[], Any], memory: Tensor, description: str, others: set[Transfer] | None = None) -> Transfer:
    """Start a transfer. A peer that is gone already is noticed here, one that goes later in `Flight.wait`."""
    with _describing_errors(description), _unrecorded(memory):
        if others is None:
            return Transfer(call(), memory, description)
        found = Transfer(call(), memory, description, others)
        others.add(found)
        return found


@contextmanager
def _unrecorded(memory: Tensor) -> Iterator[None]:
    """Hide a host's transfer from profilers: one that ends after its profiler has stopped writes into freed memory."""
    if memory.device.type != "cpu" or not torch._C._autograd._profiler_enabled():
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def wait_all(transfers: set[Transfer]) -> None:
    """Wait for all that is under way, but not for long: the others may be gone, or have failed before they sent."""
    end = time.monotonic() + _PARTING_SECONDS
    while transfers:
        left = max(end - time.monotonic(), 0.001)
        with suppress(RuntimeError):
            transfers.pop().work.wait(timedelta(seconds=left))


@contextmanager
def _describing_errors(description: str) -> Iterator[None]:
    """A backend's own errors name a socket; ours name the rank."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"{description} failed: {error}") from error


class FirstError:
    """The first transfer that failed; those after it go on."""

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
        """Raise it, if there was one."""
        if self._first is not None:
            raise self._first


class CompletedWork:
    """Nothing is under way."""

    def wait(self) -> None:
        """Return at once."""
