"""A second transport over the same ranks, with a Gloo group of its own.

Its calls need no order with those of the first transport, so it can be used from another thread or at other times.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from zerostep.comm.transport.base import BaseTransport, as_bytes, as_real
from zerostep.comm.transport.ints import PendingInts
from zerostep.comm.transport.presence import Presence
from zerostep.comm.transport.protocol import TAG_DATA, BucketMemory, Message, Transport
from zerostep.comm.transport.rows import all_gather_rows
from zerostep.comm.transport.tags import wire_tag
from zerostep.comm.transport.transfer import Transfer, start, wait_all


class CompanionTransport(BaseTransport):
    """A transport over a Gloo group that torch does not know. Accelerator memory is copied through the host."""

    wire_device = torch.device("cpu")

    def __init__(
        self,
        gloo: dist.ProcessGroupGloo,
        timeout: timedelta | None = None,
        presence: Presence | None = None,
        peers: tuple[int, ...] = (),
    ) -> None:
        self._gloo: Any = gloo
        self._timeout, self.presence = timeout, presence or Presence()
        self.peers = peers or tuple(range(gloo.size()))
        self._unfinished: set[Transfer] = set()
        self._errors: list[str] = []
        _companions.add(self)
        # Dropping the group closes its sockets, and a peer that is still receiving would fail: finish sending first.
        # At exit `_close_companions` does the same.
        finalize(self, wait_all, self._unfinished).atexit = False
        self.rank = gloo.rank()
        self.world_size = gloo.size()

    @classmethod
    def connect(
        cls,
        store: Any,
        rank: int,
        world_size: int,
        timeout: timedelta | None,
        presence: Presence | None = None,
        peers: tuple[int, ...] = (),
    ) -> CompanionTransport:
        """Connect the ranks that use `store`; a collective."""
        with _batch_scheduling():
            gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout or distributed_c10d.default_pg_timeout)
        companion = cls(gloo, timeout, presence, peers)
        # No rank may drop the group while others are still connecting to it.
        companion.all_gather_ints([0])
        return companion

    def gather(self, bucket_memories: Sequence[BucketMemory], row: Sequence[int], fingerprint: int) -> list[list[int]]:
        """Send every owner's part to every rank, through host memory."""
        return super().gather([_HostBucket(bucket_memory) for bucket_memory in bucket_memories], row, fingerprint)

    def stream_ordered(self, device: torch.device) -> bool:
        """Never: waiting for Gloo blocks the host."""
        return False

    def exchanges_status(self, bucket_memories: Sequence[BucketMemory]) -> bool:
        """True if there is anything to gather: all of it goes through host memory."""
        return bool(bucket_memories)

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, by rank."""
        return all_gather_rows(self._all_gather_row, values, self)

    def _all_gather_row(self, values: Sequence[int]) -> list[list[int]]:
        transfer, rows = self.start_all_gather_row(values)
        transfer.wait()
        return torch.stack(rows).tolist()

    def start_all_gather_row(self, values: Sequence[int]) -> tuple[Transfer, list[Tensor]]:
        """Start an all-gather of equally many integers, and where they will be, by rank."""
        row = torch.tensor(values, dtype=torch.int64)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        description = f"the all-gather of {self.participants}"
        return self._start(lambda: self._gloo.allgather([rows], [row]), row, description), rows

    def start_all_gather_ints(self, values: Sequence[int]) -> PendingInts:
        """At once: whoever uses a companion waits for the others anyway."""
        rows = self.all_gather_ints(values)
        return PendingInts(lambda: rows)

    def start_all_reduce(self, memory: Tensor) -> Transfer:
        """Start summing `memory`, on the host, over all ranks, in place."""
        description = f"the all-reduce of {self.participants}"
        return self._start(lambda: self._gloo.allreduce([as_real(memory)]), memory, description)

    def companion(self) -> CompanionTransport:
        """A transport over a further Gloo group of the same ranks; a collective."""
        return connect_companion(self, self._timeout)

    def belong_to(self, presence: Presence) -> None:
        """Tell `presence` from now on what this rank waits for."""
        self.presence = presence

    @property
    def failed(self) -> bool:
        """Whether a transfer has failed: Gloo then closes connections, and no later one would get through."""
        return bool(self._errors)

    def close(self) -> None:
        """Wait for messages under way, then end the group and its threads."""
        wait_all(self._unfinished)
        self._gloo = None

    def start_send(self, memory: Tensor, to: int, tag: int = TAG_DATA) -> Transfer:
        """Start sending host memory to one rank."""
        data, description = as_bytes(memory), f"sending to rank {self.peers[to]}"
        number = wire_tag(tag, data.numel())
        return self._start(lambda: self._gloo.send([data], to, number), memory, description, self._unfinished)

    def start_receive(self, memory: Tensor, source: int, tag: int = TAG_DATA) -> Transfer:
        """Start receiving into host memory from one rank."""
        data, description = as_bytes(memory), f"receiving from rank {self.peers[source]}"
        number = wire_tag(tag, data.numel())
        return self._start(lambda: self._gloo.recv([data], source, number), memory, description, self._unfinished)

    def start_broadcast(self, memory: Tensor, source: int) -> Transfer:
        """Start overwriting host memory with that of rank `source`."""
        data, description = as_bytes(memory), f"the broadcast of rank {self.peers[source]}"
        return self._start(lambda: self._gloo.broadcast(data, source), memory, description)

    def _start(
        self, call: Callable[[], Any], memory: Tensor, description: str, unfinished: set[Transfer] | None = None
    ) -> Transfer:
        return start(call, memory, description, unfinished, self._errors, self.presence)


def connect_companion(beside: Transport, timeout: timedelta | None) -> CompanionTransport:
    """A transport over a new Gloo group of the same ranks; a collective."""
    # torch names new groups by counters, which differ between the ranks of a subgroup. So rank 0 draws the name.
    token = torch.frombuffer(bytearray(uuid4().bytes), dtype=torch.uint8).to(beside.wire_device)
    beside.broadcast(token, 0)
    store = distributed_c10d.PrefixStore(
        f"zerostep/{bytes(token.tolist()).hex()}", distributed_c10d._get_default_store()
    )
    return CompanionTransport.connect(store, beside.rank, beside.world_size, timeout, beside.presence, beside.peers)


_companions: WeakSet[CompanionTransport] = WeakSet()


@atexit.register
def _close_companions() -> None:
    """Close all companions: torch ends only registered groups, and Gloo's threads must not outlive the interpreter."""
    # Python joins non-daemon threads before this runs: no save in the background uses a companion any more.
    for companion in list(_companions):
        companion.close()


