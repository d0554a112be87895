"""How well two constants describe a network: what strategies send, measured, fitted, and held against other points.

Run as ``python -m benchmarks.communication [--network loopback,shaped] [--rate 1gbit] [--ranks 2,3,4] [--most 64]
[--json OUT]``. Timed are the backend's all-reduce, which is what DDP waits for; the two ways of `ShardedOptimizer` in
host memory, gradients to their owners and parameters from them, by messages to every other rank at once; and a single
message. Sizes go from 1 KB to ``--most`` MB, and begin at 1 MB where there are more ranks than cores, because waiting
for a core is no matter of the network. Half of the sizes at the outer numbers of ranks are fitted, by least squares of
relative errors; the other sizes, and all of any number of ranks in between, are held out. A model is an algorithm,
which says how many messages follow each other (each costs *alpha*) and how many bytes (each costs *beta*). The last
rows are the forecast of `zerostep plan`, with one pair of constants for everything, and the options that tell it so.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launch import run_on
from benchmarks.machine import hardware, versions
from benchmarks.network import Host, loopback, obstacle, shaped
from benchmarks.timing import markdown, slowest, timed
from zerostep.comm.transport import Transport, connect
from zerostep.tools.planner import forecast
from zerostep.tools.planner.forecast import Network

OPERATIONS = ("all-reduce", "to owners", "from owners", "message")
SECONDS = 240
LARGE = 1 << 20  # what buckets are; from here on, few repetitions are enough
START, LEAST = (1e-4, 1e-9), (1e-6, 1e-13)  # seconds for a message and for a byte: to begin with, and to differ from
STEP, ROUNDS = 1e-3, 8
EVERYTHING, BUCKETS = "forecast, all sizes", "forecast, from 1 MB on"


@dataclass(frozen=True)
class Point:
    """A measured time of an operation over `ranks` ranks; `size` is the whole, of which a gather brings parts."""

    operation: str
    ranks: int
    size: int
    seconds: float


Cost = Callable[[float, int, Network], float]


def _message(size: float, ranks: int, network: Network) -> float:
    return network.latency + size / network.bandwidth


def _ring(size: float, ranks: int, network: Network) -> float:
    return 2 * forecast.reduce_scatter_seconds(size, ranks, network)


def _tree(size: float, ranks: int, network: Network) -> float:
    """Up and down, in pieces that follow each other closely."""
    return 2 * (math.ceil(math.log2(ranks)) * network.latency + size / network.bandwidth)


def _at_once(size: float, ranks: int, network: Network) -> float:
    """To or from all others at the same time: the bytes add up, the messages do not."""
    return network.latency + size * (ranks - 1) / ranks / network.bandwidth


MODELS: Mapping[str, Mapping[str, Cost]] = {
    "all-reduce": {"ring": _ring, "tree": _tree},
    "to owners": {"ring": forecast.reduce_scatter_seconds, "at once": _at_once},
    "from owners": {"ring": forecast.all_gather_seconds, "at once": _at_once},
    "message": {"direct": _message},
}
# What `zerostep plan` uses, whatever it is made of.
FORECAST: Mapping[str, Mapping[str, Cost]] = {
    "all-reduce": {"forecast": forecast.all_reduce_seconds},
    "to owners": {"forecast": forecast.reduce_scatter_seconds},
    "from owners": {"forecast": forecast.all_gather_seconds},
}


@dataclass(frozen=True)
class Fit:
    """A model with its constants, and its relative errors on points that it was not fitted to."""

    operation: str
    algorithm: str
    alpha: float
    beta: float
    fitted: int
    held_out: int
    median_error: float
    high_error: float  # nine of ten points are nearer
    worst_error: float

    @property
    def network(self) -> Network:
        """The constants as the forecast takes them."""
        return Network(1 / self.beta if self.beta else math.inf, self.alpha)


# ---------------------------------------------------------------------- the fit


def features(cost: Cost, point: Point, near: Network) -> tuple[float, float]:
    """How often a model counts alpha, and how often beta, near some constants; the choice of an algorithm may hang on
    them, and between such choices every model is linear in both.
    """
    here = cost(point.size, point.ranks, near)
    later = Network(near.bandwidth, near.latency * (1 + STEP))
    slower = Network(near.bandwidth / (1 + STEP), near.latency)
    alphas = (cost(point.size, point.ranks, later) - here) / (near.latency * STEP)
    return alphas, (cost(point.size, point.ranks, slower) - here) * near.bandwidth / STEP


def settled(costs: Mapping[str, Cost], points: Sequence[Point]) -> tuple[float, float]:
    """The constants, looked for again until the models choose the same algorithms with them."""
    alpha, beta = START
    for _ in range(ROUNDS):
        near = Network(1 / max(beta, LEAST[1]), max(alpha, LEAST[0]))
        rows = [(*features(costs[point.operation], point, near), point.seconds) for point in points]
        alpha, beta = constants(rows)
    return alpha, beta


def constants(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The alpha and beta, neither below zero, with the smallest relative errors: rows of counts and seconds."""
    table = torch.tensor([[a / seconds, b / seconds] for a, b, seconds in rows], dtype=torch.float64)
    scale = table.norm(dim=0).clamp(min=1e-300)
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    both = (torch.linalg.lstsq(table / scale, ones).solution[:, 0] / scale).tolist()
    if min(both) >= 0:
        return both[0], both[1]
    single = [float(table[:, k].sum() / table[:, k].square().sum()) if bool(table[:, k].any()) else 0 for k in (0, 1)]
    choices = [(single[0], 0.0), (0.0, single[1])]
    return min(choices, key=lambda pair: float((table @ torch.tensor(pair, dtype=torch.float64) - 1).square().sum()))


