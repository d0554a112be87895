"""Where the work of a bucket runs while backward goes on, and what backward waits for at its end.

Two lanes, one face. A backend that works in stream order never blocks the host, so its work is launched at once, on a
stream beside backward's. Any other backend blocks whoever waits for it, so its work is done by one thread, in the
order in which it was handed over. Either way a future carries the result, or the error, to backward's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol
from weakref import finalize

import torch
from torch import Tensor
from torch.futures import Future

__all__ = ["BucketRunner", "StreamRunner", "ThreadRunner"]

Task = Callable[[], Tensor]


class BucketRunner(Protocol):
    """Runs tasks in the order in which they come."""

    def run(self, task: Task) -> Future[Tensor]:
        """Start `task` now or as soon as those before it are done."""


class StreamRunner:
    """Tasks are launched by the caller, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._side = _Side(device)

    def run(self, task: Task) -> Future[Tensor]:
        """Launch `task`; its future is ordered after it on the accelerator."""
        self._side.follow_caller()
        return self._side.complete(self._side.future(), task)


class ThreadRunner:
    """Tasks are run by one thread of their own."""

    def __init__(self, device: torch.device) -> None:
        self._side = _Side(device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zerostep-buckets")
        finalize(self, self._thread.shutdown, wait=False)

    def run(self, task: Task) -> Future[Tensor]:
        """Hand `task` to the thread."""
        self._side.follow_caller()
        future = self._side.future()
        self._thread.submit(self._side.complete, future, task)
        return future


class _Side:
    """The stream beside the caller's; nothing at all on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def follow_caller(self) -> None:
        """What runs here from now on comes after what the caller has launched so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))

    def future(self) -> Future[Tensor]:
        return Future() if self._stream is None else Future(devices=[self._device])

    def complete(self, future: Future[Tensor], task: Task) -> Future[Tensor]:
        """Errors go where the result would: an exception in a DDP hook would leave DDP unusable."""
        try:
            with self._current():
                future.set_result(task())
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        return future

    @contextmanager
    def _current(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with self._stream:
                yield
