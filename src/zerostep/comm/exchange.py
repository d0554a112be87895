"""How the gradients of a bucket come to their owners, and its parameters to everyone; both under way while others work.

Three ways, one face. In host memory every rank sends each owner its part and sums what it receives in the order of the
ranks: half the bytes of an all-reduce, and the same sum on every run. Receives are posted before sends, because a send
that finds no receive posted holds up the opposite direction. A backend that works in stream order has a reduce-scatter
and an all-gather of its own. In a world of one there is nothing to do.

Memory that is under way belongs to the exchange until `finish()` or `wait()` has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from zerostep.comm.transport import EvenParts, NullTransport, Transfer, Transport
from zerostep.plan.buckets import even_part
from zerostep.plan.layout import Bucket
from zerostep.tensors import Scratch

__all__ = [
    "Exchange",
    "HostExchange",
    "NullExchange",
    "PendingGather",
    "PendingInts",
    "PendingReduce",
    "StreamExchange",
    "connect",
]

_TAG_REDUCE = 0x7A70
_TAG_GATHER = 0x7A71
_TAG_MEET = 0x7A72
# A long part travels in several messages, so that what has arrived is summed while the rest is under way.
_MESSAGE_BYTES = 4 << 20


class PendingReduce(Protocol):
    """A bucket of gradients on its way to the owners."""

    def finish(self, out: Tensor | None = None) -> Tensor:
        """This rank's part of the sum, in memory of its own: in `out`, if that is of use."""


class PendingGather(Protocol):
    """A bucket of parameters on its way to everyone."""

    def wait(self) -> None:
        """Return when all parts are in place (on an accelerator: when the current stream will see them so)."""


class PendingInts(Protocol):
    """Words on their way to everyone."""

    def wait(self) -> list[list[int]]:
        """The words of every rank, by rank."""


class Exchange(Protocol):
    """All ranks make the same calls in the same order."""

    def reduce(self, memory: Tensor, bucket: Bucket) -> PendingReduce:
        """Start bringing the sum of every part of `memory` to its owner."""

    def gather(self, memory: Tensor, bucket: Bucket) -> PendingGather:
        """Start bringing every owner's part of `memory` to all ranks, in place."""

    def start_all_gather_ints(self, words: Sequence[int]) -> PendingInts:
        """Start exchanging a few words; all ranks give equally many."""

    def release_scratch(self) -> None:
        """Nothing is launched for a while: let go of spare memory."""

    @property
    def blocks_host(self) -> bool:
        """Whether waiting stops the host, and not only a stream."""

    @property
    def bytes_sent(self) -> int:
        """How much this rank has sent so far."""

    @property
    def bytes_received(self) -> int:
        """How much this rank has received so far."""


def connect(transport: Transport, device: torch.device) -> Exchange:
    """The exchange for memory on `device`; a collective."""
    if isinstance(transport, NullTransport):
        return NullExchange()
    if transport.stream_ordered(device):
        return StreamExchange(transport)
    return HostExchange(transport.companion())


@dataclass(frozen=True)
class _ReducedHere:
    """Nothing has to travel."""

    memory: Tensor
    words: Sequence[int] = ()

    def finish(self, out: Tensor | None = None) -> Tensor:
        return self.memory


@dataclass(frozen=True)
class _GatheredHere:
    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class _PendingInts:
    read: Callable[[], list[list[int]]]

    def wait(self) -> list[list[int]]:
        return self.read()


class NullExchange:
    """A world of one."""

    blocks_host = False
    bytes_sent = bytes_received = 0

    def reduce(self, memory: Tensor, bucket: Bucket) -> PendingReduce:
        """The memory is the sum."""
        return _ReducedHere(memory[: bucket.size])

    def gather(self, memory: Tensor, bucket: Bucket) -> PendingGather:
        """Everything is here."""
        return _GatheredHere()

    def start_all_gather_ints(self, words: Sequence[int]) -> PendingInts:
        """This rank's words."""
        return _PendingInts(lambda: [list(words)])

    def release_scratch(self) -> None:
        """There is none."""


