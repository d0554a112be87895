"""Overlap mode when an update, a hook, a callback or a rank fails."""

import os
import signal
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adam, AdamW

from tests.helpers.overlap import (
    EACH_HOOK,
    HOOKS,
    OPTIONS,
    Hook,
    Values,
    assert_equal_on_all_ranks,
    backward,
    in_ddp,
    overlapped,
    rank_batches,
    state_on_every_rank,
    train,
    values_of,
)
from tests.helpers.pool import Pool, run_fresh
from zerostep import ZeroRedundancyOptimizer, hook_with_zero_step_interleaved


class FailingAdam(Adam):
    """Raises once, at the call of `step` with number `fails_at`, before or after the update."""

    fails_at: int | None = None
    # A tuple of all: a number would change once in a step, however many parts it has.
    calls: tuple[int, ...] = ()
    late = False

    def step(self, closure: Any = None) -> Any:
        self.calls = (*self.calls, len(self.calls))
        if len(self.calls) == self.fails_at and not self.late:
            raise ArithmeticError("no more numbers")
        loss = super().step(closure)
        if len(self.calls) == self.fails_at:
            raise ArithmeticError("no more numbers")
        return loss


def _fail_at(zero: ZeroRedundancyOptimizer, bucket: int, late: bool = False) -> None:
    """Let the update of one of the next buckets fail on this rank."""
    inner = zero.optim
    assert isinstance(inner, FailingAdam)
    inner.late, inner.fails_at = late, len(inner.calls) + 1 + bucket


def _fail_once(group: ProcessGroup, hook: str, bucket: int, late: bool, options: dict[str, Any]) -> Values:
    ddp = in_ddp(group, **options)
    zero = overlapped(ddp, hook, FailingAdam, lr=0.02)
    series = rank_batches(group, 7)
    train(ddp, zero, series[:3])
    before, saved = values_of(ddp), state_on_every_rank(zero)
    if dist.get_rank(group) == 1:
        _fail_at(zero, bucket, late)
    zero.zero_grad()
    with pytest.raises(RuntimeError, match="no more numbers") as caught:
        backward(ddp, series[3])
    assert "rank 1 failed in its local update of step 4" in str(caught.value)
    assert "Unable to cast" not in str(caught.value)
    _assert_refused_until_loaded(ddp, zero, series[4], before, saved)
    train(ddp, zero, series[4:])
    assert all(not torch.equal(before[name], value) for name, value in values_of(ddp).items())
    assert len(state_on_every_rank(zero)["state"]) == len(before)
    return values_of(ddp)


def _assert_refused_until_loaded(
    ddp: DDP, zero: ZeroRedundancyOptimizer, batch: Any, weights: Values, saved: dict[str, Any]
) -> None:
    """Half of the parameters are new: nothing goes on, and nothing is saved, before a checkpoint is loaded."""
    for attempt in (lambda: backward(ddp, batch), zero.step, lambda: zero.consolidate_state_dict(to=0)):
        with pytest.raises(RuntimeError, match="load the last checkpoint"):
            attempt()
    zero.zero_grad()
    ddp.load_state_dict(weights)
    zero.load_state_dict(saved)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["default", "find_unused"])
@pytest.mark.parametrize("late", [False, True], ids=["before the update", "after it"])
@EACH_HOOK
def test_statement_50_an_error_in_one_update_surfaces_everywhere_and_training_goes_on_once_a_state_is_loaded(
    pool: Pool, hook: str, late: bool, options: dict[str, Any]
) -> None:
    for world in (2, 3):
        for bucket in (0, 1):
            assert_equal_on_all_ranks(pool.run(_fail_once, world, hook, bucket, late, options))


def _fail_alone(group: ProcessGroup, hook: str) -> None:
    ddp = in_ddp(group)
    zero = overlapped(ddp, hook, FailingAdam, lr=0.02)
    series = rank_batches(group, 6)
    train(ddp, zero, series[:3])
    before, saved = values_of(ddp), state_on_every_rank(zero)
    _fail_at(zero, 1)
    with pytest.raises(RuntimeError, match="no more numbers"):
        train(ddp, zero, series[3:4])
    _assert_refused_until_loaded(ddp, zero, series[4], before, saved)
    train(ddp, zero, series[4:])
    assert all(not torch.equal(before[name], value) for name, value in values_of(ddp).items())


@EACH_HOOK
def test_statement_50_in_a_world_of_one(pool: Pool, hook: str) -> None:
    pool.run(_fail_alone, 1, hook)


def _fail_in_the_callback(group: ProcessGroup, hook: str) -> Values:
    ddp = in_ddp(group)
    zero = overlapped(ddp, hook)
    series = rank_batches(group, 6)

    def refuse(params: Any, gradients: Any) -> None:
        if dist.get_rank(group) == 0:
            raise ArithmeticError("not a number")

    train(ddp, zero, series[:3])
    before, saved = values_of(ddp), state_on_every_rank(zero)
    zero.set_gradient_callback(refuse)
    with pytest.raises(RuntimeError, match="not a number"):
        train(ddp, zero, series[3:4])
    zero.set_gradient_callback(None)
    _assert_refused_until_loaded(ddp, zero, series[4], before, saved)
    train(ddp, zero, series[4:])
    return values_of(ddp)


