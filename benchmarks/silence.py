"""One rank of many in one process: a transport whose other ranks say and take nothing, at no cost."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from zerostep.comm.exchange import TAG_REDUCE, Exchange, HostExchange, StreamExchange
from zerostep.comm.transport import TAG_DATA, GroupTransport, NullTransport, PendingInts, Transfer, kind_of


class _Done:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class SilentTransport(GroupTransport):
    """Rank ``rank`` of ``world_size``. The others' gradients are zeros, their parameters what is there already."""

    wire_device = torch.device("cpu")

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.messages = 0

    def stream_ordered(self, device: torch.device) -> bool:
        """As with a backend for accelerators alone."""
        return device.type != "cpu"

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Everyone says the same."""
        return [list(values) for _ in range(self.world_size)]

    def start_all_gather_ints(self, values: Sequence[int]) -> PendingInts:
        """Everyone says the same."""
        self.messages += 1
        return PendingInts(lambda: [list(values) for _ in range(self.world_size)])

    def start_reduce_scatter(self, output: Tensor, memory: Tensor, parts: Sequence[Tensor] | None) -> Transfer:
        """The sum is this rank's own part."""
        self.messages += 1
        output.copy_(memory.view(self.world_size, -1)[self.rank] if parts is None else parts[self.rank])
        return Transfer(_Done(), output, "")

    def start_all_gather(self, memory: Tensor, parts: Sequence[Tensor] | None) -> Transfer:
        """Everything is there."""
        self.messages += 1
        return Transfer(_Done(), memory, "")

    def start_all_reduce(self, memory: Tensor) -> Transfer:
        """The sum is what this rank has."""
        self.messages += 1
        return Transfer(_Done(), memory, "")

    def start_send(self, memory: Tensor, to: int, tag: int = TAG_DATA) -> Transfer:
        """Count the message."""
        self.messages += 1
        return Transfer(_Done(), memory, "")

    def start_receive(self, memory: Tensor, source: int, tag: int = TAG_DATA) -> Transfer:
        """Zeros for gradients; parameters stay as they are."""
        return Transfer(_Done(), memory.zero_() if kind_of(tag) == TAG_REDUCE else memory, "")

    def start_broadcast(self, memory: Tensor, source: int) -> Transfer:
        """Everything is there."""
        self.messages += 1
        return Transfer(_Done(), memory, "")

    def companion(self) -> Any:
        """Itself: there is no order to keep."""
        return self


@contextmanager
def alone_among(world_size: int, rank: int, collectives: bool) -> Iterator[SilentTransport]:
    """Optimizers built here believe in ``world_size`` ranks; ``collectives`` as on accelerators, else by messages."""
    transport = SilentTransport(rank, world_size)

    def exchange(ranks: SilentTransport, device: torch.device) -> Exchange:
        return StreamExchange(ranks) if collectives else HostExchange(ranks)

    if world_size == 1:
        with patch("zerostep.comm.mesh.connect", lambda group, device=None, presence=None: NullTransport()):
            yield transport
        return
    with (
        patch("zerostep.comm.mesh.connect", lambda group, device=None, presence=None: transport),
        patch("zerostep.optim.zero.connect", lambda group, device=None, presence=None: transport),
        patch("zerostep.comm.mesh.control_of", lambda ranks: ranks),
        patch("zerostep.optim.zero.control_of", lambda ranks: ranks),
        patch("zerostep.step.bucket_shards.connect_exchange", exchange),
    ):
        yield transport
