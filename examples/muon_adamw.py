"""Muon for the matrices of a transformer and AdamW for the rest, in one optimizer.

Muon needs whole matrices, so each has one owner; what AdamW updates is cut anywhere. With `verify=True` the unsharded
optimizers run beside the first ten steps, and the first bit that differs is an error.
"""

import torch
import torch.distributed as dist

from common import batches, build, mean, say, start
from zerostep import ShardedOptimizer

device = start()
model = build(device)
named = list(model.named_parameters())
matrices = [(name, param) for name, param in named if name.startswith("blocks.") and param.dim() == 2]
others = [(name, param) for name, param in named if not name.startswith("blocks.") or param.dim() != 2]
groups = [
    {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.01},
    {"params": others},
]
optimizer = ShardedOptimizer(model, torch.optim.AdamW, groups, lr=1e-3, verify=True)

for window in batches(20, device):
    optimizer.zero_grad()
    loss = model(window)
    loss.backward()
    optimizer.step()

stats, state = optimizer.stats(), optimizer.state
whole = [name for name, param in matrices if param in state]
pieces = sum(state[param]["exp_avg"].numel() for _, param in others if param in state)
report = f"rank {stats.rank} owns {stats.owned_elements} of {stats.elements} elements: {pieces} under AdamW, and whole"
reports = [""] * stats.world_size
dist.all_gather_object(reports, "\n  ".join([report, *whole]))
say(*reports, f"loss: {mean(loss):.4f}; the first ten steps were equal to the unsharded ones, bit for bit")
dist.destroy_process_group()
