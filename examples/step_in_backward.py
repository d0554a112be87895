"""DDP with the step inside backward: each bucket is updated and sent while the gradients of the next are computed.

`zerostep trace examples/step_in_backward.py` draws one of the steps.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from common import batches, build, mean, say, start, state_bytes
from zerostep import ZeroRedundancyOptimizer, hook_with_zero_step_interleaved

device = start()
# Small buckets for a small model; with DDP's usual 25 MB there would be one.
model = DistributedDataParallel(build(device), bucket_cap_mb=0.4)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3)
model.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, model, optimizer))

for window in batches(30, device):
    optimizer.zero_grad()
    loss = model(window)
    loss.backward()

say(f"loss: {mean(loss)}", f"optimizer state of rank 0: {state_bytes(optimizer)} bytes")
dist.destroy_process_group()
