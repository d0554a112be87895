"""Send nested values from one rank to another, or to all, as text and tensors, never as a pickle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from zerostep.comm import stream
from zerostep.comm.agreement import Fact, agreed
from zerostep.comm.codec import Packed, empty, pack, specs, unpack
from zerostep.comm.transport import Transport

_HOST = torch.device("cpu")
_MAX_TEXT_BYTES = 1 << 30  # a damaged header must not make this rank allocate all its memory
_HEADER = Struct("<qq")  # bytes of text, bytes of tensors


def send_object(transport: Transport, value: Any, to: int) -> None:
    """Send a value to one rank, which calls `receive_object`."""
    packed = pack(value)
    stream.send_bytes(transport, _HEADER.pack(len(packed.text), packed.nbytes), to)
    stream.send_bytes(transport, packed.text, to)
    stream.send(transport, packed.tensors, to)


def receive_object(transport: Transport, source: int) -> Any:
    """The value that rank `source` sends, in host memory."""
    # In the order of `send_object`: header, text, tensors.
    size, nbytes = _HEADER.unpack(stream.receive_bytes(transport, _HEADER.size, source))
    return _receive(transport, source, size, nbytes)


def gather_object(transport: Transport, make: Callable[[], Any], to: int) -> list[Any]:
    """On rank `to`: what `make` returned on every rank, by rank, as copies in host memory. Elsewhere an empty list.

    A collective: if `make` or an allocation fails on one rank, all ranks raise. A value is sent to rank `to` alone.
    """
    packed = _pack_together(transport, make, f"rank {to}")
    rows = transport.all_gather_ints([len(packed.text), packed.nbytes])
    if transport.rank != to:
        _send_together(transport, packed, to)
        return []
    return _receive_together(transport, packed, rows)


def _send_together(transport: Transport, packed: Packed, to: int) -> None:
    """A sender's part of `gather_object`: the `agreed` blocks and transfers of `_receive_together`, in its order."""
    scratch = stream.Scratch(transport.wire_device)
    with agreed(transport), _allocating(transport, packed.nbytes):
        scratch.reserve(packed.tensors)
    stream.send_bytes(transport, packed.text, to)
    with agreed(transport):
        pass
    stream.send(transport, packed.tensors, to, scratch)


def _receive_together(transport: Transport, packed: Packed, rows: Sequence[Sequence[int]]) -> list[Any]:
    """All ranks' values, their own memory allocated before any sender begins to send tensors."""
    own, total = transport.rank, sum(nbytes for _, nbytes in rows)
    sources = [source for source in range(transport.world_size) if source != own]
    with agreed(transport), _allocating(transport, sum(size for size, _ in rows)):
        buffers = {source: bytearray(_checked_size(rows[source][0], source)) for source in sources}
    texts = {source: stream.receive_into(transport, buffers[source], source) for source in sources}
    with agreed(transport), _allocating(transport, total):
        expected = {source: _checked_specs(texts[source], rows[source][1], source) for source in sources}
        tensors = {source: [empty(spec, _HOST) for spec in expected[source]] for source in sources}
        scratch = stream.Scratch(transport.wire_device)
        for received in tensors.values():
            scratch.reserve(received)
        values = {own: _copy_to_host(packed)}
    for source in sources:
        stream.receive(transport, tensors[source], source, scratch)
        values[source] = unpack(texts[source], tensors[source])
    return [values[source] for source in range(transport.world_size)]


def copy_object(value: Any) -> Any:
    """A deep copy with its tensors in host memory; `TypeError` for what could not be sent either."""
    return _copy_to_host(pack(value))


def broadcast_object(transport: Transport, value: Any, source: int, device: torch.device) -> Any:
    """The value of rank `source`: itself on that rank, a copy with its tensors on `device` elsewhere; a collective."""
    here = transport.rank == source
    packed = _pack_together(transport, lambda: value if here else None, f"everyone from rank {source}")
    size, nbytes = transport.all_gather_ints([len(packed.text), packed.nbytes])[source]
    text = stream.broadcast_bytes(transport, packed.text if here else bytes(_checked_size(size, source)), source)
    with agreed(transport), _allocating(transport, nbytes):
        tensors = packed.tensors if here else [empty(spec, device) for spec in _checked_specs(text, nbytes, source)]
        scratch = stream.Scratch(transport.wire_device)
        scratch.reserve(tensors)
    stream.broadcast(transport, tensors, source, scratch)
    return value if here else unpack(text, tensors)


@contextmanager
def _allocating(transport: Transport, nbytes: int) -> Iterator[None]:
    """Say which rank has no memory, and for how much: torch's own error has neither."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise MemoryError(
            f"rank {transport.rank} has no memory for {nbytes} bytes of tensors and text from other ranks: {error}; "
            "make room, or save with zerostep.save, which collects nothing"
        ) from error


def _pack_together(transport: Transport, make: Callable[[], Any], target: str) -> Packed:
    """Encode a value; if that fails on one rank, all ranks raise before any data is sent."""
    with agreed(transport) as agreement:
        packed = pack(make())
        agreement.compare([Fact("where the values go", target)])
    return packed


def _receive(transport: Transport, source: int, size: int, nbytes: int) -> Any:
    text = stream.receive_bytes(transport, _checked_size(size, source), source)
    tensors = [empty(spec, _HOST) for spec in _checked_specs(text, nbytes, source)]
    stream.receive(transport, tensors, source)
    return unpack(text, tensors)


def _checked_specs(text: bytes, nbytes: int, source: int) -> tuple[Tensor, ...]:
    """The tensors to receive; `ValueError` before anything is allocated if they do not have the announced size."""
    tensor_specs = specs(text)
    total = sum(spec.nbytes for spec in tensor_specs)
    if total != nbytes:
        raise ValueError(f"rank {source} announced {nbytes} bytes of tensors, but describes {total}")
    return tensor_specs


def _checked_size(size: int, source: int) -> int:
    if not 0 <= size <= _MAX_TEXT_BYTES:
        raise ValueError(f"rank {source} announced {size} bytes of text; at most {_MAX_TEXT_BYTES} are accepted")
    return size


def _copy_to_host(packed: Packed) -> Any:
    tensors: list[Tensor] = [tensor.to(_HOST, copy=True) for tensor in packed.tensors]
    return unpack(packed.text, tensors)
