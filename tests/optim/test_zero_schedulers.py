"""Schedulers, closures and gradient scalers with `ZeroRedundancyOptimizer` on several ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, lr_scheduler

from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, assert_same_bits, batches, build, train
from tests.helpers.zero_steps import MODES, numbered
from zerostep import ZeroRedundancyOptimizer

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1.0 / (n + 1)]),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.05], total_steps=13),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


def _scheduled(group: ProcessGroup, name: str, views: bool) -> None:
    def run(make: Callable[[Any], Optimizer]) -> tuple[list[Any], dict[str, Tensor]]:
        ddp = DDP(build(), process_group=group)
        params = list(ddp.parameters())
        optimizer = make([{"params": params[:4]}, {"params": params[4:], "lr": 0.02}])
        scheduler = SCHEDULERS[name](optimizer)
        seen = []
        for batch in batches(4, dist.get_rank(group), 12):
            seen += train(ddp, optimizer, [batch])
            loss = [torch.tensor(seen[0]).item() + len(seen)] if name == "plateau" else []
            scheduler.step(*loss)
            seen += [entry["lr"] for entry in optimizer.param_groups]
            seen += [entry["betas"] for entry in optimizer.param_groups]
        return seen, numbered(params)

    seen, params = run(lambda groups: ZeroRedundancyOptimizer(groups, Adam, group, views, lr=0.05))
    expected, plain_params = run(lambda groups: Adam(groups, lr=0.05))
    assert seen == expected
    assert_same_bits(params, plain_params)


@MODES
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_statement_4_schedulers_act_on_all_ranks_as_on_plain(pool: Pool, name: str, world: int, views: bool) -> None:
    pool.run(_scheduled, world, name, views)


def _closures(group: ProcessGroup, views: bool) -> None:
    def run(make: Callable[[Any], Optimizer]) -> tuple[list[float], dict[str, Tensor]]:
        ddp = DDP(build(), process_group=group)
        optimizer = make(ddp.parameters())
        return [_step_with_closure(ddp, optimizer, batch) for batch in _batches(group)], numbered(
            list(ddp.parameters())
        )

    losses, params = run(lambda params: ZeroRedundancyOptimizer(params, Adam, group, views, lr=0.05))
    expected, plain_params = run(lambda params: Adam(params, lr=0.05))
    assert losses == expected
    assert_same_bits(params, plain_params)


def _batches(group: ProcessGroup) -> list[Batch]:
    return batches(6, dist.get_rank(group), 10)


def _step_with_closure(ddp: DDP, optimizer: Optimizer, batch: Batch) -> float:
    def closure() -> float:
        optimizer.zero_grad()
        loss = mse_loss(ddp(batch[0]), batch[1])
        loss.backward()
        return loss.item()

    return optimizer.step(closure)


@MODES
@pytest.mark.parametrize("world", [1, 2, 3])
def test_statement_6_closures_across_ranks_equal_plain(pool: Pool, world: int, views: bool) -> None:
    pool.run(_closures, world, views)


def _lbfgs(group: ProcessGroup, views: bool) -> tuple[list[float], list[Tensor]]:
    model = build()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), LBFGS, group, views, lr=0.1, max_iter=3)
    inputs, targets = batches(7, 0, 1)[0]  # all ranks evaluate the same loss, each as often as its shard wants

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(5)]
    return losses, [param.detach().clone() for param in model.parameters()]


@MODES
@pytest.mark.parametrize("world", [2, 3])
def test_statement_6_lbfgs_solves_over_shards(pool: Pool, world: int, views: bool) -> None:
    (losses, first), *others = pool.run(_lbfgs, world, views)
    assert losses[-1] < losses[0]
    for _, other in others:
        assert_same_bits(numbered(first), numbered(other))


def _scaled(group: ProcessGroup, views: bool) -> list[float]:
    rank = dist.get_rank(group)

    def run(make: Callable[[Any], Optimizer]) -> tuple[list[float], dict[str, Tensor], list[bool]]:
        ddp = DDP(build(), process_group=group)
        optimizer = make(ddp.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        scales, moved = [], []
        for number, (inputs, targets) in enumerate(batches(8, rank, 8)):
            before = numbered(list(ddp.parameters()))
            optimizer.zero_grad()
            loss = mse_loss(ddp(inputs), targets)
            # Only one rank overflows; DDP brings that to all.
            scaler.scale(loss * float("inf") if number in (2, 5) and rank == 0 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved.append(any(not torch.equal(param, before[str(n)]) for n, param in enumerate(ddp.parameters())))
        return scales, numbered(list(ddp.parameters())), moved

    scales, params, moved = run(lambda params: ZeroRedundancyOptimizer(params, AdamW, group, views, lr=0.01))
    expected, plain_params, plain_moved = run(lambda params: AdamW(params, lr=0.01))
    assert scales == expected and moved == plain_moved == [number not in (2, 5) for number in range(8)]
    assert_same_bits(params, plain_params)
    return scales


@MODES
@pytest.mark.parametrize("world", [1, 2, 3])
def test_statement_14_scaled_steps_are_skipped_on_all_ranks_alike(pool: Pool, world: int, views: bool) -> None:
    first, *others = pool.run(_scaled, world, views)
    assert all(other == first for other in others)


def _changed_before_adding(group: ProcessGroup, views: bool) -> None:
    """An option that was changed since the last step survives a further group."""
    first, second = (nn.Parameter(torch.ones(4)) for _ in range(2))
    zero = ZeroRedundancyOptimizer([first], SGD, group, parameters_as_bucket_view=views, lr=0.5)
    first.grad = torch.ones(4)
    zero.step()
    zero.param_groups[0]["lr"] = 0.25
    zero.add_param_group({"params": [second], "lr": 2.0})
    assert [each["lr"] for each in zero.param_groups] == [0.25, 2.0]
    zero.step()
    assert torch.equal(first.detach(), torch.full((4,), 1 - 0.5 - 0.25))


@pytest.mark.parametrize("views", [False, True])
def test_options_changed_since_the_last_step_survive_a_further_group(pool: Pool, views: bool) -> None:
    pool.run(_changed_before_adding, 2, views)
