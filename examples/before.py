"""Plain data-parallel training: every rank holds the whole state of AdamW. `after.py` is the same, sharded."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from common import batches, build, mean, say, start, state_bytes

device = start()
model = DDP(build(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for window in batches(30, device):
    optimizer.zero_grad()
    loss = model(window)
    loss.backward()
    optimizer.step()

say(f"loss: {mean(loss)}", f"optimizer state per rank: {state_bytes(optimizer)} bytes")
del model, optimizer, loss  # before their group: at the end of a process, torch may find a thread of it at work
dist.barrier()
dist.destroy_process_group()
