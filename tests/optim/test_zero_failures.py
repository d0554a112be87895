"""Steps of `ZeroRedundancyOptimizer` that fail on one rank, on all, or because a rank is gone: every rank raises."""

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, Adam, Optimizer

from tests.helpers.pool import OFFSET, Outcome, Pool, Ranks, run_fresh
from tests.helpers.reference import assert_same_bits, assert_same_state_dict
from zerostep import StepMismatchError, ZeroRedundancyOptimizer
from zerostep.comm.transport import TAG_DATA, GroupTransport

MODES = pytest.mark.parametrize("views", [False, True], ids=["copied", "views"])
SHAPES = [(4, 3), (5,), (2, 2), (7,), (3,)]
LR: dict[str, Any] = {"lr": 0.1}


def _params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def _set_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def _numbered(params: list[nn.Parameter]) -> dict[str, Tensor]:
    return {str(number): param.detach().clone() for number, param in enumerate(params)}


def _refusals(zero: ZeroRedundancyOptimizer) -> list[str]:
    """What every way to go on says."""
    calls: list[Callable[[], object]] = [zero.step, zero.state_dict, lambda: zero.consolidate_state_dict(to=0)]
    texts = []
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


class TroubleError(Exception):
    """What the inner optimizer of these tests raises."""


class FailingAdam(Adam):
    """Fails at the third step on the ranks in `ranks`, before or after it has changed its parameters."""

    ranks: tuple[int, ...] = ()
    after: bool = False
    count: int = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        fails = self.count == 3 and dist.get_rank() in self.ranks
        if fails and not self.after:
            raise TroubleError("no more memory")
        loss = super().step(closure)
        if fails:
            raise TroubleError("no more memory")
        return loss


def _failing(ranks: tuple[int, ...], after: bool) -> type[FailingAdam]:
    return type("FailingAdam", (FailingAdam,), {"ranks": ranks, "after": after})


