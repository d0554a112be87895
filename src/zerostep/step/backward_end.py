"""When a backward call is over, from inside the hooks that run in it."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from torch.autograd import Variable

from zerostep.step.weak import weakly

_OUTER = -1  # in place of the number of a graph task that is not known yet


class BackwardEnd:
    """Calls `action` once at the end of each backward call in which `expect` was called.

    A backward call inside another one, as in reentrant checkpointing, is part of the outer one. After a call that has
    failed, and under compiled autograd, which runs no callbacks, `action` is not called; `active` is then false.
    Runs on autograd's threads; the engine's lock keeps them apart.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = weakly(action)
        # Autograd has the only strong references, and drops them with the call: a failed one leaves nothing here.
        self._expected: WeakSet[_TaskEnd] = WeakSet()
        self._lock = RLock()  # several threads may run backward calls
        self._last_task = -1  # the one that was expected last; numbers are never used again

    @property
    def active(self) -> bool:
        """Whether a backward call is running in which `expect` was called."""
        return len(self._expected) > 0

    @property
    def is_expected(self) -> bool:
        """Whether `expect` was called in this call last, so that it need not be called again; called per gradient."""
        task: int = torch._C._current_graph_task_id()
        return task == self._last_task and task != -1

    def expect(self) -> None:
        """Call `action` when the backward call that runs this hook is over."""
        task = torch._C._current_graph_task_id()
        with self._lock:
            self._last_task = task
            if task == -1 or any(each.task == task for each in self._expected):
                return
            end = _TaskEnd(task, weakly(self._task_over))
            self._expected.add(end)
        _queue(end)

    def _task_over(self, end: _TaskEnd) -> None:
        outer = torch._C._current_autograd_node()
        with self._lock:
            self._expected.discard(end)
            if any(each.task != _OUTER for each in self._expected):
                return  # a call inside another one, or beside one in another thread, which ends the pass
            if outer is None:
                self._expected.clear()  # an outer call that was waited for has failed, or ran nothing further
        if outer is None:
            self._action()
        else:
            self._expect_outer(outer)

    def _expect_outer(self, node: Any) -> None:
        """A call has ended inside another one, in which no gradient has arrived: wait for that node's successors.

        They run in the outer call. If none does, the pass is ended by the next call of the optimizer's methods.
        """
        end = _TaskEnd(_OUTER, weakly(self._task_over))
        handles: list[Any] = []

        def resume(*args: Any) -> None:
            for handle in handles:
                handle.remove()
            self.expect()
            with self._lock:
                self._expected.discard(end)

        with self._lock:
            self._expected.add(end)
        for successor, _ in node.next_functions:
            if successor is not None:
                handles.append(successor.register_prehook(resume))


class _TaskEnd:
    """A callback of one of autograd's graph tasks. It runs twice: at first it queues itself behind DDP's callback."""

    def __init__(self, task: int, over: Callable[[_TaskEnd], None]) -> None:
        self.task, self._over, self._queued_again = task, over, False

    def __call__(self) -> None:
        if self._queued_again:
            self._over(self)
        else:
            self._queued_again = True
            _queue(self)


def _queue(callback: Callable[[], None]) -> None:
    engine: Any = Variable._execution_engine
    engine.queue_callback(callback)
