"""Audits of ranks on any device: what the tests in host memory and those on an accelerator have in common."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

import zerostep
from tests.helpers.cuda_training import SMALL_BUCKETS, nccl_group
from zerostep import AuditError, ShardedOptimizer, ZeroRedundancyOptimizer, hook_with_zero_step_interleaved

WAYS = ["zero", "zero bf16", "overlap", "bare scatter", "bare all", "ddp scatter", "ddp all", "bare scatter forward"]
WITH_MASTERS = ["bare scatter bf16", "ddp all bf16", "bare scatter forward bf16"]
EVERY = 3
WIDTH = 24


class Layers(nn.Module):
    """Six layers, and a parameter that no step changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Of the layers."""
        found: Tensor = self.layers(inputs)
        return found


class Audited:
    """A training of this rank in one of the ways, on a device; over NCCL if it is a CUDA device."""

    def __init__(self, group: ProcessGroup, device: str, way: str, **options: Any) -> None:
        self.device, self.way, self.steps = torch.device(device), way, 0
        self.rank, group = dist.get_rank(group), group if device == "cpu" else nccl_group(group)
        kind, *words = way.split()
        self.dtype = torch.bfloat16 if "bf16" in words else torch.float32
        self.module = Layers().to(self.device, self.dtype)
        self.model = self.module if kind == "bare" else DDP(self.module, process_group=group)
        if kind in ("zero", "overlap"):
            self.optimizer: Any = self._zero(group, kind == "overlap", options)
        else:
            settings = {"reduction": words[0], "gather": "forward" if "forward" in words else "step", **options}
            masters = torch.float32 if self.dtype == torch.bfloat16 else None
            self.optimizer = ShardedOptimizer(
                self.model,
                AdamW,
                process_group=group,
                bucket_mb=SMALL_BUCKETS,
                master_dtype=masters,
                lr=0.01,
                **settings,
            )

    def _zero(self, group: ProcessGroup, overlap: bool, options: dict[str, Any]) -> ZeroRedundancyOptimizer:
        named = list(self.module.named_parameters())
        zero = ZeroRedundancyOptimizer(named, AdamW, group, overlap_with_ddp=overlap, lr=0.01, **options)
        if overlap:
            assert isinstance(self.model, DDP)
            self.model.register_comm_hook(group, hook_with_zero_step_interleaved(allreduce_hook, self.model, zero))
        return zero

    def backward(self) -> None:
        """The first half of a step; in overlap mode all of it."""
        self.optimizer.zero_grad()
        inputs = torch.ones(4, WIDTH, device=self.device, dtype=self.dtype) * (1 + self.rank)
        self.model(inputs).float().square().mean().backward()

    def train(self, steps: int) -> None:
        """Whole steps, which are counted."""
        for _ in range(steps):
            self.backward()
            if self.way != "overlap":
                self.optimizer.step()
            self.steps += 1

    def flip(self, name: str) -> None:
        """Change the lowest bit of the last element, as faulty memory would: no version counter sees it."""
        flip(self.module.get_parameter(name))


def flip(tensor: Tensor) -> None:
    """Change the lowest bit of the last element."""
    tensor.data.view(-1).view(torch.uint8).view(tensor.numel(), -1)[-1, 0] ^= 1


def found_by_hand(group: ProcessGroup, device: str, way: str, name: str) -> str:
    """What `audit()` says of a bit that flips on rank 1."""
    training = Audited(group, device, way)
    training.train(2)
    assert training.optimizer.audit().parameters == 13
    if training.rank == 1:
        training.flip(name)
    with pytest.raises(AuditError) as caught:
        training.optimizer.audit()
    return str(caught.value)


def found_regularly(group: ProcessGroup, device: str, way: str) -> tuple[str, int]:
    """What `audit_every` says of a bit that flips on rank 1 after the first step, and how many steps there were."""
    training = Audited(group, device, way, audit_every=EVERY)
    training.train(1)
    if training.rank == 1:
        training.flip("frozen")
    # What is raised inside backward comes out of DDP as a RuntimeError that quotes it.
    with pytest.raises(RuntimeError if way == "overlap" else AuditError) as caught:
        training.train(20)
    return str(caught.value), training.optimizer.optimizer_view().step


def nothing_found(group: ProcessGroup, device: str, way: str) -> None:
    """Where all agree, nothing is said, in any step."""
    training = Audited(group, device, way, audit_every=1)
    training.train(8)
    training.optimizer.audit()
    training.optimizer.consolidate_state_dict(to=0)


def found_at_the_end(group: ProcessGroup, device: str, way: str, path: Path, call: str) -> str:
    """What is said of a bit that flips on rank 1 just before the last step, when the training has ended."""
    training = Audited(group, device, way, audit_every=1)
    training.train(2)
    if training.rank == 1:
        training.flip("frozen")
    calls = {
        "save": lambda: zerostep.save(path, training.optimizer, training.module),
        "consolidate": lambda: training.optimizer.consolidate_state_dict(to=0),
        "audit": training.optimizer.audit,
    }
    with pytest.raises(AuditError) as caught:
        training.train(1)  # in host memory it is found here
        calls[call]()
    training.optimizer.consolidate_state_dict(to=0)  # it is said once
    return str(caught.value)


def wrong_master(group: ProcessGroup, device: str, way: str) -> str:
    """What is said of a master on rank 1 that its parameter does not come from."""
    training = Audited(group, device, way)
    training.train(2)
    if training.rank == 1:
        shards = training.optimizer._training.engine.buckets.shards
        next(shard.master for shard in shards.values() if shard.master.numel())[-1] *= 2
    with pytest.raises(AuditError) as caught:
        training.optimizer.audit()
    return str(caught.value)


def loaded_meanwhile(group: ProcessGroup, device: str, way: str, path: Path) -> int:
    """How many steps there are when a bit that flips before a load, which replaces it, has not been found since."""
    training = Audited(group, device, way, audit_every=2)
    training.train(1)
    zerostep.save(path, training.optimizer, training.module)
    if training.rank == 1:
        training.flip("frozen")
    try:
        training.train(1)
    except AuditError:
        assert device == "cpu"
    zerostep.load(path, training.optimizer, training.module)
    training.train(9)
    steps: int = training.optimizer.optimizer_view().step
    return steps
