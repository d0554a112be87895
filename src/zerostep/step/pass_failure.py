"""The error that left a backward pass half done, and the wait of one thread for the passes of another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, RLock

from zerostep.errors import TransportError
from zerostep.step.iteration import Iteration


class PassFailure:
    """Remembers an error inside a pass, after which ranks may have reduced different buckets.

    `lock` is the engine's: it is held by whoever enters `noting` or calls a method, but for `await_passes`.
    """

    def __init__(self, lock: RLock, iteration: Iteration, rank: int) -> None:
        self._changed, self._iteration, self._rank = Condition(lock), iteration, rank
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """The error, if there was one since the last `forget`."""
        return self._error

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Remember an error that leaves an open pass; one of the transport says in which step and on which rank."""
        try:
            yield
        except TransportError as error:
            if error.__cause__ is not None and error.__cause__ is self._error:
                raise  # noted and described inside
            self._note(error)
            raise TransportError(
                f"the backward pass of step {self._iteration.steps + 1} failed on rank {self._rank}: {error}; "
                "restart from the last checkpoint on all ranks"
            ) from error
        except BaseException as error:
            self._note(error)
            raise

    def _note(self, error: BaseException) -> None:
        if self._iteration.in_pass:
            self._error = error
            self._changed.notify_all()

    def pass_ended(self, error: BaseException | None) -> None:
        """A pass has ended, and its update may have failed: whoever waits for it goes on."""
        self._error = error or self._error
        self._changed.notify_all()

    def forget(self) -> None:
        """A state was loaded."""
        self._error = None

    def await_passes(self, count: int) -> None:
        """Wait until another thread has ended `count` backward passes."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._ended(count))
        if self._error is not None:
            raise RuntimeError(f"a backward pass failed beside this one: {self._error}")

    def _ended(self, count: int) -> bool:
        return self._iteration.passes >= count and not self._iteration.in_pass
