"""A layer of experts that are divided among ranks, so that they have fewer replicas than the rest of the model.

`torchrun --nproc-per-node 4`: two copies of the experts, each divided between two ranks. With `--whole` every rank has
all experts, which costs their memory on every rank and gives the same numbers.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from common import batches, mean, say, start
from zerostep import ShardedOptimizer

STEPS, WIDTH, EXPERTS = 20, 32, 4


class Exchange(torch.autograd.Function):
    """An equal part of a tensor for each rank of a group; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Send the parts."""
        ctx.group = group
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, sent.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Send their gradients back."""
        return Exchange.forward(ctx, grads[0], ctx.group), None


class Experts(nn.Module):
    """Each word goes to its best expert; `group` are the ranks among which the experts are divided."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.gate, self.group, self.ranks = nn.Linear(WIDTH, EXPERTS, bias=False), group, dist.get_world_size(group)
        experts = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        ]
        first = dist.get_rank(group) * EXPERTS // self.ranks
        # Named by their number in the whole model: no two experts have the same name.
        self.own = nn.ModuleDict({str(n): experts[n] for n in range(first, first + EXPERTS // self.ranks)})

    def forward(self, hidden: Tensor) -> Tensor:
        """Send words to the ranks of their experts, and bring the results back."""
        words = hidden.flatten(0, 1)
        weight, expert = self.gate(words).softmax(-1).max(-1)
        chosen = nn.functional.one_hot(expert, EXPERTS).T.unsqueeze(-1)  # zeros for all other words
        parts = Exchange.apply(chosen * words, self.group).unflatten(0, (self.ranks, -1)).unbind(1)
        found = torch.stack([run(part.flatten(0, 1)) for run, part in zip(self.own.values(), parts, strict=True)], 1)
        back = Exchange.apply(found.unflatten(0, (self.ranks, -1)).transpose(1, 2).flatten(0, 1), self.group)
        return hidden + ((chosen * back).sum(0) * weight.unsqueeze(-1)).view_as(hidden)


device = start()
ranks = dist.get_world_size()
shape = (ranks, 1) if "--whole" in sys.argv else (ranks // 2, 2)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "experts"))
torch.manual_seed(0)
words, head, experts = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256), Experts(mesh["experts"].get_group())
model = nn.Sequential(words, experts, head).to(device)

own = {name for name, _ in model.named_parameters() if ".own." in name}
groups: list[dict[str, Any]] = [
    {"params": [(name, param) for name, param in model.named_parameters() if name not in own]},
    {"params": [(name, param) for name, param in model.named_parameters() if name in own]},
]
if mesh["experts"].size() > 1:
    groups[1]["process_group"] = mesh["copies"].get_group()  # the ranks that have the same experts
optimizer = ShardedOptimizer(model, torch.optim.AdamW, groups, lr=3e-3)

for window in batches(STEPS, device):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
    loss.backward()
    norm = optimizer.clip_grad_norm_(1.0)  # of the whole model: all experts, and the rest
    optimizer.step()

size = sum(param.numel() for param in model.parameters())
say(f"experts {tuple(mesh.shape)}: loss {mean(loss):.4f}, norm {norm.item():.4f}, {size} parameters on rank 0")
dist.destroy_process_group()
