"""The host's time for each parameter in a step: what hooks, bookkeeping and the update cost where there is no network.

Run as ``python -m benchmarks.host [--params 100,1000,10000] [--rounds N] [--json OUT]``. One process, one
thread, parameters of 64 elements in a chain of additions. A step is forward, backward, `step()` and `zero_grad()`; from
its time that of forward and backward without an optimizer is taken, and what is left is divided by the number of
parameters. All entries take turns in every round.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.machine import hardware, versions
from benchmarks.timing import markdown
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer

SIZE, WARMUP = 64, 5
BARE = "forward and backward"
OPTIONS: dict[str, Any] = {"lr": 1e-3, "fused": True}

Step = Callable[[], None]


class Chain(nn.Module):
    """Many small parameters, each added to what comes in."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.links = [nn.Parameter(torch.randn(SIZE) * 0.01) for _ in range(count)]
        for index, link in enumerate(self.links):
            self.register_parameter(f"link{index}", link)

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum of everything."""
        for link in self.links:
            inputs = inputs + link
        return inputs


def entries(count: int) -> dict[str, Step]:
    """What takes turns: a step of each."""
    return {
        BARE: _bare(Chain(count)),
        "DDP, AdamW": _wrapped(Chain(count), AdamW),
        "drop-in": _wrapped(Chain(count), ZeroRedundancyOptimizer, optimizer_class=AdamW),
        'sharded, gather="step"': _sharded(Chain(count), gather="step"),
        'sharded, gather="forward"': _sharded(Chain(count), gather="forward"),
        'sharded, update="backward"': _sharded(Chain(count), update="backward"),
    }


def _bare(model: Chain) -> Step:
    inputs = torch.zeros(SIZE)

    def step() -> None:
        model(inputs).sum().backward()
        for link in model.links:
            link.grad = None

    return step


def _wrapped(model: Chain, make: Callable[..., Any], **options: Any) -> Step:
    return _step(DistributedDataParallel(model), make(model.parameters(), **options, **OPTIONS))


def _sharded(model: Chain, **options: Any) -> Step:
    return _step(model, ShardedOptimizer(model, AdamW, **options, **OPTIONS))


def _step(module: nn.Module, optimizer: Any) -> Step:
    inputs = torch.zeros(SIZE)

    def step() -> None:
        module(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(count: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds for each parameter and round, by entry."""
    steps = entries(count)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARMUP + rounds):
        for name, step in steps.items():
            with _no_garbage():
                start = time.perf_counter()
                step()
                taken = time.perf_counter() - start
            if turn >= WARMUP:
                found[name].append(taken / count * 1e6)
    return found


@contextmanager
def _no_garbage() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def report(counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each number of parameters and entry: quartiles of the time over that of forward and backward."""
    rows = list[dict[str, Any]]()
    for count in counts:
        found = measure(count, rounds)
        bare = median(found[BARE])
        for name, taken in found.items():
            low, middle, high = (value - (bare if name != BARE else 0.0) for value in quantiles(taken, n=4))
            rows.append({"parameters": count, "entry": name, "low": low, "median": middle, "high": high})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, a column for each number of parameters."""
    counts = sorted({row["parameters"] for row in rows})
    names = list(dict.fromkeys(row["entry"] for row in rows))
    cells = {
        (row["entry"], row["parameters"]): f"{row['median']:.1f} ({row['low']:.1f}-{row['high']:.1f})" for row in rows
    }
    head = ["us for each parameter", *(f"{count:,}" for count in counts)]
    return markdown(head, [[name, *(cells[name, count] for count in counts)] for name in names])


def main() -> None:
    """Measure, print a table, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--params", default="100,1000,10000")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    rows = report([int(count) for count in chosen.params.split(",")], chosen.rounds)
    print(table(rows))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"hardware": hardware(), "versions": versions(), "rows": rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
