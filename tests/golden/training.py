"""The training behind the golden checkpoints; its numbers are exact in floating point, or recorded."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import AdamW, Muon

from zerostep import ShardedOptimizer


class Golden(nn.Module):
    """Parameters in bfloat16 with masters, a tied one, matrices for another optimizer, and a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6, dtype=torch.bfloat16)
        self.hidden = nn.Linear(6, 10, bias=False, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(10)
        self.last = nn.Linear(6, 11, dtype=torch.bfloat16)
        self.last.weight = self.words.weight
        with torch.no_grad():
            for place, param in enumerate(self.parameters()):
                steps = torch.arange(param.numel(), dtype=torch.float32).view(param.shape)
                param.copy_((steps % (7 + place) - 3) / 8)

    def forward(self, step: int) -> Tensor:
        """A loss with the same gradients on all ranks."""
        assert isinstance(self.norm.running_mean, Tensor)
        self.norm.running_mean.add_(step)
        terms = []
        for place, param in enumerate(self.parameters()):
            steps = torch.arange(param.numel(), dtype=torch.float32).view(param.shape)
            terms.append((param * ((steps * step % (5 + place) - 2) / 4).to(param.dtype)).sum().float())
        return torch.stack(terms).sum()


def make(group: ProcessGroup) -> tuple[Golden, ShardedOptimizer]:
    """The model and its optimizer, which is AdamW, and Muon for the hidden matrix."""
    model = Golden()
    matrices = [("hidden.weight", model.hidden.weight)]
    others = [(name, param) for name, param in model.named_parameters() if name != "hidden.weight"]
    groups: list[dict[str, Any]] = [
        {"params": others, "weight_decay": 0.125},
        {"params": matrices, "optimizer_class": Muon, "lr": 0.0625},
    ]
    options: dict[str, Any] = {"master_dtype": torch.float32, "lr": 0.03125}
    return model, ShardedOptimizer(model, AdamW, groups, process_group=group, bucket_mb=0.0001, **options)


def train(model: Golden, optimizer: ShardedOptimizer, steps: int) -> None:
    """Some steps."""
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def everything(model: Golden, optimizer: ShardedOptimizer) -> dict[str, Any]:
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
    if not isinstance(value, Tensor):
        return value
    return [str(value.dtype), list(value.shape), value.detach().double().reshape(-1).tolist()]
