"""A few integers of every rank in flight to every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zerostep.comm.transport.transfer import Transfer


@dataclass(frozen=True)
class PendingInts:
    """Integers in flight to every rank. `is_done` never waits; without it they are there already."""

    read: Callable[[], list[list[int]]]
    is_done: Callable[[], bool] = lambda: True

    def wait(self) -> list[list[int]]:
        """The integers of every rank, by rank."""
        return self.read()

    def done(self) -> bool:
        """Whether `wait` is known to return at once."""
        return self.is_done()


def ints_on_host(transfer: Transfer) -> PendingInts:
    """The rows that a transfer of host memory brings."""
    return PendingInts(lambda: transfer.wait().tolist(), transfer.work.is_completed)


def ints_on_device(transfer: Transfer, stream: torch.Stream) -> PendingInts:
    """The rows that a transfer of accelerator memory brings, copied to the host on `stream`; nothing waits here."""
    # On a stream of its own: the current one would wait for the transfer, and all that was launched before it.
    with stream:
        rows = transfer.wait()
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        arrived = stream.record_event()
    rows.record_stream(stream)  # its memory must not be used again before the copy, even if nobody reads it

    def read() -> list[list[int]]:
        arrived.synchronize()
        found: list[list[int]] = host.tolist()
        return found

    return PendingInts(read, arrived.query)
