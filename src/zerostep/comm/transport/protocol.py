"""The interface of a transport, and of the bucket memory that it gathers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zerostep.comm.transport.ints import PendingInts
from zerostep.comm.transport.presence import Presence
from zerostep.comm.transport.transfer import Transfer

TAG_DATA = 0x7A65


class Message(Protocol):
    """A range of one owner's part of a bucket that is sent as one message."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""

    def pack(self) -> Tensor:
        """The elements as one-dimensional contiguous memory, to be sent."""

    def buffer(self) -> Tensor:
        """Memory of the same size, dtype and device to receive the elements into."""

    def unpack(self, memory: Tensor) -> None:
        """Copy received elements from `memory` into the parameters, unless they are there already."""


class BucketMemory(Protocol):
    """One bucket as messages: every owner's part, cut into messages in the same way on all ranks."""

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""

    def attach(self) -> None:
        """Find the memory of parameters whose `.data` was replaced; called before each gather."""

    def messages(self, owner: int) -> Sequence[Message]:
        """The messages of `owner`'s part; empty if it owns nothing in this bucket."""


class Transport(Protocol):
    """Communication between one rank and the others of its group.

    All ranks make the same calls in the same order, and each rank from one thread at a time.
    """

    rank: int
    world_size: int
    presence: Presence
    peers: tuple[int, ...]

    @property
    def wire_device(self) -> torch.device:
        """The device on which tensors must be to be sent: the host if the group serves it."""

    def stream_ordered(self, device: torch.device) -> bool:
        """Whether waiting for a transfer of `device` memory only orders streams and never blocks the host."""

    def gather(self, bucket_memories: Sequence[BucketMemory], row: Sequence[int], fingerprint: int) -> list[list[int]]:
        """Send every owner's part to every rank.

        If `exchanges_status`, the ranks first exchange `row`, their status in a few integers, and `fingerprint`, a hash
        of what they are about to send: the rows of all ranks are returned, and a fingerprint that differs raises before
        any data is sent. Otherwise only this rank's own row is returned.
        """

    def exchanges_status(self, bucket_memories: Sequence[BucketMemory]) -> bool:
        """Whether `gather` of these buckets exchanges statuses: only where hosts wait for each other anyway."""

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, by rank; all ranks give equally many, and are in the same call: see `calling`."""

    def start_all_gather_ints(self, values: Sequence[int]) -> PendingInts:
        """Start an all-gather of a few integers, without waiting for anyone; all ranks give equally many."""

    def broadcast(self, memory: Tensor, source: int) -> None:
        """Overwrite `memory` (contiguous, on the wire device) with that of rank `source`."""

    def start_send(self, memory: Tensor, to: int, tag: int = TAG_DATA) -> Transfer:
        """Start sending contiguous `memory`, on the wire device, to one rank.

        Messages of one tag and one length keep their order; those of another tag or length are never taken for them.
        """

    def start_receive(self, memory: Tensor, source: int, tag: int = TAG_DATA) -> Transfer:
        """Start receiving into contiguous `memory`, on the wire device, from one rank."""

    def start_all_reduce(self, memory: Tensor) -> Transfer:
        """Start summing `memory` over all ranks, in place."""

    def abort(self) -> None:
        """End the transfers that an accelerator waits for, and the use of the group; from any thread. Else nothing."""

    def companion(self) -> Transport:
        """A second transport over the same ranks, whose calls need no order with those of this one; a collective."""
