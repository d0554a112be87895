"""The ranks of an optimizer: a group that shards one copy of the state, or a mesh (replicate, shard) of more copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerostep.comm.transport import NullTransport, Presence, Transport, connect, control_of
from zerostep.dtensors import mesh_groups


@dataclass(frozen=True)
class Ranks:
    """The transports of an optimizer.

    `shards`: the ranks that divide one copy of the state. `replicas`: the ranks that hold the same part of other
    copies. `everyone`: all ranks of all copies, which are those of `group`; `control`: the same, for control traffic.
    `positions`: for each rank of `everyone`, its rank among its `shards`, which says what it owns.
    """

    everyone: Transport
    control: Transport
    shards: Transport
    replicas: Transport
    group: dist.ProcessGroup | None
    positions: Sequence[int]

    def shard_control(self) -> Transport:
        """The `shards`, for control traffic; a collective."""
        return self.control if self.shards is self.everyone else control_of(self.shards)

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


def as_group(given: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """A process group, or that of a mesh of one dimension; `ValueError` for other meshes."""
    if isinstance(given, DeviceMesh) and given.ndim != 1:
        raise ValueError(f"a mesh of {given.ndim} dimensions is no process group: pass the submesh of one, mesh['dp']")
    return given.get_group() if isinstance(given, DeviceMesh) else given


def resolve(
    given: dist.ProcessGroup | DeviceMesh | None, device: torch.device | None, presence: Presence | None = None
) -> Ranks:
    """The ranks of a process group, of the world, or of a mesh of one or two dimensions: (replicate, shard).

    Waits are told to `presence`, by default to one of their own.
    """
    if not isinstance(given, DeviceMesh):
        everyone = connect(given, device, presence)
        return Ranks(everyone, control_of(everyone), everyone, NullTransport(), given, range(everyone.world_size))
    if given.ndim == 1:
        return resolve(given.get_group(), device)
    if given.ndim != 2:
        raise ValueError(
            f"a mesh for sharding has one dimension, or two (replicate, shard); this one has {given.ndim}: pass the "
            "submesh of the data-parallel dimensions"
        )
    return _resolve_rows(given, device)


def mesh_controls(tensors: Iterable[Tensor]) -> list[Transport]:
    """Control traffic over each dimension of the meshes of some DTensors; a collective, in the order of the tensors."""
    groups = dict.fromkeys(group for tensor in tensors for group in mesh_groups(tensor))
    return [control_of(connect(group)) for group in groups]


def _resolve_rows(mesh: DeviceMesh, device: torch.device | None) -> Ranks:
    """The ranks of a mesh whose rows each divide one copy."""
    positions, group = _positions(mesh.mesh.tolist()), _whole_group(mesh)
    ranks = sorted(mesh.mesh.flatten().tolist())
    presence = Presence(ranks, ranks.index(dist.get_rank()))
    shards, replicas = (connect(mesh.get_group(dim), device, presence) for dim in (1, 0))
    everyone = connect(group, device, presence)
    return Ranks(everyone, control_of(everyone), shards, replicas, group, positions)


def _positions(rows: Sequence[Sequence[int]]) -> list[int]:
    """The position of each rank in the group of its row, in the order of the ranks.

    torch sorts the ranks of a group, so the position in a row of the mesh may be another.
    """
    orders = [[sorted(row).index(rank) for rank in row] for row in rows]
    for row, order in zip(rows, orders, strict=True):
        if order != orders[0]:
            raise ValueError(
                f"the ranks of a mesh must rise in the same order in all rows; those of {list(row)} do not as those of "
                f"{list(rows[0])}: torch sorts the ranks of a group, so columns would not hold the same part of the "
                "state. Sort each row"
            )
    by_rank = {
        rank: place for row, order in zip(rows, orders, strict=True) for rank, place in zip(row, order, strict=True)
    }
    return [by_rank[rank] for rank in sorted(by_rank)]


def _whole_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of all ranks of a mesh; `None` for the world. A collective if the mesh has no such group yet."""
    if mesh.size() == dist.get_world_size():
        return None
    # `_flatten` may make a new group: all ranks of the mesh must call it in the same order as other collectives.
    group: dist.ProcessGroup = mesh._flatten().get_group()
    return group
