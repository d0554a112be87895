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

from zerostep.comm.transport import EvenParts, Flight, NullTransport, Transport
from zerostep.plan.buckets import even_part
from zerostep.plan.layout import Bucket
from zerostep.tensors import Scratch

__all__ = ["Exchange", "Gathering", "HostExchange", "Meeting", "NullExchange", "Reducing", "StreamExchange", "connect"]

_TAG_REDUCE = 0x7A70
_TAG_GATHER = 0x7A71
_TAG_MEET = 0x7A72
# A long part travels in several messages, so that what has arrived is summed while the rest is under way.
_MESSAGE_BYTES = 4 << 20


class Reducing(Protocol):
    """A bucket of gradients on its way to the owners."""

    def finish(self, out: Tensor | None = None) -> Tensor:
        """This rank's part of the sum, in memory of its own: in `out`, if that is of use."""


class Gathering(Protocol):
    """A bucket of parameters on its way to everyone."""

    def wait(self) -> None:
        """Return when all parts are in place (on an accelerator: when the current stream will see them so)."""


class Meeting(Protocol):
    """Words on their way to everyone."""

    def wait(self) -> list[list[int]]:
        """The words of every rank, by rank."""


class Exchange(Protocol):
    """All ranks make the same calls in the same order."""

    def reduce(self, memory: Tensor, bucket: Bucket) -> Reducing:
        """Start bringing the sum of every part of `memory` to its owner."""

    def gather(self, memory: Tensor, bucket: Bucket) -> Gathering:
        """Start bringing every owner's part of `memory` to all ranks, in place."""

    def meet(self, words: Sequence[int]) -> Meeting:
        """Start exchanging a few words; all ranks give equally many."""

    def rest(self) -> None:
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
class _Here:
    """Nothing has to travel."""

    memory: Tensor
    words: Sequence[int] = ()

    def finish(self, out: Tensor | None = None) -> Tensor:
        return self.memory


@dataclass(frozen=True)
class _Nothing:
    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class _Words:
    read: Callable[[], list[list[int]]]

    def wait(self) -> list[list[int]]:
        return self.read()


class NullExchange:
    """A world of one."""

    blocks_host = False
    bytes_sent = bytes_received = 0

    def reduce(self, memory: Tensor, bucket: Bucket) -> Reducing:
        """The memory is the sum."""
        return _Here(memory[: bucket.size])

    def gather(self, memory: Tensor, bucket: Bucket) -> Gathering:
        """Everything is here."""
        return _Nothing()

    def meet(self, words: Sequence[int]) -> Meeting:
        """This rank's words."""
        return _Words(lambda: [list(words)])

    def rest(self) -> None:
        """There is none."""


# ---------------------------------------------------------------------- host memory


class HostExchange:
    """Point to point through host memory; accelerator memory is staged."""

    blocks_host = True

    def __init__(self, transport: Transport) -> None:
        self._transport, self._rank, self._world = transport, transport.rank, transport.world_size
        self.bytes_sent = self.bytes_received = 0
        self._scratch = Scratch()

    def reduce(self, memory: Tensor, bucket: Bucket) -> Reducing:
        """Every rank's part to its owner, who sums in the order of the ranks."""
        host = memory.cpu()
        mine = host[bucket.cuts[self._rank] : bucket.cuts[self._rank + 1]]
        sources = [source for _, source in self._partners()] if mine.numel() else []
        rooms = {source: self._scratch.take(mine.numel(), mine.dtype) for source in sources}
        pairs = [(host[bucket.cuts[to] : bucket.cuts[to + 1]], to, rooms.get(source), source)
                 for to, source in self._partners()]  # fmt: skip
        flights = self._swap(pairs, _TAG_REDUCE)
        return _HostReducing(self._rank, mine, rooms, flights, memory.device, self._scratch)

    def gather(self, memory: Tensor, bucket: Bucket) -> Gathering:
        """Every owner's part to all, straight into place where the memory is the host's."""
        staged = memory.cpu() if memory.device.type != "cpu" else memory
        parts = [staged[bucket.cuts[rank] : bucket.cuts[rank + 1]] for rank in range(self._world)]
        pairs = [(parts[self._rank], to, parts[source], source) for to, source in self._partners()]
        flights = self._swap(pairs, _TAG_GATHER)
        others = [(bucket.cuts[rank], parts[rank]) for rank in range(self._world) if rank != self._rank]
        return _HostGathering(flights, memory, [] if staged is memory else others)

    def meet(self, words: Sequence[int]) -> Meeting:
        """One small message to and from every rank."""
        rows = {rank: torch.tensor(words, dtype=torch.int64) for rank in range(self._world)}
        pairs = [(rows[self._rank], to, rows[source], source) for to, source in self._partners()]
        flights = self._swap(pairs, _TAG_MEET)

        def read() -> list[list[int]]:
            for flight in flights.all():
                flight.wait()
            return [rows[rank].tolist() for rank in range(self._world)]

        return _Words(read)

    def rest(self) -> None:
        """Keep what is under way."""
        self._scratch.trim()

    def _partners(self) -> Iterator[tuple[int, int]]:
        """Whom to send to and whom to receive from: in each round everybody sends once and receives once."""
        for shift in range(1, self._world):
            yield (self._rank + shift) % self._world, (self._rank - shift) % self._world

    def _swap(self, pairs: Sequence[tuple[Tensor, int, Tensor | None, int]], tag: int) -> _Flights:
        found = _Flights()
        for outgoing, to, room, source in pairs:
            for piece in _pieces(room):
                self.bytes_received += piece.numel() * piece.element_size()
                found.receives.setdefault(source, []).append(self._transport.start_receive(piece, source, tag))
            for piece in _pieces(outgoing):
                found.sends.append(self._transport.start_send(piece, to, tag))
                self.bytes_sent += piece.numel() * piece.element_size()
        return found


