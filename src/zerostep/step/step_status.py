"""How every rank's update has ended, told to all: in the same step where hosts wait for each other, else later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from zerostep.comm.agreement import AllGather, Fact, describe_error, failure_texts, text_to_ints
from zerostep.comm.exchange import Exchange
from zerostep.comm.transport import PendingInts
from zerostep.step.labels import PhaseTimer
from zerostep.step.late_rows import LateRows
from zerostep.step.place import Place, compare_places


class PeerFailedError(RuntimeError):
    """Another rank's update has failed."""


UPDATED, FAILED, UNTOUCHED = range(3)  # `UNTOUCHED`: failed before the inner optimizer was called


def compare_status(
    rows: Sequence[Sequence[int]],
    before: int,
    facts: Callable[[], Sequence[Fact]],
    ask: AllGather | None,
    error: BaseException | None,
) -> None:
    """Raise if some rank's update has failed, or if ranks are not in one place. A row is a status and a place.

    `before` is the number of steps before the last load, `error` that of this rank's own update. `ask` gathers integers
    of all ranks, if all are at this point: then the error, or the option that differs, is told.
    """
    failed = next((rank for rank, row in enumerate(rows) if row[0] != UPDATED), None)
    if failed is not None:
        cause = f": {failure_texts(ask, error)[failed]}" if ask is not None else "; its own output has the cause"
        raise PeerFailedError(f"rank {failed} failed in its local update of step {rows[failed][1] + before + 1}{cause}")
    compare_places([row[1:] for row in rows], before, facts, ask)


class StepStatus:
    """One message per step: whether this rank's update has failed, and where the rank is.

    The message of a step is read before any further one is sent on the same exchange: a rank whose update has failed
    sends its error behind it, and the others then answer with theirs.
    """

    def __init__(
        self,
        control: Exchange,
        timer: PhaseTimer,
        late: LateRows,
        before: Callable[[], int],
        facts: Callable[[], Sequence[Fact]],
    ) -> None:
        self._control, self._timer, self._late = control, timer, late
        self._before, self._facts = before, facts
        self._rows: PendingInts | None = None
        self._texts: PendingInts | None = None

    def send(self, place: Place, failure: BaseException | None) -> None:
        """Send how the update has ended."""
        rows = self._control.start_all_gather_ints([UPDATED if failure is None else FAILED, *place.to_ints()])
        if self._control.blocks_host:
            self._rows = rows
        else:
            self._late.add(rows, self._judge)

    def send_error(self, failure: BaseException) -> None:
        """Send why this rank's update has failed, behind its status. Nothing waits: others answer when they read."""
        if self._control.blocks_host:
            self._texts = self._control.start_all_gather_ints(text_to_ints(describe_error(failure)))

    def read(self) -> None:
        """Read the statuses of all ranks; raises if one has failed, or is not in the same place."""
        if self._texts is not None:
            return  # this rank has failed itself
        rows, self._rows = self._rows, None
        if rows is not None:
            with self._timer.waiting("control"):
                self._judge(rows.wait())
        self._late.check()

    def drain(self) -> None:
        """Receive what is under way, after a failed step."""
        self._late.drop()
        texts, self._texts = self._texts, None
        with suppress(RuntimeError):
            if texts is None:
                self.read()
            elif self._rows is not None:
                self._rows.wait()
        self._rows = None
        if texts is not None:
            texts.wait()

    def _judge(self, rows: Sequence[Sequence[int]]) -> None:
        compare_status(rows, self._before(), self._facts, self._ask if self._control.blocks_host else None, None)

    def _ask(self, values: Sequence[int]) -> list[list[int]]:
        return self._control.start_all_gather_ints(values).wait()
