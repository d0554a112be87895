"""Uneven inputs under `ShardedOptimizer`: ranks that have run out of batches go on with their part of the work."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from tests.pool import Pool, RankError
from tests.reference import Batch, batches, build, difference
from zerostep import ShardedOptimizer

LENGTHS = (8, 2, 4, 0)
BUCKET_MB = 0.0003


def _inputs(world: int) -> list[list[Batch]]:
    return [batches(1, rank, LENGTHS[rank]) for rank in range(world)]


def _reference(inputs: list[list[Batch]], accumulate: int, clip: float) -> nn.Module:
    """All ranks' batches in one process: a rank without a batch counts as zeros."""
    model = build()
    optimizer = AdamW(model.parameters(), lr=0.05)
    scheduler = StepLR(optimizer, 2, 0.5)
    for start in range(0, max(LENGTHS), accumulate):
        optimizer.zero_grad()
        for place in range(start, start + accumulate):
            for mine in inputs:
                if place < len(mine):
                    data, targets = mine[place]
                    (mse_loss(model(data), targets) / len(inputs)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return model


def _train(model: nn.Module, optimizer: ShardedOptimizer, mine: list[Batch], accumulate: int, clip: float) -> None:
    scheduler = StepLR(optimizer, 2, 0.5)
    for place, (data, targets) in enumerate(mine):
        last = place % accumulate == accumulate - 1
        if place % accumulate == 0:
            optimizer.zero_grad()
        with nullcontext() if last else optimizer.no_sync():
            mse_loss(model(data), targets).backward()
        if last:
            if clip:
                optimizer.clip_grad_norm_(clip)
            optimizer.step()
            scheduler.step()


def _uneven(group: ProcessGroup, way: str, gather: str, accumulate: int, clip: float) -> float:
    wrapping, reduction = way.split()
    inputs = _inputs(dist.get_world_size(group))
    bare = build()
    model: Any = DDP(bare, process_group=group) if wrapping == "wrapped" else bare
    settings: dict[str, Any] = {"reduction": reduction, "gather": gather, "bucket_mb": BUCKET_MB}
    optimizer = ShardedOptimizer(model, AdamW, process_group=group, lr=0.05, **settings)
    for _ in range(2):  # a second context finds everything as the first did
        with torch.no_grad():
            for param, start in zip(bare.parameters(), build().parameters(), strict=True):
                param.copy_(start)
        optimizer.load_state_dict(
            {"state": {}, "param_groups": AdamW(build().parameters(), lr=0.05).state_dict()["param_groups"]}
        )
        with Join([model, optimizer] if wrapping == "wrapped" else [optimizer]):
            _train(model, optimizer, inputs[dist.get_rank(group)], accumulate, clip)
        optimizer.synchronize()
    return difference(_reference(inputs, accumulate, clip).parameters(), bare.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("way", ["bare scatter", "bare all", "wrapped scatter", "wrapped all"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_without_inputs_count_as_zeros(pool: Pool, world: int, way: str, clip: float, accumulate: int) -> None:
    for gather in ("step", "forward") if not clip else ("step",):
        assert max(pool.run(_uneven, world, way, gather, accumulate, clip, deadline=30)) < 1e-6


def _clipped_by_torch(group: ProcessGroup) -> None:
    model = build()
    optimizer = ShardedOptimizer(model, AdamW, process_group=group, lr=0.05)
    with Join([optimizer], enable=True):
        for data, targets in batches(1, dist.get_rank(group), 1):
            mse_loss(model(data), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_torch_s_clipping_is_refused_inside(pool: Pool) -> None:
    with pytest.raises(RankError, match="the optimizer's own clip_grad_norm_"):
        pool.run(_clipped_by_torch, 2, deadline=30)


def _optimizer_first(group: ProcessGroup) -> None:
    model = DDP(build(), process_group=group)
    optimizer = ShardedOptimizer(model, AdamW, lr=0.05)
    with Join([optimizer, model]):
        for data, targets in batches(1, dist.get_rank(group), 1):
            mse_loss(model(data), targets).backward()
            optimizer.step()


def test_a_wrapped_module_is_listed_first(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"Join\(\[ddp, optimizer\]\)"):
        pool.run(_optimizer_first, 2, deadline=30)
