"""Which ranks share the work: all of a group, or a mesh that shards inside and replicates across."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerostep.comm.transport import NullTransport, Transport, connect

__all__ = ["Ranks", "ReplicaAllReduce", "resolve"]


@dataclass(frozen=True)
class Ranks:
    """`shards` divide one copy of the state, `replicas` hold the same part of their copies, `everyone` is both."""

    everyone: Transport
    shards: Transport
    replicas: Transport
    group: dist.ProcessGroup | None

    def replica_sum(self, device: torch.device) -> ReplicaAllReduce:
        """How this rank's part of a sum becomes the sum over all replicas; a collective."""
        if isinstance(self.replicas, NullTransport) or self.replicas.stream_ordered(device):
            return ReplicaAllReduce(self.replicas, staged=False)
        return ReplicaAllReduce(self.replicas.companion(), staged=True)


@dataclass
class ReplicaAllReduce:
    """The sum over all replicas. `bytes_moved` counts what a ring would send, and receive."""

    transport: Transport
    staged: bool
    bytes_moved: int = 0

    def __call__(self, part: Tensor) -> Tensor:
        """Sum this rank's part with those of the other copies."""
        if isinstance(self.transport, NullTransport) or not part.numel():
            return part
        copies = self.transport.world_size
        self.bytes_moved += 2 * (copies - 1) * part.nbytes // copies
        memory = part.cpu() if self.staged else part
        self.transport.start_all_reduce(memory).wait()
        return memory.to(part.device)


def resolve(given: dist.ProcessGroup | DeviceMesh | None, device: torch.device | None) -> Ranks:
    """The ranks of a process group, of the world, or of a mesh of one or two dimensions: (replicate, shard)."""
    if not isinstance(given, DeviceMesh):
        everyone = connect(given, device)
        return Ranks(everyone, everyone, NullTransport(), given)
    if given.ndim == 1:
        return resolve(given.get_group(), device)
    if given.ndim != 2:
        raise ValueError(
            f"a mesh for sharding has one dimension, or two (replicate, shard); this one has {given.ndim}: pass the "
            "submesh of the data-parallel dimensions"
        )
    whole = _whole(given)
    return Ranks(
        connect(whole, device), connect(given.get_group(1), device), connect(given.get_group(0), device), whole
    )


def _whole(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """A group of all ranks of a mesh."""
    if mesh.size() == dist.get_world_size():
        return None
    found: dist.ProcessGroup = mesh._flatten().get_group()
    return found
