"""A program for the ranks of two hosts: what `test_two_hosts.py` compares.

The arguments are a folder that all hosts see, and a path at which each host has a disk of its own.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

import zerostep
from benchmarks.network import CABLE, bytes_sent
from tests.integrations.frameworks.launch import report
from zerostep import CheckpointError, ShardedOptimizer, ZeroRedundancyOptimizer
from zerostep.checkpoint import save as save_module

FOLDER, DISK = Path(sys.argv[1]), Path(sys.argv[2])
LOCAL_RANK, RANKS_OF_A_HOST = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
STEPS, WIDTH = 4, 512
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


def build(kind: str) -> tuple[nn.Module, Any]:
    """A model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    if kind == "sharded":
        return model, ShardedOptimizer(model, SGD, **MOMENTUM)
    if kind == "mesh":
        shape = (dist.get_world_size() // RANKS_OF_A_HOST, RANKS_OF_A_HOST)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        return model, ShardedOptimizer(model, SGD, process_group=mesh, **MOMENTUM)
    ddp = DDP(model)
    if kind == "zero":
        return ddp, ZeroRedundancyOptimizer(ddp.parameters(), SGD, **MOMENTUM)
    if kind == "sharded-all":
        return ddp, ShardedOptimizer(ddp, SGD, reduction="all", **MOMENTUM)
    return ddp, SGD(ddp.parameters(), **MOMENTUM)


def train(model: nn.Module, optimizer: Any, first: int, count: int) -> None:
    """Some steps, each with data of its own on each rank."""
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 16, generator=generator)).square().mean().backward()
        optimizer.step()


def trained(kind: str) -> Tensor:
    """The weights after all steps."""
    model, optimizer = build(kind)
    train(model, optimizer, 0, STEPS)
    return torch.cat([param.detach().flatten() for param in model.parameters()]).clone()


def compare(kind: str) -> float:
    """The largest difference to plain training."""
    return float((trained(kind) - trained("plain")).abs().max())


def crossing(kind: str) -> dict[str, float]:
    """Bytes of a step that leave this host, and those of the model's parameters."""
    model, optimizer = build(kind)
    train(model, optimizer, 0, 1)  # connects what is not connected yet
    before = _sent()
    train(model, optimizer, 1, STEPS)
    sent = (_sent() - before) / STEPS
    return {"sent": sent, "model": sum(param.nbytes for param in model.parameters())}


def _sent() -> int:
    """What has left this host; all ranks read it while nobody sends, but for the messages of the barriers."""
    dist.barrier()
    count = bytes_sent(CABLE)
    dist.barrier()
    return count


def saved_on_the_shared_disk(kind: str) -> float:
    """Save and load where all hosts see the files; the difference after further steps."""
    model, optimizer = build(kind)
    train(model, optimizer, 0, 2)
    path = FOLDER / "checkpoints" / kind
    zerostep.save(path, optimizer, model)
    other, fresh = build(kind)
    assert zerostep.load(path, fresh, other).step == 2
    for each, its in ((model, optimizer), (other, fresh)):
        train(each, its, 2, 2)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


def saved_on_a_local_disk(kind: str) -> tuple[str, list[str], list[str]]:
    """Save where each host has a disk of its own; the error, what is on the disk, and the state after the next step."""
    _mount()
    model, optimizer = build(kind)
    train(model, optimizer, 0, 1)
    text = ""
    try:
        with mock.patch.object(save_module, "_SEEN_SECONDS", 1):
            zerostep.save(DISK / "runs" / "step-1", optimizer, model)
    except CheckpointError as error:
        text = str(error)
    dist.barrier()
    train(model, optimizer, 1, 1)
    return text, sorted(os.listdir(DISK)), sorted(os.listdir(DISK / "runs"))


def _mount() -> None:
    """Mount the host's own disk, in the mount namespace that all processes of the host share."""
    if LOCAL_RANK == 0:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", DISK], check=True)
    dist.barrier()
    (DISK / f"host-{dist.get_rank() // RANKS_OF_A_HOST}").touch()
    dist.barrier()


def main() -> None:
    """Run the cases."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases: dict[str, Callable[[], Any]] = {}
    cases |= {f"{kind}-trained": partial(compare, kind) for kind in ("zero", "sharded", "sharded-all", "mesh")}
    cases |= {f"{kind}-crossing": partial(crossing, kind) for kind in ("plain", "sharded", "mesh")}
    cases |= {f"{kind}-shared": partial(saved_on_the_shared_disk, kind) for kind in ("zero", "mesh")}
    cases |= {"sharded-local": partial(saved_on_a_local_disk, "sharded")}
    report(FOLDER, dist.get_rank(), cases)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
