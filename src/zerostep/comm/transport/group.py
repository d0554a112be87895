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

from zerostep.comm.transport.protocol import BucketMemory, EvenParts, Message, Transport
from zerostep.comm.transport.transfer import FirstError, Transfer, start
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

    def gather(self, bucket_memories: Sequence[BucketMemory], status: int, fingerprint: int) -> list[int]:
        """Bring every owner's part to every rank, bucket by bucket in the given order.

        A peer that is lost on the way is an error, but only when the others have got all that they wait for.
        """
        errors = FirstError()
        statuses = (
            self._exchange_status(status, fingerprint, errors) if self.meets_on_host(bucket_memories) else [status]
        )
        for bucket_memory in bucket_memories:
            bucket_memory.attach()
            if bucket_memory.device.type == "cpu":
                self._exchange(bucket_memory, errors)
            else:
                self._broadcast_messages(bucket_memory)
        errors.raise_if_any()
        return statuses

    def meets_on_host(self, bucket_memories: Sequence[BucketMemory]) -> bool:
        """True where some parcel lies in host memory: then every rank waits for every other anyway."""
        return any(bucket_memory.device.type == "cpu" for bucket_memory in bucket_memories)

    def _exchange(self, bucket_memory: BucketMemory, errors: FirstError) -> None:
        outgoing = [message.pack() for message in bucket_memory.messages(self.rank)]
        in_flight = deque[tuple[Message | None, Transfer | None, Transfer | None]]()
        for shift in range(1, self.world_size):
            to, source = (self.rank + shift) % self.world_size, (self.rank - shift) % self.world_size
            for message, memory in zip_longest(bucket_memory.messages(source), outgoing):
                # The receive comes first: a send that finds no receive posted holds up the opposite direction.
                receive = send = None
                with errors:
                    receive = self.start_receive(message.buffer(), source) if message is not None else None
                with errors:
                    send = self.start_send(memory, to) if memory is not None else None
                in_flight.append((message, receive, send))
                if len(in_flight) == _MESSAGES_IN_FLIGHT:
                    _finish_messages(*in_flight.popleft(), errors)
        while in_flight:
            _finish_messages(*in_flight.popleft(), errors)

    def _broadcast_messages(self, bucket_memory: BucketMemory) -> None:
        in_flight = deque[tuple[Message | None, Transfer]]()
        for owner in range(self.world_size):
            mine = owner == self.rank
            for message in bucket_memory.messages(owner):
                transfer = self._start_broadcast(message.pack() if mine else message.buffer(), owner)
                in_flight.append((None if mine else message, transfer))
                if len(in_flight) == _BROADCASTS_IN_FLIGHT:
                    _finish_broadcast(*in_flight.popleft())
        while in_flight:
            _finish_broadcast(*in_flight.popleft())

    def _exchange_status(self, status: int, fingerprint: int, errors: FirstError) -> list[int]:
        """One small message to and from every rank: cheaper than a collective."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        words = {rank: torch.tensor([status, fingerprint]) for rank in range(self.world_size)}
        transfers = list[Transfer]()
        for rank in others:
            with errors:
                transfers.append(self._start_receive(words[rank], rank, _TAG_WORD))
        for rank in others:
            with errors:
                transfers.append(self._start_send(words[self.rank], rank, _TAG_WORD))
        for transfer in transfers:
            with errors:
                transfer.wait()
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
        description = f"the all-gather of {self.world_size} ranks"
        start(lambda: dist.all_gather(rows, row, group=self._group, async_op=True), row, description).wait()
        return torch.stack(rows).tolist()

    def broadcast(self, memory: Tensor, source: int) -> None:
        """Overwrite `memory` with that of rank `source`."""
        self._start_broadcast(memory, source).wait()

    def start_send(self, memory: Tensor, to: int, tag: int = TAG_DATA) -> Transfer:
        """Start sending `memory` to one rank."""
        return self._start_send(memory, to, tag)

    def start_receive(self, memory: Tensor, source: int, tag: int = TAG_DATA) -> Transfer:
        """Start receiving into `memory` from one rank."""
        return self._start_receive(memory, source, tag)

    def start_reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], memory: Tensor) -> Transfer:
        """One native call where all parts are equally long, else the list form, which takes any lengths."""
        description = f"the reduce-scatter of {self.world_size} ranks"
        if _fills(parts, memory):
            call: Callable[..., Any] = partial(_reduce_scatter, as_real(output), as_real(memory))
        else:
            call = partial(dist.reduce_scatter, as_real(output), list(map(as_real, parts)))
        return start(lambda: call(group=self._group, async_op=True), output, description)

    def start_all_gather(self, parts: Sequence[Tensor], memory: Tensor) -> Transfer:
        """One native call where all parts are equally long, else the list form, which takes any lengths."""
        description, mine = f"the all-gather of {self.world_size} ranks", parts[self.rank]
        if _fills(parts, memory):
            call: Callable[..., Any] = partial(_all_gather, as_real(memory), as_real(mine))
        else:
            call = partial(dist.all_gather, list(map(as_real, parts)), as_real(mine))
        return start(lambda: call(group=self._group, async_op=True), memory, description)

    def start_all_reduce(self, memory: Tensor) -> Transfer:
        """Start summing `memory` over all ranks, in place."""
        description = f"the all-reduce of {self.world_size} ranks"
        return start(lambda: dist.all_reduce(as_real(memory), group=self._group, async_op=True), memory, description)

    def _start_send(self, memory: Tensor, to: int, tag: int) -> Transfer:
        description = f"sending to rank {to} of {self.world_size}"
        return start(
            lambda: dist.isend(as_bytes(memory), group=self._group, group_dst=to, tag=tag), memory, description
        )

    def _start_receive(self, memory: Tensor, source: int, tag: int) -> Transfer:
        description = f"receiving from rank {source} of {self.world_size}"
        return start(
            lambda: dist.irecv(as_bytes(memory), group=self._group, group_src=source, tag=tag), memory, description
        )

    def _start_broadcast(self, memory: Tensor, source: int) -> Transfer:
        description, data = f"the broadcast of rank {source} of {self.world_size}", as_bytes(memory)
        return start(
            lambda: dist.broadcast(data, group=self._group, group_src=source, async_op=True), memory, description
        )

    def companion(self) -> Transport:
        """A Gloo group of our own over the same ranks; host memory only, whatever backends this group has."""
        token = torch.frombuffer(bytearray(uuid4().bytes), dtype=torch.uint8).to(self.wire_device)
        self.broadcast(token, 0)
        from zerostep.comm.transport.companion import CompanionTransport  # a subclass: it must come later

        # torch names new groups by counters that differ between ranks of a subgroup; a drawn name cannot clash.
        unpack = distributed_c10d.PrefixStore(
            f"zerostep/{bytes(token.tolist()).hex()}", distributed_c10d._get_default_store()
        )
        return CompanionTransport.over(unpack, self.rank, self.world_size, _timeout(self._group))


def _finish_messages(
    message: Message | None, receive: Transfer | None, send: Transfer | None, errors: FirstError
) -> None:
    with errors:
        if message is not None and receive is not None:
            message.unpack(receive.wait())
    with errors:
        if send is not None:
            send.wait()


def _finish_broadcast(message: Message | None, transfer: Transfer) -> None:
    memory = transfer.wait()
    if message is not None:
        message.unpack(memory)


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


def _fills(parts: Sequence[Tensor], memory: Tensor) -> bool:
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
