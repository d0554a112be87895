"""The transport of a world of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerostep.comm.transport.ints import PendingInts
from zerostep.comm.transport.presence import Presence
from zerostep.comm.transport.protocol import BucketMemory, Transport
from zerostep.comm.transport.transfer import CompletedWork, Transfer
from zerostep.errors import TransportError


class NullTransport:
    """A world of one: collectives return at once, and messages to other ranks raise."""

    rank = 0
    world_size = 1
    presence = Presence()
    peers: tuple[int, ...] = (0,)
    wire_device = torch.device("cpu")

    def stream_ordered(self, device: torch.device) -> bool:
        """True on accelerators: there is no transfer that could block the host."""
        return device.type != "cpu"

    def gather(self, bucket_memories: Sequence[BucketMemory], row: Sequence[int], fingerprint: int) -> list[list[int]]:
        """Nothing to gather: return this rank's row."""
        return [list(row)]

    def exchanges_status(self, bucket_memories: Sequence[BucketMemory]) -> bool:
        """False: there is no other rank."""
        return False

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """This rank's integers."""
        return [list(values)]

    def start_all_gather_ints(self, values: Sequence[int]) -> PendingInts:
        """This rank's integers."""
        return PendingInts(lambda: [list(values)])

    def broadcast(self, memory: Tensor, source: int) -> None:
        """Nothing to do: the only rank has `memory`."""

    def start_send(self, memory: Tensor, to: int, tag: int = 0) -> Transfer:
        """Raise: there is no other rank."""
        raise TransportError(f"cannot send to rank {to}: this is a world of one")

    def start_receive(self, memory: Tensor, source: int, tag: int = 0) -> Transfer:
        """Raise: there is no other rank."""
        raise TransportError(f"cannot receive from rank {source}: this is a world of one")

    def start_all_reduce(self, memory: Tensor) -> Transfer:
        """Nothing to do: the sum over one rank is `memory`."""
        return Transfer(CompletedWork(), memory, "")

    def abort(self) -> None:
        """Nothing to do: there is no other rank to wait for."""

    def companion(self) -> Transport:
        """This transport itself: its calls need no order."""
        return self
