"""Saves that go on in the background: one at a time, and no failure is lost."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable

from zerostep.comm.transport import Transport, TransportError
from zerostep.errors import CheckpointError

__all__ = ["BackgroundSaves", "PendingSave"]

logger = logging.getLogger("zerostep")

_UNDER_WAY, _DONE, _FAILED = 0, 1, 2


class PendingSave:
    """A save, perhaps still under way."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self.error: BaseException | None = None
        self.told = False  # whether this rank has heard of the failure
        # Not a daemon: a process that comes to its end first finishes what it has begun to write.
        self._thread = threading.Thread(target=self._run, name="zerostep-save")
        self._thread.start()

    def _run(self) -> None:
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            # Nobody may be left to ask; and frames would keep the copies alive that were to be written.
            logger.error("a checkpoint could not be written in the background: %s", error)
            traceback.clear_frames(error.__traceback__)
            self.error = error
        self._work = None

    @property
    def done(self) -> bool:
        """Whether this rank has come to an end, good or bad."""
        return not self._thread.is_alive()

    @property
    def status(self) -> int:
        """How it stands on this rank, as a number."""
        return _UNDER_WAY if not self.done else _DONE if self.error is None else _FAILED

    def join(self) -> None:
        """Return when this rank has come to an end, good or bad."""
        self._thread.join()

    def wait(self) -> None:
        """Return when the checkpoint is complete, or raise what went wrong; local."""
        self.join()
        self.told = True
        if self.error is not None:
            raise CheckpointError(
                f"a checkpoint could not be written in the background: {self.error}; the ones before it are intact"
            ) from self.error


class BackgroundSaves:
    """The saves of one optimizer. Two never run at a time, and a failure ends the next step or save of all ranks."""

    def __init__(self, everyone: Transport) -> None:
        self._everyone = everyone
        self._transports: tuple[Transport, Transport] | None = None
        self._current: PendingSave | None = None

    def begin(self, work: Callable[[Transport], None]) -> PendingSave:
        """Start a save in the background. All ranks call it; `work` gets a transport that nobody else uses."""
        if self._transports is None:
            self._transports = self._everyone.companion(), self._everyone.companion()
        transport = self._transports[0]
        self._current = PendingSave(lambda: work(transport))
        return self._current

    def raise_if_failed(self) -> None:
        """Before each step, on all ranks: if a save is under way, ask how it stands, and raise if it failed."""
        if self._current is None or self._transports is None:
            return
        statuses = [row[0] for row in self._transports[1].all_gather_ints([self._current.status])]
        if _FAILED in statuses:
            self.finish()
        elif _UNDER_WAY not in statuses:
            self._current = None

    def finish(self) -> None:
        """Wait for the save under way, if there is one; a failure that not all ranks have heard of, all raise."""
        current, self._current = self._current, None
        if current is None or self._transports is None:
            return
        current.join()
        lost = isinstance(current.error, TransportError)
        rows = self._transports[1].all_gather_ints([current.error is not None, current.told, lost])
        if any(row[2] for row in rows):
            self._transports = None  # its sockets are closed; the next save connects anew
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed and not all(row[1] for row in rows):
            current.wait()
            raise CheckpointError(f"a checkpoint could not be written in the background: rank {failed[0]} failed")
