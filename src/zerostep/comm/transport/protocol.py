"""What a transport does, and what it needs to know of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zerostep.comm.transport.transfer import Transfer

__all__ = ["BucketMemory", "EvenParts", "Message", "Transport"]


class Message(Protocol):
    """A stretch of one owner's part of a bucket that travels as one message."""

    def pack(self) -> Tensor:
        """The elements as one-dimensional contiguous memory, to be sent."""

    def buffer(self) -> Tensor:
        """Memory of the same kind to receive them into."""

    def unpack(self, memory: Tensor) -> None:
        """Take over received memory."""


class BucketMemory(Protocol):
    """What a transport needs of one bucket: every owner's part, in pieces that all ranks cut alike."""

    @property
    def device(self) -> torch.device:
        """Where the bucket lies."""

    def attach(self) -> None:
        """Follow parameters whose `.data` was bound to other memory; before each gather."""

    def messages(self, owner: int) -> Sequence[Message]:
        """The part of `owner`; empty if it owns nothing here."""


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

    def gather(self, bucket_memories: Sequence[BucketMemory], status: int, fingerprint: int) -> list[int]:
        """Bring every owner's part to every rank.

        Where hosts wait for each other anyway, a word goes first: the returned status of every rank, and a fingerprint
        of what is about to be sent, which must be the same on all. Elsewhere only this rank's own status is returned.
        """

    def meets_on_host(self, bucket_memories: Sequence[BucketMemory]) -> bool:
        """Whether a word goes before these parcels."""

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, by rank; all ranks give equally many."""

    def broadcast(self, memory: Tensor, source: int) -> None:
        """Overwrite `memory` (contiguous, on the wire device) with that of rank `source`."""

    def start_send(self, memory: Tensor, to: int, tag: int = ...) -> Transfer:
        """Start sending contiguous `memory`, on the wire device, to one rank; messages of one tag keep their order."""

    def start_receive(self, memory: Tensor, source: int, tag: int = ...) -> Transfer:
        """Start receiving into contiguous `memory`, on the wire device, from one rank."""

    def start_reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], memory: Tensor) -> Transfer:
        """Start summing every rank's `parts`, views of `memory`, each to its rank's `output`; in stream order."""

    def start_all_gather(self, parts: Sequence[Tensor], memory: Tensor) -> Transfer:
        """Start bringing every rank's own one of `parts`, views of `memory`, to all ranks; in stream order."""

    def start_all_reduce(self, memory: Tensor) -> Transfer:
        """Start summing `memory` over all ranks, in place."""

    def companion(self) -> Transport:
        """A second transport over the same ranks, whose calls need no order with those of this one; a collective."""


class EvenParts(Sequence[Tensor]):
    """Memory in equally long parts, of which each is made only if it is asked for: there may be thousands."""

    def __init__(self, memory: Tensor, length: int) -> None:
        self._memory, self._length = memory, length

    def __len__(self) -> int:
        return self._memory.numel() // self._length

    def __getitem__(self, rank: Any) -> Any:
        return self._memory[range(len(self))[rank] * self._length :][: self._length]
