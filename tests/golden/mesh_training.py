"""The training behind the golden checkpoint of a mesh; its gradients are exact, and its results are recorded."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import AdamW

from zerostep import ShardedOptimizer


class Meshed(nn.Module):
    """Matrices cut by rows and by columns, unevenly, one that all hold, a tied one, and a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9, dtype=torch.bfloat16)
        self.down = nn.Linear(9, 6, bias=False, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(9, 6, bias=False, dtype=torch.bfloat16)
        self.last.weight = self.down.weight
        with torch.no_grad():
            for place, param in enumerate(self.parameters()):
                param.copy_((_steps(param) % (7 + place) - 3) / 8)

    def forward(self, step: int) -> Tensor:
        """A loss with the same gradients on all ranks."""
        assert isinstance(self.norm.running_mean, Tensor)
        self.norm.running_mean.add_(step)
        terms = []
        for place, param in enumerate(self.parameters()):
            factors = ((_steps(param) * step % (5 + place) - 2) / 4).to(param.dtype)
            if isinstance(param, DTensor):
                factors = distribute_tensor(factors, param.device_mesh, param.placements)
            product = (param * factors).sum()
            terms.append((product.full_tensor() if isinstance(product, DTensor) else product).float())
        return torch.stack(terms).sum()


def _steps(param: Tensor) -> Tensor:
    return torch.arange(param.numel(), dtype=torch.float32).view(param.shape)


PLACEMENTS: dict[str, Any] = {
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
    "norm.weight": Replicate(),
}


def make(group: Any, mesh: DeviceMesh | None, placements: dict[str, Any]) -> tuple[Meshed, ShardedOptimizer]:
    """The model, its parameters distributed over a mesh, and its optimizer."""
    model = Meshed()
    if mesh is not None:
        for name, placement in placements.items():
            module, _, leaf = name.rpartition(".")
            old = model.get_parameter(name)
            new = nn.Parameter(distribute_tensor(old.detach(), mesh, [placement]))
            for owner in (model.get_submodule(module), model.last):
                if getattr(owner, leaf, None) is old:
                    setattr(owner, leaf, new)
    options: dict[str, Any] = {"master_dtype": torch.float32, "lr": 0.03125, "weight_decay": 0.125}
    return model, ShardedOptimizer(model, AdamW, process_group=group, bucket_mb=0.0001, **options)


def train(model: Meshed, optimizer: ShardedOptimizer, steps: int) -> None:
    """Some steps."""
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def everything(model: Meshed, optimizer: ShardedOptimizer) -> dict[str, Any]:
    """The model and the whole state as JSON has them, on every rank."""
    for to in range(optimizer.world_size):
        optimizer.consolidate_state_dict(to=to)
        if to == optimizer.rank:
            found = optimizer.state_dict()
    return {
        "model": {key: _plain(value) for key, value in model.state_dict().items()},
        "state": {str(number): {k: _plain(v) for k, v in entry.items()} for number, entry in found["state"].items()},
        "groups": [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in found["param_groups"]],
    }


def _plain(value: Any) -> Any:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(whole, Tensor):
        return whole
    return [str(whole.dtype), list(whole.shape), whole.detach().double().reshape(-1).tolist()]
