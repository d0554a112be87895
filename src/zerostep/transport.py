"""The one door to the network: every collective, and every difference between backends and torch versions.

Two facts about a backend are needed, and both are asked for, not derived from its name: which devices the process
group serves, and whether the memory to move is host memory.

* Host memory moves point to point. Receives are posted before sends and partners are taken in shifted pairs: two
  opposite broadcasts in one group run one after the other, two opposite messages run at the same time.
* Accelerator memory moves by broadcasts from each owner: the one collective that every backend offers for parts of
  uneven length, in stream order, without a word between the hosts.

Everything travels as bytes, so that no dtype is refused. Ranks are always ranks of the group, never of the world.

Order is the contract: all ranks make the same calls in the same order, from one thread per transport.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, Protocol
from uuid import uuid4
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

__all__ = [
    "CompanionTransport",
    "EvenParts",
    "Flight",
    "GroupTransport",
    "NullTransport",
    "Parcel",
    "Piece",
    "Transport",
    "TransportError",
    "connect",
]

_TAG_DATA = 0x7A65
_TAG_WORD = 0x7A66
# Messages under way at a time. Many keep a socket busy; on an accelerator, stream order does that, and scratch is dear.
_MESSAGES_IN_FLIGHT = 8
_BROADCASTS_IN_FLIGHT = 2
_PARTING_SECONDS = 10


class TransportError(RuntimeError):
    """A transfer failed; the message names the other rank and what was under way."""


class Piece(Protocol):
    """A stretch of one owner's part of a bucket that travels as one message."""

    def load(self) -> Tensor:
        """The elements as one-dimensional contiguous memory, to be sent."""

    def room(self) -> Tensor:
        """Memory of the same kind to receive them into."""

    def store(self, memory: Tensor) -> None:
        """Take over received memory."""


class Parcel(Protocol):
    """What a transport needs of one bucket: every owner's part, in pieces that all ranks cut alike."""

    @property
    def device(self) -> torch.device:
        """Where the bucket lies."""

    def attach(self) -> None:
        """Follow parameters whose `.data` was bound to other memory; before each gather."""

    def pieces(self, owner: int) -> Sequence[Piece]:
        """The part of `owner`; empty if it owns nothing here."""


@dataclass(frozen=True, eq=False)
class Flight:
    """A transfer under way. It keeps the memory alive that the backend still reads or writes.

    `others` are all that nobody has waited for yet, this one included.
    """

    work: Any
    memory: Tensor
    story: str
    others: set[Flight] = field(default_factory=set)

    def wait(self) -> Tensor:
        """Wait for the transfer (on an accelerator: make the current stream wait) and return its memory."""
        self.others.discard(self)
        with _telling(self.story):
            self.work.wait()
        return self.memory


def _start(call: Callable[[], Any], memory: Tensor, story: str, others: set[Flight] | None = None) -> Flight:
    """Start a transfer. A peer that is gone already is noticed here, one that goes later in `Flight.wait`."""
    with _telling(story), _unrecorded(memory):
        if others is None:
            return Flight(call(), memory, story)
        found = Flight(call(), memory, story, others)
        others.add(found)
        return found


@contextmanager
def _unrecorded(memory: Tensor) -> Iterator[None]:
    """Hide a host's transfer from profilers: one that ends after its profiler has stopped writes into freed memory."""
    if memory.device.type != "cpu" or not torch._C._autograd._profiler_enabled():
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


