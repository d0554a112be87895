"""Send any number of tensors from one rank to another, or to all, in pieces of bounded size.

Sender and receiver must have tensors of the same sizes in the same order: both cut them into pieces by size alone. A
piece inside one tensor on the wire device is sent from, and received into, that tensor; any other is copied through
scratch memory. Two pieces are under way at a time, so scratch memory never exceeds two pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from zerostep.comm.transport import Transfer, Transport, finish_in_order
from zerostep.tensors import flat_alias

PIECE_BYTES = 16 << 20
_PIECES_IN_FLIGHT = 2


def pieces(memories: Iterable[Tensor], limit: int = PIECE_BYTES) -> Iterator[list[Tensor]]:
    """Cut one-dimensional tensors, laid end to end, into pieces of `limit` elements; the last may be shorter."""
    piece, free = list[Tensor](), limit
    for memory in memories:
        start = 0
        while start < memory.numel():
            part = memory[start : start + free]
            piece.append(part)
            start, free = start + part.numel(), free - part.numel()
            if not free:
                yield piece
                piece, free = [], limit
    if piece:
        yield piece


def send(transport: Transport, tensors: Sequence[Tensor], to: int, scratch: Scratch | None = None) -> None:
    """Send dense tensors to one rank, which calls `receive`."""
    _run_transfers(transport, tensors, lambda memory: transport.start_send(memory, to), True, scratch)


def receive(transport: Transport, tensors: Sequence[Tensor], source: int, scratch: Scratch | None = None) -> None:
    """Overwrite dense tensors with those that rank `source` sends."""
    _run_transfers(transport, tensors, lambda memory: transport.start_receive(memory, source), False, scratch)


def broadcast(transport: Transport, tensors: Sequence[Tensor], source: int, scratch: Scratch | None = None) -> None:
    """Overwrite dense tensors with those of rank `source`, on all ranks."""
    memories, sending = scratch or Scratch(transport.wire_device), transport.rank == source
    for piece in _byte_pieces(tensors):
        memory = memories.acquire(piece, copy_in=sending)
        transport.broadcast(memory, source)
        memories.release(piece, memory, copy_out=not sending)


def send_bytes(transport: Transport, data: bytes, to: int) -> None:
    """Send bytes to one rank, which calls `receive_bytes` with their number."""
    send(transport, [_tensor(bytearray(data))], to)


def receive_bytes(transport: Transport, size: int, source: int) -> bytes:
    """Receive `size` bytes from one rank."""
    return receive_into(transport, bytearray(size), source)


def receive_into(transport: Transport, data: bytearray, source: int) -> bytes:
    """Receive as many bytes from one rank as `data` has, into it."""
    receive(transport, [_tensor(data)], source)
    return bytes(data)


def broadcast_bytes(transport: Transport, data: bytes, source: int) -> bytes:
    """The bytes of rank `source`, on all ranks; every other rank must pass equally many bytes, of any value."""
    received = bytearray(data)
    broadcast(transport, [_tensor(received)], source)
    return bytes(received)


class Scratch:
    """The memory to send or receive a piece: the tensor itself if it is one on the wire device, else scratch."""

    def __init__(self, wire_device: torch.device) -> None:
        self._device = wire_device
        self._spare: list[Tensor] = []

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Allocate now what tensors will need, so that a lack of memory is noticed before anything is sent."""
        sizes = [sum(part.numel() for part in piece) for piece in _byte_pieces(tensors) if not self._is_direct(piece)]
        needed = max(sizes, default=0)
        for _ in range(min(len(sizes), _PIECES_IN_FLIGHT)):
            self._spare.append(torch.empty(needed, dtype=torch.uint8, device=self._device))

    def acquire(self, piece: list[Tensor], copy_in: bool) -> Tensor:
        """The memory for a piece; with `copy_in` it holds the piece's bytes."""
        if self._is_direct(piece):
            return piece[0]
        size = sum(part.numel() for part in piece)
        if self._spare and self._spare[-1].numel() >= size:
            memory = self._spare.pop()[:size]
        else:
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        if copy_in:
            _copy(piece, _split(memory, piece))
        return memory

    def release(self, piece: list[Tensor], memory: Tensor, copy_out: bool) -> None:
        """Take back the memory of a finished transfer; with `copy_out` its bytes are written to the tensors."""
        if self._is_direct(piece):
            return
        if copy_out:
            _copy(_split(memory, piece), piece)
        # Used for the next piece: allocators often cannot use a large aligned block again.
        self._spare.append(memory)

    def _is_direct(self, piece: list[Tensor]) -> bool:
        return len(piece) == 1 and piece[0].device == self._device


def _byte_pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    return pieces(flat_alias(tensor).view(torch.uint8) for tensor in tensors)


def _run_transfers(
    transport: Transport,
    tensors: Sequence[Tensor],
    start: Callable[[Tensor], Transfer],
    sending: bool,
    scratch: Scratch | None,
) -> None:
    memories = scratch or Scratch(transport.wire_device)

    def finish(piece: list[Tensor], transfer: Transfer) -> None:
        # Scratch may be reused only after the wait: until then the backend reads or writes it.
        memories.release(piece, transfer.wait(), copy_out=not sending)

    finish_in_order(
        (partial(finish, piece, start(memories.acquire(piece, copy_in=sending))) for piece in _byte_pieces(tensors)),
        _PIECES_IN_FLIGHT,
    )


def _split(memory: Tensor, piece: list[Tensor]) -> Sequence[Tensor]:
    return memory.split([part.numel() for part in piece])


def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for here, there in zip(source, target, strict=True):
        there.copy_(here)


def _tensor(data: bytearray) -> Tensor:
    """A tensor that shares the memory of `data`, and keeps it alive."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
