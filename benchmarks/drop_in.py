"""The drop-in optimizer against torch's own and against no sharding at all, on two local ranks.

Run as ``python -m benchmarks.drop_in [--rounds N] [--case NAME] [--json OUT]``. All variants of a case run in the same
processes, in interleaved rounds; a round counts as long as its slowest rank. Only ratios within one run mean anything.
"""

import argparse
import json
import os
import platform
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as DDP

from benchmarks.bars import Bar, bar_lines, judge
from benchmarks.cases import CASES, Case, Measure, OptimizerSpec, Text, build, case_named, window
from benchmarks.memory import peak_growth
from benchmarks.timing import Probe, Timing, interleave, markdown, slowest, spread_cells, timed
from zerostep import ZeroRedundancyOptimizer
from zerostep.tools.demo import largest_difference, run_ranks

RANKS = 2
RECIPIENT = 0
SENDER = 1
TORCH_CONSOLIDATIONS = 2  # each takes seconds

Make = Callable[[Iterable[nn.Parameter], OptimizerSpec], Any]


@dataclass(frozen=True)
class Variant:
    """One way to hold optimizer state."""

    name: str
    make: Make


def _unsharded(parameters: Iterable[nn.Parameter], spec: OptimizerSpec) -> Any:
    return spec.kind(parameters, **spec.options)


def _sharded(zero: Any, view: bool, parameters: Iterable[nn.Parameter], spec: OptimizerSpec) -> Any:
    return zero(parameters, spec.kind, parameters_as_bucket_view=view, **spec.options)


PLAIN = Variant("plain", _unsharded)
TORCH = Variant("torch", partial(_sharded, TorchZero, False))
TORCH_VIEW = Variant("torch, bucket view", partial(_sharded, TorchZero, True))
OURS = Variant("zerostep", partial(_sharded, ZeroRedundancyOptimizer, False))
OURS_VIEW = Variant("zerostep, bucket view", partial(_sharded, ZeroRedundancyOptimizer, True))
VARIANTS = (PLAIN, TORCH, TORCH_VIEW, OURS, OURS_VIEW)

BARS = (
    Bar("small", "step()", OURS.name, TORCH.name, Fraction(1, 3)),
    Bar("many", "step()", OURS.name, TORCH.name, Fraction(1, 8)),
    Bar("gpt", "training step", OURS.name, TORCH_VIEW.name, Fraction(1)),
    Bar("gpt", "training step", OURS_VIEW.name, TORCH_VIEW.name, Fraction(1)),
    Bar("gpt", "step()", OURS.name, TORCH_VIEW.name, Fraction(1)),
    Bar("gpt", "step()", OURS_VIEW.name, TORCH_VIEW.name, Fraction(1)),
    Bar("consolidate", "consolidation", OURS.name, TORCH.name, Fraction(1, 30)),
)


@dataclass(frozen=True)
class _Contender:
    module: nn.Module
    optimizer: Any

    def probe(self, measure: Measure, case: Case) -> Probe:
        if measure == "step()":
            return self.optimizer.step
        assert isinstance(case.model, Text)
        return partial(self._train, window(case.model, dist.get_rank()))

    def _train(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.module(batch).backward()
        self.optimizer.step()


def _contender(variant: Variant, case: Case) -> _Contender:
    module = build(case)
    wrapped = DDP(module) if "training step" in case.measures else module
    return _Contender(wrapped, variant.make(module.parameters(), case.optimizer))


def measure_steps(name: str, rounds: int) -> dict[str, Any]:
    """Time the case's measures for every variant; collective. Rank 0's answer speaks for all ranks."""
    case = case_named(name)
    contenders = {variant.name: _contender(variant, case) for variant in VARIANTS}
    seconds = {}
    for measure in case.measures:
        probes = {name: contender.probe(measure, case) for name, contender in contenders.items()}
        seconds[measure] = interleave(probes, rounds)
    return {"seconds": seconds, "details": _agreement(contenders)}


def _agreement(contenders: Mapping[str, _Contender]) -> dict[str, dict[str, float]]:
    plain = list(contenders[PLAIN.name].module.parameters())
    gaps = [largest_difference(plain, contender.module.parameters()) for contender in contenders.values()]
    return {name: {"difference": gap} for name, gap in zip(contenders, slowest(gaps), strict=True)}


def measure_consolidation(name: str, rounds: int) -> dict[str, Any]:
    """Time the gathering of all state on one rank and the growth of memory there and at the sender; collective."""
    case = case_named(name)
    limits = {TORCH: min(rounds, TORCH_CONSOLIDATIONS), OURS: rounds}
    results: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in limits}
    for turn in range(rounds):
        for variant in (variant for variant, limit in limits.items() if turn < limit):
            results[variant.name].append(_consolidate_once(variant, case))
    seconds = {name: [result["seconds"] for result in entries] for name, entries in results.items()}
    details = {name: _largest_growth(entries) for name, entries in results.items()}
    return {"seconds": {"consolidation": seconds}, "details": details}


