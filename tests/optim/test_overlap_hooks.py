"""The overlap hooks: the two factories, late ranks, options that change, accumulation, gradient callbacks."""

import random
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.utils import clip_grad_value_, get_total_norm
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, StepLR

from tests.helpers.overlap import (
    EACH_GRADIENT_MODE,
    EACH_HOOK,
    HOOKS,
    Branches,
    Values,
    assert_equal_on_all_ranks,
    assert_same,
    backward,
    gradients_of,
    in_ddp,
    logged_warnings,
    overlapped,
    plain_optimizer,
    rank_batches,
    state_on_every_rank,
    train,
    values_of,
)
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, assert_same_state_dict
from zerostep import ZeroRedundancyOptimizer

# The two factories, step() and the end of backward.


def _call_step(group: ProcessGroup, hook: str) -> None:
    ddp = in_ddp(group)
    zero = overlapped(ddp, hook)
    train(ddp, zero, rank_batches(group, 3))
    calls: list[int] = []

    def closure() -> float:
        calls.append(1)
        return 0.0

    values, gradients, state = values_of(ddp), gradients_of(ddp), state_on_every_rank(zero)
    with logged_warnings() as logged:
        assert zero.step() is None
        assert zero.step(closure) == 0.0
    assert calls == [1]
    assert len(logged) == 1 and "step() does nothing" in logged[0]
    assert_same_bits(values_of(ddp), values)
    assert_same_bits(gradients_of(ddp), gradients)
    assert_same_state_dict(state_on_every_rank(zero), state)


@EACH_HOOK
def test_statement_33_step_does_nothing_but_warn(pool: Pool, hook: str) -> None:
    pool.run(_call_step, 2, hook)


def _steps_in_closures(group: ProcessGroup, hook: str) -> None:
    ours, other = in_ddp(group), in_ddp(group)
    zero, series = overlapped(ours, hook), rank_batches(group, 4)
    plain = plain_optimizer(other)

    def step(optimizer: Any, ddp: Any, batch: Any) -> float:
        optimizer.zero_grad()
        backward(ddp, batch)
        return 2.0

    for optimizer, ddp in ((zero, ours), (plain, other)):
        for batch in series:
            with logged_warnings() as logged:
                assert optimizer.step(partial(step, optimizer, ddp, batch)) == 2.0
            assert not logged
    assert_same(ours, other)


@EACH_HOOK
def test_a_closure_of_step_is_run_and_its_backward_pass_is_the_step(pool: Pool, hook: str) -> None:
    pool.run(_steps_in_closures, 2, hook)


def _gradients_of_the_wrapped_hook(group: ProcessGroup, hook: str, views: bool) -> None:
    alone, ours = (in_ddp(group, gradient_as_bucket_view=views) for _ in range(2))
    alone.register_comm_hook(group, allreduce_hook)
    zero = ZeroRedundancyOptimizer(ours.parameters(), SGD, process_group=group, overlap_with_ddp=True, lr=0.5)
    for shard_buckets in (False, True):
        assert callable(HOOKS[hook](allreduce_hook, ours, zero, shard_buckets=shard_buckets))
    made: Any = HOOKS[hook](hook=allreduce_hook, ddp=ours, zero=zero)
    assert made.__name__ and made.__qualname__
    ours.register_comm_hook(group, made)
    for batch in rank_batches(group, 4):
        alone.load_state_dict(ours.state_dict())
        for ddp in (alone, ours):
            ddp.zero_grad()
            backward(ddp, batch)
        assert len(gradients_of(alone)) == len(list(alone.parameters()))
        assert_same_bits(gradients_of(ours), gradients_of(alone))


@EACH_GRADIENT_MODE
@EACH_HOOK
def test_statement_34_gradients_are_those_of_the_wrapped_hook(pool: Pool, hook: str, views: bool) -> None:
    pool.run(_gradients_of_the_wrapped_hook, 3, hook, views)


def _values_after_each_backward(group: ProcessGroup, hook: str) -> list[Values]:
    ddp = in_ddp(group)
    zero = overlapped(ddp, hook)
    found = [values_of(ddp)]
    for batch in rank_batches(group, 4):
        zero.zero_grad()
        backward(ddp, batch)
        found.append(values_of(ddp))
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
@EACH_HOOK
def test_statement_35_when_backward_returns_all_ranks_hold_the_new_parameters(
    pool: Pool, hook: str, world: int
) -> None:
    ranks = pool.run(_values_after_each_backward, world, hook)
    for moments in zip(*ranks, strict=True):
        assert_equal_on_all_ranks(list(moments))
    for before, after in pairwise(ranks[0]):
        assert all(not torch.equal(before[name], after[name]) for name in before)


# Ranks that are not in step.