@contextmanager
def _batch_scheduling() -> Iterator[None]:
    """Give the threads that are started inside the SCHED_BATCH policy, on Linux.

    Gloo's threads wake up for every packet. Under the default policy each wake-up interrupts a computing thread on a
    busy core, which costs about a tenth of its time; later wake-ups find more packets at once and lose nothing.
    """
    before = _thread_ids()
    yield
    # A thread that someone else starts in the meantime is caught too: it only yields its turn more readily.
    for thread in _thread_ids() - before:
        with suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _thread_ids() -> set[int]:
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()


class _HostBucket:
    """A bucket whose messages are in host memory, wherever its parameters are."""

    device = torch.device("cpu")

    def __init__(self, bucket_memory: BucketMemory) -> None:
        self._bucket_memory = bucket_memory

    def attach(self) -> None:
        self._bucket_memory.attach()

    def messages(self, owner: int) -> Sequence[Message]:
        messages = self._bucket_memory.messages(owner)
        if self._bucket_memory.device == self.device:
            return messages
        return [_HostMessage(message) for message in messages]


@dataclass(frozen=True)
class _HostMessage:
    message: Message

    @property
    def nbytes(self) -> int:
        return self.message.nbytes

    def pack(self) -> Tensor:
        # Blocks until the device has written the elements: Gloo reads host memory without knowing of streams.
        return self.message.pack().cpu()

    def buffer(self) -> Tensor:
        return torch.empty_like(self.message.buffer(), device="cpu")

    def unpack(self, memory: Tensor) -> None:
        self.message.unpack(self.message.buffer().copy_(memory))
