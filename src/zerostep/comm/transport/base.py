"""What the group transport and the companion transport share: the gather of buckets, and messages between two ranks.

A subclass adds the three transfers that these are made of: a send, a receive and a broadcast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, zip_longest

import torch
from torch import Tensor

from zerostep.comm.transport.presence import Presence
from zerostep.comm.transport.protocol import BucketMemory, Message, Transport
from zerostep.comm.transport.transfer import FirstError, Transfer, finish_in_order
from zerostep.errors import TransportError

# A tag of its own: a status must never match a receive that waits for data.
_TAG_STATUS = 0x7A66
# Many messages keep a socket busy. On an accelerator stream order does that, and scratch memory is scarce.
_MESSAGES_IN_FLIGHT = 8
_GROUPS_IN_FLIGHT = 2
_GROUP_BYTES = 64 << 20
_MOST_NAMED = 8


class BaseTransport(Transport, ABC):
    """A transport that gathers host memory by messages and accelerator memory by broadcasts."""

    presence = Presence()
    peers: tuple[int, ...] = ()  # the numbers by which errors and reports name the ranks: those of the whole optimizer

    @property
    def participants(self) -> str:
        """Who takes part in a collective, in words: how many, or which ones if they are not all ranks."""
        if self.world_size == len(self.presence.ranks) or self.world_size > _MOST_NAMED:
            return f"{self.world_size} ranks"
        return f"ranks {', '.join(map(str, self.peers))}"

    @abstractmethod
    def start_broadcast(self, memory: Tensor, source: int) -> Transfer:
        """Start overwriting `memory` with that of rank `source`."""

    def abort(self) -> None:
        """Nothing to do: no accelerator waits for this transport."""

    def broadcast(self, memory: Tensor, source: int) -> None:
        """Overwrite `memory` with that of rank `source`."""
        self.start_broadcast(memory, source).wait()

    def gather(self, bucket_memories: Sequence[BucketMemory], row: Sequence[int], fingerprint: int) -> list[list[int]]:
        """Send every owner's part to every rank, bucket by bucket in the given order, and return the rows.

        If a peer is lost on the way, the messages of all other ranks are still exchanged before this raises.
        """
        errors = FirstError()
        # The fingerprints come before any data: a rank with another layout would make the message sizes differ.
        exchanges = self.exchanges_status(bucket_memories)
        rows = self._exchange_status(row, fingerprint, errors) if exchanges else [list(row)]
        for device, memories in groupby(bucket_memories, key=lambda bucket_memory: bucket_memory.device):
            self._gather_on(device, list(memories), errors)
        errors.raise_if_any()
        return rows

    def _gather_on(self, device: torch.device, memories: Sequence[BucketMemory], errors: FirstError) -> None:
        for memory in memories:
            memory.attach()
            if device.type == "cpu":
                finish_in_order(self._exchange_messages(memory, errors), _MESSAGES_IN_FLIGHT)
        if device.type != "cpu":
            finish_in_order(self._broadcast_messages(memories), _GROUPS_IN_FLIGHT)

    def exchanges_status(self, bucket_memories: Sequence[BucketMemory]) -> bool:
        """True if some bucket is in host memory: then every rank waits for every other anyway."""
        return any(bucket_memory.device.type == "cpu" for bucket_memory in bucket_memories)

    def _exchange_messages(self, bucket_memory: BucketMemory, errors: FirstError) -> Iterator[Callable[[], None]]:
        outgoing = [message.pack() for message in bucket_memory.messages(self.rank)]
        for shift in range(1, self.world_size):
            to, source = (self.rank + shift) % self.world_size, (self.rank - shift) % self.world_size
            for message, memory in zip_longest(bucket_memory.messages(source), outgoing):
                # Post the receive before the send: a send without a posted receive blocks the opposite direction.
                receive = send = None
                # After an error go on with the other ranks: they wait for this rank's messages.
                with errors:
                    receive = self.start_receive(message.buffer(), source) if message is not None else None
                with errors:
                    send = self.start_send(memory, to) if memory is not None else None
                yield partial(_finish_messages, message, receive, send, errors)

    def start_broadcasts(self, memories: Sequence[tuple[Tensor, int]]) -> Sequence[Transfer]:
        """Start overwriting each memory with that of the rank that comes with it, all at once if the backend can."""
        return [self.start_broadcast(memory, source) for memory, source in memories]

    def _broadcast_messages(self, memories: Sequence[BucketMemory]) -> Iterator[Callable[[], None]]:
        # All ranks take the owners in the same order: broadcasts of one group are matched by their order alone.
        messages = [each for memory in memories for each in _by_turns(memory, self.world_size)]
        for group in _groups(messages):
            sent = [(each.pack() if owner == self.rank else each.buffer(), owner) for each, owner in group]
            received = [
                (each, memory) for (each, owner), (memory, _) in zip(group, sent, strict=True) if owner != self.rank
            ]
            # The backend reads and writes all memories until the wait.
            yield partial(_finish_broadcasts, self.start_broadcasts(sent), sent, received)

    def _exchange_status(self, row: Sequence[int], fingerprint: int, errors: FirstError) -> list[list[int]]:
        """Exchange rows and fingerprints with every rank, in one small message each: cheaper than a collective."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        # Rows start with this rank's own values, so a peer that is lost does not look like a wrong fingerprint.
        rows = {rank: torch.tensor([fingerprint, *row]) for rank in range(self.world_size)}
        transfers = list[Transfer]()
        for rank in others:
            with errors:
                transfers.append(self.start_receive(rows[rank], rank, _TAG_STATUS))
        for rank in others:
            with errors:
                transfers.append(self.start_send(rows[self.rank], rank, _TAG_STATUS))
        for transfer in transfers:
            with errors:
                transfer.wait()
        for rank in others:
            if int(rows[rank][0]) != fingerprint:
                raise TransportError(
                    f"rank {rank} is about to send other parameters than rank {self.rank} expects: requires_grad, "
                    "dtype and device of parameters must change on all ranks together"
                )
        return [rows[rank][1:].tolist() for rank in range(self.world_size)]