def _state_everywhere(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    for to in range(zero.world_size):
        zero.consolidate_state_dict(to=to)
        if to == zero.rank:
            found = zero.state_dict()
    return found


def _one_rank_fails(group: ProcessGroup, after: bool, views: bool) -> tuple[str, str, list[str]]:
    world_rank = dist.get_process_group_ranks(group)[1]
    ours, theirs = _params(), _params()
    zero = ZeroRedundancyOptimizer(ours, _failing((world_rank,), after), group, views, **LR)
    plain = Adam(theirs, **LR)
    for seed in range(2):
        for params, optimizer in ((ours, zero), (theirs, plain)):
            _set_gradients(params, seed)
            optimizer.step()
    saved, values = _state_everywhere(zero), _numbered(ours)
    _set_gradients(ours, 2)
    with pytest.raises((RuntimeError, TroubleError)) as caught:
        zero.step()
    refusals = _refusals(zero)
    _assert_heals(zero, ours, saved, values)
    for seed in range(2, 5):
        for params, optimizer in ((ours, zero), (theirs, plain)):
            _set_gradients(params, seed)
            optimizer.step()
    assert_same_bits(_numbered(ours), _numbered(theirs))
    assert_same_state_dict(_state_everywhere(zero), plain.state_dict())
    return type(caught.value).__name__, str(caught.value), refusals


def _assert_heals(
    zero: ZeroRedundancyOptimizer, params: list[nn.Parameter], saved: dict[str, Any], values: dict[str, Tensor]
) -> None:
    """A dict that does not fit changes nothing; a good one, with the model's own values, makes all well again."""
    with pytest.raises(ValueError, match="param_groups"):
        zero.load_state_dict({"state": {}})
    assert len(_refusals(zero)) == 3
    zero.load_state_dict(saved)
    with torch.no_grad():
        for param, value in zip(params, values.values(), strict=True):
            param.copy_(value)


@MODES
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("world", [2, 3, 4, OFFSET], ids=str)
def test_an_error_on_one_rank_ends_the_step_of_all(pool: Pool, world: int | Ranks, after: bool, views: bool) -> None:
    for rank, (kind, text, refusals) in enumerate(pool.run(_one_rank_fails, world, after, views)):
        if rank == 1:
            assert (kind, text) == ("TroubleError", "no more memory")
            excerpt = "the local update of step 3 failed on rank 1: TroubleError: no more memory"
        else:
            excerpt = (
                f"step 3 failed on rank {rank}: rank 1 failed in its local update of step 3: TroubleError: no more "
                "memory"
            )
            assert (kind, text) == ("RuntimeError", f"{excerpt}; restart from the last checkpoint on all ranks")
        remedy = (
            "parameters and optimizer state are from different steps: load the last checkpoint, the model's and this "
            "optimizer's, on all ranks before going on"
        )
        assert refusals == [f"{excerpt}; {remedy}"] * 3


def _all_fail_after(group: ProcessGroup) -> list[str]:
    params = _params()
    zero = ZeroRedundancyOptimizer(params, _failing((0, 1, 2), after=True), group, **LR)
    for seed in range(2):
        _set_gradients(params, seed)
        zero.step()
    _set_gradients(params, 2)
    with pytest.raises(TroubleError):
        zero.step()
    return _refusals(zero)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_error_on_all_ranks_after_the_update_is_remembered(pool: Pool, world: int) -> None:
    for rank, refusals in enumerate(pool.run(_all_fail_after, world)):
        assert all(f"step 3 failed on rank {rank}: TroubleError: no more memory" in text for text in refusals)


# Closures.


def _closure_fails_everywhere(group: ProcessGroup, views: bool) -> None:
    ours, theirs = _params(), _params()
    zero, plain = ZeroRedundancyOptimizer(ours, Adam, group, views, **LR), Adam(theirs, **LR)
    empty = _Empty()
    for seed, closure in enumerate((_no_batch, partial(_no_batch), empty.batch, empty)):
        before = _numbered(ours)
        for optimizer in (zero, plain):
            with pytest.raises(TroubleError, match="no batch"):
                optimizer.step(closure)
        assert_same_bits(_numbered(ours), before)
        for params, optimizer in ((ours, zero), (theirs, plain)):
            _set_gradients(params, seed)
            optimizer.step()
        assert_same_bits(_numbered(ours), _numbered(theirs))
    assert_same_state_dict(_state_everywhere(zero), plain.state_dict())


def _no_batch() -> float:
    raise TroubleError("no batch")


class _Empty:
    """A data set without data, as a closure of two more kinds."""

    def batch(self) -> float:
        raise TroubleError("no batch")

    def __call__(self) -> float:
        raise TroubleError("no batch")


@MODES
@pytest.mark.parametrize("world", [1, 2, 3, OFFSET], ids=str)
def test_an_error_in_the_closure_of_all_ranks_costs_nothing(pool: Pool, world: int | Ranks, views: bool) -> None:
    pool.run(_closure_fails_everywhere, world, views)


def _closure_fails_once(group: ProcessGroup, views: bool) -> None:
    """A rank that tries again cannot be told from one that goes on with its next batch."""
    ours, theirs = _params(), _params()
    zero, plain = ZeroRedundancyOptimizer(ours, Adam, group, views, **LR), Adam(theirs, **LR)
    for params in (ours, theirs):
        _set_gradients(params, 0)
    assert zero.step(lambda: 1.5) == 1.5
    plain.step()
    state = _state_everywhere(zero)
    if zero.rank == 0:
        with pytest.raises(TroubleError, match="no batch"):
            zero.step(_no_batch)
    with pytest.raises(StepMismatchError, match=r"rank 0 is in call 3 of step\(\), ranks? 1.* in call 2 of step\(\)"):
        zero.step(lambda: 1.5)
    for mine, original in zip(ours, theirs, strict=True):
        mine.data.copy_(original.data)
    zero.load_state_dict(state)
    for params in (ours, theirs):
        _set_gradients(params, 1)
    zero.step()
    plain.step()
    assert_same_bits(_numbered(ours), _numbered(theirs))


@MODES
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_tries_again_after_an_error_in_its_closure_is_named(pool: Pool, world: int, views: bool) -> None:
    pool.run(_closure_fails_once, world, views)


class SpoiledAdam(Adam):
    """Fails between its closure and the end of its update, on all ranks."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise TroubleError("no more memory")


def _update_with_closure_fails(group: ProcessGroup) -> list[str]:
    params = _params()
    zero = ZeroRedundancyOptimizer(params, SpoiledAdam, group, **LR)
    _set_gradients(params, 0)
    with pytest.raises(TroubleError):
        zero.step(lambda: 1.0)
    return _refusals(zero)


@pytest.mark.parametrize("world", [1, 2])
def test_an_update_that_fails_after_its_closure_is_remembered(pool: Pool, world: int) -> None:
    for rank, refusals in enumerate(pool.run(_update_with_closure_fails, world)):
        assert all(f"step 1 failed on rank {rank}: TroubleError: no more memory" in text for text in refusals)


# Ranks that change their parameters alone.


def _frozen_on_one_rank(group: ProcessGroup, views: bool) -> tuple[str, list[str]]:
    params = _params()
    zero = ZeroRedundancyOptimizer(params, SGD, group, views, **LR)
    _set_gradients(params, 0)
    zero.step()
    if zero.rank == 1:
        params[2].requires_grad_(False)
        params[2].grad = None  # with a gradient, it would be updated and sent as before
    others = [param for param in params if zero._param_to_rank[param] != zero.rank]
    before = _numbered(others)
    with pytest.raises(RuntimeError) as caught:
        zero.step()
    assert_same_bits(_numbered(others), before)
    return str(caught.value), _refusals(zero)


@MODES
@pytest.mark.parametrize("world", [2, 3, OFFSET], ids=str)
def test_freezing_on_one_rank_alone_is_refused_before_anything_is_sent(
    pool: Pool, world: int | Ranks, views: bool
) -> None:
    for rank, (text, refusals) in enumerate(pool.run(_frozen_on_one_rank, world, views)):
        other = 0 if rank == 1 else 1
        assert f"step 2 failed on rank {rank}: " in text
        assert f"rank {other} is about to send other parameters than rank {rank} expects: requires_grad" in text
        assert all(f"step 2 failed on rank {rank}" in refusal for refusal in refusals)


# Ranks that die.


class DyingSGD(SGD):
    """Ends its own process in the third step of world rank 1, before or after the update, once it is `armed`.

    The constructor of a sharding optimizer tries a class that it does not know.
    """

    after: bool = False
    count: int = 0
    armed = False

    def step(self, closure: Any = None) -> Any:
        self.count += self.armed
        if self.after:
            super().step(closure)
        if self.count == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return None if self.after else super().step(closure)


class LateDyingSGD(DyingSGD):
    """The same, with the update done but not sent."""

    after = True


def _die_in_message(zero: ZeroRedundancyOptimizer, number: int) -> None:
    """End this process when it is about to send its message `number` of a step."""
    send, count = GroupTransport.start_send, 0

    def dying(self: GroupTransport, memory: Tensor, to: int, tag: int = TAG_DATA) -> Any:
        nonlocal count
        count += tag == TAG_DATA
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(self, memory, to, tag)

    assert zero.rank == 1
    GroupTransport.start_send = dying  # type: ignore[method-assign]


def _train_until_death(
    group: ProcessGroup, kind: type[Optimizer], views: bool, message: int, mixed: bool
) -> tuple[str, list[str]]:
    params = _params()
    if mixed:
        params += [nn.Parameter(torch.ones(4, dtype=torch.float64)), nn.Parameter(torch.ones(9, dtype=torch.bfloat16))]
    zero = ZeroRedundancyOptimizer(params, kind, group, views, **LR)
    vars(zero.optim)["armed"] = True
    for param in params:
        param.grad = torch.ones_like(param)
    zero.step()
    zero.step()
    if message and zero.rank == 1:
        _die_in_message(zero, message)
    with pytest.raises(RuntimeError) as caught:
        zero.step()
    return str(caught.value), _refusals(zero)


def _assert_told(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.rank == 1:
            assert outcome.exitcode == -signal.SIGKILL
            continue
        assert outcome.error is None, outcome.error
        text, refusals = outcome.result
        assert text.startswith(f"step 3 failed on rank {outcome.rank}: the exchange of parameters failed: ")
        assert f"rank 1 of {len(outcomes)} failed" in text
        assert text.endswith("; restart from the last checkpoint on all ranks")
        assert all("load the last checkpoint" in refusal and "step 3" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("world", "kind", "views"),
    [(2, DyingSGD, False), (2, LateDyingSGD, True), (3, DyingSGD, True), (3, LateDyingSGD, False), (4, DyingSGD, True)],
)
def test_a_peer_killed_in_its_update_is_noticed_by_all(world: int, kind: type[Optimizer], views: bool) -> None:
    # The deadline is below the time-out of the group: it is the death that is noticed, not the silence.
    _assert_told(run_fresh(_train_until_death, world, kind, views, 0, False, deadline=10.0))


@pytest.mark.parametrize("message", [1, 2, 3])
def test_a_peer_killed_between_messages_is_noticed_by_all(message: int) -> None:
    _assert_told(run_fresh(_train_until_death, 3, SGD, False, message, True, deadline=10.0))
