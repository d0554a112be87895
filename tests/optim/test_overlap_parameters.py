"""Overlap mode with unused parameters, buckets that are hard to divide, added groups and rebound memory."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

from tests.helpers.overlap import (
    EACH_HOOK,
    HOOKS,
    OPTIONS,
    Branches,
    Values,
    assert_same,
    backward,
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
from tests.helpers.reference import assert_same_bits, assert_same_state_dict, build
from zerostep import ZeroRedundancyOptimizer, hook_with_zero_step

# Parameters without gradients.


# What each rank takes in each iteration: c is used by one rank alone, then by none; at times only the trunk is used.
TAKEN = [("ab", "ab"), ("a", "a"), ("b", "ab"), ("", ""), ("a", ""), ("abc", "ab"), ("b", "b"), ("", "c")]


def _take_branches(group: ProcessGroup, hook: str, kind: type[Optimizer], views: bool) -> None:
    plain, ours = (
        in_ddp(group, Branches(), find_unused_parameters=True, gradient_as_bucket_view=views) for _ in range(2)
    )
    options: dict[str, Any] = {**OPTIONS, "momentum": 0.9} if kind is SGD else OPTIONS
    optimizer, zero = plain_optimizer(plain, kind, **options), overlapped(ours, hook, kind, **options)
    for batch, taken in zip(rank_batches(group, len(TAKEN)), TAKEN, strict=True):
        before, state = values_of(ours), state_on_every_rank(zero)["state"]
        for ddp, each in ((plain, optimizer), (ours, zero)):
            each.zero_grad()
            backward(ddp, batch, taken[dist.get_rank(group) % 2])
        optimizer.step()
        assert_same(ours, plain)
        _assert_untouched(ours, zero, set("abc") - set("".join(taken)), before, state)
    assert_same_state_dict(state_on_every_rank(zero), optimizer.state_dict())


def _assert_untouched(
    ddp: DDP, zero: ZeroRedundancyOptimizer, unused: set[str], before: Values, state: dict[int, Any]
) -> None:
    after = state_on_every_rank(zero)["state"]
    for index, (name, param) in enumerate(ddp.named_parameters()):
        if name.split(".")[2] in unused:
            assert param.grad is None
            assert_same_bits({name: param}, {name: before[name]})
            assert_same_state_dict({"": after.get(index)}, {"": state.get(index)})
        else:
            assert not torch.equal(param, before[name])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", [AdamW, SGD])
@EACH_HOOK
def test_statement_41_what_no_rank_uses_keeps_value_and_state(
    pool: Pool, hook: str, kind: type[Optimizer], world: int
) -> None:
    for views in (False, True):
        pool.run(_take_branches, world, hook, kind, views)


def _keep_zeroed_gradients(group: ProcessGroup, hook: str) -> None:
    plain, ours = (in_ddp(group, Branches(), find_unused_parameters=True) for _ in range(2))
    optimizer, zero = plain_optimizer(plain), overlapped(ours, hook)
    for batch, taken in zip(rank_batches(group, len(TAKEN)), TAKEN, strict=True):
        for ddp, each in ((plain, optimizer), (ours, zero)):
            each.zero_grad(set_to_none=False)
            backward(ddp, batch, taken[dist.get_rank(group) % 2])
        optimizer.step()
        assert_same(ours, plain)


@EACH_HOOK
def test_unused_parameters_whose_gradients_are_zeroed_and_not_dropped(pool: Pool, hook: str) -> None:
    pool.run(_keep_zeroed_gradients, 2, hook)


# Which parameters there are.


def _bare_linears(*sizes: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return nn.Sequential(*(nn.Linear(size, out, bias=False) for size, out in pairwise(sizes)))


def _train_bare(group: ProcessGroup, hook: str, sizes: tuple[int, ...]) -> None:
    plain, ours = (in_ddp(group, _bare_linears(*sizes), bucket_cap_mb=25) for _ in range(2))
    optimizer, zero = plain_optimizer(plain), overlapped(ours, hook)
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    for _ in range(4):
        batch = torch.randn(4, sizes[0], generator=generator), torch.randn(4, sizes[-1], generator=generator)
        train(plain, optimizer, [batch])
        train(ours, zero, [batch])
        assert_same(ours, plain)
    assert_same_state_dict(state_on_every_rank(zero), optimizer.state_dict())


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (3, 90, 1, 2), (3, 2)], ids=str)
@EACH_HOOK
def test_statement_47_buckets_that_are_hard_to_divide(pool: Pool, hook: str, sizes: tuple[int, ...]) -> None:
    pool.run(_train_bare, 2, hook, sizes)
    pool.run(_train_bare, 3, hook, sizes)


def _add_a_group(group: ProcessGroup, hook: str, options: dict[str, Any]) -> None:
    sides = []
    for _ in range(2):
        ddp = in_ddp(group, **options)
        params = list(ddp.parameters())
        sides.append((ddp, params[::2], {"params": params[1::2], "lr": 0.1}))
    (plain, first, later), (ours, our_first, our_later) = sides
    plain.register_comm_hook(group, allreduce_hook)
    optimizer = AdamW(first, lr=0.02)
    zero = ZeroRedundancyOptimizer(our_first, AdamW, process_group=group, overlap_with_ddp=True, lr=0.02)
    ours.register_comm_hook(group, HOOKS[hook](allreduce_hook, ours, zero))
    for number, batch in enumerate(rank_batches(group, 7)):
        if number == 3:
            optimizer.add_param_group(later)
            zero.add_param_group(our_later)
            assert {*zero.param_groups[1]} == {*optimizer.param_groups[1]}
        for ddp, each in ((plain, optimizer), (ours, zero)):
            ddp.zero_grad()
            train(ddp, each, [batch])
        assert_same(ours, plain)
    assert_same_state_dict(state_on_every_rank(zero), optimizer.state_dict())


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["default", "find_unused"])
@EACH_HOOK
def test_a_group_may_be_added(pool: Pool, hook: str, options: dict[str, Any]) -> None:
    pool.run(_add_a_group, 2, hook, options)


def _add_a_wrong_group(group: ProcessGroup, hook: str) -> None:
    plain, ours = (in_ddp(group) for _ in range(2))
    optimizer, zero = plain_optimizer(plain), overlapped(ours, hook)
    for number, batch in enumerate(rank_batches(group, 4)):
        if number == 2:
            with pytest.raises(ValueError, match="group"):
                zero.add_param_group({"params": [next(ours.parameters())]})
        for ddp, each in ((plain, optimizer), (ours, zero)):
            train(ddp, each, [batch])
        assert_same(ours, plain)


@EACH_HOOK
def test_a_refused_group_changes_nothing(pool: Pool, hook: str) -> None:
    pool.run(_add_a_wrong_group, 2, hook)


def _rebind(group: ProcessGroup, hook: str) -> None:
    plain, ours = (in_ddp(group) for _ in range(2))
    optimizer, zero = plain_optimizer(plain), overlapped(ours, hook)
    for number, batch in enumerate(rank_batches(group, 5)):
        for ddp, each in ((plain, optimizer), (ours, zero)):
            for param in list(ddp.parameters())[number % 2 :: 2]:
                param.data = param.detach() * 1.5
            train(ddp, each, [batch])
        assert_same(ours, plain)
    assert_same_state_dict(state_on_every_rank(zero), optimizer.state_dict())


@EACH_HOOK
def test_parameters_may_be_bound_to_other_memory(pool: Pool, hook: str) -> None:
    pool.run(_rebind, 2, hook)


def _look_at_state(group: ProcessGroup, hook: str) -> int:
    ddp = in_ddp(group)
    zero = overlapped(ddp, hook, SGD, lr=0.1, momentum=0.9)
    assert len(zero.state) == 0
    train(ddp, zero, rank_batches(group, 3))
    mine = [param for param in ddp.parameters() if zero._param_to_rank[param] == zero.rank]
    assert {id(param) for param in zero.state} == {id(param) for param in mine}
    inner = {id(entry["momentum_buffer"]) for entry in zero.optim.state.values()}
    assert {id(entry["momentum_buffer"]) for entry in zero.state.values()} == inner
    return len(mine)


@EACH_HOOK
def test_state_is_keyed_by_the_users_tensors(pool: Pool, hook: str) -> None:
    owned = pool.run(_look_at_state, 3, hook)
    assert sum(owned) == len(list(build().parameters())) and min(owned) > 0


def _ask_for_parameter_views(group: ProcessGroup) -> None:
    ddp = in_ddp(group)
    pointers = [param.data_ptr() for param in ddp.parameters()]
    with logged_warnings() as logged:
        zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, group, True, True, lr=0.1)
    assert len(logged) == 1 and "parameters_as_bucket_view=True has no effect" in logged[0]
    ddp.register_comm_hook(group, hook_with_zero_step(allreduce_hook, ddp, zero))
    train(ddp, zero, rank_batches(group, 3))
    assert [param.data_ptr() for param in ddp.parameters()] == pointers


def test_parameter_views_are_ignored_with_a_warning(pool: Pool) -> None:
    pool.run(_ask_for_parameter_views, 2)
