"""Messages of all ranks that are read later, because the host may not wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from zerostep.comm.transport import PendingInts

Check = Callable[[Sequence[Sequence[int]]], None]

# The host may be some steps ahead of an accelerator. Beyond that nobody reads: what differs differs in later ones, too.
_MOST = 16


class LateRows:
    """Rows under way, each with the check that is made once it has arrived."""

    def __init__(self) -> None:
        self._rows: deque[tuple[PendingInts, Check]] = deque(maxlen=_MOST)

    def add(self, rows: PendingInts, check: Check) -> None:
        """Check these rows when they are there."""
        self._rows.append((rows, check))

    def check(self) -> None:
        """Check what has arrived, in order, without waiting."""
        while self._rows and self._rows[0][0].done():
            rows, check = self._rows.popleft()
            check(rows.wait())

    def drop(self) -> None:
        """A state is loaded: what was sent before counts no longer."""
        self._rows.clear()
