"""What the examples share, none of it about sharding: local ranks, a small GPT, real text, what to print."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from zerostep.tools.demo import GPT, GPTShape

SHAPE = GPTShape(context=32, width=128, heads=4, layers=2)


def start() -> torch.device:
    """Meet the other ranks, over NCCL if there is a GPU for each and over Gloo if not; the device of this rank."""
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count() >= ranks
    if gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if gpus else "gloo")
    return torch.device("cuda", rank) if gpus else torch.device("cpu")


def build(device: torch.device, dtype: torch.dtype = torch.float32) -> GPT:
    """A byte-level GPT, the same at every call."""
    torch.manual_seed(0)
    return GPT(SHAPE).to(device, dtype)


def batches(count: int, device: torch.device, replica: int | None = None) -> Iterator[Tensor]:
    """Windows of the text, others on every rank or, if they are given, for every replica; the same at every call."""
    characters, random = text(), torch.Generator().manual_seed(dist.get_rank() if replica is None else replica)
    for _ in range(count):
        yield windows(characters, 16, random).to(device)


def text() -> Tensor:
    """The sources of Python's standard library, as bytes."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)


def windows(characters: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Some windows of a text."""
    starts = torch.randint(len(characters) - SHAPE.context, (count, 1), generator=random)
    return characters[starts + torch.arange(SHAPE.context + 1)].long()


def mean(value: Tensor) -> float:
    """The mean over all ranks."""
    total = value.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def state_bytes(optimizer: Optimizer) -> int:
    """The optimizer state that this rank holds."""
    tensors = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.dim())


def say(*lines: str) -> None:
    """Print, on one rank."""
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
