"""One rank of thousands, in one process without a network: what grows with the number of ranks.

Run as ``python -m benchmarks.scale [--ranks 8,64,1024,4096] [--rank K] [--model small,large] [--device cpu|cuda]
[--rounds N] [--profile] [--json OUT]``. The other ranks are silent: their gradients are zeros, and what they send is
there already. *construct* is the constructor, with its plan; *step* is forward, backward and `step()` less the same
without an optimizer: copies into buckets, sums, messages and the update of one share. Memory is what the optimizer
holds on this rank, against what `zerostep plan` says.
"""

import argparse
import cProfile
import gc
import io
import json
import pstats
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW

from benchmarks.machine import hardware, versions
from benchmarks.silence import alone_among
from benchmarks.timing import markdown
from zerostep import ShardedOptimizer
from zerostep.plan.layout_planner import Settings
from zerostep.tools.demo import GPT, GPTShape
from zerostep.tools.planner.comparison import Request, bytes_of_ranks
from zerostep.tools.planner.forecast import Strategy
from zerostep.tools.planner.memory import Memory
from zerostep.tools.planner.recipe import Recipe, Rule
from zerostep.tools.planner.sources import Source

RANKS = (8, 64, 1024, 4096)
SHAPES = {
    "small": GPTShape(context=64, width=384, heads=6, layers=6),
    "large": GPTShape(context=64, width=768, heads=12, layers=12, vocabulary=25_000),
}
WARMUP = 1
Update = Literal["step", "backward"]


@dataclass(frozen=True)
class Setting:
    """One row: which model on which rank of how many, and how buckets travel."""

    model: str
    ranks: int
    rank: int
    collectives: bool
    device: str
    update: Update = "step"

    @property
    def way(self) -> str:
        """How buckets travel."""
        return "collectives" if self.collectives else "messages"


def measure(setting: Setting, rounds: int) -> dict[str, Any]:
    """Build one rank, train a few steps, and look into it."""
    model, data = _model(setting)
    alone = _seconds_of(lambda: _pass(model, data), rounds, setting.device)
    with alone_among(setting.ranks, setting.rank, setting.collectives) as transport:
        start = time.perf_counter()
        optimizer = ShardedOptimizer(model, AdamW, lr=1e-3, update=setting.update)
        construct = time.perf_counter() - start
        step = _seconds_of(lambda: _train(model, optimizer, data), rounds, setting.device)
        before = transport.messages
        _train(model, optimizer, data)
        calls = transport.messages - before
    held = optimizer.stats().state_bytes
    planned = plan(setting, model)
    parameters = sum(param.numel() for param in model.parameters())
    return {
        **vars(setting),
        "parameters": parameters,
        "buckets": optimizer.stats().buckets,
        "construct seconds": construct,
        "step seconds": max(0.0, median(step) - median(alone)),
        "compute seconds": median(alone),
        "calls": calls,
        "state bytes": held,
        "planned state bytes": planned.state,
        "planned scratch bytes": planned.scratch,
    }


def plan(setting: Setting, model: nn.Module) -> Memory:
    """What the planner says of the same rank."""
    named = tuple((name, nn.Parameter(param.detach().to("meta"))) for name, param in model.named_parameters())
    source = Source(setting.model, named, tuple(buffer.to("meta") for buffer in model.buffers()))
    recipe, ranks = Recipe(Rule(AdamW, {"lr": 1e-3})), setting.ranks
    settings = Settings(update=setting.update)
    found = bytes_of_ranks(Request(source, recipe, ranks, ranks, settings, setting.device))
    return found[Strategy.SHARDED].memory(setting.rank)


def profiled(setting: Setting) -> str:
    """What the constructor and one step spend their time on."""
    model, data = _model(setting)
    profile = cProfile.Profile()
    with alone_among(setting.ranks, setting.rank, setting.collectives):
        profile.enable()
        optimizer = ShardedOptimizer(model, AdamW, lr=1e-3)
        profile.disable()
        _train(model, optimizer, data)
        text = [f"constructor:\n{_top(profile)}"]
        profile = cProfile.Profile()
        profile.enable()
        _train(model, optimizer, data)
        profile.disable()
    return "\n".join([*text, f"step:\n{_top(profile)}"])


def _top(profile: cProfile.Profile, lines: int = 14) -> str:
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("cumulative").print_stats("zerostep|distributed", lines)
    return "\n".join(line for line in out.getvalue().splitlines() if ":" in line or "ncalls" in line)


def _model(setting: Setting) -> tuple[nn.Module, torch.Tensor]:
    shape = SHAPES[setting.model]
    torch.manual_seed(0)
    model = GPT(shape).to(setting.device)
    return model, torch.randint(shape.vocabulary, (1, shape.context + 1), device=setting.device)


def _pass(model: nn.Module, data: torch.Tensor) -> None:
    model.zero_grad()
    model(data).backward()


def _train(model: nn.Module, optimizer: ShardedOptimizer, data: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(data).backward()
    optimizer.step()


def _seconds_of(action: Any, rounds: int, device: str) -> list[float]:
    for _ in range(WARMUP):
        action()
    found = []
    for _ in range(rounds):
        gc.collect()
        start = time.perf_counter()
        action()
        if device != "cpu":
            torch.accelerator.synchronize()
        found.append(time.perf_counter() - start)
    return found


def render(rows: list[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    header = ["model", "ranks", "by", "buckets", "construct s", "step ms", "compute ms", "calls / step"]
    header += ["state MiB", "/ plan", "scratch MiB, planned"]
    return markdown(header, [_cells(row) for row in rows])


def _cells(row: Mapping[str, Any]) -> list[str]:
    way = "collectives" if row["collectives"] else "messages"
    counts = [f"{row['parameters'] / 1e6:.1f} M", str(row["ranks"]), way, str(row["buckets"])]
    times = [f"{row['construct seconds']:.2f}", f"{1e3 * row['step seconds']:.0f}"]
    times += [f"{1e3 * row['compute seconds']:.0f}", str(row["calls"])]
    share = row["state bytes"] / row["planned state bytes"] if row["planned state bytes"] else 1.0
    memory = [f"{row['state bytes'] / 2**20:.3f}", f"{share:.3f}", f"{row['planned scratch bytes'] / 2**20:.1f}"]
    return [*counts, *times, *memory]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=lambda text: list(map(int, text.split(","))), default=list(RANKS))
    parser.add_argument("--rank", type=int, help="which of them; the one in the middle if not given")
    parser.add_argument("--model", type=lambda text: text.split(","), default=["small"], help=", ".join(SHAPES))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="also print what the largest number of ranks costs")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser.parse_args()


def settings(models: list[str], ranks: list[int], rank: int | None, device: str) -> list[Setting]:
    """All rows: on an accelerator only collectives are used."""
    ways = (True,) if device != "cpu" else (False, True)
    return [
        Setting(model, count, count // 2 if rank is None else min(rank, count - 1), way, device)
        for model in models
        for way in ways
        for count in ranks
    ]


def main() -> None:
    """Measure every row and print the table."""
    chosen = _arguments()
    torch.set_num_threads(1)
    environment = {"versions": versions(), "hardware": hardware()}
    found = settings(chosen.model, chosen.ranks, chosen.rank, chosen.device)
    rows: list[Mapping[str, Any]] = [measure(setting, chosen.rounds) for setting in found]
    print(render(rows), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps({**environment, "rows": rows}, indent=1) + "\n")
    if chosen.profile:
        for setting in found:
            if setting.ranks == max(chosen.ranks):
                print(f"\n{setting}\n{profiled(setting)}")


if __name__ == "__main__":
    main()