class _Delay:
    """Now and then a short pause, at other moments on every rank and in every repetition."""

    def __init__(self, *seed: int) -> None:
        self._random = random.Random(repr(seed))

    def __call__(self, *_: Any) -> None:
        if self._random.random() < 0.2:
            time.sleep(self._random.random() * 0.003)


def _train_with_delays(group: ProcessGroup, hook: str, repetitions: int, iterations: int) -> None:
    rank, series = dist.get_rank(group), rank_batches(group, iterations)
    plain = in_ddp(group)
    optimizer = plain_optimizer(plain)
    expected = []
    for batch in series:
        train(plain, optimizer, [batch])
        expected.append(values_of(plain))
    for repetition in range(repetitions):
        in_backward, in_update, outside = (_Delay(repetition, rank, place) for place in range(3))

        def wrapped(state: Any, bucket: GradBucket, pause: _Delay = in_backward) -> Future[Tensor]:
            pause()
            return allreduce_hook(state, bucket)

        ddp = in_ddp(group, gradient_as_bucket_view=repetition % 2 == 1)
        zero = overlapped(ddp, hook, wrapped=wrapped)
        zero.set_gradient_callback(in_update)
        for batch, values in zip(series, expected, strict=True):
            outside()
            train(ddp, zero, [batch])
            assert_same_bits(ddp.named_parameters(), values)


@pytest.mark.parametrize("world", [2, 3])
@EACH_HOOK
def test_statement_39_ranks_that_are_late_at_random(pool: Pool, hook: str, world: int) -> None:
    pool.run(_train_with_delays, world, hook, repetitions=4, iterations=25, deadline=110.0)


# Options that change.


def _change_the_rate(group: ProcessGroup, hook: str) -> None:
    plain, ours = (in_ddp(group) for _ in range(2))
    optimizer, zero = plain_optimizer(plain), overlapped(ours, hook)
    for batch, lr in zip(rank_batches(group, 6), [0.01, 0.1, 0.0, 0.05, 0.001, 0.01], strict=True):
        before = values_of(ours)
        for ddp, each in ((plain, optimizer), (ours, zero)):
            each.param_groups[0]["lr"] = lr
            train(ddp, each, [batch])
        assert_same(ours, plain)
        assert (lr == 0.0) == all(torch.equal(before[name], param) for name, param in ours.named_parameters())
    assert_same_state_dict(state_on_every_rank(zero), optimizer.state_dict())


@EACH_HOOK
def test_statement_42_a_new_rate_counts_in_the_next_backward(pool: Pool, hook: str) -> None:
    pool.run(_change_the_rate, 2, hook)


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "step": partial(StepLR, step_size=2, gamma=0.3),
    "cosine": partial(CosineAnnealingLR, T_max=8),
    "lambda": partial(LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch)),
    "one cycle": partial(OneCycleLR, max_lr=0.1, total_steps=10),
}


def _follow_schedules(group: ProcessGroup, hook: str, tensor_lr: bool) -> list[str]:
    """Train with each scheduler; returns what was said about schedulers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for make in SCHEDULERS.values():
            _follow_schedule(group, hook, make, tensor_lr)
    return [str(warning.message) for warning in caught if "scheduler" in str(warning.message)]


def _follow_schedule(group: ProcessGroup, hook: str, make: Callable[[Optimizer], LRScheduler], tensor_lr: bool) -> None:
    plain, ours = (in_ddp(group) for _ in range(2))
    rates = (torch.tensor(0.02) if tensor_lr else 0.02 for _ in range(2))
    optimizer, zero = plain_optimizer(plain, Adam, lr=next(rates)), overlapped(ours, hook, Adam, lr=next(rates))
    schedulers = make(optimizer), make(zero)
    for batch in rank_batches(group, 8):
        for ddp, each, scheduler in zip((plain, ours), (optimizer, zero), schedulers, strict=True):
            train(ddp, each, [batch])
            scheduler.step()
        assert_same(ours, plain)
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@EACH_HOOK
def test_statement_42_schedulers_are_followed_and_do_not_complain(pool: Pool, hook: str, tensor_lr: bool) -> None:
    assert pool.run(_follow_schedules, 2, hook, tensor_lr) == [[], []]


class CountingSGD(SGD):
    """Counts its steps in its groups, and takes smaller ones as it goes."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] *= 0.9
        return super().step(closure)


def _count_in_groups(group: ProcessGroup, hook: str) -> None:
    plain, ours = (in_ddp(group) for _ in range(2))
    optimizer = plain_optimizer(plain, CountingSGD, lr=0.1)
    zero = overlapped(ours, hook, CountingSGD, lr=0.1)
    for number, batch in enumerate(rank_batches(group, 5), start=1):
        for ddp, each in ((plain, optimizer), (ours, zero)):
            train(ddp, each, [batch])
        assert_same(ours, plain)
        assert zero.param_groups[0]["count"] == zero.optim.param_groups[0]["count"] == number
    assert_same_state_dict(state_on_every_rank(zero), optimizer.state_dict())


