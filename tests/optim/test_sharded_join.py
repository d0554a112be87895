"""Uneven inputs under `ShardedOptimizer`: ranks that have run out of batches still do their part of each step."""

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from tests.helpers.pool import Pool, RankError
from tests.helpers.reference import Batch, batches, build, difference
from tests.helpers.sharding import MOMENTUM, Contest, backward, sharded
from zerostep import ShardedOptimizer

LENGTHS = (8, 2, 0)
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
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_without_inputs_count_as_zeros(pool: Pool, world: int, way: str, clip: float, accumulate: int) -> None:
    both = ("step", "forward") if world == 2 else ("step",) if accumulate == 1 else ("forward",)
    for gather in both if not clip else ("step",):
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


# Contexts that do nothing, and contexts that an exception ends.


def _even(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """What only works outside of a context: torch's clipping, and gradients that are set to zero."""
    for batch in data:
        backward(model, batch)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def _joinables(model: nn.Module, optimizer: Any) -> list[Any]:
    return [model, optimizer] if isinstance(model, DDP) else [optimizer]


def _switched_off(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    if not isinstance(optimizer, ShardedOptimizer):
        _even(model, optimizer, data)
        return
    with Join(_joinables(model, optimizer), enable=False):
        _even(model, optimizer, data[:2])
    _even(model, optimizer, data[2:])


def _not_joining(group: ProcessGroup) -> None:
    Contest(kind=SGD, options=MOMENTUM, close=2e-6).run(group, _switched_off)


@pytest.mark.parametrize("world", [2, 3])
def test_a_context_that_is_switched_off_changes_nothing(pool: Pool, world: int) -> None:
    pool.run(_not_joining, world, deadline=30)


def _one_away(group: ProcessGroup, inside: bool) -> float:
    """In a context that is switched off, and after it, a rank with a gradient of zeros makes passes like any other."""
    model, reference = build(), build()
    optimizer, plain = sharded(group, model, SGD, **MOMENTUM), SGD(reference.parameters(), **MOMENTUM)
    everybody = [batches(7, rank, 3) for rank in range(dist.get_world_size(group))]
    with Join([optimizer], enable=False):
        if inside:
            _absent(model, optimizer, everybody, dist.get_rank(group))
    if not inside:
        _absent(model, optimizer, everybody, dist.get_rank(group))
    for place in range(3):
        for rank, data in enumerate(everybody):
            if not (place == 1 and rank == 1):
                (mse_loss(reference(data[place][0]), data[place][1]) / len(everybody)).backward()
        plain.step()
        plain.zero_grad()
    return difference(reference.parameters(), model.parameters())


def _absent(model: nn.Module, optimizer: ShardedOptimizer, everybody: list[list[Batch]], rank: int) -> None:
    for place, batch in enumerate(everybody[rank]):
        if place == 1 and rank == 1:
            (mse_loss(model(batch[0]), batch[1]) * 0.0).backward()
        else:
            backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("inside", [False, True], ids=["after", "inside"])
def test_nobody_is_told_of_a_pass_where_a_context_is_switched_off(pool: Pool, inside: bool) -> None:
    assert max(pool.run(_one_away, 2, inside, deadline=20)) < 1e-6


class BadDayError(Exception):
    """Something that happens to all ranks."""


def _ended(model: nn.Module, optimizer: Any, data: list[Batch], moment: str) -> None:
    """Training, in a context that ends with an exception in the second iteration, and then without one."""
    context = Join(_joinables(model, optimizer)) if isinstance(optimizer, ShardedOptimizer) else nullcontext()
    with suppress(BadDayError), context:
        del context
        for number, batch in enumerate(data[:2]):
            optimizer.zero_grad()
            if number and moment == "before backward":
                raise BadDayError
            backward(model, batch)
            if number and moment == "before the step":
                raise BadDayError
            optimizer.step()
            if number and moment == "after the step":
                raise BadDayError
    optimizer.zero_grad()
    _even(model, optimizer, data[2:4])
    with Join(_joinables(model, optimizer)) if isinstance(optimizer, ShardedOptimizer) else nullcontext():
        for batch in data[4:]:
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()


def _after_an_exception(group: ProcessGroup, moment: str, gather: str) -> None:
    contest = Contest(kind=SGD, options=MOMENTUM, close=2e-6, ours={"gather": gather})
    contest.run(group, lambda model, optimizer, data: _ended(model, optimizer, data, moment), steps=6)


@pytest.mark.parametrize("gather", ["step", "forward"])
@pytest.mark.parametrize("moment", ["before backward", "before the step", "after the step"])
@pytest.mark.parametrize("world", [2, 3])
def test_training_goes_on_after_a_context_that_an_exception_has_ended(
    pool: Pool, world: int, moment: str, gather: str
) -> None:
    pool.run(_after_an_exception, world, moment, gather, deadline=30)


def _terminated(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """The second rank has fewer inputs than the others, and all are told."""
    steps, told = 2, not isinstance(optimizer, ShardedOptimizer)
    if told:
        _plainly(model, optimizer, data[:steps])
    else:
        mine = data[: steps if dist.get_rank() == 1 else steps + 1]
        try:
            with Join(_joinables(model, optimizer), throw_on_early_termination=True):
                _plainly(model, optimizer, mine)
        except RuntimeError as error:
            told = "exhausted" in str(error)
    assert told
    optimizer.zero_grad()
    _even(model, optimizer, data[steps + 1 :])


def _plainly(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def _termination(group: ProcessGroup) -> None:
    Contest(kind=SGD, options=MOMENTUM, close=2e-6).run(group, _terminated, steps=5)


@pytest.mark.parametrize("world", [2, 3])
def test_training_goes_on_after_an_early_termination(pool: Pool, world: int) -> None:
    pool.run(_termination, world, deadline=30)


def _one_context_after_another(group: ProcessGroup) -> float:
    """A context that goes away late does not end the one that has come after it; nor does a pass without a step."""
    inputs = _inputs(dist.get_world_size(group))
    model = build()
    optimizer = ShardedOptimizer(model, AdamW, process_group=group, lr=0.05, bucket_mb=BUCKET_MB)
    context = Join([optimizer])
    with context:
        for data, targets in batches(1, dist.get_rank(group), 1):
            mse_loss(model(data), targets).backward()
    optimizer.zero_grad()
    context = Join([optimizer])
    with context:
        _train(model, optimizer, inputs[dist.get_rank(group)], 1, 0.0)
    return difference(_reference(inputs, 1, 0.0).parameters(), model.parameters())


@pytest.mark.parametrize("world", [2, 3])
def test_a_context_is_ended_by_its_own_end_alone(pool: Pool, world: int) -> None:
    assert max(pool.run(_one_context_after_another, world, deadline=30)) < 1e-6
