"""Send any number of tensors from one rank to another, or to all, in pieces of bounded size.

Sender and receiver must have tensors of the same sizes in the same order: both cut them into pieces by size alone. A
piece inside one tensor on the wire device is sent from, and received into, that tensor; any other is copied through
scratch memory. Two pieces are under way at a time, so scratch memory never exceeds two pieces.
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
_PIECES_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes of one tensor, given by its index in the list."""

    tensor: int
    span: Span


def pieces(sizes: Sequence[int], limit: int = PIECE_BYTES) -> Iterator[tuple[ByteRange, ...]]:
    """Cut tensors of `sizes` bytes, laid end to end, into pieces of at most `limit` bytes."""
    piece, free = list[ByteRange](), limit
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            length = min(free, size - start)
            piece.append(ByteRange(tensor, Span(start, start + length)))
            start, free = start + length, free - length
            if not free:
                yield tuple(piece)
                piece, free = [], limit
    if piece:
        yield tuple(piece)


def send(transport: Transport, tensors: Sequence[Tensor], to: int) -> None:
    """Send dense tensors to one rank, which calls `receive`."""
    buffers = _PieceBuffers(transport, tensors)
    _run_transfers(buffers, lambda memory: transport.start_send(memory, to), sending=True)


def receive(transport: Transport, tensors: Sequence[Tensor], source: int) -> None:
    """Overwrite dense tensors with those that rank `source` sends."""
    buffers = _PieceBuffers(transport, tensors)
    _run_transfers(buffers, lambda memory: transport.start_receive(memory, source), sending=False)


def broadcast(transport: Transport, tensors: Sequence[Tensor], source: int) -> None:
    """Overwrite dense tensors with those of rank `source`, on all ranks."""
    buffers, sending = _PieceBuffers(transport, tensors), transport.rank == source
    for piece in buffers.pieces():
        memory = buffers.acquire(piece, copy_in=sending)
        transport.broadcast(memory, source)
        buffers.release(piece, memory, copy_out=not sending)


def send_bytes(transport: Transport, data: bytes, to: int) -> None:
    """Send bytes to one rank, which calls `receive_bytes` with their number."""
    send(transport, [_tensor(bytearray(data))], to)


def receive_bytes(transport: Transport, size: int, source: int) -> bytes:
    """Receive `size` bytes from one rank."""
    data = bytearray(size)
    receive(transport, [_tensor(data)], source)
    return bytes(data)


def broadcast_bytes(transport: Transport, data: bytes, source: int) -> bytes:
    """The bytes of rank `source`, on all ranks; every other rank must pass equally many bytes, of any value."""
    received = bytearray(data)
    broadcast(transport, [_tensor(received)], source)
    return bytes(received)


class _PieceBuffers:
    """The memory to send or receive each piece of a list of tensors: the tensor itself where possible, else scratch."""

    def __init__(self, transport: Transport, tensors: Sequence[Tensor]) -> None:
        self._device = transport.wire_device
        self._bytes = [flat_alias(tensor).view(torch.uint8) for tensor in tensors]
        self._spare: list[Tensor] = []

    def pieces(self) -> Iterator[tuple[ByteRange, ...]]:
        return pieces([memory.numel() for memory in self._bytes])

    def acquire(self, piece: tuple[ByteRange, ...], copy_in: bool) -> Tensor:
        """The memory for a piece; with `copy_in` it holds the piece's bytes."""
        slices = self._slices(piece)
        if not self._needs_scratch(slices):
            return slices[0]
        scratch = self._scratch(sum(part.span.length for part in piece))
        if copy_in:
            _copy(slices, _split(scratch, slices))
        return scratch

    def release(self, piece: tuple[ByteRange, ...], memory: Tensor, copy_out: bool) -> None:
        """Take back the memory of a finished transfer; with `copy_out` its bytes are written to the tensors."""
        slices = self._slices(piece)
        if not self._needs_scratch(slices):
            return
        if copy_out:
            _copy(_split(memory, slices), slices)
        # Used for the next piece: allocators often cannot use a large aligned block again.
        self._spare.append(memory)

    def _scratch(self, size: int) -> Tensor:
        if self._spare and self._spare[-1].numel() >= size:
            return self._spare.pop()[:size]
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _slices(self, piece: tuple[ByteRange, ...]) -> list[Tensor]:
        return [self._bytes[part.tensor][part.span.start : part.span.stop] for part in piece]

    def _needs_scratch(self, slices: list[Tensor]) -> bool:
        return len(slices) != 1 or slices[0].device != self._device


def _run_transfers(buffers: _PieceBuffers, start: Callable[[Tensor], Transfer], sending: bool) -> None:
    in_flight = deque[tuple[tuple[ByteRange, ...], Transfer]]()

    def finish_oldest() -> None:
        piece, transfer = in_flight.popleft()
        # Scratch may be reused only after the wait: until then the backend reads or writes it.
        buffers.release(piece, transfer.wait(), copy_out=not sending)

    for piece in buffers.pieces():
        in_flight.append((piece, start(buffers.acquire(piece, copy_in=sending))))
        if len(in_flight) == _PIECES_IN_FLIGHT:
            finish_oldest()
    while in_flight:
        finish_oldest()


def _split(memory: Tensor, slices: list[Tensor]) -> Sequence[Tensor]:
    return memory.split([part.numel() for part in slices])


def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for here, there in zip(source, target, strict=True):
        there.copy_(here)


def _tensor(data: bytearray) -> Tensor:
    """A tensor that shares the memory of `data`, and keeps it alive."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
