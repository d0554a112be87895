"""Control traffic: agreement, saves and loads, consolidation. It never takes a place among the gradients' messages.

Every process group gets one Gloo group beside it, which all optimizers over it share that give its ranks the same
numbers: the ranks of a row of a mesh have those of the mesh. It is made by the first of them, and anew when the process
group is another one, or when an error has closed its connections.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zerostep.comm.transport.base import BaseTransport
from zerostep.comm.transport.companion import CompanionTransport
from zerostep.comm.transport.group import GroupTransport
from zerostep.comm.transport.ints import PendingInts
from zerostep.comm.transport.protocol import TAG_DATA, Transport
from zerostep.comm.transport.rows import all_gather_rows
from zerostep.comm.transport.transfer import Transfer

logger = logging.getLogger("zerostep")

# `None` for a group whose ranks have no Gloo.
_shared: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], CompanionTransport | None]] = WeakKeyDictionary()


def control_of(transport: Transport) -> Transport:
    """The transport for control traffic between the ranks of `transport`; a collective.

    It is `transport` itself where the ranks have no Gloo. One thread of a process uses it at a time: whatever runs in
    the background has a companion of its own.
    """
    if not isinstance(transport, GroupTransport):
        return transport
    control = ControlTransport(transport)
    return control if control.connected() else transport


class ControlTransport(BaseTransport):
    """A transport in host memory over the Gloo group that belongs to a process group."""

    wire_device = torch.device("cpu")

    def __init__(self, beside: GroupTransport) -> None:
        self._beside, self.presence = beside, beside.presence
        self.rank, self.world_size, self.peers = beside.rank, beside.world_size, beside.peers

    def connected(self) -> bool:
        """Whether there is a Gloo group; the first call for a process group makes it, as a collective."""
        if self._beside.peers not in self._found:
            self._found[self._beside.peers] = _connect(self._beside)
        return self._found[self._beside.peers] is not None

    @property
    def _found(self) -> dict[tuple[int, ...], CompanionTransport | None]:
        return _shared.setdefault(self._beside.group, {})

    def _current(self) -> CompanionTransport:
        """The shared transport; a collective if an error has closed the one before."""
        found = self._found.get(self._beside.peers)
        # An error closes the connections on every rank: each finds out, and connects anew in its next call.
        if found is None or found.failed:
            found = self._found[self._beside.peers] = self._beside.companion()
        return found

    def stream_ordered(self, device: torch.device) -> bool:
        """Never: waiting for Gloo blocks the host."""
        return False

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's integers, by rank."""
        return all_gather_rows(self._all_gather_row, values, self)

    def _all_gather_row(self, values: Sequence[int]) -> list[list[int]]:
        transfer, rows = self._current().start_all_gather_row(values)
        transfer.noted_by(self.presence).wait()
        return torch.stack(rows).tolist()

    def start_all_gather_ints(self, values: Sequence[int]) -> PendingInts:
        """At once: whoever uses control traffic waits for the others anyway."""
        rows = self.all_gather_ints(values)
        return PendingInts(lambda: rows)

    def start_send(self, memory: Tensor, to: int, tag: int = TAG_DATA) -> Transfer:
        """Start sending host memory to one rank."""
        return self._current().start_send(memory, to, tag).noted_by(self.presence)

    def start_receive(self, memory: Tensor, source: int, tag: int = TAG_DATA) -> Transfer:
        """Start receiving into host memory from one rank."""
        return self._current().start_receive(memory, source, tag).noted_by(self.presence)

    def start_all_reduce(self, memory: Tensor) -> Transfer:
        """Start summing `memory`, on the host, over all ranks, in place."""
        return self._current().start_all_reduce(memory).noted_by(self.presence)

    def companion(self) -> Transport:
        """A transport over a Gloo group of its own; a collective."""
        companion = self._current().companion()
        companion.belong_to(self.presence)
        return companion

    def start_broadcast(self, memory: Tensor, source: int) -> Transfer:
        """Start overwriting `memory` with that of rank `source`."""
        return self._current().start_broadcast(memory, source).noted_by(self.presence)


def _connect(beside: GroupTransport) -> CompanionTransport | None:
    """A Gloo group of the same ranks, or `None` on all of them if one cannot use Gloo; a collective."""
    problem = _problem_with_gloo()
    if problem:
        logger.warning(
            "Gloo cannot be used on rank %d, so control runs over the process group: %s", beside.rank, problem
        )
    if any(row[0] for row in beside.all_gather_ints([bool(problem)])):
        return None
    return beside.companion()


def _problem_with_gloo() -> str:
    """Why this process cannot use Gloo: a build without it, or a host name without an address; empty if it can."""
    if not dist.is_gloo_available():
        return "torch was built without it"
    try:
        dist.ProcessGroupGloo.create_default_device()
    except RuntimeError as error:
        return str(error)
    return ""
