"""Parameters that another dimension of a mesh divides: DTensors, as `parallelize_module` makes them.

Everything here also takes ordinary tensors, which are their own memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

_slot: Any = DTensor.__dict__["_local_tensor"]


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return isinstance(tensor, DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """The tensor that this rank holds in memory; of an ordinary tensor, itself.

    By the slot and not by the attribute: of a late parameter the attribute waits for its values.
    """
    local: Tensor = _slot.__get__(tensor) if isinstance(tensor, DTensor) else tensor
    return local


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The memory of each of some tensors on this rank."""
    return [local_of(tensor) for tensor in tensors]


def as_like(local: Tensor, like: Tensor) -> Tensor:
    """A DTensor over `local`, with mesh, placements and whole shape of `like`; `local` itself if that is no DTensor."""
    if not isinstance(like, DTensor):
        return local
    with torch._C.DisableTorchFunctionSubclass():  # a late parameter would wait
        shape, stride = like.shape, like.stride()
    # Not by from_local, which moves host memory, as that of collected state, to the device of the mesh.
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def local_grad(grad: Tensor, param: Tensor) -> Tensor:
    """A gradient in the placements of its parameter, as this rank holds it.

    A collective over the parameter's mesh if the gradient has other placements, such as partial sums.
    """
    if not isinstance(param, DTensor):
        return grad
    if not isinstance(grad, DTensor):
        raise TypeError(
            f"the gradient of a DTensor parameter of shape {tuple(param.shape)} is a {torch.typename(grad)}: set .grad "
            "to a DTensor on the same mesh"
        )
    if grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    local = local_of(grad)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def whole_of(value: Any) -> Any:
    """A DTensor as an ordinary tensor, on every rank of its mesh: a collective over it. Anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_placements(name: str, tensor: Tensor, divided_by: Iterable[int]) -> None:
    """Raise `ValueError` for a DTensor that cannot be divided among the ranks `divided_by` in addition."""
    if not isinstance(tensor, DTensor):
        return
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            kind = "is a partial sum" if isinstance(placement, Partial) else "has a layout of its own"
            raise ValueError(
                f"parameter {name!r} {kind} over its mesh ({placement}), and only Shard and Replicate can be divided: "
                "redistribute it before the optimizer is built"
            )
    _, ranges = local_ranges(tensor)
    sizes, held = tuple(stop - start for start, stop in ranges), tuple(local_of(tensor).shape)
    if sizes != held:
        raise ValueError(
            f"parameter {name!r} has a local part of shape {held} here, where torch would divide it into {sizes}: make "
            "it with distribute_tensor, so that it is known which elements each rank holds"
        )
    both = set(_mesh_ranks(tensor)).intersection(divided_by) - {dist.get_rank()}
    if both:
        raise ValueError(
            f"parameter {name!r} is a DTensor on a mesh with rank {min(both)}, among which this optimizer divides its "
            "state, too: give process_group the data-parallel dimension of the mesh, mesh['dp'], or use plain "
            "parameters there"
        )


def check_overlap(name: str, tensor: Tensor, everyone: Iterable[int]) -> None:
    """Raise `ValueError` if a dimension of a DTensor's mesh has some of the ranks `everyone` beside other ranks."""
    known = set(everyone)
    for group in mesh_groups(tensor):
        ranks = set(dist.get_process_group_ranks(group))
        if len(ranks & known) > 1 and not ranks <= known:
            raise ValueError(
                f"parameter {name!r} is a DTensor over ranks {sorted(ranks)}, some of which belong to this optimizer "
                "and some do not, so that norms would count it twice: use a mesh that lies inside or outside"
            )


def _mesh_ranks(tensor: DTensor) -> list[int]:
    ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return ranks


def mesh_groups(tensor: Tensor) -> list[dist.ProcessGroup]:
    """The process groups of all dimensions of a DTensor's mesh, with more than one rank; none of an ordinary tensor."""
    return [group for group, _ in _dimensions(tensor)]


def sharding_groups(tensor: Tensor) -> list[dist.ProcessGroup]:
    """The process groups that hold different blocks of a tensor: over them a sum of its elements is added up."""
    return [group for group, placement in _dimensions(tensor) if isinstance(placement, Shard)]


def _dimensions(tensor: Tensor) -> Iterator[tuple[dist.ProcessGroup, Any]]:
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for dim, placement in enumerate(tensor.placements):
            if mesh.size(dim) > 1:
                yield mesh.get_group(dim), placement


def local_ranges(tensor: Tensor) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """The whole shape of a tensor, and in each dimension the first element that this rank holds and the one behind."""
    with torch._C.DisableTorchFunctionSubclass():  # a late parameter would wait
        shape = tuple(tensor.shape)
    ranges = [(0, size) for size in shape]
    if isinstance(tensor, DTensor):
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate() or ()
        for mesh_dim, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                ranges[placement.dim] = _chunk(ranges[placement.dim], coordinate[mesh_dim], mesh.size(mesh_dim))
    return shape, ranges


def _chunk(of: tuple[int, int], position: int, parts: int) -> tuple[int, int]:
    """The part at `position` of a range that is divided into `parts` chunks, all but the last ones of equal size."""
    start, stop = of
    size = -(-(stop - start) // parts)
    first = min(start + position * size, stop)
    return first, min(first + size, stop)


def describe_placements(tensor: Tensor) -> str:
    """How a tensor is divided over its mesh, for comparisons between ranks; empty for an ordinary tensor."""
    if not isinstance(tensor, DTensor):
        return ""
    with torch._C.DisableTorchFunctionSubclass():
        return f"{tuple(map(str, tensor.placements))} of {tuple(tensor.shape)}"
