"""Any number of tensors from one rank to another, or to all, in pieces of bounded size.

Both sides cut the same list of sizes into the same pieces. A piece that lies in one tensor, on a device that the
network serves, is sent from and received into that tensor; any other passes through scratch memory. Two pieces are
under way at a time, so scratch memory never exceeds two pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerostep.comm.transport import Transfer, Transport
from zerostep.plan.layout import Span
from zerostep.tensors import flat_alias

__all__ = [
    "PIECE_BYTES",
    "ByteRange",
    "broadcast",
    "broadcast_bytes",
    "pieces",
    "receive",
    "receive_bytes",
    "send",
    "send_bytes",
]

PIECE_BYTES = 16 << 20
_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes of one tensor, given by its place in the list."""

    tensor: int
    span: Span


def pieces(sizes: Sequence[int], limit: int = PIECE_BYTES) -> Iterator[tuple[ByteRange, ...]]:
    """Cut tensors of `sizes` bytes, laid end to end, into pieces of at most `limit` bytes."""
    piece, room = list[ByteRange](), limit
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            taken = min(room, size - start)
            piece.append(ByteRange(tensor, Span(start, start + taken)))
            start, room = start + taken, room - taken
            if not room:
                yield tuple(piece)
                piece, room = [], limit
    if piece:
        yield tuple(piece)


def send(transport: Transport, tensors: Sequence[Tensor], to: int) -> None:
    """Send dense tensors to one rank, which calls `receive`."""
    stage = _Stage(transport, tensors)
    _run_transfers(stage, lambda memory: transport.start_send(memory, to), fill=True, drain=False)


def receive(transport: Transport, tensors: Sequence[Tensor], source: int) -> None:
    """Overwrite dense tensors with those that rank `source` sends."""
    stage = _Stage(transport, tensors)
    _run_transfers(stage, lambda memory: transport.start_receive(memory, source), fill=False, drain=True)


def broadcast(transport: Transport, tensors: Sequence[Tensor], source: int) -> None:
    """Overwrite dense tensors with those of rank `source`, on all ranks."""
    stage, here = _Stage(transport, tensors), transport.rank == source
    for piece in stage.pieces():
        memory = stage.memory(piece, fill=here)
        transport.broadcast(memory, source)
        if not here:
            stage.drain(piece, memory)
        stage.release(piece, memory)


def send_bytes(transport: Transport, data: bytes, to: int) -> None:
    """Send bytes to one rank, which knows how many."""
    send(transport, [_tensor(bytearray(data))], to)


def receive_bytes(transport: Transport, size: int, source: int) -> bytes:
    """Receive `size` bytes from one rank."""
    data = bytearray(size)
    receive(transport, [_tensor(data)], source)
    return bytes(data)


def broadcast_bytes(transport: Transport, data: bytes, source: int) -> bytes:
    """The bytes of rank `source`, on all ranks; every other rank gives as many bytes of its own."""
    shared = bytearray(data)
    broadcast(transport, [_tensor(shared)], source)
    return bytes(shared)


class _Stage:
    """The bytes of a list of tensors, and the scratch memory through which they pass where they must."""

    def __init__(self, transport: Transport, tensors: Sequence[Tensor]) -> None:
        self._device = transport.wire_device
        self._bytes = [flat_alias(tensor).view(torch.uint8) for tensor in tensors]
        self._spare: list[Tensor] = []

    def pieces(self) -> Iterator[tuple[ByteRange, ...]]:
        return pieces([memory.numel() for memory in self._bytes])

    def memory(self, piece: tuple[ByteRange, ...], fill: bool) -> Tensor:
        slices = self._slices(piece)
        if self._direct(slices):
            return slices[0]
        scratch = self._scratch(sum(part.span.length for part in piece))
        if fill:
            _copy(slices, self._split(scratch, slices))
        return scratch

    def drain(self, piece: tuple[ByteRange, ...], memory: Tensor) -> None:
        slices = self._slices(piece)
        if not self._direct(slices):
            _copy(self._split(memory, slices), slices)

    def release(self, piece: tuple[ByteRange, ...], memory: Tensor) -> None:
        """Keep scratch memory for the next piece: allocators find it hard to use large aligned blocks again."""
        if not self._direct(self._slices(piece)):
            self._spare.append(memory)

    def _scratch(self, size: int) -> Tensor:
        if self._spare and self._spare[-1].numel() >= size:
            return self._spare.pop()[:size]
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _slices(self, piece: tuple[ByteRange, ...]) -> list[Tensor]:
        return [self._bytes[part.tensor][part.span.start : part.span.stop] for part in piece]

    def _direct(self, slices: list[Tensor]) -> bool:
        return len(slices) == 1 and slices[0].device == self._device

    def _split(self, memory: Tensor, slices: list[Tensor]) -> Sequence[Tensor]:
        return memory.split([part.numel() for part in slices])


def _run_transfers(stage: _Stage, start: Callable[[Tensor], Transfer], fill: bool, drain: bool) -> None:
    in_flight = deque[tuple[tuple[ByteRange, ...], Transfer]]()

    def land() -> None:
        piece, transfer = in_flight.popleft()
        memory = transfer.wait()
        if drain:
            stage.drain(piece, memory)
        stage.release(piece, memory)

    for piece in stage.pieces():
        in_flight.append((piece, start(stage.memory(piece, fill))))
        if len(in_flight) == _IN_FLIGHT:
            land()
    while in_flight:
        land()


def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for from_, to in zip(source, target, strict=True):
        to.copy_(from_)


def _tensor(data: bytearray) -> Tensor:
    """The very bytes of `data`, not a copy."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