@EACH_HOOK
def test_statement_50_an_error_in_the_gradient_callback(pool: Pool, hook: str) -> None:
    assert_equal_on_all_ranks(pool.run(_fail_in_the_callback, 2, hook))


def _late(future: Future[Tensor]) -> Future[Tensor]:
    """The same result a while later."""
    found: Future[Tensor] = Future()
    threading.Timer(0.1, found.set_result, [future.wait()]).start()
    return found


def _watch(ddp: DDP, hook: Hook) -> list[Future[Tensor]]:
    """Register a hook; the list has the futures that it gave to DDP."""
    futures: list[Future[Tensor]] = []

    def outer(state: Any, bucket: GradBucket) -> Future[Tensor]:
        futures.append(hook(state, bucket))
        return futures[-1]

    ddp.register_comm_hook(ddp.process_group, outer)
    return futures


def _fail_while_others_are_late(group: ProcessGroup) -> None:
    """The first bucket fails at once, while the others are still being reduced."""
    late = False

    def wrapped(state: Any, bucket: GradBucket) -> Future[Tensor]:
        future = allreduce_hook(state, bucket)
        return _late(future) if late and bucket.index() > 0 else future

    ddp = in_ddp(group)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), FailingAdam, group, overlap_with_ddp=True, lr=0.02)
    futures = _watch(ddp, hook_with_zero_step_interleaved(wrapped, ddp, zero))
    series = rank_batches(group, 4)
    train(ddp, zero, series[:3])
    futures.clear()
    late = True
    _fail_at(zero, 0)
    with pytest.raises(RuntimeError, match="no more numbers"):
        train(ddp, zero, series[3:])
    assert len(futures) >= 3 and all(future.done() for future in futures)


def test_statement_50_nothing_is_under_way_once_backward_has_raised(pool: Pool) -> None:
    pool.run(_fail_while_others_are_late, 2)


def _fail_in_the_wrapped_hook(group: ProcessGroup, hook: str, synchronously: bool, at: int) -> Values:
    """In iteration `at` the wrapped hook fails in the first bucket, on all ranks, and the last bucket is late."""
    failing = False

    def wrapped(state: Any, bucket: GradBucket) -> Future[Tensor]:
        future = allreduce_hook(state, bucket)
        if not failing or (bucket.index() > 0 and not bucket.is_last()):
            return future
        if bucket.is_last():
            return _late(future)
        future.wait()
        if synchronously:
            raise ArithmeticError("gradients are wrong")
        failed: Future[Tensor] = Future()
        failed.set_exception(ArithmeticError("gradients are wrong"))  # type: ignore[arg-type]
        return failed

    ddp = in_ddp(group, find_unused_parameters=True)  # so that the first pass has several buckets
    zero = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, group, overlap_with_ddp=True, **OPTIONS)
    futures = _watch(ddp, HOOKS[hook](wrapped, ddp, zero))
    for number, batch in enumerate(rank_batches(group, 5)):
        failing = number == at
        with pytest.raises(RuntimeError, match="gradients are wrong") if failing else nullcontext():
            train(ddp, zero, [batch])
        assert all(future.done() for future in futures)
    before = values_of(ddp)
    train(ddp, zero, rank_batches(group, 1))
    assert all(not torch.equal(before[name], value) for name, value in values_of(ddp).items())
    return values_of(ddp)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("synchronously", [False, True], ids=["future", "raises"])
@EACH_HOOK
def test_statement_50_an_error_of_the_wrapped_hook(pool: Pool, hook: str, synchronously: bool, at: int) -> None:
    assert_equal_on_all_ranks(pool.run(_fail_in_the_wrapped_hook, 2, hook, synchronously, at))


def _die_in_backward(group: ProcessGroup, hook: str) -> list[str]:
    ddp = in_ddp(group)
    zero = overlapped(ddp, hook)
    series = rank_batches(group, 4)
    train(ddp, zero, series[:3])

    def die(params: Any, gradients: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank(group) == 1:
        zero.set_gradient_callback(die)
    texts = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            train(ddp, zero, series[3:])
        texts.append(str(caught.value))
    with pytest.raises(RuntimeError, match="load the last checkpoint"):
        zero.consolidate_state_dict()
    return texts


@EACH_HOOK
def test_survivors_of_a_killed_rank_raise(hook: str) -> None:
    outcomes = run_fresh(_die_in_backward, 3, hook, deadline=60.0)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].error
        first, second = outcomes[rank].result
        assert "rank 1" in first and "checkpoint" in first
        assert "checkpoint" in second
