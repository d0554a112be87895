"""Gradients of a bucket to their owners, parameters to everyone: asynchronous, so that compute goes on meanwhile.

Three implementations of one protocol. In host memory every rank sends each owner its part, and owners sum what they
receive in rank order: half the bytes of an all-reduce, and the same sum on every run. Receives are posted before sends,
because a send that finds no receive posted holds up the opposite direction. A backend that works in stream order has
its own reduce-scatter and all-gather. In a world of one there is nothing to do.

Memory given to an exchange belongs to it until `finish()` or `wait()` has returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Protocol

import torch
from torch import Tensor

from zerostep.comm.transport import GroupTransport, NullTransport, PendingInts, Transfer, Transport, message_tag
from zerostep.plan.buckets import even_part
from zerostep.plan.layout import Bucket
from zerostep.tensors import Scratch

TAG_REDUCE = 0x7A70
_TAG_GATHER = 0x7A71
_TAG_INTS = 0x7A72
# A long part travels in several messages, so that what has arrived is summed while the rest is in flight.
_MESSAGE_BYTES = 4 << 20


class PendingReduce(Protocol):
    """A bucket of gradients in flight to its owners."""

    def finish(self, out: Tensor | None = None) -> Tensor:
        """This rank's part of the sum; an exchange may write it into `out`."""

    @property
    def nbytes(self) -> int:
        """Bytes that the exchange holds for this bucket beside the bucket itself."""


class PendingGather(Protocol):
    """A bucket of parameters in flight to every rank."""

    def wait(self) -> object:
        """Return when all parts are in place; on an accelerator, when the current stream will see them in place."""


class Exchange(Protocol):
    """How buckets travel. All ranks make the same calls in the same order."""

    blocks_host: bool  # whether waiting stops the host, and not only a stream
    bytes_sent: int  # by this rank so far
    bytes_received: int

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a bucket of gradients; its content is undefined."""

    def free(self, memory: Tensor) -> None:
        """Take back the memory of a reduced bucket, for the next one."""

    def reduce(self, memory: Tensor, bucket: Bucket) -> PendingReduce:
        """Start summing every part of `memory` over the ranks, to the part's owner."""

    def gather(self, memory: Tensor, bucket: Bucket) -> PendingGather:
        """Start sending every owner's part of `memory` to all ranks, in place."""

    def start_all_gather_ints(self, values: Sequence[int]) -> PendingInts:
        """Start an all-gather of a few integers; every rank gives the same number of them."""

    def all_gather_values(self, values: Tensor) -> Tensor:
        """A row of a few numbers in double precision from every rank, by rank, on their device."""

    def release_scratch(self) -> None:
        """Release memory that is kept for reuse: no bucket will be launched for a while."""


def connect(transport: Transport, device: torch.device) -> Exchange:
    """The exchange for memory on `device`; a collective, because the host's exchange makes a group of its own."""
    if isinstance(transport, NullTransport):
        return NullExchange()
    if isinstance(transport, GroupTransport) and transport.stream_ordered(device):
        return StreamExchange(transport)
    return HostExchange(transport.companion())


class _Unpooled:
    """Memory for buckets from the device's allocator, which takes it back with its last reference."""

    blocks_host = False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def free(self, memory: Tensor) -> None:
        pass

    def release_scratch(self) -> None:
        pass


# ---------------------------------------------------------------------- a world of one


@dataclass(frozen=True)
class _Local:
    """A reduce or gather of one rank, which is complete at once."""

    memory: Tensor
    nbytes = 0

    def finish(self, out: Tensor | None = None) -> Tensor:
        return self.memory

    def wait(self) -> None:
        pass


class NullExchange(_Unpooled):
    """A world of one: nothing travels."""

    bytes_sent = bytes_received = 0

    def reduce(self, memory: Tensor, bucket: Bucket) -> PendingReduce:
        """The memory is the sum."""
        return _Local(memory[: bucket.size])

    def gather(self, memory: Tensor, bucket: Bucket) -> PendingGather:
        """All parts are in place."""
        return _Local(memory)

    def start_all_gather_ints(self, values: Sequence[int]) -> PendingInts:
        """This rank's integers."""
        return PendingInts(lambda: [list(values)])

    def all_gather_values(self, values: Tensor) -> Tensor:
        """This rank's numbers."""
        return values.view(1, -1)


# ---------------------------------------------------------------------- host memory


