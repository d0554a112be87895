"""A second transport over the same ranks, with a Gloo group of its own, whose calls need no order with the first's."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from zerostep.comm.transport.group import GroupTransport, as_bytes, as_real
from zerostep.comm.transport.protocol import Parcel, Piece, Transport
from zerostep.comm.transport.transfer import Flight, land_all, start
from zerostep.errors import TransportError

__all__ = ["CompanionTransport"]


class CompanionTransport(GroupTransport):
    """A transport over a Gloo group that torch has no name for. Accelerator memory is staged through the host."""

    wire_device = torch.device("cpu")

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        self._gloo: Any = gloo
        self._flights: set[Flight] = set()
        _companions.add(self)
        # Whoever goes first must not leave the others with messages that nobody takes: their sockets would fail.
        finalize(self, land_all, self._flights).atexit = False
        self.rank = gloo.rank()
        self.world_size = gloo.size()

    @classmethod
    def over(cls, store: Any, rank: int, world_size: int, timeout: timedelta | None) -> CompanionTransport:
        """Connect the ranks that meet at `store`; a collective."""
        with _patient_threads():
            gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout or distributed_c10d.default_pg_timeout)
        companion = cls(gloo)
        companion.all_gather_ints([0])  # nobody may drop it while others are still connecting
        return companion

    def gather(self, parcels: Sequence[Parcel], status: int, fingerprint: int) -> list[int]:
        """Bring every owner's part to every rank, through host memory."""
        return super().gather([_Staged(parcel) for parcel in parcels], status, fingerprint)

    def stream_ordered(self, device: torch.device) -> bool:
        """Never."""
        return False

    def meets_on_host(self, parcels: Sequence[Parcel]) -> bool:
        """Always, if there is anything to gather."""
        return bool(parcels)

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, by rank."""
        row = torch.tensor(values, dtype=torch.int64)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        start(lambda: self._gloo.allgather([rows], [row]), row, f"the all-gather of {self.world_size} ranks").wait()
        return torch.stack(rows).tolist()

    def _start_send(self, memory: Tensor, to: int, tag: int) -> Flight:
        data, story = as_bytes(memory), f"sending to rank {to}"
        return start(lambda: self._gloo.send([data], to, tag), memory, story, self._flights)

    def _start_receive(self, memory: Tensor, source: int, tag: int) -> Flight:
        data, story = as_bytes(memory), f"receiving from rank {source}"
        return start(lambda: self._gloo.recv([data], source, tag), memory, story, self._flights)

    def start_all_reduce(self, memory: Tensor) -> Flight:
        """Start summing `memory`, on the host, over all ranks, in place."""
        story = f"the all-reduce of {self.world_size} ranks"
        return start(lambda: self._gloo.allreduce([as_real(memory)]), memory, story)

    def _start_broadcast(self, memory: Tensor, source: int) -> Flight:
        data = as_bytes(memory)
        return start(lambda: self._gloo.broadcast(data, source), memory, f"the broadcast of rank {source}")

    def companion(self) -> Transport:
        """A companion needs no companion."""
        raise TransportError("a companion transport has no companion of its own")


_companions: WeakSet[CompanionTransport] = WeakSet()


@atexit.register
def _end_companions() -> None:
    """torch ends the groups that it has names for. The threads of ours must not outlive the interpreter."""
    for companion in list(_companions):
        land_all(companion._flights)
        companion._gloo = None


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Threads that are started inside let others finish their turn, on Linux.

    A thread that is woken for every packet and takes a busy core each time costs those who compute there a tenth of
    their time; it loses nothing by finding more packets when its turn comes.
    """
    before = _threads()
    yield
    for thread in _threads() - before:
        with suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _threads() -> set[int]:
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()


class _Staged:
    """A parcel as host memory."""

    device = torch.device("cpu")

    def __init__(self, parcel: Parcel) -> None:
        self._parcel = parcel

    def attach(self) -> None:
        self._parcel.attach()

    def pieces(self, owner: int) -> Sequence[Piece]:
        pieces = self._parcel.pieces(owner)
        return pieces if self._parcel.device == self.device else [_StagedPiece(piece) for piece in pieces]


@dataclass(frozen=True)
class _StagedPiece:
    piece: Piece

    def load(self) -> Tensor:
        return self.piece.load().cpu()

    def room(self) -> Tensor:
        return torch.empty_like(self.piece.room(), device="cpu")

    def store(self, memory: Tensor) -> None:
        self.piece.store(self.piece.room().copy_(memory))
