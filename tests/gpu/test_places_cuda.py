"""Ranks on NCCL that are not in the same place, or whose update fails: told some steps later, and nobody waits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from tests.helpers.cuda_training import DEADLINE, DEVICE, SMALL_BUCKETS, nccl_group
from tests.helpers.pool import Pool
from zerostep import ShardedOptimizer, StepMismatchError, ZeroRedundancyOptimizer, hook_with_zero_step_interleaved

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WAYS = ["zero", "overlap", "bare scatter", "bare all", "ddp scatter", "ddp all", "bare scatter forward"]


class Failing(SGD):
    """Fails while `trouble` is set."""

    trouble = False

    def step(self, closure: Any = None) -> Any:
        if self.trouble:
            raise ArithmeticError("a bad day")
        return super().step(closure)


def _built(group: ProcessGroup, way: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(48, 48) for _ in range(6)]).to(DEVICE)
    kind, *words = way.split()
    model = module if kind == "bare" else DDP(module, process_group=group, device_ids=[0])
    if kind in ("zero", "overlap"):
        overlap = kind == "overlap"
        zero = ZeroRedundancyOptimizer(module.parameters(), Failing, group, overlap_with_ddp=overlap, lr=0.01)
        if overlap:
            assert isinstance(model, DDP)
            model.register_comm_hook(group, hook_with_zero_step_interleaved(allreduce_hook, model, zero))
        return model, zero, zero.optim
    settings: dict[str, Any] = {"reduction": words[0], "gather": "forward" if "forward" in words else "step"}
    found = ShardedOptimizer(model, Failing, process_group=group, bucket_mb=SMALL_BUCKETS, lr=0.01, **settings)
    return model, found, found._inners.all[0]


def _train(model: nn.Module, optimizer: Any, way: str, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 48, device=DEVICE)).square().mean().backward()
        if way != "overlap":
            optimizer.step()
        torch.cuda.synchronize()  # here, so that what was sent has arrived when the next step looks


def _other_rate(group: ProcessGroup, way: str) -> str:
    model, optimizer, _ = _built(nccl_group(group), way)
    _train(model, optimizer, way, 3)
    if dist.get_rank(group) == 1:
        optimizer.param_groups[0]["lr"] = 0.02
    with pytest.raises(StepMismatchError) as caught:
        _train(model, optimizer, way, 3)
    with pytest.raises(RuntimeError, match="load the last checkpoint"):
        optimizer.consolidate_state_dict(to=0)
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_options_that_differ_are_named_within_two_steps(pool: Pool, way: str) -> None:
    for text in pool.run(_other_rate, 2, way, deadline=DEADLINE):
        assert "ranks differ in the options of the parameter groups: rank 0 has digest " in text
        assert "rank 1 has digest " in text and text.endswith("; restart from the last checkpoint on all ranks")


def _failing(group: ProcessGroup, way: str) -> str:
    model, optimizer, inner = _built(nccl_group(group), way)
    _train(model, optimizer, way, 3)
    inner.trouble = dist.get_rank(group) == 1
    with pytest.raises((RuntimeError, ArithmeticError)) as caught:
        _train(model, optimizer, way, 1)
        # The other rank has ended its step by now. What it sent is read before anything else is sent.
        optimizer.step() if way != "overlap" else _train(model, optimizer, way, 1)
    return str(caught.value)


@pytest.mark.parametrize("way", ["zero", "overlap", "ddp all"])
def test_an_update_that_fails_on_one_rank_is_told_to_the_others(pool: Pool, way: str) -> None:
    first, second = pool.run(_failing, 2, way, deadline=DEADLINE)
    # From the row that it sent, or, if that is still under way on a busy device, from its note in the job's store.
    row = "rank 1 failed in its local update of step 4; its own output has the cause"
    assert row in first or "the local update of step 4 failed on rank 1" in first
    assert "a bad day" in second
