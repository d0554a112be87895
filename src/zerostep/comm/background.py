"""Saves in the background: one at a time, and a failure on any rank raises on all ranks.

Each save runs on a thread of its own and communicates through a companion transport of its own. The main thread reads
its outcome before each step, and waits for it before the next save.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from zerostep.comm.agreement import agreed
from zerostep.comm.transport import Transport, calling
from zerostep.errors import CheckpointError, TransportError

logger = logging.getLogger("zerostep")

_RUNNING, _SUCCEEDED, _FAILED = 0, 1, 2


class PendingSave:
    """A save in the background, which may still be under way."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self.error: BaseException | None = None
        self.reported = False  # whether `wait` has returned or raised on this rank
        self._may_begin = threading.Event()
        # Not a daemon thread: at exit the interpreter waits until the checkpoint is written.
        self._thread = threading.Thread(target=self._run, name="zerostep-save")
        self._thread.start()

    def begin(self, cancelled: bool = False) -> None:
        """Let the thread work, or end it: it communicates only once every rank has a thread."""
        if cancelled:
            self._work = None
        self._may_begin.set()

    def _run(self) -> None:
        """Runs on the background thread."""
        self._may_begin.wait()
        if self._work is None:
            return
        try:
            self._work()
        except BaseException as error:
            # Log now: the training loop may end without another step or save that would raise.
            logger.error("a checkpoint could not be written in the background: %s", error)
            # The frames of the traceback would keep the copies alive that were to be written.
            traceback.clear_frames(error.__traceback__)
            self.error = error
        # Frees the copies, which `work` holds, even if the caller keeps this object.
        self._work = None

    @property
    def done(self) -> bool:
        """Whether this rank has finished, with or without an error."""
        return not self._thread.is_alive()

    def wait_until_done(self) -> None:
        """Return when this rank has finished, with or without an error."""
        self._thread.join()

    def wait(self) -> None:
        """Return when the checkpoint is complete, or raise what went wrong; local."""
        self.wait_until_done()
        self.reported = True
        if self.error is not None:
            raise CheckpointError(
                f"a checkpoint could not be written in the background: {self.error}; the ones before it are intact"
            ) from self.error


class _Transports(NamedTuple):
    save: Transport  # for the background thread
    status: Transport  # for the main thread, in no order with the other


class BackgroundSaves:
    """The background saves of one optimizer: one at a time; a failure raises in the next step or save of all ranks."""

    def __init__(self, everyone: Transport) -> None:
        self._everyone = everyone
        self._transports: _Transports | None = None
        self._current: PendingSave | None = None

    def begin(self, work: Callable[[Transport], None], everyone: Transport | None = None) -> PendingSave:
        """Run `work` on a background thread, with a transport that nothing else uses; a collective, after `finish`.

        `everyone` has the ranks that take part, if they are others than those of the optimizer.
        """
        if everyone is not None and everyone is not self._everyone:
            self._everyone, self._transports = everyone, None
        if self._transports is None:
            self._transports = _Transports(self._everyone.companion(), self._everyone.companion())
        transport = self._transports.save
        save: PendingSave | None = None
        try:
            with agreed(self._everyone), _starting(self._everyone.rank):
                save = PendingSave(lambda: calling("a save in the background")(work)(transport))
        except BaseException:
            if save is not None:
                save.begin(cancelled=True)
            raise
        save.begin()
        self._current = save
        return save

    def raise_if_failed(self) -> None:
        """Raise if the current save has failed on any rank; a collective before each step, while there is a save."""
        if self._current is None or self._transports is None:
            return
        # Ranks finish at different times. `_current` changes only by what all ranks have received, so that all of
        # them make this collective, or none.
        statuses = [row[0] for row in self._transports.status.all_gather_ints([_status(self._current)])]
        if _FAILED in statuses:
            self.finish()
        elif _RUNNING not in statuses:
            self._current = None

    def finish(self) -> None:
        """Wait for the current save, if any, and raise if it failed; a collective.

        A failure that `PendingSave.wait` has already raised on all ranks is not raised again.
        """
        current, self._current = self._current, None
        if current is None or self._transports is None:
            return
        current.wait_until_done()
        lost = isinstance(current.error, TransportError)
        rows = self._transports.status.all_gather_ints([current.error is not None, current.reported, lost])
        if any(row[2] for row in rows):
            # Gloo closes the sockets of a group after an error: all ranks connect again for the next save.
            self._transports = None
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed and not all(row[1] for row in rows):
            current.wait()
            raise CheckpointError(f"a checkpoint could not be written in the background: rank {failed[0]} failed")


@contextmanager
def _starting(rank: int) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise CheckpointError(
            f"a checkpoint could not be written in the background: rank {rank} cannot start a thread: {error}; the "
            "ones before it are intact"
        ) from error


def _status(save: PendingSave) -> int:
    # `done` first: the thread sets `error` before it ends.
    if not save.done:
        return _RUNNING
    return _SUCCEEDED if save.error is None else _FAILED
