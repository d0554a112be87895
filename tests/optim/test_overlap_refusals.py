"""What overlap mode refuses, and what it must not mistake for an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import SGD, Optimizer

from tests.helpers.overlap import (
    EACH_GRADIENT_MODE,
    EACH_HOOK,
    HOOKS,
    assert_same,
    backward,
    in_ddp,
    overlapped,
    plain_optimizer,
    rank_batches,
    train,
)
from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, build
from zerostep import ZeroRedundancyOptimizer


def _freeze(group: ProcessGroup, hook: str, options: dict[str, Any], start: bool) -> None:
    model = build()
    changing = model.get_parameter("second.weight")
    changing.requires_grad_(start)
    ddp = in_ddp(group, model, **options)
    zero = overlapped(ddp, hook)
    series = rank_batches(group, 4)
    train(ddp, zero, series[:3])
    changing.requires_grad_(not start)
    with pytest.raises(RuntimeError, match="requires_grad of some parameters has changed"):
        train(ddp, zero, series[3:])


@pytest.mark.parametrize("start", [True, False], ids=["freeze", "unfreeze"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["default", "find_unused"])
@EACH_HOOK
def test_a_change_of_requires_grad_raises(pool: Pool, hook: str, options: dict[str, Any], start: bool) -> None:
    pool.run(_freeze, 2, hook, options, start)


def _cast(group: ProcessGroup, hook: str, dtype: torch.dtype, no_grad_first: bool) -> None:
    ddp = in_ddp(group)
    zero = overlapped(ddp, hook)
    series = rank_batches(group, 3)
    train(ddp, zero, series[:2])
    ddp.to(torch.float32)  # nothing moves
    train(ddp, zero, series[2:])
    ddp.to(dtype)
    batch: Batch = tuple(part.to(dtype) if part.is_floating_point() else part for part in series[2])  # type: ignore[assignment]
    if no_grad_first:
        with torch.no_grad():
            ddp.module(batch[0])  # an evaluation in another dtype is not a mistake
    zero.zero_grad()
    sentence = rf"parameter 'param\.0' was torch\.float32 on cpu, and is now {dtype} on cpu, .* anew"
    with pytest.raises(RuntimeError, match=sentence):
        backward(ddp, batch)
    ddp.to(torch.float32)  # as it was, but DDP's own hooks are gone
    with pytest.raises(RuntimeError, match=sentence):
        backward(ddp, series[2])


@pytest.mark.parametrize(("dtype", "no_grad_first"), [(torch.bfloat16, True), (torch.float64, False)], ids=str)
@EACH_HOOK
def test_a_cast_after_construction_raises(pool: Pool, hook: str, dtype: torch.dtype, no_grad_first: bool) -> None:
    pool.run(_cast, 2, hook, dtype, no_grad_first)


def _pass_an_ordinary_optimizer(group: ProcessGroup, hook: str) -> None:
    ddp = in_ddp(group)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, process_group=group, lr=0.1)
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        HOOKS[hook](allreduce_hook, ddp, zero)


@EACH_HOOK
def test_an_optimizer_without_overlap_is_refused(pool: Pool, hook: str) -> None:
    pool.run(_pass_an_ordinary_optimizer, 2, hook)


def _pass_another_group(group: ProcessGroup, hook: str) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = in_ddp(group)
    own = pairs[dist.get_rank(group) // 2]
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, process_group=own, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(ValueError, match="same process group"):
        HOOKS[hook](allreduce_hook, ddp, zero)


@EACH_HOOK
def test_different_process_groups_are_refused(pool: Pool, hook: str) -> None:
    pool.run(_pass_another_group, 4, hook)


def _scale(group: ProcessGroup, hook: str, unscale: bool) -> None:
    ddp = in_ddp(group)
    zero = overlapped(ddp, hook)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    inputs, targets = rank_batches(group, 1)[0]
    scaler.scale(mse_loss(ddp(inputs), targets)).backward()
    if unscale:
        scaler.unscale_(zero)
    with pytest.raises(RuntimeError, match=r"GradScaler cannot be used.*overlap_with_ddp=False"):
        scaler.step(zero)


@pytest.mark.parametrize("unscale", [False, True])
@EACH_HOOK
def test_a_gradient_scaler_is_refused(pool: Pool, hook: str, unscale: bool) -> None:
    pool.run(_scale, 2, hook, unscale)


def _clip(group: ProcessGroup, hook: str, views: bool, max_norm: float) -> None:
    ddp = in_ddp(group, gradient_as_bucket_view=views)
    zero = overlapped(ddp, hook)
    series = rank_batches(group, 8)
    next_moments: list[Callable[[], object]] = [
        zero.zero_grad,
        lambda: zero.zero_grad(set_to_none=False),
        zero.step,
        lambda: backward(ddp, series[-1]),
    ]
    for batch, moment in zip(series, next_moments, strict=False):
        backward(ddp, batch)
        clip_grad_norm_(ddp.parameters(), max_norm)
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_.*overlap_with_ddp=False.*set_gradient_callback"):
            moment()
        train(ddp, zero, [batch])  # said once


@pytest.mark.parametrize("max_norm", [1e-3, 1e3], ids=["clipped", "below the limit"])
@EACH_GRADIENT_MODE
@EACH_HOOK
def test_clipping_after_backward_is_refused(pool: Pool, hook: str, views: bool, max_norm: float) -> None:
    pool.run(_clip, 2, hook, views, max_norm)


def _do_harmless_things(group: ProcessGroup, hook: str, views: bool, unused: bool) -> None:
    plain, ours = (in_ddp(group, gradient_as_bucket_view=views, find_unused_parameters=unused) for _ in range(2))
    optimizer, zero = plain_optimizer(plain), overlapped(ours, hook)
    series = iter(rank_batches(group, 40))
    for action in HARMLESS:
        for _ in range(2):
            batch = next(series)
            for ddp, each in ((plain, optimizer), (ours, zero)):
                action(ddp, each, batch)
                backward(ddp, batch)
            optimizer.step()
            assert_same(ours, plain)


def _read_norm(ddp: DDP, optimizer: Optimizer, batch: Batch) -> None:
    norm = get_total_norm([param.grad for param in ddp.parameters() if param.grad is not None])
    assert norm.isfinite()


def _accumulate_once(ddp: DDP, optimizer: Optimizer, batch: Batch) -> None:
    with ddp.no_sync():
        backward(ddp, batch)


def _drop_gradients(ddp: DDP, optimizer: Optimizer, batch: Batch) -> None:
    for param in ddp.parameters():
        param.grad = None


def _replace_gradients(ddp: DDP, optimizer: Optimizer, batch: Batch) -> None:
    for param in ddp.parameters():
        param.grad = None if param.grad is None else torch.zeros_like(param.grad)


def _evaluate(ddp: DDP, optimizer: Optimizer, batch: Batch) -> None:
    ddp.eval()
    with torch.no_grad():
        ddp(batch[0])
    ddp.train()


HARMLESS: list[Callable[[DDP, Optimizer, Batch], None]] = [
    lambda ddp, optimizer, batch: optimizer.zero_grad(),
    lambda ddp, optimizer, batch: optimizer.zero_grad(set_to_none=False),
    lambda ddp, optimizer, batch: ddp.zero_grad(),
    lambda ddp, optimizer, batch: ddp.zero_grad(set_to_none=False),
    lambda ddp, optimizer, batch: ddp.module.zero_grad(set_to_none=False),
    lambda ddp, optimizer, batch: None,
    _read_norm,
    _accumulate_once,
    _drop_gradients,
    _replace_gradients,
    _evaluate,
]


@pytest.mark.parametrize("unused", [False, True], ids=["default", "find_unused"])
@EACH_GRADIENT_MODE
@EACH_HOOK
def test_no_false_alarm_over_gradients(pool: Pool, hook: str, views: bool, unused: bool) -> None:
    pool.run(_do_harmless_things, 2, hook, views, unused)
