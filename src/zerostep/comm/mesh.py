"""The ranks of an optimizer: a group that shards one copy of the state, or a mesh (replicate, shard) of more copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerostep.comm.transport import NullTransport, Transport, connect


@dataclass(frozen=True)
class Ranks:
    """The transports of an optimizer.

    `shards`: the ranks that divide one copy of the state. `replicas`: the ranks that hold the same part of other
    copies. `everyone`: all ranks of all copies, which are those of `group`.
    """

    everyone: Transport
    shards: Transport
    replicas: Transport
    group: dist.ProcessGroup | None

    def replica_all_reduce(self, device: torch.device) -> ReplicaAllReduce:
        """The all-reduce over the replicas for memory on `device`; a collective, as it may connect a companion."""
        staged = not self.replicas.stream_ordered(device)
        return ReplicaAllReduce(self.replicas.companion() if staged else self.replicas, staged)


@dataclass
class ReplicaAllReduce:
    """Sums a tensor over all replicas. `bytes_moved` counts what a ring all-reduce would send, and receive.

    `staged`: accelerator memory is copied through the host.
    """

    transport: Transport
    staged: bool
    bytes_moved: int = 0

    def __call__(self, part: Tensor) -> Tensor:
        """The sum of `part` over all replicas; in place, unless it is staged from an accelerator."""
        if isinstance(self.transport, NullTransport) or not part.numel():
            return part
        replicas = self.transport.world_size
        self.bytes_moved += 2 * (replicas - 1) * part.nbytes // replicas
        # With `staged`, `cpu()` blocks until the device has written `part`: Gloo knows of no streams.
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
    group = _whole_group(given)
    return Ranks(
        connect(group, device), connect(given.get_group(1), device), connect(given.get_group(0), device), group
    )


def _whole_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of all ranks of a mesh; `None` for the world. A collective if the mesh has no such group yet."""
    if mesh.size() == dist.get_world_size():
        return None
    # `_flatten` may make a new group: all ranks of the mesh must call it in the same order as other collectives.
    group: dist.ProcessGroup = mesh._flatten().get_group()
    return group
