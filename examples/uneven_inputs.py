"""Ranks with different numbers of batches: one that has run out goes on with its share of the work.

With a bare module the optimizer joins alone; with a module in DDP it is `Join([ddp, optimizer])`.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from common import batches, build, say, start
from zerostep import ShardedOptimizer

device = start()
rank = dist.get_rank()
model = build(device)
optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)

count = 10 + 5 * rank
with Join([optimizer]):
    for window in batches(count, device):
        optimizer.zero_grad()
        model(window).backward()
        optimizer.step()

steps = optimizer.stats().steps
total = sum(param.detach().double().sum().item() for param in model.parameters())
reports = [""] * dist.get_world_size()
dist.all_gather_object(reports, f"rank {rank}: {count} batches, {steps} steps, sum of all parameters {total}")
say(*reports)
dist.destroy_process_group()