class Transport(Protocol):
    """How one rank talks to the others of its group."""

    @property
    def rank(self) -> int:
        """This rank in the group."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""

    @property
    def wire_device(self) -> torch.device:
        """Where tensors must lie to be sent: the host if the group serves it."""

    def stream_ordered(self, device: torch.device) -> bool:
        """Whether waiting for a transfer of `device` memory only orders streams and never blocks the host."""

    def gather(self, parcels: Sequence[Parcel], status: int, fingerprint: int) -> list[int]:
        """Bring every owner's part to every rank.

        Where hosts wait for each other anyway, a word goes first: the returned status of every rank, and a fingerprint
        of what is about to be sent, which must be the same on all. Elsewhere only this rank's own status is returned.
        """

    def meets_on_host(self, parcels: Sequence[Parcel]) -> bool:
        """Whether a word goes before these parcels."""

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, by rank; all ranks give equally many."""

    def broadcast(self, memory: Tensor, source: int) -> None:
        """Overwrite `memory` (contiguous, on the wire device) with that of rank `source`."""

    def start_send(self, memory: Tensor, to: int, tag: int = ...) -> Flight:
        """Start sending contiguous `memory`, on the wire device, to one rank; messages of one tag keep their order."""

    def start_receive(self, memory: Tensor, source: int, tag: int = ...) -> Flight:
        """Start receiving into contiguous `memory`, on the wire device, from one rank."""

    def start_reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], memory: Tensor) -> Flight:
        """Start summing every rank's `parts`, views of `memory`, each to its rank's `output`; in stream order."""

    def start_all_gather(self, parts: Sequence[Tensor], memory: Tensor) -> Flight:
        """Start bringing every rank's own one of `parts`, views of `memory`, to all ranks; in stream order."""

    def start_all_reduce(self, memory: Tensor) -> Flight:
        """Start summing `memory` over all ranks, in place."""

    def companion(self) -> Transport:
        """A second transport over the same ranks, whose calls need no order with those of this one; a collective."""


class NullTransport:
    """A world of one: there is nobody to talk to."""

    rank = 0
    world_size = 1
    wire_device = torch.device("cpu")

    def stream_ordered(self, device: torch.device) -> bool:
        """There is no transfer to wait for."""
        return device.type != "cpu"

    def gather(self, parcels: Sequence[Parcel], status: int, fingerprint: int) -> list[int]:
        """Nothing to bring."""
        return [status]

    def meets_on_host(self, parcels: Sequence[Parcel]) -> bool:
        """Nobody to meet."""
        return False

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """This rank's integers."""
        return [list(values)]

    def broadcast(self, memory: Tensor, source: int) -> None:
        """`memory` is already everywhere."""

    def start_send(self, memory: Tensor, to: int, tag: int = 0) -> Flight:
        """There is no other rank."""
        raise TransportError(f"cannot send to rank {to}: this is a world of one")

    def start_receive(self, memory: Tensor, source: int, tag: int = 0) -> Flight:
        """There is no other rank."""
        raise TransportError(f"cannot receive from rank {source}: this is a world of one")

    def start_reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], memory: Tensor) -> Flight:
        """The sum over one rank."""
        output.copy_(parts[0])
        return Flight(_Done(), output, "")

    def start_all_gather(self, parts: Sequence[Tensor], memory: Tensor) -> Flight:
        """Every part is here."""
        return Flight(_Done(), memory, "")

    def start_all_reduce(self, memory: Tensor) -> Flight:
        """The sum over one rank."""
        return Flight(_Done(), memory, "")

    def companion(self) -> Transport:
        """Itself: no order to keep."""
        return self


