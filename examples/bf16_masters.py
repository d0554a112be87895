"""A bfloat16 model with float32 masters: in bfloat16 alone, small updates are lost in rounding.

Weights, activations and the parameters that travel are bfloat16. Each rank keeps float32 masters of its own share only,
and updates those.
"""

from typing import Any

import torch
import torch.distributed as dist

from common import batches, build, mean, say, start, state_bytes
from zerostep import ShardedOptimizer

STEPS, TAIL = 60, 10


def train(name: str, dtype: torch.dtype, **options: Any) -> None:
    """Train a model of `dtype`, and print the mean loss of the last steps and the bytes of a rank."""
    model = build(device, dtype)
    optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=1e-4, **options)
    tail = torch.zeros((), device=device)
    for step, window in enumerate(batches(STEPS, device)):
        optimizer.zero_grad()
        loss = model(window)
        loss.backward()
        optimizer.step()
        if step >= STEPS - TAIL:
            tail += loss.detach() / TAIL

    weights = sum(param.nbytes for param in model.parameters())
    masters = 4 * optimizer.stats().owned_elements if "master_dtype" in options else 0
    say(f"{name:22} {mean(tail):6.3f} {weights:9} {masters:9} {state_bytes(optimizer):9}")


device = start()
say(f"{'bytes per rank:':22} {'loss':>6} {'weights':>9} {'masters':>9} {'state':>9}")
train("float32", torch.float32)
train("bfloat16", torch.bfloat16)
train("bfloat16 with masters", torch.bfloat16, master_dtype=torch.float32, reduce_dtype=torch.float32)
dist.destroy_process_group()
