"""Saves that go on in the background: one at a time, and no failure is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable

from zerostep.checkpoint.errors import CheckpointError
from zerostep.transport import Transport

__all__ = ["PendingSave", "Saves"]

_UNDER_WAY, _DONE, _FAILED = 0, 1, 2


class PendingSave:
    """A save, perhaps still under way."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self.told = False  # whether somebody has heard of the failure
        # Not a daemon: a process that comes to its end first finishes what it has begun to write.
        self._thread = threading.Thread(target=self._run, name="zerostep-save")
        self._thread.start()

    def _run(self) -> None:
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self._work = None  # with it go the copies that it wrote

    @property
    def done(self) -> bool:
        """Whether this rank has come to an end, good or bad."""
        return not self._thread.is_alive()

    @property
    def status(self) -> int:
        """How it stands on this rank, as a number."""
        return _UNDER_WAY if not self.done else _DONE if self._error is None else _FAILED

    def wait(self) -> None:
        """Return when the checkpoint is complete, or raise what went wrong. All ranks call it, and end alike."""
        self._thread.join()
        self.told = True
        if self._error is not None:
            raise CheckpointError(
                f"a checkpoint could not be written in the background: {self._error}; the ones before it are intact"
            ) from self._error


class Saves:
    """The saves of one optimizer. Two never run at a time, and a failure ends the next step or save of all ranks."""

    def __init__(self, everyone: Transport) -> None:
        self._everyone = everyone
        self._lanes: tuple[Transport, Transport] | None = None
        self._current: PendingSave | None = None

    def begin(self, work: Callable[[Transport], None]) -> PendingSave:
        """Start a save in the background. All ranks call it; `work` gets a transport that nobody else uses."""
        if self._lanes is None:
            self._lanes = self._everyone.companion(), self._everyone.companion()
        lane = self._lanes[0]
        self._current = PendingSave(lambda: work(lane))
        return self._current

    def look(self) -> None:
        """Before each step, on all ranks: if a save is under way, ask how it stands, and raise if it failed."""
        if self._current is None or self._lanes is None:
            return
        statuses = [row[0] for row in self._lanes[1].all_gather_ints([self._current.status])]
        if _FAILED in statuses:
            self.finish()
        elif _UNDER_WAY not in statuses:
            self._current = None

    def finish(self) -> None:
        """Wait for the save under way, if there is one; a failure that nobody has heard of is raised on all ranks."""
        current, self._current = self._current, None
        if current is not None and not current.told:
            current.wait()