@dataclass(frozen=True)
class _Flights:
    receives: dict[int, list[Flight]] = field(default_factory=dict)
    sends: list[Flight] = field(default_factory=list)

    def all(self) -> list[Flight]:
        return [flight for flights in self.receives.values() for flight in flights] + self.sends


@dataclass(frozen=True)
class _HostReducing:
    rank: int
    mine: Tensor
    rooms: dict[int, Tensor]
    flights: _Flights
    device: torch.device
    scratch: Scratch

    def finish(self, out: Tensor | None = None) -> Tensor:
        total = torch.empty_like(self.mine) if out is None or out.device.type != "cpu" else out
        for number, place in enumerate(_pieces(total)):
            self._sum(number, place)
        for flight in self.flights.sends:
            flight.wait()
        for room in self.rooms.values():
            self.scratch.give(room)
        return total.to(self.device)

    def _sum(self, number: int, place: Tensor) -> None:
        """The order is that of the ranks, whoever sums."""
        parts = [self._part(rank, number) for rank in sorted([self.rank, *self.rooms])]
        torch.add(parts[0], parts[1], out=place)
        for part in parts[2:]:
            place.add_(part)

    def _part(self, rank: int, number: int) -> Tensor:
        return list(_pieces(self.mine))[number] if rank == self.rank else self.flights.receives[rank][number].wait()


@dataclass(frozen=True)
class _HostGathering:
    flights: _Flights
    memory: Tensor
    staged: Sequence[tuple[int, Tensor]]

    def wait(self) -> None:
        for flight in self.flights.all():
            flight.wait()
        for start, part in self.staged:
            self.memory[start : start + part.numel()].copy_(part)


def _pieces(part: Tensor | None) -> Sequence[Tensor]:
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

    def reduce(self, memory: Tensor, bucket: Bucket) -> Reducing:
        """A reduce-scatter; memory that was made for it is padded so that all parts are equally long."""
        parts = self._parts(memory, bucket)
        output = torch.empty_like(parts[self._rank])
        self._count(memory)
        flight = self._transport.start_reduce_scatter(output, parts, memory)
        return _StreamReducing(flight, memory, bucket.owned(self._rank).length)

    def gather(self, memory: Tensor, bucket: Bucket) -> Gathering:
        """An all-gather in place."""
        self._count(memory)
        return self._transport.start_all_gather(self._parts(memory, bucket), memory)  # type: ignore[return-value]

    def meet(self, words: Sequence[int]) -> Meeting:
        """One row for every rank; a sum of rows with one rank's words in each is all of them."""
        own = torch.tensor(
            [[0] * len(words)] * self._rank + [list(words)] + [[0] * len(words)] * (self._world - self._rank - 1)
        )
        device = self._transport.wire_device
        # From pinned memory the copy is a matter between streams; from any other it would stop the host.
        rows = (own.pin_memory() if device.type != "cpu" else own).to(device, non_blocking=True)
        flight = self._transport.start_all_reduce(rows)
        return _Words(lambda: flight.wait().tolist())

    def rest(self) -> None:
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
class _StreamReducing:
    flight: Flight
    memory: Tensor  # read by the backend until the flight has landed
    length: int

    def finish(self, out: Tensor | None = None) -> Tensor:
        return self.flight.wait()[: self.length]
