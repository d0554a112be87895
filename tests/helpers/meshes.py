"""Small models with tensor and sequence parallelism, and plain training of them, for tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import Optimizer

WIDTH, HIDDEN, WINDOW, BATCH, CLASSES = 8, 12, 4, 3, 8
NAMES = ("rest", "dp", "tp")


class Net(nn.Module):
    """Norm, two linear layers with a residual, a head; `window` says which part of the sequence this rank has."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.window = slice(None)

    def forward(self, x: Tensor) -> Any:
        x = x[:, self.window] * self.scale
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


@dataclass(frozen=True)
class Place:
    """This rank's place in a mesh of (dp, tp); ranks that are too many form further meshes beside it."""

    mesh: DeviceMesh

    @property
    def dp(self) -> DeviceMesh:
        return self.mesh["dp"]

    @property
    def tp(self) -> DeviceMesh:
        return self.mesh["tp"]

    @property
    def replica(self) -> int:
        return int(self.mesh.get_local_rank("dp"))


def place(dp: int, tp: int) -> Place:
    """A mesh over all ranks; a collective of the world."""
    rest = dist.get_world_size() // (dp * tp)
    return Place(init_device_mesh("cpu", (rest, dp, tp), mesh_dim_names=NAMES))


def tensor_parallel() -> dict[str, ParallelStyle]:
    """`up` by columns, `down` by rows; norm, scale and head are ordinary parameters on all ranks."""
    return {"up": ColwiseParallel(), "down": RowwiseParallel()}


def sequence_parallel() -> dict[str, ParallelStyle]:
    """The same, and the norm works on a part of the sequence: its gradients are partial sums."""
    return {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def build(here: Place, styles: Callable[[], dict[str, ParallelStyle]] = tensor_parallel, hidden: int = HIDDEN) -> Net:
    """The same model on all ranks, parallelized over the tp dimension."""
    torch.manual_seed(0)
    model = Net(hidden).to(here.mesh.device_type)
    if styles is sequence_parallel:
        size, rank = here.tp.size(), here.tp.get_local_rank()
        model.window = slice(rank * WINDOW // size, (rank + 1) * WINDOW // size)
        del model.scale  # an ordinary parameter would see only a part of the sequence
        model.register_buffer("scale", torch.ones(WIDTH, device=here.mesh.device_type))
    parallelize_module(model, here.tp, styles())
    return model


def batches(here: Place, count: int) -> list[tuple[Tensor, Tensor]]:
    """One batch for each step, another one on each replica."""
    generator, device = torch.Generator().manual_seed(100 + here.replica), here.mesh.device_type
    return [
        (
            torch.randn(BATCH, WINDOW, WIDTH, generator=generator).to(device),
            torch.randn(BATCH, WINDOW, CLASSES, generator=generator).to(device),
        )
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def average(here: Place, params: Sequence[Tensor]) -> None:
    """What DDP would do inside the dp dimension, by hand, on what each rank holds."""
    for param in params:
        if param.grad is not None:
            if isinstance(param.grad, DTensor):
                assert isinstance(param, DTensor)
                param.grad = param.grad.redistribute(param.device_mesh, param.placements)
            local = local_of(param.grad)
            local.mul_(1.0 / here.dp.size())
            dist.all_reduce(local, group=here.dp.get_group())


def local_of(tensor: Tensor) -> Tensor:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def global_norm(params: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients of a model, each element once, in double precision."""
    squares = [whole(param.grad).double().pow(2).sum() for param in params if param.grad is not None]
    return torch.stack(squares).sum().sqrt()


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip(params: Sequence[Tensor], most: float) -> Tensor:
    total = global_norm(params)
    factor = (most / (total + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None:
            local = local_of(param.grad)
            local.mul_(factor.to(local.dtype))
    return total


def train_plain(
    here: Place,
    model: nn.Module,
    optimizer: Optimizer,
    data: Sequence[tuple[Tensor, Tensor]],
    most: float | None = None,
) -> list[float]:
    """Plain training with hand-made averages; the norms, if gradients are clipped."""
    norms, params = [], list(model.parameters())
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        average(here, params)
        if most is not None:
            norms.append(float(clip(params, most)))
        optimizer.step()
    return norms
