"""Where a bucket of overlap mode is updated and gathered while backward goes on.

A backend that works in stream order never blocks the host: its tasks are launched at once, by the caller, on a stream
beside backward's. Any other backend blocks the thread that waits for it: its tasks run in one thread, in the order in
which they were submitted. A future carries the result, or the error, to the end of backward.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from weakref import finalize

import torch
from torch import Tensor
from torch.futures import Future

Task = Callable[[], Tensor]

_HIGH = -1


class BucketRunner:
    """Runs tasks in the order in which they are submitted, which must be the same on all ranks."""

    def __init__(self, device: torch.device, stream_ordered: bool) -> None:
        self._device = device
        # Ahead of backward's kernels: what this stream launches is small, and a gather waits for it.
        self._stream = None if device.type == "cpu" else torch.Stream(device, priority=_HIGH)
        self._thread = None
        if not stream_ordered:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zerostep-buckets")
            finalize(self, self._thread.shutdown, wait=False)

    def run(self, task: Task) -> Future[Tensor]:
        """Start `task` now, or as soon as those before it are done."""
        future: Future[Tensor] = Future() if self._stream is None else Future(devices=[self._device])
        if self._stream is not None:
            # Here and not in the task: it must come after what this thread has launched, not after the other's work.
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        if self._thread is None:
            _complete(self._stream, future, [task])
        else:
            self._thread.submit(_complete, self._stream, future, [task])
        return future


def _complete(stream: torch.Stream | None, future: Future[Tensor], only_task: list[Task]) -> None:
    """Run a task. Its error, if it has one, goes into the future: nobody would complete it otherwise.

    The task is taken out of its list, and gone before the future is done: it holds the optimizer, and whoever waits for
    the future may drop that next. Held by the thread's frames, it would end here, some time later, with its sockets.
    """
    try:
        # The result is set with the stream current: the future's event is then recorded behind the task's work.
        with nullcontext() if stream is None else stream:
            result = only_task.pop()()
            future.set_result(result)
    except BaseException as error:
        future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))  # type: ignore[arg-type]
