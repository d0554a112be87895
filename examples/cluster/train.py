"""Training on the hosts of a cluster: state is divided inside a host and replicated across hosts; every start resumes.

`slurm_torchrun.sh`, `slurm_ranks.sh` and `kubernetes.yaml` start it. It needs RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun sets. Every start is the same, on however many hosts: build
everything, load what `zerostep.latest` finds, and train.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerostep

BATCH = 16  # of all ranks together


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints are, seen by all hosts")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--minutes", type=float, default=10, help="the longest wait for another rank")
    return parser.parse_args()


def start(minutes: float) -> torch.device:
    """Meet the other ranks; the device of this one."""
    gpus, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    if gpus:
        torch.cuda.set_device(local)
    # A host without power or network closes no sockets: only this ends the wait for it.
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(minutes=minutes))
    return torch.device("cuda", local) if gpus else torch.device("cpu")


def mesh_of_hosts(device: torch.device) -> DeviceMesh:
    """One row per host: launchers give the ranks of a host numbers in a row."""
    of_a_host = int(os.environ["LOCAL_WORLD_SIZE"])
    shape = (dist.get_world_size() // of_a_host, of_a_host)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def share(step: int) -> Tensor:
    """This rank's share of what all ranks train on in a step."""
    inputs = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))
    return inputs[dist.get_rank() :: dist.get_world_size()]


def main(chosen: argparse.Namespace) -> None:
    """From the last checkpoint, or from the start, to the end."""
    device = start(chosen.minutes)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(device)
    optimizer = zerostep.ShardedOptimizer(model, torch.optim.AdamW, process_group=mesh_of_hosts(device), lr=1e-3)
    newest = zerostep.latest(chosen.folder)
    done = 0 if newest is None else zerostep.load(newest, optimizer, model).step
    saving = None
    for step in range(done + 1, chosen.steps + 1):
        inputs = share(step).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        if step % chosen.every == 0:
            saving = zerostep.save(chosen.folder / f"step-{step}", optimizer, model, keep=2, wait=False)
    if saving is not None:
        saving.wait()  # before the process group ends, which it uses
    total = loss.detach() if done < chosen.steps else torch.zeros((), device=device)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"steps {done} to {chosen.steps}, loss {total.item() / dist.get_world_size():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(arguments())