class HostExchange:
    """Point-to-point messages through host memory; accelerator memory is copied to the host first."""

    blocks_host = True

    def __init__(self, transport: Transport) -> None:
        self._transport, self._rank, self._world = transport, transport.rank, transport.world_size
        self.bytes_sent = self.bytes_received = 0
        self._bucket_scratch, self._receive_scratch = Scratch(), Scratch()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory from a pool on the host, fresh memory elsewhere."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        return self._bucket_scratch.allocate(numel, dtype)

    def free(self, memory: Tensor) -> None:
        """Return memory to the pool."""
        self._bucket_scratch.free(memory)

    def reduce(self, memory: Tensor, bucket: Bucket) -> PendingReduce:
        """Send every rank's part to its owner, who sums in rank order."""
        host = memory.cpu()
        parts = _parts(host, bucket)
        mine = parts[self._rank]
        sources = [source for _, source in self._pairs()] if mine.numel() else []
        buffers = {source: self._receive_scratch.allocate(mine.numel(), mine.dtype) for source in sources}
        messages = [(parts[to], to, buffers.get(source), source) for to, source in self._pairs()]
        transfers = self._start(messages, TAG_REDUCE, _number(bucket))
        return _HostReduce(self._rank, mine, buffers, transfers, memory.device, self._receive_scratch)

    def gather(self, memory: Tensor, bucket: Bucket) -> PendingGather:
        """Send every owner's part to all ranks, straight into place if the memory is on the host."""
        host = memory.cpu()
        parts = _parts(host, bucket)
        messages = [(parts[self._rank], to, parts[source], source) for to, source in self._pairs()]
        transfers = self._start(messages, _TAG_GATHER, _number(bucket))
        others = [(bucket.cuts[rank], parts[rank]) for rank in range(self._world) if rank != self._rank]
        return _HostGather(transfers, memory, [] if host is memory else others)

    def start_all_gather_ints(self, values: Sequence[int]) -> PendingInts:
        """One small message to and from every rank."""
        rows = {rank: torch.tensor(values, dtype=torch.int64) for rank in range(self._world)}
        messages = [(rows[self._rank], to, rows[source], source) for to, source in self._pairs()]
        transfers = self._start(messages, _TAG_INTS)

        def read() -> list[list[int]]:
            transfers.wait()
            return [rows[rank].tolist() for rank in range(self._world)]

        # Gloo says that a message has come only to those who wait for it.
        return PendingInts(read, is_done=lambda: False)

    def all_gather_values(self, values: Tensor) -> Tensor:
        """As integers of the same bits; the host waits for them."""
        rows = self.start_all_gather_ints(values.view(torch.int64).tolist()).wait()
        return torch.tensor(rows, dtype=torch.int64).view(torch.float64).to(values.device)

    def release_scratch(self) -> None:
        """Release the pools' free memory; what is in flight stays."""
        self._bucket_scratch.trim()
        self._receive_scratch.trim()

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Whom to send to and whom to receive from, so that at each shift every rank sends once and receives once."""
        for shift in range(1, self._world):
            yield (self._rank + shift) % self._world, (self._rank - shift) % self._world

    def _start(
        self, messages: Sequence[tuple[Tensor, int, Tensor | None, int]], kind: int, bucket: int = 0
    ) -> _Transfers:
        """Post the receive of each pair before its send: this order must be the same on all ranks."""
        transfers = _Transfers(self._transport)
        for outgoing, to, buffer, source in messages:
            for number, piece in enumerate(_pieces(buffer)):
                tag = message_tag(kind, bucket, number)
                self.bytes_received += piece.numel() * piece.element_size()
                transfers.receives.setdefault(source, []).append(self._transport.start_receive(piece, source, tag))
            for number, piece in enumerate(_pieces(outgoing)):
                tag = message_tag(kind, bucket, number)
                transfers.sends.append(self._transport.start_send(piece, to, tag))
                self.bytes_sent += piece.numel() * piece.element_size()
        return transfers


@dataclass(frozen=True)
class _Transfers:
    """Transfers that are in flight; each keeps its memory alive, and they keep the transport, which would end them."""

    transport: Transport
    receives: dict[int, list[Transfer]] = field(default_factory=dict)
    sends: list[Transfer] = field(default_factory=list)

    def wait(self) -> None:
        for transfer in chain(*self.receives.values(), self.sends):
            transfer.wait()


@dataclass(frozen=True)
class _HostReduce:
    rank: int
    mine: Tensor
    buffers: dict[int, Tensor]
    transfers: _Transfers
    device: torch.device
    scratch: Scratch

    @property
    def nbytes(self) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in self.buffers.values())

    def finish(self, out: Tensor | None = None) -> Tensor:
        total = torch.empty_like(self.mine) if out is None or out.device.type != "cpu" else out
        for number, place in enumerate(_pieces(total)):
            self._sum(number, place)
        for transfer in self.transfers.sends:
            transfer.wait()
        for buffer in self.buffers.values():
            self.scratch.free(buffer)
        return total.to(self.device)

    def _sum(self, number: int, place: Tensor) -> None:
        """Sum in rank order: every owner must use the same order, or a sum would depend on who owns it."""
        parts = [self._part(rank, number) for rank in sorted([self.rank, *self.buffers])]
        torch.add(parts[0], parts[1], out=place)
        for part in parts[2:]:
            place.add_(part)

    def _part(self, rank: int, number: int) -> Tensor:
        return list(_pieces(self.mine))[number] if rank == self.rank else self.transfers.receives[rank][number].wait()


@dataclass(frozen=True)
class _HostGather:
    transfers: _Transfers
    memory: Tensor
    staged: Sequence[tuple[int, Tensor]]

    def wait(self) -> None:
        self.transfers.wait()
        for start, part in self.staged:
            self.memory[start : start + part.numel()].copy_(part)


def _number(bucket: Bucket) -> int:
    """A number that no other bucket of the layout has: that of its first parameter."""
    return bucket.slots[0].param if bucket.slots else 0


def _parts(memory: Tensor, bucket: Bucket) -> list[Tensor]:
    """Every rank's part of the memory of a bucket."""
    return [memory[start:stop] for start, stop in pairwise(bucket.cuts)]


