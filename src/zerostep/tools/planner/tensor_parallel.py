"""What one rank of tensor parallelism holds: a model is divided for real, on a mesh of ranks that do not exist.

Process groups of torch's "fake" backend know their size and their rank, and send nothing. On them `parallelize_module`
gives the parameters the placements and local shapes of training, on tensors without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from zerostep.dtensors import is_dtensor
from zerostep.tools.errors import PlanError
from zerostep.tools.planner.shapes import NAMED_SHAPES, divided_dimension
from zerostep.tools.planner.sources import Source, load, resolve

_WANTED = (
    "give --tp-plan package.module:function, which gets the model and the mesh, or which is a plan of "
    "parallelize_module; or a factory that makes DTensors itself"
)


def load_divided(model: str, dtype: torch.dtype | None, size: int, plan: str | None) -> list[Source]:
    """Return what each of `size` ranks of tensor parallelism holds of a model, in the order of the ranks."""
    _check(model, size, plan)
    return [_load_coordinate(model, dtype, size, plan, rank) for rank in range(size)]


def _check(model: str, size: int, plan: str | None) -> None:
    if size < 1:
        raise PlanError(f"--tp must be at least 1, not {size}")
    if model.endswith((".safetensors", ".json")):
        raise PlanError(f"--tp cannot divide the tensors of {model}, which has no modules: give a factory as --model")
    if model in NAMED_SHAPES and plan is not None:
        raise PlanError(f"--model {model} is divided as Megatron does: drop --tp-plan, or give a factory as --model")
    if dist.is_initialized():
        raise PlanError("--tp needs a process without a process group: run it outside of training")


def _load_coordinate(model: str, dtype: torch.dtype | None, size: int, plan: str | None, rank: int) -> Source:
    with fake_mesh(size, rank) as mesh:
        if model in NAMED_SHAPES:
            return load(model, dtype, divide_tensor=partial(_as_megatron, mesh))
        return load(model, dtype, divide_module=partial(_divide, mesh, plan))


@contextmanager
def fake_mesh(size: int, rank: int) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh "tp" whose other ranks do not exist; collectives return at once, without values."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def _as_megatron(mesh: DeviceMesh, name: str, tensor: Tensor) -> Tensor:
    dim = divided_dimension(name)
    return distribute_tensor(tensor, mesh, [Replicate() if dim is None else Shard(dim)])


def _divide(mesh: DeviceMesh, path: str | None, model: nn.Module) -> nn.Module:
    """Parallelize a model as the user says; raise `PlanError` if that does not divide it."""
    divided = model if path is None else _apply(path, model, mesh)
    if mesh.size() > 1 and not any(map(is_dtensor, divided.parameters())):
        raise PlanError(f"--tp {mesh.size()}: no parameter of the model is a DTensor: {_WANTED}")
    return divided


def _apply(path: str, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: Mapping[str, Any] | Callable[..., Any] = resolve(path, "--tp-plan")
    if not callable(plan) and not isinstance(plan, Mapping):
        raise PlanError(f"--tp-plan {path} is a {type(plan).__name__}: {_WANTED}")
    try:
        made = plan(model, mesh) if callable(plan) else parallelize_module(model, mesh, dict(plan))
    except Exception as error:
        raise PlanError(f"--tp-plan {path} fails with {type(error).__name__}: {error}: {_WANTED}") from error
    if isinstance(made, Mapping):
        made = parallelize_module(model, mesh, dict(made))
    return made if isinstance(made, nn.Module) else model
