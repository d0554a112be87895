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
from zerostep.comm.transport.protocol import BucketMemory, Message, Transport
from zerostep.comm.transport.transfer import Transfer, start, wait_all
from zerostep.errors import TransportError

__all__ = ["CompanionTransport"]


class CompanionTransport(GroupTransport):
    """A transport over a Gloo group that torch has no name for. Accelerator memory is staged through the host."""

    wire_device = torch.device("cpu")

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        self._gloo: Any = gloo
        self._transfers: set[Transfer] = set()
        _companions.add(self)
        # Whoever goes first must not leave the others with messages that nobody takes: their sockets would fail.
        finalize(self, wait_all, self._transfers).atexit = False
        self.rank = gloo.rank()
        self.world_size = gloo.size()

    @classmethod
    def over(cls, unpack: Any, rank: int, world_size: int, timeout: timedelta | None) -> CompanionTransport:
        """Connect the ranks that meet at `store`; a collective."""
        with _patient_threads():
            gloo = dist.ProcessGroupGloo(unpack, rank, world_size, timeout or distributed_c10d.default_pg_timeout)
        companion = cls(gloo)
        companion.all_gather_ints([0])  # nobody may drop it while others are still connecting
        return companion

    def gather(self, bucket_memories: Sequence[BucketMemory], status: int, fingerprint: int) -> list[int]:
        """Bring every owner's part to every rank, through host memory."""
        return super().gather([_Staged(bucket_memory) for bucket_memory in bucket_memories], status, fingerprint)

    def stream_ordered(self, device: torch.device) -> bool:
        """Never."""
        return False

    def meets_on_host(self, bucket_memories: Sequence[BucketMemory]) -> bool:
        """Always, if there is anything to gather."""
        return bool(bucket_memories)

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, by rank."""
        row = torch.tensor(values, dtype=torch.int64)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        start(lambda: self._gloo.allgather([rows], [row]), row, f"the all-gather of {self.world_size} ranks").wait()
        return torch.stack(rows).tolist()

    def _start_send(self, memory: Tensor, to: int, tag: int) -> Transfer:
        data, description = as_bytes(memory), f"sending to rank {to}"
        return start(lambda: self._gloo.send([data], to, tag), memory, description, self._transfers)

    def _start_receive(self, memory: Tensor, source: int, tag: int) -> Transfer:
        data, description = as_bytes(memory), f"receiving from rank {source}"
        return start(lambda: self._gloo.recv([data], source, tag), memory, description, self._transfers)

    def start_all_reduce(self, memory: Tensor) -> Transfer:
        """Start summing `memory`, on the host, over all ranks, in place."""
        description = f"the all-reduce of {self.world_size} ranks"
        return start(lambda: self._gloo.allreduce([as_real(memory)]), memory, description)

    def _start_broadcast(self, memory: Tensor, source: int) -> Transfer:
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
        wait_all(companion._transfers)
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

    def __init__(self, bucket_memory: BucketMemory) -> None:
        self._flat_bucket = bucket_memory

    def attach(self) -> None:
        self._flat_bucket.attach()

    def messages(self, owner: int) -> Sequence[Message]:
        messages = self._flat_bucket.messages(owner)
        return (
            messages if self._flat_bucket.device == self.device else [_StagedMessage(message) for message in messages]
        )


@dataclass(frozen=True)
class _StagedMessage:
    message: Message

    def pack(self) -> Tensor:
        return self.message.pack().cpu()

    def buffer(self) -> Tensor:
        return torch.empty_like(self.message.buffer(), device="cpu")

    def unpack(self, memory: Tensor) -> None:
        self.message.unpack(self.message.buffer().copy_(memory))
