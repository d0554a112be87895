"""The training of `before.py`, sharded: every rank holds its share of the state of AdamW. The loss is the same."""

import torch
import torch.distributed as dist

from common import batches, build, mean, say, start, state_bytes
from zerostep import ShardedOptimizer

device = start()
model = build(device)
optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)

for window in batches(30, device):
    optimizer.zero_grad()
    loss = model(window)
    loss.backward()
    optimizer.step()

say(f"loss: {mean(loss)}", f"optimizer state per rank: {state_bytes(optimizer)} bytes")
dist.destroy_process_group()