def _finish_messages(
    message: Message | None, receive: Transfer | None, send: Transfer | None, errors: FirstError
) -> None:
    with errors:
        if message is not None and receive is not None:
            message.unpack(receive.wait())
    # Wait for the send even if the receive failed: the backend still reads the memory.
    with errors:
        if send is not None:
            send.wait()


def _finish_broadcasts(
    transfers: Sequence[Transfer], memories: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Message, Tensor]]
) -> None:
    for transfer in transfers:
        transfer.wait()
    for message, memory in received:
        message.unpack(memory)


def _by_turns(memory: BucketMemory, owners: int) -> Iterator[tuple[Message, int]]:
    """All messages and their owners, one of each owner by turns, so that all ranks send at the same time."""
    for turn in zip_longest(*(memory.messages(owner) for owner in range(owners))):
        for owner, message in enumerate(turn):
            if message is not None:
                yield message, owner


def _groups(messages: Iterable[tuple[Message, int]]) -> Iterator[list[tuple[Message, int]]]:
    """Messages that are under way together: of at most so many bytes, or one."""
    group, filled = list[tuple[Message, int]](), 0
    for message, owner in messages:
        if group and filled + message.nbytes > _GROUP_BYTES:
            yield group
            group, filled = [], 0
        group.append((message, owner))
        filled += message.nbytes
    if group:
        yield group


def as_real(memory: Tensor) -> Tensor:
    """A view of complex numbers as pairs of real ones: no backend can sum complex numbers."""
    return torch.view_as_real(memory) if memory.is_complex() else memory


def as_bytes(memory: Tensor) -> Tensor:
    """A view of contiguous memory as bytes, which every backend can send.

    Memory that is not contiguous would be copied, and what is received into the copy would be lost.
    """
    return memory.reshape(-1).view(torch.uint8)
