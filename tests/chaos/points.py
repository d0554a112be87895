"""Where faults happen: named points inside a rank's process, and what happens there.

A point is a function of the library that is replaced while a block runs; the n-th call of it is the moment.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.optim import AdamW

from tests.chaos.registry import OVERLAP
from zerostep.checkpoint import directory, tensor_file
from zerostep.comm.exchange import HostExchange
from zerostep.comm.transport import CompanionTransport, GroupTransport
from zerostep.comm.transport.base import BaseTransport
from zerostep.step.overlap_pipeline import OverlapPipeline
from zerostep.step.update import Updater

Act = Callable[[], object]


class Network:
    """DDP's own reduction; a class only so that it can be replaced."""

    @staticmethod
    def reduce(state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket."""
        return default_hooks.allreduce_hook(state, bucket)


def reduced(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """A communication hook that averages, with a point in it."""
    return Network.reduce(state, bucket)


def targets(point: str, mode: str) -> list[tuple[Any, str]]:
    """The functions of a point in a mode."""
    zero = mode == "drop-in" or mode in OVERLAP
    known: dict[str, list[tuple[Any, str]]] = {
        "reduce": [(Network, "reduce")] if zero else [(HostExchange, "reduce")],
        "update": [(AdamW, "step")],
        "gather": [(BaseTransport, "gather")] if zero else [(HostExchange, "gather")],
        "bucket": [(OverlapPipeline, "process") if zero else (Updater, "step_on")],
        "message": [(GroupTransport, "start_send"), (CompanionTransport, "start_send")],
        "write": [(tensor_file, "_write_all")],
        "fsync": [(os, "fsync")],
        "manifest": [(directory, "write_bytes")],
        "rename": [(os, "rename")],
    }
    if point == "bucket" and mode == "drop-in":
        return known["message"]  # all its buckets are one gather
    return known[point]


class Fuse:
    """Acts once, at the n-th call of any of the functions that it is in."""

    def __init__(self, call: int, act: Act, note: Act) -> None:
        self._left, self._act, self._note = call, act, note
        self._lock = threading.Lock()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with the act before it."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._left -= 1
                now = self._left == 0
            if now:
                self._note()
                self._act()
            return function(*args, **kwargs)

        wrapped.__dict__.update(getattr(function, "__dict__", {}))  # torch marks a step that it has wrapped
        return wrapped

    @property
    def fired(self) -> bool:
        """Whether it has acted."""
        return self._left <= 0


@contextmanager
def armed(point: str, mode: str, act: Act, call: int, note: Act) -> Iterator[Fuse]:
    """Inside, let `act` happen at a point, before its n-th call."""
    fuse = Fuse(call, act, note)
    with ExitStack() as stack:
        for owner, name in targets(point, mode):
            static = isinstance(vars(owner).get(name), staticmethod)
            wrapped = fuse.around(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, staticmethod(wrapped) if static else wrapped))
        yield fuse


# What happens there.


class FaultError(Exception):
    """What a fault raises."""


def kill() -> None:
    """End this process without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop this process until somebody lets it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    """Raise an ordinary error."""
    raise FaultError("a bad day")


def interrupt() -> None:
    """What Ctrl-C does."""
    raise KeyboardInterrupt("a bad day")


def leave() -> None:
    """What `sys.exit()` does."""
    raise SystemExit("a bad day")


def run_out_of_memory() -> None:
    """What an allocation does that fails."""
    raise MemoryError("no more memory")


def disk_full() -> None:
    """What a write does on a full disk."""
    raise OSError(28, "No space left on device")


def slow(seconds: float) -> Act:
    """Take some time: this fault is nothing but that."""
    return lambda: time.sleep(seconds)


def note_in(path: Path) -> Act:
    """Write down when the fault happens, on the clock that all processes share."""
    return lambda: path.write_text(repr(time.monotonic()))