def error(cost: Cost, network: Network, point: Point) -> float:
    """By how much of the measured time the model is off."""
    return abs(cost(point.size, point.ranks, network) / point.seconds - 1)


def divided(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Those to fit, and those held out: every second size, and all numbers of ranks but the least and the most."""
    sizes = sorted({point.size for point in points})
    ends = {min(point.ranks for point in points), max(point.ranks for point in points)}
    fitted = [point for point in points if sizes.index(point.size) % 2 == 0 and point.ranks in ends]
    return fitted, [point for point in points if point not in fitted]


def fit(points: Sequence[Point], algorithms: Mapping[str, Mapping[str, Cost]], name: str = "") -> Fit:
    """One alpha and beta for these points; `algorithms` has those to choose from, by what fits its own points best.

    For points of several operations, an algorithm must be known for all of them.
    """
    train, test = divided(points)
    known = set.intersection(*({*algorithms[point.operation]} for point in points))
    found = [_fitted(train, test, {key: value[each] for key, value in algorithms.items() if each in value}, each)
             for each in sorted(known)]  # fmt: skip
    best = min(found, key=lambda pair: pair[0])[1]
    return Fit(name or points[0].operation, **best)


def _fitted(
    train: Sequence[Point], test: Sequence[Point], costs: Mapping[str, Cost], algorithm: str
) -> tuple[float, dict[str, Any]]:
    alpha, beta = settled(costs, train)
    network = Network(1 / beta if beta else math.inf, alpha)
    own = [error(costs[point.operation], network, point) for point in train]
    others = [error(costs[point.operation], network, point) for point in test] or [math.nan]
    numbers = {"algorithm": algorithm, "alpha": alpha, "beta": beta, "fitted": len(train), "held_out": len(test)}
    return sum(value * value for value in own), {
        **numbers,
        "median_error": median(others),
        "high_error": sorted(others)[math.ceil(0.9 * len(others)) - 1],
        "worst_error": max(others),
    }


def fits(points: Sequence[Point]) -> list[Fit]:
    """A fit for each operation, and for all collectives at once, as the forecast has them; also for large ones."""
    each = [fit([point for point in points if point.operation == name], MODELS) for name in OPERATIONS]
    together = [point for point in points if point.operation in FORECAST]
    large = [point for point in together if point.size >= LARGE]
    found = [*each, fit(together, FORECAST, EVERYTHING)]
    return [*found, fit(large, FORECAST, BUCKETS)] if large else found


# ---------------------------------------------------------------------- measuring


def sizes_up_to(most: int, ranks: int = 2) -> list[int]:
    """Powers of four from 1 KB on, or from 1 MB on where ranks share cores."""
    least = LARGE if ranks > (os.cpu_count() or 1) else 0
    return [1 << power for power in range(10, 40, 2) if least <= 1 << power <= most]


def measure(most: int) -> list[list[float]]:
    """For every operation, a median of seconds for every size; collective."""
    wire, sizes = connect(None), sizes_up_to(most, dist.get_world_size())
    return [[median(slowest(_times(_action(name, size, wire), size))) for size in sizes] for name in OPERATIONS]


def _times(action: Callable[[], object], size: int) -> list[float]:
    count = 5 if size >= LARGE else 25
    for _ in range(1 if size >= LARGE else 5):
        action()
    return [timed(action) for _ in range(count)]


def _action(name: str, size: int, wire: Transport) -> Callable[[], object]:
    ranks, rank = wire.world_size, wire.rank
    memory = torch.zeros(-(-size // 4 // ranks) * ranks)
    if name == "all-reduce":
        return lambda: dist.all_reduce(memory)
    if name == "message":
        return lambda: _pass_on(memory, rank, ranks)
    parts = memory.chunk(ranks)
    rooms = [torch.zeros_like(parts[0]) for _ in range(ranks)]
    if name == "to owners":
        return lambda: _to_owners(parts, rooms, wire)
    return lambda: _all_at_once([parts[rank]] * ranks, rooms, wire)


def _to_owners(parts: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor], wire: Transport) -> None:
    """Every rank sums the others' parts of what it owns."""
    for source in _all_at_once(parts, rooms, wire):
        parts[wire.rank].add_(rooms[source])


def _all_at_once(parts: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor], wire: Transport) -> list[int]:
    """Send every other rank its part and receive its own; returns the others."""
    others = [rank for rank in range(wire.world_size) if rank != wire.rank]
    receives = [wire.start_receive(rooms[rank], rank) for rank in others]
    sends = [wire.start_send(parts[rank], rank) for rank in others]
    for flight in (*receives, *sends):
        flight.wait()
    return others


