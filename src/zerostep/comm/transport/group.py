"""The transport over a torch process group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from zerostep.comm.transport.protocol import EvenParts, Parcel, Piece, Transport
from zerostep.comm.transport.transfer import Flight, Trouble, start
from zerostep.errors import TransportError

__all__ = ["TAG_DATA", "GroupTransport", "as_bytes", "as_real"]

TAG_DATA, _TAG_WORD = 0x7A65, 0x7A66
# Messages under way at a time. Many keep a socket busy; on an accelerator, stream order does that, and scratch is dear.
_MESSAGES_IN_FLIGHT = 8
_BROADCASTS_IN_FLIGHT = 2


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
        trouble = Trouble()
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

    def _exchange(self, parcel: Parcel, trouble: Trouble) -> None:
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

    def _meet(self, status: int, fingerprint: int, trouble: Trouble) -> list[int]:
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
        start(lambda: dist.all_gather(rows, row, group=self._group, async_op=True), row, story).wait()
        return torch.stack(rows).tolist()

    def broadcast(self, memory: Tensor, source: int) -> None:
        """Overwrite `memory` with that of rank `source`."""
        self._start_broadcast(memory, source).wait()

    def start_send(self, memory: Tensor, to: int, tag: int = TAG_DATA) -> Flight:
        """Start sending `memory` to one rank."""
        return self._start_send(memory, to, tag)

    def start_receive(self, memory: Tensor, source: int, tag: int = TAG_DATA) -> Flight:
        """Start receiving into `memory` from one rank."""
        return self._start_receive(memory, source, tag)

    def start_reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], memory: Tensor) -> Flight:
        """One native call where all parts are equally long, else the list form, which takes any lengths."""
        story = f"the reduce-scatter of {self.world_size} ranks"
        if _tile(parts, memory):
            call: Callable[..., Any] = partial(_reduce_scatter, as_real(output), as_real(memory))
        else:
            call = partial(dist.reduce_scatter, as_real(output), list(map(as_real, parts)))
        return start(lambda: call(group=self._group, async_op=True), output, story)

    def start_all_gather(self, parts: Sequence[Tensor], memory: Tensor) -> Flight:
        """One native call where all parts are equally long, else the list form, which takes any lengths."""
        story, mine = f"the all-gather of {self.world_size} ranks", parts[self.rank]
        if _tile(parts, memory):
            call: Callable[..., Any] = partial(_all_gather, as_real(memory), as_real(mine))
        else:
            call = partial(dist.all_gather, list(map(as_real, parts)), as_real(mine))
        return start(lambda: call(group=self._group, async_op=True), memory, story)

    def start_all_reduce(self, memory: Tensor) -> Flight:
        """Start summing `memory` over all ranks, in place."""
        story = f"the all-reduce of {self.world_size} ranks"
        return start(lambda: dist.all_reduce(as_real(memory), group=self._group, async_op=True), memory, story)

    def _start_send(self, memory: Tensor, to: int, tag: int) -> Flight:
        story = f"sending to rank {to} of {self.world_size}"
        return start(lambda: dist.isend(as_bytes(memory), group=self._group, group_dst=to, tag=tag), memory, story)

    def _start_receive(self, memory: Tensor, source: int, tag: int) -> Flight:
        story = f"receiving from rank {source} of {self.world_size}"
        return start(lambda: dist.irecv(as_bytes(memory), group=self._group, group_src=source, tag=tag), memory, story)

    def _start_broadcast(self, memory: Tensor, source: int) -> Flight:
        story, data = f"the broadcast of rank {source} of {self.world_size}", as_bytes(memory)
        return start(lambda: dist.broadcast(data, group=self._group, group_src=source, async_op=True), memory, story)

    def companion(self) -> Transport:
        """A Gloo group of our own over the same ranks; host memory only, whatever backends this group has."""
        token = torch.frombuffer(bytearray(uuid4().bytes), dtype=torch.uint8).to(self.wire_device)
        self.broadcast(token, 0)
        from zerostep.comm.transport.companion import CompanionTransport  # a subclass: it must come later

        # torch names new groups by counters that differ between ranks of a subgroup; a drawn name cannot clash.
        store = distributed_c10d.PrefixStore(
            f"zerostep/{bytes(token.tolist()).hex()}", distributed_c10d._get_default_store()
        )
        return CompanionTransport.over(store, self.rank, self.world_size, _timeout(self._group))


def _land(piece: Piece | None, receive: Flight | None, send: Flight | None, trouble: Trouble) -> None:
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


# torch 2.13 renames both.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _tile(parts: Sequence[Tensor], memory: Tensor) -> bool:
    """Whether equally long parts fill the memory."""
    if isinstance(parts, EvenParts):
        return True
    return len({part.numel() for part in parts}) == 1 and len(parts) * parts[0].numel() == memory.numel()


def as_real(memory: Tensor) -> Tensor:
    """Complex numbers as pairs: no backend has sums of its own for them."""
    return torch.view_as_real(memory) if memory.is_complex() else memory


def as_bytes(memory: Tensor) -> Tensor:
    """Contiguous memory of any dtype, as what every backend moves."""
    return memory.reshape(-1).view(torch.uint8)
