"""The pure parts of the benchmarks: the fit, the comparison with limits, the tables, the counts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import communication, host
from benchmarks.census import first_steps, sorted_calls
from benchmarks.communication import FORECAST, MODELS, Point, constants, divided, fit
from benchmarks.picture import floor, lines
from benchmarks.scale import Setting, measure
from benchmarks.sharded import ideals, render
from benchmarks.timing import Timing, another_run
from zerostep.tools.planner.forecast import Network

NETWORK = Network(bandwidth=118e6, latency=2e-4)


def points(operation: str, algorithm: str, network: Network = NETWORK) -> list[Point]:
    cost = MODELS[operation][algorithm]
    sizes = communication.sizes_up_to(64 << 20)
    return [Point(operation, ranks, size, cost(size, ranks, network)) for ranks in (2, 3, 4) for size in sizes]


@pytest.mark.parametrize(
    ("operation", "algorithm"), [("all-reduce", "ring"), ("all-reduce", "tree"), ("message", "direct")]
)
def test_a_fit_finds_the_constants_and_the_algorithm_that_made_the_points(operation: str, algorithm: str) -> None:
    found = fit(points(operation, algorithm), MODELS)
    assert found.algorithm == algorithm
    assert found.alpha == pytest.approx(NETWORK.latency, rel=1e-6)
    assert found.network.bandwidth == pytest.approx(NETWORK.bandwidth, rel=1e-6)
    assert found.worst_error < 1e-6


def test_held_out_points_tell_the_error() -> None:
    exact = points("all-reduce", "ring")
    off = [Point(p.operation, p.ranks, p.size, p.seconds * (1.25 if p.ranks == 3 else 1)) for p in exact]
    found = fit(off, MODELS)
    assert found.worst_error == pytest.approx(0.2, rel=1e-6)  # the model says four fifths of what was measured
    assert (found.fitted, found.held_out) == (10, 17)


def test_half_of_the_sizes_at_the_outer_ranks_are_fitted_and_nothing_is_lost() -> None:
    train, test = divided(points("message", "direct"))
    assert {point.ranks for point in train} == {2, 4}
    assert not set(train) & set(test)
    assert len(train) + len(test) == 27
    assert {1 << 12, 1 << 24} <= {point.size for point in test if point.ranks == 2}


def test_constants_are_never_negative() -> None:
    alpha, beta = constants([(1.0, 1e3, 2e-3), (1.0, 1e6, 1e-3)])
    assert beta == 0
    assert alpha > 0


def test_constants_of_points_without_bytes() -> None:
    assert constants([(1.0, 0.0, 2e-3), (2.0, 0.0, 4e-3)]) == pytest.approx((2e-3, 0.0))


def test_a_joint_fit_uses_every_collective() -> None:
    names = ("all-reduce", "to owners", "from owners")
    sizes = communication.sizes_up_to(64 << 20)
    made = {name: FORECAST[name]["forecast"] for name in names}
    together = [
        Point(name, n, size, made[name](size, n, NETWORK)) for name in names for n in (2, 3, 4) for size in sizes
    ]
    found = fit(together, FORECAST, "together")
    assert (found.operation, found.algorithm) == ("together", "forecast")
    assert found.worst_error < 1e-6
    assert found.network.bandwidth == pytest.approx(NETWORK.bandwidth, rel=1e-6)
    assert not math.isnan(found.median_error)


def test_a_network_without_latency_still_has_a_bandwidth() -> None:
    sizes = [1 << power for power in (20, 22, 24, 26)]
    slow = [Point("all-reduce", ranks, size, size / 60e6 - 1e-3) for ranks in (2, 3, 4) for size in sizes]
    found = fit(slow, FORECAST, "large")
    assert found.alpha == 0
    assert 50e6 < found.network.bandwidth < 150e6


# ---------------------------------------------------------------------- counts


def test_receives_are_the_other_sides_sends() -> None:
    names = ["gloo:send", "gloo:recv", "gloo:send", "gloo:all_reduce", "nccl:all_reduce", "Optimizer.step#AdamW.step"]
    assert sorted_calls(names) == {"collectives": 2, "messages": 2}


class Sleeper:
    """Its first updates are lost."""

    def __init__(self, lost: int) -> None:
        self.weight, self.steps, self.lost = torch.zeros(3), 0, lost

    def step(self, batch: Tensor) -> None:
        self.steps += 1
        if self.steps > self.lost:
            self.weight += 1

    def settle(self) -> None:
        pass

    def full_parameters(self) -> list[Tensor]:
        return [self.weight]

    def state_bytes(self) -> int:
        return 0


@pytest.mark.parametrize(("lost", "counted", "taken"), [(0, 0, 2), (1, 1, 2), (3, 3, 4), (9, 5, 5)])
def test_lost_updates_are_counted_from_the_start(lost: int, counted: int, taken: int) -> None:
    trainer, found = first_steps(lambda: Sleeper(lost), torch.zeros(1), least=2, most=5)
    assert found.lost == counted
    assert isinstance(trainer, Sleeper)
    assert trainer.steps == taken


# ---------------------------------------------------------------------- tables and pictures


def result(**more: Any) -> dict[str, Any]:
    """As files from before there were calls, peaks and lost updates."""
    seconds = {"bound": [0.6, 0.7, 0.8], "ddp": [1.0, 1.0, 1.2], "forward": [0.8, 0.9, 0.9]}
    amounts = dict.fromkeys(seconds, 1.0)
    known = {"title": "T", "case": "gpt", "ranks": 2, "rate": "1gbit", "load": [0.0, 0.0], "bars": []}
    measured = {
        "seconds": seconds,
        "sent over P": amounts,
        "state bytes": amounts,
        "difference": {"ddp": 0.0, "forward": 1e-5},
    }
    speeds = {"gigabits per second": {"one way": 1.0}}
    return {**known, **measured, **speeds, "failures": {"fsdp2": "ImportError: none"}, **more}


def cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_old_results_are_shown_with_dashes_for_what_they_lack() -> None:
    text = render(result())
    assert cells(text, "zerostep, gather=forward") == [
        *("zerostep, gather=forward", "3", "900.00", "850.00 - 900.00", "0.900", "0.599 - 1.352"),
        *("1.000", "-", "2.000", "-", "-", "off by 1.0e-05"),
    ]
    assert "perfect overlap" not in text


def test_new_results_are_shown_with_calls_memory_and_lost_updates() -> None:
    more = {
        "calls": {"forward": {"collectives": 1, "messages": 26}},
        "peak bytes": {"forward": 3 << 20},
        "lost": {"forward": 2},
    }
    found = cells(render(result(**more)), "zerostep, gather=forward")
    assert found[7:] == ["1 + 26 messages", "2.000", "3", "2", "off by 1.0e-05"]


def test_what_failed_is_a_row_that_says_why() -> None:
    assert cells(render(result()), "FSDP2, no reshard")[-2:] == ["-", "ImportError: none"]


def test_the_ideal_is_the_longer_of_computing_and_the_network() -> None:
    seconds = {"bound": [0.5], "wire": [0.8], "ddp": [1.6]}
    assert ideals(seconds) == (0.8, 1.3)
    assert ideals({"bound": [0.75], "wire": [0.5]}) == (0.75, 1.25)
    assert ideals({"bound": [0.9]}) is None
    amounts = dict.fromkeys(seconds, 1.0)
    text = render(result(**{"seconds": seconds, "sent over P": amounts, "state bytes": amounts, "failures": {}}))
    assert "800 ms, 0.500 of DDP. Without any they add up: 1300 ms, 0.812 of DDP" in text
    assert floor(seconds) == 0.5


def test_bars_of_a_picture_are_sorted_and_leave_the_bounds_out() -> None:
    found = lines(result()["seconds"])
    assert [line.entry.key for line in found] == ["forward", "ddp"]
    assert (found[0].low, found[0].median, found[0].high) == pytest.approx((0.85, 0.9, 0.9))
    assert floor(result()["seconds"]) == pytest.approx(0.7)


# ---------------------------------------------------------------------- one rank of many


@pytest.mark.parametrize("collectives", [False, True])
def test_a_simulated_rank_holds_what_is_planned(collectives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import scale
    from zerostep.tools.demo import GPTShape

    monkeypatch.setitem(scale.SHAPES, "small", GPTShape(context=8, width=16, heads=2, layers=1))
    found = measure(Setting("small", 64, 63, collectives, "cpu"), rounds=1)
    assert found["state bytes"] == found["planned state bytes"]
    assert found["calls"] > 0


@pytest.mark.parametrize("rounds", [3, 5, 10])
def test_another_run_lies_where_the_table_says(rounds: int) -> None:
    """Runs of noisy rounds, of which nearly all should agree with the one before."""
    random = torch.Generator().manual_seed(rounds)

    def run() -> tuple[Timing, Timing]:
        common, own, others = (torch.randn(rounds, generator=random).mul(0.1).exp() for _ in range(3))
        return Timing(tuple((0.8 * common * own).tolist())), Timing(tuple((common * others).tolist()))

    inside = 0
    for _ in range(400):
        found, (ours, other) = another_run(*run()), run()
        assert found is not None
        inside += found[0] <= ours.median / other.median <= found[1]
    assert 0.90 <= inside / 400 <= 0.999
    assert another_run(Timing((1.0,)), Timing((2.0,))) is None


def test_the_host_s_time_is_what_comes_on_top_of_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {host.BARE: [10.0, 10.0, 13.0], "ours": [14.0, 15.0, 16.0]}
    monkeypatch.setattr(host, "measure", lambda count, rounds: taken)
    bare, ours = host.report([7], 3)
    assert (bare["median"], ours["median"]) == (10.0, 5.0) and ours["low"] <= 5.0 <= ours["high"]
    assert "| ours " in host.table([bare, ours]) and "5.0 (" in host.table([bare, ours])
