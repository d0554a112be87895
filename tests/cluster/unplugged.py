"""A program for the ranks of two hosts, one of which loses its network and can say nothing to anybody.

It trains as examples/resume.py does. The arguments are the folder of the checkpoints, which all hosts see, and, on the
host that loses its network, the step after which it does.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import zerostep
from benchmarks.network import CABLE
from zerostep import ShardedOptimizer

STEPS, EVERY, BATCH = 8, 2, 8
START = timedelta(seconds=120)
# Sockets of a host that is unplugged stay open: this alone ends the wait for it.
PATIENCE = timedelta(seconds=12)


def share(step: int) -> torch.Tensor:
    """This rank's share of what all ranks train on in a step."""
    inputs = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
    return inputs[dist.get_rank() :: dist.get_world_size()]


def unplug() -> None:
    """Cut this host off."""
    dist.barrier()  # nobody waits for a message of the step before
    if os.environ["LOCAL_RANK"] == "0":
        subprocess.run(["ip", "link", "set", CABLE, "down"], check=True)


def meet() -> dist.ProcessGroup:
    """Wait for all ranks to be ready for quick steps; the group in which nobody waits for long from then on."""
    dist.init_process_group("gloo", timeout=START)
    SGD(nn.Linear(1, 1).parameters(), lr=1.0).step()  # imports much
    dist.barrier()
    group: dist.ProcessGroup = dist.new_group(timeout=PATIENCE)
    return group


def main() -> None:
    """Train from the last checkpoint, or from the start, to the end."""
    folder, last = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
    torch.set_num_threads(1)
    group = meet()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = ShardedOptimizer(model, SGD, process_group=group, lr=0.1, momentum=0.9, stall_seconds=1)
    newest = zerostep.latest(folder, group)
    done = 0 if newest is None else zerostep.load(newest, optimizer, model).step
    if dist.get_rank() == 0:
        print(f"ranks {dist.get_world_size()} start after step {done}", flush=True)
    for step in range(done + 1, STEPS + 1):
        optimizer.zero_grad()
        loss = model(share(step)).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item() / dist.get_world_size():.5f}", flush=True)
        if step % EVERY == 0:
            zerostep.save(folder / f"step-{step}", optimizer, model, keep=2)
        if step == 5 and dist.get_world_size() == 4:
            unplug() if step == last else dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