def _pass_on(memory: torch.Tensor, rank: int, ranks: int) -> None:
    """From rank 0 to rank 1; the others look on."""
    if rank == 0:
        dist.send(memory, 1)
    elif rank == 1:
        dist.recv(memory, 0)


def points_on(hosts: Sequence[Host], most: int) -> list[Point]:
    """All points of one network and number of ranks."""
    seconds = run_on(hosts, measure, most, seconds=SECONDS)[0]
    return [
        Point(name, len(hosts), size, value)
        for name, row in zip(OPERATIONS, seconds, strict=True)
        for size, value in zip(sizes_up_to(most, len(hosts)), row, strict=True)
    ]


# ---------------------------------------------------------------------- report


def render(network: str, found: Sequence[Fit]) -> str:
    """Return the fits as a Markdown table."""
    header = ["operation", "model", "alpha us", "MB/s", "fitted", "held out", "error, median", "9 of 10 below", "worst"]
    table = markdown(header, [_cells(each) for each in found])
    return f"## {network}\n\n{table}\n\n{_options(found[-1])}\n"


def _options(best: Fit) -> str:
    if not (best.high_error < 1 and math.isfinite(best.network.bandwidth)):
        return "Two constants do not describe this network: do not forecast with them."
    options = f"--bandwidth {best.network.bandwidth / 1e9:.3g} --latency {1e6 * best.alpha:.0f}"
    return f"For `zerostep plan`: `{options} --error {math.ceil(100 * best.high_error)}`"


def _cells(found: Fit) -> list[str]:
    speed = "no limit" if math.isinf(found.network.bandwidth) else f"{found.network.bandwidth / 1e6:.0f}"
    counts = [str(found.fitted), str(found.held_out)]
    errors = [f"{each:.0%}" for each in (found.median_error, found.high_error, found.worst_error)]
    return [found.operation, found.algorithm, f"{1e6 * found.alpha:.0f}", speed, *counts, *errors]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.communication", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--network", type=lambda text: text.split(","), default=["loopback", "shaped"])
    parser.add_argument("--rate", default="1gbit", help="speed of a shaped network's links")
    parser.add_argument("--ranks", type=lambda text: list(map(int, text.split(","))), default=[2, 3, 4])
    parser.add_argument("--most", type=int, default=64, help="the largest size in MB")
    parser.add_argument("--json", type=Path, help="also write points and fits to this file")
    return parser.parse_args()


def main() -> None:
    """Measure, fit, and print what the fit is worth."""
    chosen, results = _arguments(), []
    for kind in chosen.network:
        if kind == "shaped" and obstacle():
            print(f"Not measured: {obstacle()}.\n")
            continue
        title = "loopback" if kind == "loopback" else f"links of {chosen.rate}"
        points: list[Point] = []
        for ranks in chosen.ranks:
            with loopback(ranks) if kind == "loopback" else shaped(ranks, chosen.rate) as hosts:
                points += points_on(hosts, chosen.most << 20)
        found = fits(points)
        print(render(title, found), flush=True)
        results.append(
            {"network": title, "fits": [asdict(each) for each in found], "points": list(map(asdict, points))}
        )
    if chosen.json:
        environment = {"versions": versions(), "hardware": hardware()}
        chosen.json.write_text(json.dumps({**environment, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
