"""What every rank sends at the end of a backward pass: where it is, and which parameters have a gradient on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zerostep.comm.exchange import Exchange
from zerostep.comm.transport import PendingInts, Presence
from zerostep.errors import StepMismatchError
from zerostep.step.labels import PhaseTimer
from zerostep.step.late_rows import LateRows
from zerostep.step.place import Progress, by_value, compare_loads
from zerostep.step.used_mask import pack_mask, union_of_masks


@dataclass(frozen=True)
class PassMessage:
    """Steps since the last load, passes since the last step, own loads, and a mask of used parameters."""

    steps: int
    passes: int
    loads: int
    used: Sequence[bool]

    def to_ints(self) -> list[int]:
        """The message as integers to send."""
        return [self.steps, self.passes, self.loads, *pack_mask(self.used)]


def used_by_any(rows: Sequence[Sequence[int]], count: int, before: int = 0) -> set[int]:
    """The parameters that some rank has used, from the messages of all ranks; raises if ranks are not in one place.

    `before` is the number of steps before the last load.
    """
    compare_loads([row[2] for row in rows])
    values = {rank: (row[0] + before + 1, row[1] + 1) for rank, row in enumerate(rows)}
    if len(set(values.values())) > 1:
        raise StepMismatchError(f"{by_value(values, _in_pass)}; call backward() and step() equally often on all ranks")
    return {index for index, flag in enumerate(union_of_masks([row[3:] for row in rows], count)) if flag}


class PassMessages:
    """Sends a message at the end of each pass, and reads those of all ranks when they are needed.

    Where the host does not wait for other ranks, a message that tells nothing new is read when it is there.
    `before` is the number of steps before the last load.
    """

    def __init__(
        self,
        control: Exchange,
        timer: PhaseTimer,
        progress: Progress,
        late: LateRows,
        before: Callable[[], int],
        presence: Presence,
    ) -> None:
        self._control, self._timer, self._progress = control, timer, progress
        self._late, self._before, self._presence = late, before, presence
        self._unread: list[tuple[PendingInts, bool]] = []

    @property
    def unread(self) -> bool:
        """Whether messages of other ranks were not read yet."""
        return bool(self._unread)

    def send(self, passes: int, used: Sequence[bool], complete: bool) -> None:
        """Send which parameters this rank has used; `complete` if that is all, so that others can add nothing."""
        message = PassMessage(self._progress.steps, passes, self._progress.loads, used)
        with self._timer.phase("control"):
            pending = self._control.start_all_gather_ints(message.to_ints())
        if not self._control.blocks_host:
            self._presence.device_mark(pending.done)
        if self._control.blocks_host or not complete:
            self._unread.append((pending, not complete))
        else:
            self._late.add(pending, self._compare)

    def read(self, count: int) -> set[int]:
        """Wait for all messages: which of `count` parameters some rank has used, where this rank has not used all."""
        unread, self._unread = self._unread, []
        found = set[int]()
        for pending, applies in unread:
            with self._timer.waiting("control"):
                rows = pending.wait()
            used = used_by_any(rows, count if applies else 0, self._before())
            found |= used
        return found

    def _compare(self, rows: Sequence[Sequence[int]]) -> None:
        used_by_any(rows, 0, self._before())


def _in_pass(place: tuple[int, int], several: bool) -> str:
    step, number = place
    return f"{'are' if several else 'is'} at step {step}, backward pass {number}"
