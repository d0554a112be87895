"""Each bucket is updated and sent inside backward, as its sum arrives: no gradient is kept, nothing is sent twice.

`zerostep trace examples/update_in_backward.py` draws one of the steps.
"""

import torch
import torch.distributed as dist

from common import batches, build, mean, say, start
from zerostep import ShardedOptimizer

device = start()
model = build(device)
# Small buckets for a small model; without `bucket_mb` there would be one or two.
optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3, update="backward", gather="forward", bucket_mb=0.4)

for window in batches(30, device):
    optimizer.zero_grad()
    loss = model(window)
    loss.backward()  # updates the parameters
    held = optimizer.stats().gradient_bytes
    optimizer.step()  # ends the step

say(f"loss: {mean(loss)}", f"gradients of rank 0 after backward: {held} bytes")
dist.destroy_process_group()