def _pieces(part: Tensor | None) -> Sequence[Tensor]:
    """A part as the messages it travels in. Lengths alone decide, so sender and receiver cut alike."""
    if part is None or not part.numel():
        return ()
    return part.split(max(1, _MESSAGE_BYTES // part.element_size()))


# ---------------------------------------------------------------------- stream order


class StreamExchange(_Unpooled):
    """The backend's own collectives, in stream order: the host waits only in `PendingInts.wait`."""

    def __init__(self, transport: GroupTransport) -> None:
        self._transport, self._rank, self._world = transport, transport.rank, transport.world_size
        self.bytes_sent = self.bytes_received = 0
        self._even: dict[int, tuple[Bucket, int | None]] = {}  # by identity: thousands of cuts are slow to compare

    def reduce(self, memory: Tensor, bucket: Bucket) -> PendingReduce:
        """A reduce-scatter; buckets are padded so that the parts of all ranks have the same length."""
        parts = self._parts(memory, bucket)
        output = memory.new_empty(memory.numel() // self._world if parts is None else parts[self._rank].numel())
        self._count(memory)
        transfer = self._transport.start_reduce_scatter(output, memory, parts)
        return _StreamReduce(transfer, memory, bucket.owned(self._rank).length, output.nbytes)

    def gather(self, memory: Tensor, bucket: Bucket) -> PendingGather:
        """An all-gather in place."""
        self._count(memory)
        return self._transport.start_all_gather(memory, self._parts(memory, bucket))

    def start_all_gather_ints(self, values: Sequence[int]) -> PendingInts:
        """In stream order, as everything here."""
        return self._transport.start_all_gather_ints(values)

    def all_gather_values(self, values: Tensor) -> Tensor:
        """In stream order: no host waits."""
        rows = values.new_empty((self._world, values.numel()))
        rows[self._rank] = values
        return self._transport.start_all_gather(rows.view(-1), None).wait().view_as(rows)

    def _parts(self, memory: Tensor, bucket: Bucket) -> list[Tensor] | None:
        """Every rank's part; `None` if they are equally long and fill the memory, so that no view needs to be made."""
        if id(bucket) not in self._even:
            lengths = {stop - start for start, stop in pairwise(bucket.cuts)}
            self._even[id(bucket)] = bucket, lengths.pop() if len(lengths) == 1 else even_part(bucket)
        even = self._even[id(bucket)][1]
        if even is not None and even * self._world == memory.numel():
            return None
        return _parts(memory, bucket)

    def _count(self, memory: Tensor) -> None:
        moved = memory.numel() * memory.element_size() * (self._world - 1) // self._world
        self.bytes_sent += moved
        self.bytes_received += moved


@dataclass(frozen=True)
class _StreamReduce:
    transfer: Transfer
    memory: Tensor  # the backend reads it until the transfer is done
    length: int
    nbytes: int

    def finish(self, out: Tensor | None = None) -> Tensor:
        return self.transfer.wait()[: self.length]