class GroupTransport:
    """A transport over a torch process group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self._group, self._device = group, device
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    @cached_property
    def wire_device(self) -> torch.device:
        """The host if the group serves it, else the device of the parameters, else the current accelerator."""
        kinds = list(_backends(self._group))
        if "cpu" in kinds:
            return torch.device("cpu")
        if self._device is not None and self._device.type in kinds:
            return self._device
        return torch.device(kinds[0], torch.accelerator.current_device_index())

    def stream_ordered(self, device: torch.device) -> bool:
        """True for a backend that serves accelerators alone: one that serves the host too stages through it."""
        backends = _backends(self._group)
        return device.type != "cpu" and backends.get(device.type) != backends.get("cpu")

    def gather(self, parcels: Sequence[Parcel], status: int, fingerprint: int) -> list[int]:
        """Bring every owner's part to every rank, bucket by bucket in the given order.

        A peer that is lost on the way is an error, but only when the others have got all that they wait for.
        """
        trouble = _Trouble()
        statuses = self._meet(status, fingerprint, trouble) if self.meets_on_host(parcels) else [status]
        for parcel in parcels:
            parcel.attach()
            if parcel.device.type == "cpu":
                self._exchange(parcel, trouble)
            else:
                self._broadcast_pieces(parcel)
        trouble.tell()
        return statuses

    def meets_on_host(self, parcels: Sequence[Parcel]) -> bool:
        """True where some parcel lies in host memory: then every rank waits for every other anyway."""
        return any(parcel.device.type == "cpu" for parcel in parcels)

    def _exchange(self, parcel: Parcel, trouble: _Trouble) -> None:
        outgoing = [piece.load() for piece in parcel.pieces(self.rank)]
        flying = deque[tuple[Piece | None, Flight | None, Flight | None]]()
        for shift in range(1, self.world_size):
            to, source = (self.rank + shift) % self.world_size, (self.rank - shift) % self.world_size
            for piece, memory in zip_longest(parcel.pieces(source), outgoing):
                # The receive comes first: a send that finds no receive posted holds up the opposite direction.
                receive = send = None
                with trouble:
                    receive = self.start_receive(piece.room(), source) if piece is not None else None
                with trouble:
                    send = self.start_send(memory, to) if memory is not None else None
                flying.append((piece, receive, send))
                if len(flying) == _MESSAGES_IN_FLIGHT:
                    _land(*flying.popleft(), trouble)
        while flying:
            _land(*flying.popleft(), trouble)

    def _broadcast_pieces(self, parcel: Parcel) -> None:
        flying = deque[tuple[Piece | None, Flight]]()
        for owner in range(self.world_size):
            mine = owner == self.rank
            for piece in parcel.pieces(owner):
                flight = self._start_broadcast(piece.load() if mine else piece.room(), owner)
                flying.append((None if mine else piece, flight))
                if len(flying) == _BROADCASTS_IN_FLIGHT:
                    _settle(*flying.popleft())
        while flying:
            _settle(*flying.popleft())

    def _meet(self, status: int, fingerprint: int, trouble: _Trouble) -> list[int]:
        """One small message to and from every rank: cheaper than a collective."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        words = {rank: torch.tensor([status, fingerprint]) for rank in range(self.world_size)}
        flights = list[Flight]()
        for rank in others:
            with trouble:
                flights.append(self._start_receive(words[rank], rank, _TAG_WORD))
        for rank in others:
            with trouble:
                flights.append(self._start_send(words[self.rank], rank, _TAG_WORD))
        for flight in flights:
            with trouble:
                flight.wait()
        for rank in others:
            if int(words[rank][1]) != fingerprint:
                raise TransportError(
                    f"rank {rank} is about to send other parameters than rank {self.rank} expects: requires_grad, "
                    "dtype and device of parameters must change on all ranks together"
                )
        return [int(words[rank][0]) for rank in range(self.world_size)]

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, by rank."""
        row = torch.tensor(values, dtype=torch.int64, device=self.wire_device)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        story = f"the all-gather of {self.world_size} ranks"
        _start(lambda: dist.all_gather(rows, row, group=self._group, async_op=True), row, story).wait()
        return torch.stack(rows).tolist()

    def broadcast(self, memory: Tensor, source: int) -> None:
        """Overwrite `memory` with that of rank `source`."""
        self._start_broadcast(memory, source).wait()

    def start_send(self, memory: Tensor, to: int, tag: int = _TAG_DATA) -> Flight:
        """Start sending `memory` to one rank."""
        return self._start_send(memory, to, tag)

    def start_receive(self, memory: Tensor, source: int, tag: int = _TAG_DATA) -> Flight:
        """Start receiving into `memory` from one rank."""
        return self._start_receive(memory, source, tag)

    def start_reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], memory: Tensor) -> Flight:
        """One native call where all parts are equally long, else the list form, which takes any lengths."""
        story = f"the reduce-scatter of {self.world_size} ranks"
        if _tile(parts, memory):
            call: Callable[..., Any] = partial(_reduce_scatter, _as_real(output), _as_real(memory))
        else:
            call = partial(dist.reduce_scatter, _as_real(output), list(map(_as_real, parts)))
        return _start(lambda: call(group=self._group, async_op=True), output, story)

    def start_all_gather(self, parts: Sequence[Tensor], memory: Tensor) -> Flight:
        """One native call where all parts are equally long, else the list form, which takes any lengths."""
        story, mine = f"the all-gather of {self.world_size} ranks", parts[self.rank]
        if _tile(parts, memory):
            call: Callable[..., Any] = partial(_all_gather, _as_real(memory), _as_real(mine))
        else:
            call = partial(dist.all_gather, list(map(_as_real, parts)), _as_real(mine))
        return _start(lambda: call(group=self._group, async_op=True), memory, story)

    def start_all_reduce(self, memory: Tensor) -> Flight:
        """Start summing `memory` over all ranks, in place."""
        story = f"the all-reduce of {self.world_size} ranks"
        return _start(lambda: dist.all_reduce(_as_real(memory), group=self._group, async_op=True), memory, story)

    def _start_send(self, memory: Tensor, to: int, tag: int) -> Flight:
        story = f"sending to rank {to} of {self.world_size}"
        return _start(lambda: dist.isend(_as_bytes(memory), group=self._group, group_dst=to, tag=tag), memory, story)

    def _start_receive(self, memory: Tensor, source: int, tag: int) -> Flight:
        story = f"receiving from rank {source} of {self.world_size}"
        return _start(
            lambda: dist.irecv(_as_bytes(memory), group=self._group, group_src=source, tag=tag), memory, story
        )

    def _start_broadcast(self, memory: Tensor, source: int) -> Flight:
        story, data = f"the broadcast of rank {source} of {self.world_size}", _as_bytes(memory)
        return _start(lambda: dist.broadcast(data, group=self._group, group_src=source, async_op=True), memory, story)

    def companion(self) -> Transport:
        """A Gloo group of our own over the same ranks; host memory only, whatever backends this group has."""
        token = torch.frombuffer(bytearray(uuid4().bytes), dtype=torch.uint8).to(self.wire_device)
        self.broadcast(token, 0)
        # torch names new groups by counters that differ between ranks of a subgroup; a drawn name cannot clash.
        store = distributed_c10d.PrefixStore(
            f"zerostep/{bytes(token.tolist()).hex()}", distributed_c10d._get_default_store()
        )
        timeout = _timeout(self._group) or distributed_c10d.default_pg_timeout
        with _patient_threads():
            gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)
        companion = CompanionTransport(gloo)
        companion.all_gather_ints([0])  # nobody may drop it while others are still connecting
        return companion


class CompanionTransport(GroupTransport):
    """A transport over a Gloo group that torch has no name for. Accelerator memory is staged through the host."""

    wire_device = torch.device("cpu")

    def __init__(self, gloo: dist.ProcessGroupGloo) -> None:
        self._gloo: Any = gloo
        self._flights: set[Flight] = set()
        _companions.add(self)
        # Whoever goes first must not leave the others with messages that nobody takes: their sockets would fail.
        finalize(self, _land_all, self._flights).atexit = False
        self.rank = gloo.rank()
        self.world_size = gloo.size()

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
        _start(lambda: self._gloo.allgather([rows], [row]), row, f"the all-gather of {self.world_size} ranks").wait()
        return torch.stack(rows).tolist()

    def _start_send(self, memory: Tensor, to: int, tag: int) -> Flight:
        data, story = _as_bytes(memory), f"sending to rank {to}"
        return _start(lambda: self._gloo.send([data], to, tag), memory, story, self._flights)

    def _start_receive(self, memory: Tensor, source: int, tag: int) -> Flight:
        data, story = _as_bytes(memory), f"receiving from rank {source}"
        return _start(lambda: self._gloo.recv([data], source, tag), memory, story, self._flights)

    def start_all_reduce(self, memory: Tensor) -> Flight:
        """Start summing `memory`, on the host, over all ranks, in place."""
        story = f"the all-reduce of {self.world_size} ranks"
        return _start(lambda: self._gloo.allreduce([_as_real(memory)]), memory, story)

    def _start_broadcast(self, memory: Tensor, source: int) -> Flight:
        data = _as_bytes(memory)
        return _start(lambda: self._gloo.broadcast(data, source), memory, f"the broadcast of rank {source}")

    def companion(self) -> Transport:
        """A companion needs no companion."""
        raise TransportError("a companion transport has no companion of its own")


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


_companions: WeakSet[CompanionTransport] = WeakSet()


@atexit.register
def _end_companions() -> None:
    """torch ends the groups that it has names for. The threads of ours must not outlive the interpreter."""
    for companion in list(_companions):
        _land_all(companion._flights)
        companion._gloo = None


def _land_all(flights: set[Flight]) -> None:
    """Wait for all that is under way, but not for long: the others may be gone, or have failed before they sent."""
    end = time.monotonic() + _PARTING_SECONDS
    while flights:
        left = max(end - time.monotonic(), 0.001)
        with suppress(RuntimeError):
            flights.pop().work.wait(timedelta(seconds=left))


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


def connect(group: dist.ProcessGroup | None, device: torch.device | None = None) -> Transport:
    """The transport of `group`, or of the whole world for `None`, for parameters on `device`."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "no process group exists yet: call torch.distributed.init_process_group() before building the optimizer"
        )
    found = group if group is not None else dist.group.WORLD
    assert found is not None
    if dist.get_rank(found) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the process group that it passed")
    return NullTransport() if dist.get_world_size(found) == 1 else GroupTransport(found, device)


