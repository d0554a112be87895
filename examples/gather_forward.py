"""New parameters travel while the next forward pass runs: each module waits for its own, and for no others.

`zerostep trace examples/gather_forward.py` draws one of the steps.
"""

import torch
import torch.distributed as dist

from common import batches, build, mean, say, start
from zerostep import ShardedOptimizer

device = start()
model = build(device)
# Small buckets for a small model; without `bucket_mb` there would be one or two.
optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3, gather="forward", bucket_mb=0.4)

for window in batches(30, device):
    optimizer.zero_grad()
    loss = model(window)
    loss.backward()
    optimizer.step()

waited = {phase: f"{1e3 * seconds / 30:.2f} ms" for phase, seconds in optimizer.stats().wait_seconds.items()}
say(f"loss: {mean(loss)}", f"waited in a step: {waited}")
dist.destroy_process_group()
