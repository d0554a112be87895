"""Resumed runs equal uninterrupted ones, in the same and in new processes, at any world size."""

import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import StepLR

import zerostep
from tests.helpers.checkpoint_setups import WAYS, weights
from tests.helpers.pool import Pool, run_fresh
from tests.helpers.reference import assert_same_bits, batches, build
from tests.helpers.sharding import gap
from zerostep import ShardedOptimizer

GLOBAL_BATCH, HALF, STEPS = 12, 4, 8


class Dropping(nn.Module):
    """A model that draws random numbers as it goes."""

    def __init__(self, seed: int, drop: float) -> None:
        super().__init__()
        self.body, self.drop = build("matrices", seed), drop
        self.norm = nn.BatchNorm1d(9) if drop else nn.Identity()  # sees a rank's own share, unlike the sums

    def forward(self, x: Tensor) -> Tensor:
        """With noise on the inputs."""
        result: Tensor = self.body(self.norm(nn.functional.dropout(x, self.drop)))
        return result


@dataclass(frozen=True)
class Run:
    """A training that can be stopped and resumed: clipped, two micro-batches a step, a schedule, random numbers."""

    way: str
    drop: float
    kind: Any = AdamW
    options: tuple[tuple[str, Any], ...] = (("lr", 0.01),)
    wait: bool = True

    def start(self, group: ProcessGroup, seed: int = 0) -> tuple[nn.Module, Any, StepLR]:
        """New objects."""
        model = Dropping(seed, self.drop)
        pair = WAYS[self.way](group, model, list(model.named_parameters()), self.kind, **dict(self.options))
        return *pair, StepLR(pair[1], 3, 0.5)

    def first(self, group: ProcessGroup, root: str, steps: int) -> dict[str, Tensor]:
        """From the start, with a checkpoint on the way."""
        objects = self.start(group)
        torch.manual_seed(100 + dist.get_rank(group))
        self._go_on(group, objects, range(HALF))
        extra = {"step": HALF, "scheduler": objects[2].state_dict(), "rng": torch.get_rng_state().tolist()}
        pending = zerostep.save(Path(root, "it"), objects[1], objects[0], extra, wait=self.wait)
        assert (pending is None) == self.wait
        self._go_on(group, objects, range(HALF, steps))
        if pending is not None:
            pending.wait()
        return weights(objects[0])

    def resumed(self, group: ProcessGroup, root: str) -> dict[str, Tensor]:
        """From the checkpoint to the end."""
        objects = self.start(group, seed=1)
        torch.manual_seed(999)
        path = zerostep.latest(root, group)
        assert path is not None
        found = zerostep.load(path, objects[1], objects[0])
        objects[2].load_state_dict(found.extra["scheduler"])
        torch.set_rng_state(torch.tensor(found.extra["rng"], dtype=torch.uint8))
        assert found.step == found.extra["step"] == HALF
        self._go_on(group, objects, range(found.extra["step"], STEPS))
        return weights(objects[0])

    def _go_on(self, group: ProcessGroup, objects: tuple[nn.Module, Any, StepLR], steps: Iterable[int]) -> None:
        model, optimizer, scheduler = objects
        for step in steps:
            optimizer.zero_grad()
            inputs, targets = batches(11, step, 1, "matrices", 2 * GLOBAL_BATCH)[0]
            mine = slice(dist.get_rank(group), None, group.size())
            for half in (0, 1):
                part = slice(half * GLOBAL_BATCH, (half + 1) * GLOBAL_BATCH)
                with _not_yet(model, optimizer) if half == 0 else nullcontext():
                    (mse_loss(model(inputs[part][mine]), targets[part][mine]) / 2).backward()
            _clip(model, optimizer)
            optimizer.step()
            scheduler.step()
        getattr(optimizer, "synchronize", lambda: None)()


def _not_yet(model: nn.Module, optimizer: Any) -> AbstractContextManager[None]:
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.no_sync()
    assert isinstance(model, DDP)
    return model.no_sync()


def _clip(model: nn.Module, optimizer: Any) -> None:
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.clip_grad_norm_(0.1)
    elif not optimizer._overlap_with_ddp:
        clip_grad_norm_(model.parameters(), 0.1)


def _no_buffers(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the statistics, which are those of rank 0."""
    return {key: value for key, value in found.items() if "running" not in key}


def _first(group: ProcessGroup, run: Run, root: str, steps: int) -> dict[str, Tensor]:
    return run.first(group, root, steps)


def _resumed(group: ProcessGroup, run: Run, root: str) -> dict[str, Tensor]:
    return run.resumed(group, root)


@pytest.mark.parametrize("way", ["elements", "forward", "wrapped", "zero", "view", "hook"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_resumed_run_is_the_uninterrupted_one(pool: Pool, tmp_path: Path, way: str, wait: bool) -> None:
    run = Run(way, drop=0.3, wait=wait)
    whole_way = pool.run(_first, 2, run, str(tmp_path), STEPS)
    found = pool.run(_resumed, 2, run, str(tmp_path))
    assert_same_bits(found[0], whole_way[0])
    assert_same_bits(_no_buffers(found[1]), _no_buffers(whole_way[1]))


def test_a_run_resumes_in_new_processes(pool: Pool, tmp_path: Path) -> None:
    run = Run("forward", drop=0.3, wait=False)
    stopped = run_fresh(_first, 3, run, str(tmp_path / "stopped"), HALF)
    assert [each.error for each in stopped] == [None] * 3
    whole_way = pool.run(_first, 3, run, str(tmp_path / "whole"), STEPS)
    for ours, theirs in zip(pool.run(_resumed, 3, run, str(tmp_path / "stopped")), whole_way, strict=True):
        assert_same_bits(_no_buffers(ours), _no_buffers(theirs))


@pytest.mark.parametrize(
    ("way", "kind", "options"),
    [
        ("elements", AdamW, (("lr", 0.01),)),
        ("forward", SGD, (("lr", 0.05), ("momentum", 0.9))),
        ("zero", AdamW, (("lr", 0.01),)),
        ("auto", Muon, (("lr", 0.02),)),
    ],
)
def test_a_run_goes_on_at_another_world_size(pool: Pool, tmp_path: Path, way: str, kind: Any, options: Any) -> None:
    run = Run(way, drop=0.0, kind=kind, options=options)
    whole_way = pool.run(_first, 2, run, str(tmp_path), STEPS)[0]
    for world in (1, 3, 4):
        for found in pool.run(_resumed, world, run, str(tmp_path)):
            assert 0.0 <= gap(found, whole_way) <= 1e-6
    shutil.rmtree(tmp_path / "it")