@contextmanager
def _telling(story: str) -> Iterator[None]:
    """A backend's own errors name a socket; ours name the rank."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"{story} failed: {error}") from error


class _Trouble:
    """The first transfer that failed; those after it go on."""

    def __init__(self) -> None:
        self._first: TransportError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, TransportError):
            return False
        self._first = self._first or error
        return True

    def tell(self) -> None:
        if self._first is not None:
            raise self._first


def _land(piece: Piece | None, receive: Flight | None, send: Flight | None, trouble: _Trouble) -> None:
    with trouble:
        if piece is not None and receive is not None:
            piece.store(receive.wait())
    with trouble:
        if send is not None:
            send.wait()


def _settle(piece: Piece | None, flight: Flight) -> None:
    memory = flight.wait()
    if piece is not None:
        piece.store(memory)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend for each kind of device that the group serves: "cpu:gloo,cuda:nccl" names two."""
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The group's own time-out where torch tells it; `None` means torch's default."""
    for kind in _backends(group):
        options = getattr(group._get_backend(torch.device(kind)), "options", None)
        if options is not None:
            return getattr(options, "_timeout", None)
    return None


class _Done:
    """Nothing is under way."""

    def wait(self) -> None:
        pass


# torch 2.13 renames both.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class EvenParts(Sequence[Tensor]):
    """Memory in equally long parts, of which each is made only if it is asked for: there may be thousands."""

    def __init__(self, memory: Tensor, length: int) -> None:
        self._memory, self._length = memory, length

    def __len__(self) -> int:
        return self._memory.numel() // self._length

    def __getitem__(self, rank: Any) -> Any:
        return self._memory[range(len(self))[rank] * self._length :][: self._length]


def _tile(parts: Sequence[Tensor], memory: Tensor) -> bool:
    """Whether equally long parts fill the memory."""
    if isinstance(parts, EvenParts):
        return True
    return len({part.numel() for part in parts}) == 1 and len(parts) * parts[0].numel() == memory.numel()


def _as_real(memory: Tensor) -> Tensor:
    """Complex numbers as pairs: no backend has sums of its own for them."""
    return torch.view_as_real(memory) if memory.is_complex() else memory


def _as_bytes(memory: Tensor) -> Tensor:
    return memory.reshape(-1).view(torch.uint8)