@pytest.mark.parametrize("world", [1, 2, 3])
@EACH_HOOK
def test_counters_in_groups_advance_once_for_each_backward(pool: Pool, hook: str, world: int) -> None:
    pool.run(_count_in_groups, world, hook)


def _construct_wrongly(group: ProcessGroup) -> None:
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="learning rate"):
        ZeroRedundancyOptimizer(params, SGD, process_group=group, overlap_with_ddp=True, lr=-1.0)
    with pytest.raises(TypeError, match="unheard_of"):
        ZeroRedundancyOptimizer(params, SGD, process_group=group, overlap_with_ddp=True, lr=0.1, unheard_of=1)
    zero = ZeroRedundancyOptimizer(params, SGD, process_group=group, overlap_with_ddp=True)
    assert zero.param_groups[0]["lr"] == SGD([nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]


def test_statement_44_wrong_options_raise_in_the_constructor(pool: Pool) -> None:
    pool.run(_construct_wrongly, 2)


# Accumulation.


def _accumulate(group: ProcessGroup, hook: str, views: bool) -> None:
    plain, ours = (in_ddp(group, gradient_as_bucket_view=views) for _ in range(2))
    optimizer, zero = plain_optimizer(plain), overlapped(ours, hook)
    series = rank_batches(group, 15)
    for number in range(5):
        state, values = state_on_every_rank(zero), values_of(ours)
        for ddp, each in ((plain, optimizer), (ours, zero)):
            each.zero_grad()
            with ddp.no_sync():
                for batch in series[3 * number : 3 * number + 2]:
                    backward(ddp, batch)
        assert_same_bits(values_of(ours), values)
        assert_same_state_dict(state_on_every_rank(zero), state)
        for ddp in (plain, ours):
            backward(ddp, series[3 * number + 2])
        optimizer.step()
        assert_same(ours, plain)
    assert_same_state_dict(state_on_every_rank(zero), optimizer.state_dict())


@EACH_GRADIENT_MODE
@EACH_HOOK
def test_statement_48_only_the_synchronised_pass_steps(pool: Pool, hook: str, views: bool) -> None:
    pool.run(_accumulate, 2, hook, views)
    pool.run(_accumulate, 3, hook, views)


def _accumulate_branches(group: ProcessGroup, hook: str, views: bool) -> None:
    plain, ours = (
        in_ddp(group, Branches(), find_unused_parameters=True, gradient_as_bucket_view=views) for _ in range(2)
    )
    optimizer, zero = plain_optimizer(plain), overlapped(ours, hook)
    series = rank_batches(group, 8)
    for number, (alone, together) in enumerate([("a", "b"), ("ab", "c"), ("c", ""), ("", "a")]):
        for ddp, each in ((plain, optimizer), (ours, zero)):
            each.zero_grad()
            with ddp.no_sync():
                backward(ddp, series[2 * number], alone)
            backward(ddp, series[2 * number + 1], together)
        optimizer.step()
        assert_same(ours, plain)
    assert_same_state_dict(state_on_every_rank(zero), optimizer.state_dict())


@EACH_GRADIENT_MODE
@EACH_HOOK
def test_statement_48_parameters_used_in_the_other_passes_only(pool: Pool, hook: str, views: bool) -> None:
    pool.run(_accumulate_branches, 2, hook, views)


# The user's own edits.


def _clip_values(group: ProcessGroup, hook: str, views: bool) -> None:
    plain, ours = (in_ddp(group, gradient_as_bucket_view=views) for _ in range(2))
    optimizer, zero = plain_optimizer(plain), overlapped(ours, hook)
    seen: list[Tensor] = []

    def clip(params: Any, gradients: Any) -> None:
        seen.extend(params)
        for gradient in gradients:
            gradient.clamp_(-0.003, 0.003)

    mine = [param for param, owner in zero._param_to_rank.items() if owner == zero.rank]
    zero.set_gradient_callback(clip)
    for number, batch in enumerate(rank_batches(group, 7)):
        if number == 5:
            zero.set_gradient_callback(None)
        seen.clear()
        zero.zero_grad()
        backward(ours, batch)
        optimizer.zero_grad()
        backward(plain, batch)
        assert_same_bits(gradients_of(ours), gradients_of(plain))
        assert sorted(map(id, seen)) == (sorted(map(id, mine)) if number < 5 else [])
        if number < 5:
            assert get_total_norm([*gradients_of(plain).values()], torch.inf) > 0.003
            clip_grad_value_(plain.parameters(), 0.003)
        optimizer.step()
        assert_same_bits(ours.named_parameters(), plain.named_parameters())


@EACH_GRADIENT_MODE
@EACH_HOOK
def test_a_gradient_callback_edits_what_the_update_sees(pool: Pool, hook: str, views: bool) -> None:
    pool.run(_clip_values, 2, hook, views)