# ---------------------------------------------------------------------- host memory


class HostExchange:
    """Point to point through host memory; accelerator memory is staged."""

    blocks_host = True

    def __init__(self, transport: Transport) -> None:
        self._transport, self._rank, self._world = transport, transport.rank, transport.world_size
        self.bytes_sent = self.bytes_received = 0
        self._scratch = Scratch()

    def reduce(self, memory: Tensor, bucket: Bucket) -> PendingReduce:
        """Every rank's part to its owner, who sums in the order of the ranks."""
        host = memory.cpu()
        mine = host[bucket.cuts[self._rank] : bucket.cuts[self._rank + 1]]
        sources = [source for _, source in self._pairs_of_ranks()] if mine.numel() else []
        buffers = {source: self._scratch.take(mine.numel(), mine.dtype) for source in sources}
        pairs = [(host[bucket.cuts[to] : bucket.cuts[to + 1]], to, buffers.get(source), source)
                 for to, source in self._pairs_of_ranks()]  # fmt: skip
        transfers = self._start_messages(pairs, _TAG_REDUCE)
        return _HostPendingReduce(self._rank, mine, buffers, transfers, memory.device, self._scratch)

    def gather(self, memory: Tensor, bucket: Bucket) -> PendingGather:
        """Every owner's part to all, straight into place where the memory is the host's."""
        staged = memory.cpu() if memory.device.type != "cpu" else memory
        parts = [staged[bucket.cuts[rank] : bucket.cuts[rank + 1]] for rank in range(self._world)]
        pairs = [(parts[self._rank], to, parts[source], source) for to, source in self._pairs_of_ranks()]
        transfers = self._start_messages(pairs, _TAG_GATHER)
        others = [(bucket.cuts[rank], parts[rank]) for rank in range(self._world) if rank != self._rank]
        return _HostPendingGather(transfers, memory, [] if staged is memory else others)

    def start_all_gather_ints(self, words: Sequence[int]) -> PendingInts:
        """One small message to and from every rank."""
        rows = {rank: torch.tensor(words, dtype=torch.int64) for rank in range(self._world)}
        pairs = [(rows[self._rank], to, rows[source], source) for to, source in self._pairs_of_ranks()]
        transfers = self._start_messages(pairs, _TAG_MEET)

        def read() -> list[list[int]]:
            for transfer in transfers.all():
                transfer.wait()
            return [rows[rank].tolist() for rank in range(self._world)]

        return _PendingInts(read)

    def release_scratch(self) -> None:
        """Keep what is under way."""
        self._scratch.trim()

    def _pairs_of_ranks(self) -> Iterator[tuple[int, int]]:
        """Whom to send to and whom to receive from: in each round everybody sends once and receives once."""
        for shift in range(1, self._world):
            yield (self._rank + shift) % self._world, (self._rank - shift) % self._world

    def _start_messages(self, pairs: Sequence[tuple[Tensor, int, Tensor | None, int]], tag: int) -> _Transfers:
        found = _Transfers()
        for outgoing, to, buffer, source in pairs:
            for message in _messages(buffer):
                self.bytes_received += message.numel() * message.element_size()
                found.receives.setdefault(source, []).append(self._transport.start_receive(message, source, tag))
            for message in _messages(outgoing):
                found.sends.append(self._transport.start_send(message, to, tag))
                self.bytes_sent += message.numel() * message.element_size()
        return found


@dataclass(frozen=True)
class _Transfers:
    receives: dict[int, list[Transfer]] = field(default_factory=dict)
    sends: list[Transfer] = field(default_factory=list)

    def all(self) -> list[Transfer]:
        return [transfer for transfers in self.receives.values() for transfer in transfers] + self.sends


