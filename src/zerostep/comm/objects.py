"""Nested values from one rank to another, or to all: text and tensors, never a pickle."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from zerostep.comm import stream
from zerostep.comm.agreement import Fact, agreed
from zerostep.comm.codec import Packed, TensorSpec, pack, specs, unpack
from zerostep.comm.transport import Transport

__all__ = ["broadcast_object", "copy_object", "gather_object", "receive_object", "send_object"]

_HOST = torch.device("cpu")
_MOST_TEXT = 1 << 30
_HEADER = Struct("<qq")


def send_object(transport: Transport, value: Any, to: int) -> None:
    """Send a value to one rank, which calls `receive_object`."""
    packed = pack(value)
    stream.send_bytes(transport, _HEADER.pack(len(packed.text), packed.nbytes), to)
    stream.send_bytes(transport, packed.text, to)
    stream.send(transport, packed.tensors, to)


def receive_object(transport: Transport, source: int) -> Any:
    """The value that rank `source` sends, in host memory."""
    size, nbytes = _HEADER.unpack(stream.receive_bytes(transport, _HEADER.size, source))
    return _receive(transport, source, size, nbytes)


def gather_object(transport: Transport, make: Callable[[], Any], to: int) -> list[Any]:
    """What `make` returns on every rank, by rank, as copies in host memory on rank `to`; an empty list elsewhere.

    All ranks call it, and fail together if `make` fails on one. Only the sender and the recipient see a value.
    """
    packed = _pack_together(transport, make, f"rank {to}")
    rows = transport.all_gather_ints([len(packed.text), packed.nbytes])
    found = []
    for source in range(transport.world_size):
        if transport.rank == to:
            found.append(_copied(packed) if source == to else _receive(transport, source, *rows[source]))
        elif transport.rank == source:
            stream.send_bytes(transport, packed.text, to)
            stream.send(transport, packed.tensors, to)
    return found


def copy_object(value: Any) -> Any:
    """A value with nothing shared, its tensors in host memory; the same values can be copied that can travel."""
    return _copied(pack(value))


def broadcast_object(transport: Transport, value: Any, source: int, device: torch.device) -> Any:
    """The value of rank `source`: itself there, a copy with its tensors on `device` elsewhere. All ranks call it."""
    here = transport.rank == source
    packed = _pack_together(transport, lambda: value if here else None, f"everyone from rank {source}")
    size, nbytes = transport.all_gather_ints([len(packed.text), packed.nbytes])[source]
    text = stream.broadcast_bytes(transport, packed.text if here else bytes(_checked(size, source)), source)
    tensors = packed.tensors if here else [spec.empty(device) for spec in _specs(text, nbytes, source)]
    stream.broadcast(transport, tensors, source)
    return value if here else unpack(text, tensors)


def _pack_together(transport: Transport, make: Callable[[], Any], target: str) -> Packed:
    """A value that cannot travel is an error on every rank, before anything was sent."""
    with agreed(transport) as agreement:
        packed = pack(make())
        agreement.facts = [Fact("where the values go", target)]
    return packed


def _receive(transport: Transport, source: int, size: int, nbytes: int) -> Any:
    text = stream.receive_bytes(transport, _checked(size, source), source)
    tensors = [spec.empty(_HOST) for spec in _specs(text, nbytes, source)]
    stream.receive(transport, tensors, source)
    return unpack(text, tensors)


def _specs(text: bytes, nbytes: int, source: int) -> tuple[TensorSpec, ...]:
    """Nothing is allocated before what a rank announces fits together."""
    found = specs(text)
    total = sum(spec.nbytes for spec in found)
    if total != nbytes:
        raise ValueError(f"rank {source} announced {nbytes} bytes of tensors, but describes {total}")
    return found


def _checked(size: int, source: int) -> int:
    if not 0 <= size <= _MOST_TEXT:
        raise ValueError(f"rank {source} announced {size} bytes of text; at most {_MOST_TEXT} are accepted")
    return size


def _copied(packed: Packed) -> Any:
    tensors: list[Tensor] = [tensor.to(_HOST, copy=True) for tensor in packed.tensors]
    return unpack(packed.text, tensors)
