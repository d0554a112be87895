"""Control traffic: a Gloo group for each process group, shared by its optimizers, apart from the gradients' order."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerostep
from tests.helpers.pool import Pool, run_fresh
from zerostep.comm.transport import GroupTransport, connect, control_of
from zerostep.errors import TransportError


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _optimizer(group: dist.ProcessGroup) -> zerostep.ZeroRedundancyOptimizer:
    torch.manual_seed(0)
    return zerostep.ZeroRedundancyOptimizer(nn.Linear(4, 4).parameters(), torch.optim.Adam, process_group=group)


def _shared(group: dist.ProcessGroup) -> None:
    first = _optimizer(group)
    threads = _threads()
    others = [_optimizer(group) for _ in range(3)]
    assert _threads() == threads
    assert [each.rank for each in others] == [first.rank] * 3


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_optimizers_over_one_group_share_it(pool: Pool) -> None:
    pool.run(_shared, 2)


def _in_no_order(group: dist.ProcessGroup) -> list[list[int]]:
    """Rank 0 gives its control message before a message of the group, rank 1 after it."""
    transport = connect(group)
    control, numbers = control_of(transport), torch.ones(3)
    pending = transport.start_all_reduce(numbers) if transport.rank else None
    rows = control.all_gather_ints([transport.rank])
    (pending or transport.start_all_reduce(numbers)).wait()
    assert torch.equal(numbers, torch.full((3,), 2.0))
    return rows


def test_control_messages_need_no_order_with_those_of_the_group(pool: Pool) -> None:
    assert pool.run(_in_no_order, 2) == [[[0], [1]]] * 2


def _after_an_error(group: dist.ProcessGroup) -> list[list[int]]:
    control = control_of(connect(dist.new_group(timeout=timedelta(seconds=5))))
    memory = torch.zeros(1)
    with pytest.raises(TransportError):
        # Nobody sends: both time out, and Gloo closes the connection.
        control.start_receive(memory, 1 - control.rank).wait()
    return control.all_gather_ints([control.rank])


def test_ranks_connect_again_after_an_error(pool: Pool) -> None:
    assert [outcome.error or outcome.result for outcome in run_fresh(_after_an_error, 2)] == [[[0], [1]]] * 2


def _new_world(group: dist.ProcessGroup) -> list[list[list[int]]]:
    rows = []
    for number in range(2):
        ranks = dist.new_group([0, 1])
        rows.append(control_of(connect(ranks)).all_gather_ints([number, dist.get_rank()]))
        dist.destroy_process_group(ranks)
    return rows


def test_a_new_process_group_gets_its_own(pool: Pool) -> None:
    assert pool.run(_new_world, 2) == [[[[0, 0], [0, 1]], [[1, 0], [1, 1]]]] * 2


def _without_gloo(group: dist.ProcessGroup) -> bool:
    """One rank cannot use Gloo beside the process group, and all use the process group."""

    def refuse() -> None:
        raise RuntimeError("no address")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 1:
            patch.setattr(dist.ProcessGroupGloo, "create_default_device", refuse)
        transport = connect(dist.new_group([0, 1]))
        control = control_of(transport)
        assert control.all_gather_ints([control.rank]) == [[0], [1]]
    return control is transport and isinstance(control, GroupTransport)


def test_without_gloo_control_runs_over_the_process_group(pool: Pool) -> None:
    assert pool.run(_without_gloo, 2) == [True, True]