@dataclass(frozen=True)
class _HostPendingReduce:
    rank: int
    mine: Tensor
    buffers: dict[int, Tensor]
    transfers: _Transfers
    device: torch.device
    scratch: Scratch

    def finish(self, out: Tensor | None = None) -> Tensor:
        total = torch.empty_like(self.mine) if out is None or out.device.type != "cpu" else out
        for number, place in enumerate(_messages(total)):
            self._sum(number, place)
        for transfer in self.transfers.sends:
            transfer.wait()
        for buffer in self.buffers.values():
            self.scratch.give(buffer)
        return total.to(self.device)

    def _sum(self, number: int, place: Tensor) -> None:
        """The order is that of the ranks, whoever sums."""
        parts = [self._part(rank, number) for rank in sorted([self.rank, *self.buffers])]
        torch.add(parts[0], parts[1], out=place)
        for part in parts[2:]:
            place.add_(part)

    def _part(self, rank: int, number: int) -> Tensor:
        return list(_messages(self.mine))[number] if rank == self.rank else self.transfers.receives[rank][number].wait()


@dataclass(frozen=True)
class _HostPendingGather:
    transfers: _Transfers
    memory: Tensor
    staged: Sequence[tuple[int, Tensor]]

    def wait(self) -> None:
        for transfer in self.transfers.all():
            transfer.wait()
        for start, part in self.staged:
            self.memory[start : start + part.numel()].copy_(part)


def _messages(part: Tensor | None) -> Sequence[Tensor]:
    """A part as the messages it travels in; lengths alone decide, so both ends cut alike."""
    if part is None or not part.numel():
        return ()
    return part.split(max(1, _MESSAGE_BYTES // part.element_size()))


# ---------------------------------------------------------------------- stream order


class StreamExchange:
    """The backend's own collectives, in stream order: nothing here waits on the host but `Meeting.wait`."""

    blocks_host = False

    def __init__(self, transport: Transport) -> None:
        self._transport, self._rank, self._world = transport, transport.rank, transport.world_size
        self.bytes_sent = self.bytes_received = 0
        self._even: dict[int, tuple[Bucket, int | None]] = {}  # by identity: thousands of cuts are slow to compare

    def reduce(self, memory: Tensor, bucket: Bucket) -> PendingReduce:
        """A reduce-scatter; memory that was made for it is padded so that all parts are equally long."""
        parts = self._parts(memory, bucket)
        output = torch.empty_like(parts[self._rank])
        self._count(memory)
        transfer = self._transport.start_reduce_scatter(output, parts, memory)
        return _StreamPendingReduce(transfer, memory, bucket.owned(self._rank).length)

    def gather(self, memory: Tensor, bucket: Bucket) -> PendingGather:
        """An all-gather in place."""
        self._count(memory)
        return self._transport.start_all_gather(self._parts(memory, bucket), memory)  # type: ignore[return-value]

    def start_all_gather_ints(self, words: Sequence[int]) -> PendingInts:
        """One row for every rank; a sum of rows with one rank's words in each is all of them."""
        own = torch.tensor(
            [[0] * len(words)] * self._rank + [list(words)] + [[0] * len(words)] * (self._world - self._rank - 1)
        )
        device = self._transport.wire_device
        # From pinned memory the copy is a matter between streams; from any other it would stop the host.
        rows = (own.pin_memory() if device.type != "cpu" else own).to(device, non_blocking=True)
        transfer = self._transport.start_all_reduce(rows)
        return _PendingInts(lambda: transfer.wait().tolist())

    def release_scratch(self) -> None:
        """The backend's own."""

    def _parts(self, memory: Tensor, bucket: Bucket) -> Sequence[Tensor]:
        if id(bucket) not in self._even:
            self._even[id(bucket)] = bucket, even_part(bucket)
        even = self._even[id(bucket)][1]
        if even is not None and even * self._world == memory.numel():
            return EvenParts(memory, even)
        return [memory[bucket.cuts[rank] : bucket.cuts[rank + 1]] for rank in range(self._world)]

    def _count(self, memory: Tensor) -> None:
        moved = memory.numel() * memory.element_size() * (self._world - 1) // self._world
        self.bytes_sent += moved
        self.bytes_received += moved


@dataclass(frozen=True)
class _StreamPendingReduce:
    transfer: Transfer
    memory: Tensor  # read by the backend until the flight has landed
    length: int

    def finish(self, out: Tensor | None = None) -> Tensor:
        return self.transfer.wait()[: self.length]
