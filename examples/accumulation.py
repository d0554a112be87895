"""Four batches to a step, and gradients clipped by the norm of all of them together.

Inside `no_sync()` backward passes add up gradients on each rank; the first one outside sends the sum.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist

from common import batches, build, mean, say, start
from zerostep import ShardedOptimizer

STEPS, PARTS = 8, 4


def train(name: str, wait_for_last: bool) -> None:
    """Train, sending gradients after the last batch of a step or after each; print what came of it."""
    model = build(device)
    optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
    for number, window in enumerate(batches(STEPS * PARTS, device), start=1):
        last = number % PARTS == 0
        with optimizer.no_sync() if wait_for_last and not last else nullcontext():
            loss = model(window)
            (loss / PARTS).backward()
        if last:
            norm = optimizer.clip_grad_norm_(1.0).item()
            optimizer.step()
            optimizer.zero_grad()
    sent = optimizer.stats().bytes_sent // STEPS
    say(f"{name:16} loss {mean(loss):.4f}, norm before clipping {norm:.4f}, {sent} bytes sent per step and rank")


device = start()
train("with no_sync():", wait_for_last=True)
train("without:", wait_for_last=False)
dist.destroy_process_group()
