"""Training that outlives a machine: when one is lost, the others start again by themselves and go on where they were.

Start this on two machines, or twice on one:

    torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --monitor-interval=0.1 --rdzv-backend=c10d \
        --rdzv-endpoint=localhost:29400 --rdzv-conf=last_call_timeout=5,keep_alive_interval=1 \
        examples/resume.py --folder checkpoints

`--nnodes=1:2` lets torchrun go on with what is left, down to one; it notices a machine that says nothing for three
times `keep_alive_interval` seconds, and then waits `last_call_timeout` seconds for others to join. The machine of
`--rdzv-endpoint` must be among those that stay. With `--standalone --nproc-per-node=2 --max-restarts=3` in their
place, a lost rank is replaced, and the same script goes on with as many ranks as before. Set the variable
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun: otherwise ranks that it has started again may find addresses of those
before them, and fail to connect.

Every start is the same: build everything, load what `zerostep.latest` finds, if it finds something, and train. The
checkpoint fits any number of ranks. Each step trains on the same windows of text, however many ranks share them, so the
loss goes on as it would have. `--die-at STEP` makes this machine lose power after that step of its first life; with
`--lose=rank` only its last rank dies, which torchrun then replaces.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import zerostep
from common import build, mean, say, start, text, windows
from zerostep import ShardedOptimizer

BATCH = 16  # of all ranks together


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are, seen by all machines")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--die-at", type=int, help="kill this machine's processes after this step")
    parser.add_argument("--lose", choices=["machine", "rank"], default="machine", help="what --die-at kills")
    return parser.parse_args()


def share(characters: Tensor, step: int) -> Tensor:
    """This rank's share of what all ranks train on in a step."""
    return windows(characters, BATCH, torch.Generator().manual_seed(step))[dist.get_rank() :: dist.get_world_size()]


def lose_power() -> None:
    """End the launcher on this machine, and then this rank, without a word to anybody."""
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def lose_rank() -> None:
    """End the last rank alone; its launcher notices."""
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def train(chosen: argparse.Namespace) -> None:
    """From the last checkpoint, or from the start, to the end."""
    device, characters = start(), text()
    model = build(device)
    optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
    path = zerostep.latest(chosen.folder)
    done = 0 if path is None else zerostep.load(path, optimizer, model).step
    say(f"ranks {dist.get_world_size()} start after step {done}")

    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(done + 1, chosen.steps + 1):
        optimizer.zero_grad()
        loss = model(share(characters, step).to(device))
        loss.backward()
        optimizer.step()
        say(f"step {step} loss {mean(loss):.5f}")
        if step % chosen.every == 0:
            zerostep.save(chosen.folder / f"step-{step}", optimizer, model, keep=2)
        if step == chosen.die_at and life == 0:
            lose_power() if chosen.lose == "machine" else lose_rank()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(arguments())
