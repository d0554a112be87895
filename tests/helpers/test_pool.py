"""The pool itself: results, errors, deadlines, and restarts after failed jobs."""

import os
import signal
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.pool import OFFSET, DeadlineError, Pool, RankError, run_fresh


def _rank(group: dist.ProcessGroup) -> int:
    return dist.get_rank(group)


def _global_rank(group: dist.ProcessGroup) -> tuple[int, int, int]:
    return dist.get_rank(group), dist.get_rank(), dist.get_world_size(group)


def _sum(group: dist.ProcessGroup, start: float) -> float:
    value = torch.tensor([start + dist.get_rank(group)])
    dist.all_reduce(value, group=group)
    return value.item()


def _nested(group: dist.ProcessGroup, *, size: int) -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.full((size,), float(dist.get_rank(group))))
    return {"weights": [weight, (weight.detach() + 1).bfloat16()], "empty": None, "name": "nested"}


def _fail(group: dist.ProcessGroup, rank: int) -> float:
    if dist.get_rank(group) == rank:
        raise ValueError(f"rank {rank} does not like it")
    return _sum(group, 0.0)


def _fail_before_a_hang(group: dist.ProcessGroup) -> None:
    if dist.get_rank(group) == 0:
        raise ValueError("first")
    threading.Event().wait()


def _hang_alone(group: dist.ProcessGroup) -> None:
    if dist.get_rank(group) == 1:
        dist.barrier(group)


def _hang(group: dist.ProcessGroup) -> None:
    threading.Event().wait()


def _unsendable(group: dist.ProcessGroup) -> object:
    return lambda: None


def _leave_a_mess(group: dist.ProcessGroup) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    warnings.simplefilter("error")


def _state(group: dist.ProcessGroup) -> tuple[torch.dtype, int, bool]:
    warnings.warn("not an error here", stacklevel=1)
    return torch.get_default_dtype(), torch.initial_seed(), torch.is_grad_enabled()


def _own_group(group: dist.ProcessGroup) -> float:
    return _sum(dist.new_group(dist.get_process_group_ranks(group)), 1.0)


def _kill_itself(group: dist.ProcessGroup, rank: int) -> float:
    if dist.get_rank(group) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return _sum(group, 0.0)


def _pid(group: dist.ProcessGroup) -> int:
    return os.getpid()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_results_come_in_rank_order(pool: Pool, world: int) -> None:
    assert pool.run(_rank, world) == list(range(world))


def test_ranks_reach_each_other(pool: Pool) -> None:
    assert pool.run(_sum, 3, 1.0) == [6.0] * 3


def test_the_offset_group_counts_from_zero(pool: Pool) -> None:
    assert pool.run(_global_rank, OFFSET) == [(0, 1, 2), (1, 2, 2)]


def test_tensors_and_nested_results_come_back(pool: Pool) -> None:
    for rank, result in enumerate(pool.run(_nested, 2, size=5)):
        weight, after = result["weights"]
        assert isinstance(weight, torch.nn.Parameter) and torch.equal(weight, torch.full((5,), float(rank)))
        assert after.dtype == torch.bfloat16 and torch.equal(after, weight.detach().bfloat16() + 1)
        assert result["name"] == "nested" and result["empty"] is None


def test_an_unknown_world_is_refused(pool: Pool) -> None:
    with pytest.raises(ValueError, match="no group of"):
        pool.run(_rank, (2, 3))


def test_a_function_that_cannot_be_sent_costs_nothing(pool: Pool) -> None:
    before = pool.run(_pid, 1)
    with pytest.raises((AttributeError, TypeError, ValueError), match="pickle"):
        pool.run(lambda group: None, 1)
    assert pool.run(_pid, 1) == before


def test_nothing_leaks_into_the_next_job(pool: Pool) -> None:
    before = pool.run(_pid, 2)
    pool.run(_leave_a_mess, 2)
    assert pool.run(_state, 2) == [(torch.float32, 0, True)] * 2
    assert pool.run(_pid, 2) == before


def test_jobs_may_make_groups_of_their_own(pool: Pool) -> None:
    for world in (2, 4, 2, OFFSET, 4):
        ranks = world if isinstance(world, int) else len(world)
        assert pool.run(_own_group, world) == [sum(range(1, ranks + 1))] * ranks


def test_the_traceback_of_a_failing_rank_arrives(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.pool.GRACE", 0.5)
    with pytest.raises(RankError, match="rank 1 does not like it") as caught:
        pool.run(_fail, 2, 1)
    assert "_fail" in caught.value.errors[1]
    assert pool.run(_rank, 4) == [0, 1, 2, 3]


def test_a_result_that_cannot_be_sent_is_an_error(pool: Pool) -> None:
    with pytest.raises(RankError, match="pickle") as caught:
        pool.run(_unsendable, 2)
    assert sorted(caught.value.errors) == [0, 1]


def test_a_failure_does_not_wait_for_the_deadline(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.pool.GRACE", 0.5)
    with pytest.raises(RankError, match="first") as caught:
        pool.run(_fail_before_a_hang, 2)
    assert list(caught.value.errors) == [0] and "rank 1 of (0, 1) did not answer" in str(caught.value)


@pytest.mark.parametrize("function", [_hang, _hang_alone])
def test_a_hang_costs_only_the_pool(pool: Pool, function: Any) -> None:
    pool.run(_rank, 2)
    with pytest.raises(DeadlineError, match=function.__name__) as caught:
        pool.run(function, 2, deadline=1.0)
    assert caught.value.ranks == ((0, 1) if function is _hang else (1,))
    assert pool.run(_rank, 2) == [0, 1]


def test_a_dead_worker_is_a_failed_rank(pool: Pool) -> None:
    with pytest.raises(RankError, match="died with exit code -9"):
        pool.run(_kill_itself, 2, 1)
    assert pool.run(_rank, 2) == [0, 1]


def test_a_kill_is_reported_with_its_exit_code() -> None:
    first, second = run_fresh(_kill_itself, 2, 0)
    assert (first.rank, first.result, first.exitcode) == (0, None, -signal.SIGKILL)
    assert second.error is not None and "_sum" in second.error and second.exitcode == 0


def test_a_kill_from_outside() -> None:
    first, second = run_fresh(_hang, 2, deadline=2.0, kills={1: 0.1})
    assert second.exitcode == -signal.SIGKILL
    assert first.error is not None and "_hang" in first.error and first.exitcode == -signal.SIGUSR1


def test_fresh_ranks_return_results() -> None:
    outcomes = run_fresh(_sum, 2, 2.0)
    assert [(each.rank, each.result, each.error, each.exitcode) for each in outcomes] == [
        (0, 5.0, None, 0),
        (1, 5.0, None, 0),
    ]
