"""The model of step times."""

import pytest

from zerostep.tools.planner.forecast import (
    Compute,
    Network,
    Strategy,
    Traffic,
    all_gather_seconds,
    all_reduce_seconds,
    before_compute,
    behind_backward,
    reduce_scatter_seconds,
    step_time,
    update_in_backward,
    wait_in_forward,
    wire_bytes,
)

MB = 10**6
NET = Network(bandwidth=1e9, latency=1e-3)
TRAFFIC = Traffic(
    reduced=(4 * MB,) * 4, gathered=(4 * MB,) * 4, ddp=(8 * MB,) * 2, units=(8 * MB,) * 2, elements=4 * MB
)
SLOW = Compute(flops=1e9, tokens=1000)
FAST = Compute(flops=1e18, tokens=1)


def test_rings_pay_for_messages_and_bytes() -> None:
    assert reduce_scatter_seconds(4 * MB, 4, NET) == pytest.approx(3 * 1e-3 + 3e-3)
    assert all_gather_seconds(4 * MB, 4, NET) == pytest.approx(6e-3)
    assert all_reduce_seconds(400 * MB, 4, NET) == pytest.approx(2 * (3e-3 + 0.3))
    assert all_reduce_seconds(0, 1024, NET) == pytest.approx(2 * 10e-3)  # up and down a tree
    assert all_reduce_seconds(MB, 1, NET) == reduce_scatter_seconds(MB, 1, NET) == 0


@pytest.mark.parametrize(
    ("strategy", "factor"),
    [(Strategy.DDP, 2), (Strategy.WHOLE, 3), (Strategy.SHARDED, 2), (Strategy.FULL, 3)],
)
def test_wire_bytes(strategy: Strategy, factor: int) -> None:
    assert wire_bytes(strategy, TRAFFIC, 1, 1) == 0
    assert wire_bytes(strategy, TRAFFIC, 4, 4) == pytest.approx(factor * 3 / 4 * 16 * MB)


def test_wire_bytes_of_a_mesh() -> None:
    inside, across = 2 * 3 / 4 * 16 * MB, 2 * 1 / 2 * 16 * MB / 4
    assert wire_bytes(Strategy.SHARDED, TRAFFIC, 8, 4) == pytest.approx(inside + across)


def test_what_arrives_after_backward_is_exposed() -> None:
    assert behind_backward([1, 1], 10.0, lambda size: 1.0) == 1.0  # the last has nothing to hide behind
    assert behind_backward([1, 1], 2.0, lambda size: 3.0) == 5.0  # made at 1, so done at 4 and 7
    assert behind_backward([], 2.0, lambda size: 3.0) == 0.0


def test_forward_waits_for_what_has_not_come() -> None:
    assert before_compute([1, 1], 10.0, lambda size: 1.0) == 1.0
    assert before_compute([1, 1], 2.0, lambda size: 3.0) == 5.0


def test_forward_does_not_wait_for_what_is_there() -> None:
    assert wait_in_forward([1, 1], [-1.0, 0.0], 2.0) == 0.0
    assert wait_in_forward([1, 1], [-1.0, 3.0], 2.0) == 2.0  # the second half begins at 3 instead of 1


def test_a_gather_goes_before_the_reduction_of_the_next_bucket_but_one() -> None:
    sizes = Traffic(reduced=(1,) * 4, gathered=(1,) * 4, ddp=(), units=(), elements=0)
    reduced, gathered = update_in_backward(sizes, 40.0, lambda size: 2.0, lambda size: 1.0)
    assert reduced == [12.0, 22.0, 33.0, 43.0]  # buckets are full at 10, 20, 30 and 40
    assert gathered == [31.0, 41.0, 44.0, 45.0]
    reduced, gathered = update_in_backward(sizes, 0.0, lambda size: 2.0, lambda size: 1.0)
    assert (reduced, gathered) == ([2.0, 4.0, 7.0, 10.0], [5.0, 8.0, 11.0, 12.0])


def test_computing_takes_six_operations_for_each_parameter_and_token() -> None:
    for strategy in Strategy:
        found = step_time(strategy, TRAFFIC, SLOW, NET, 1, 1)
        assert found.compute == pytest.approx(6 * 4e6 * 1000 / 1e9)
        assert found.exposed == 0


def test_what_is_hidden_and_what_is_not() -> None:
    exposed = {s: step_time(s, TRAFFIC, SLOW, NET, 4, 4).exposed for s in Strategy}
    gathers = 4 * all_gather_seconds(4 * MB, 4, NET)
    assert exposed[Strategy.SHARDED] == pytest.approx(reduce_scatter_seconds(4 * MB, 4, NET) + gathers)
    ahead = step_time(Strategy.SHARDED, TRAFFIC, SLOW, NET, 4, 4, "forward").exposed
    assert ahead == pytest.approx(2 * reduce_scatter_seconds(4 * MB, 4, NET))
    assert exposed[Strategy.WHOLE] > exposed[Strategy.DDP]
    fast = {s: step_time(s, TRAFFIC, FAST, NET, 4, 4) for s in Strategy}
    assert all(time.total > time.compute for time in fast.values())


def test_updates_inside_backward_hide_all_but_the_last_gathers() -> None:
    one = reduce_scatter_seconds(4 * MB, 4, NET)
    inside = step_time(Strategy.SHARDED, TRAFFIC, SLOW, NET, 4, 4, "step", "backward")
    assert inside.exposed == pytest.approx(4 * one)  # of the last two gathers and the last reduction, and gather 1
    ahead = step_time(Strategy.SHARDED, TRAFFIC, SLOW, NET, 4, 4, "forward", "backward")
    assert ahead.exposed == pytest.approx(4 * one)  # the first layers are gathered last
    fast = [step_time(Strategy.SHARDED, TRAFFIC, FAST, NET, 4, 4, gather, "backward") for gather in ("step", "forward")]
    assert all(time.exposed == pytest.approx(8 * one) for time in fast)  # nothing to hide behind
    for strategy in set(Strategy) - {Strategy.SHARDED}:
        assert step_time(strategy, TRAFFIC, SLOW, NET, 4, 4, update="backward") == step_time(
            strategy, TRAFFIC, SLOW, NET, 4, 4
        )


def test_a_mesh_makes_short_rings() -> None:
    flat = step_time(Strategy.SHARDED, TRAFFIC, FAST, NET, 1024, 1024)
    mesh = step_time(Strategy.SHARDED, TRAFFIC, FAST, NET, 1024, 32)
    assert mesh.exposed < flat.exposed / 4


def test_an_error_of_the_model_is_an_interval_of_the_forecast() -> None:
    off = Network(NET.bandwidth, NET.latency, error=0.25)
    for strategy in Strategy:
        sure, found = (step_time(strategy, TRAFFIC, FAST, network, 4, 4) for network in (NET, off))
        assert sure.least == sure.exposed == sure.most == found.exposed
        assert found.least == pytest.approx(0.75 * found.exposed, rel=1e-6)  # nothing to hide behind
        assert found.most == pytest.approx(1.25 * found.exposed, rel=1e-6)
    hidden = step_time(Strategy.SHARDED, TRAFFIC, Compute(flops=1e9, tokens=1), NET.slower(2), 4, 4)
    assert hidden.exposed > step_time(Strategy.SHARDED, TRAFFIC, Compute(flops=1e9, tokens=1), NET, 4, 4).exposed