def _consolidate_once(variant: Variant, case: Case) -> dict[str, Any]:
    # A fresh model and optimizer per round: what the last round left on the recipient would hide growth.
    optimizer = variant.make(build(case).parameters(), case.optimizer)
    optimizer.step()
    seconds: list[float] = []
    growth = peak_growth(lambda: seconds.append(timed(partial(optimizer.consolidate_state_dict, RECIPIENT))))
    checksum = _checksum(optimizer.state_dict()) if dist.get_rank() == RECIPIENT else 0
    return {"seconds": slowest(seconds)[0], "growth": _of_every_rank(growth), "checksum": checksum}


def _of_every_rank(growth: int | None) -> list[int]:
    mine = torch.tensor([-1 if growth is None else growth])
    everyone = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(everyone, mine)
    return [int(value) for value in everyone]


def _largest_growth(entries: list[dict[str, Any]]) -> dict[str, int]:
    growth = [max(ranks) for ranks in zip(*(entry["growth"] for entry in entries), strict=True)]
    return {"sender": growth[SENDER], "recipient": growth[RECIPIENT], "checksum": entries[0]["checksum"]}


def _checksum(state_dict: Mapping[str, Any]) -> int:
    checksum = 0
    for _, state in sorted(state_dict["state"].items()):
        for _, value in sorted(state.items()):
            checksum = zlib.crc32(torch.as_tensor(value).numpy().data, checksum)
    return checksum


def run_case(case: Case, rounds: int | None) -> dict[str, Any]:
    """Run one case on fresh ranks; return its timings, details and the verdict on each bar."""
    job = measure_consolidation if "consolidation" in case.measures else measure_steps
    result = run_ranks(job, RANKS, case.name, rounds or case.rounds)[0]
    bars = [judge(bar, result["seconds"][bar.measure]) for bar in BARS if bar.case == case.name]
    return {"case": case.name, "title": case.title, **result, "bars": bars}


def render(result: Mapping[str, Any]) -> str:
    """Return a case as Markdown: a table and its bars for each measure."""
    sections = []
    for measure, seconds in result["seconds"].items():
        bars = [bar for bar in result["bars"] if bar["measure"] == measure]
        sections.append(f"## {result['title']}: {measure}\n\n{_table(seconds, result['details'])}\n\n{bar_lines(bars)}")
    return "\n\n".join(sections) + "\n"


def _table(seconds: Mapping[str, list[float]], details: Mapping[str, dict[str, Any]]) -> str:
    timings = {name: Timing(tuple(values)) for name, values in seconds.items()}
    peers = [name for name in (TORCH.name, TORCH_VIEW.name) if name in timings]
    extra = {name: _detail_cells(name, details) for name in timings}
    header = ["variant", "rounds", "median ms", "quartiles ms", *(f"/ {peer}" for peer in peers), *extra[TORCH.name]]
    rows = []
    for name, timing in timings.items():
        ratios = [f"{timing.median / timings[peer].median:.3f}" for peer in peers]
        rows.append([name, str(len(timing.seconds)), *spread_cells(timing), *ratios, *extra[name].values()])
    return markdown(header, rows)


def _detail_cells(name: str, details: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    mine = details[name]
    if "difference" in mine:
        return {"numbers": "as plain" if mine["difference"] == 0 else f"off by {mine['difference']:.1e}"}
    same = mine["checksum"] == details[TORCH.name]["checksum"]
    growth = {f"{role} grows by MiB": _mebibytes(mine[role]) for role in ("sender", "recipient")}
    return {**growth, "state": "as torch" if same else "DIFFERS"}


def _mebibytes(size: int) -> str:
    return "unknown" if size < 0 else f"{size / 2**20:.0f}"


def environment() -> dict[str, Any]:
    """Return what the numbers depend on besides the code."""
    versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    return {**versions, "cores": os.cpu_count(), "ranks": RANKS, "threads": 1, "backend": "gloo on loopback"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drop_in", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="rounds per variant instead of each case's own number")
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this case")
    parser.add_argument("--json", type=Path, help="also write every round to this file")
    arguments = parser.parse_args()
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


def main() -> None:
    """Run the chosen cases and print their tables."""
    arguments = _arguments()
    print(", ".join(f"{key} {value}" for key, value in environment().items()), end="\n\n")
    results = []
    for case in CASES:
        if arguments.case in (None, case.name):
            results.append(run_case(case, arguments.rounds))
            print(render(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": environment(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
