"""A training step with the optimizer inside backward, against the same step with the optimizer after it.

Run as ``python -m benchmarks.overlap [--network loopback|shaped] [--rate 1gbit] [--ranks N] [--rounds N] [--batch N]
[--json OUT]``. All entries run in the same processes, in interleaved rounds; a round counts as long as its slowest
rank. Only ratios within one run mean anything. A shaped network takes root and iproute2.
"""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from benchmarks.cases import Case, Text, build, case_named, window
from benchmarks.drop_in import OURS, OURS_VIEW, PLAIN, TORCH, TORCH_VIEW, Variant, environment
from benchmarks.launch import LaunchError, run_on
from benchmarks.network import LOOPBACK, Host, NetworkError, bytes_sent, loopback, shaped, throughput
from benchmarks.timing import Timing, interleave, markdown, slowest, spread_cells
from zerostep import ZeroRedundancyOptimizer
from zerostep.optim.overlap_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from zerostep.tools.demo import largest_difference

BATCH = 16  # backward then takes longer than its traffic at 1 Gbit/s: with less, there is nothing to hide behind
ROUNDS = 12
ROUNDS_TO_JUDGE = 5
COUNTED_STEPS = 2
START_SECONDS = 120
ROUND_SECONDS = 30
USUAL, SMALL = 25, 5  # DDP's own bucket size in MB, and one that starts the traffic earlier

Hook = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """One way to make a training step: who holds the state, which hook steps, in buckets of how many MB."""

    variant: Variant
    hook: Hook | None = None
    bucket_mb: int = USUAL

    @property
    def name(self) -> str:
        """How tables call it."""
        size = "" if self.bucket_mb == USUAL else f", {self.bucket_mb} MB buckets"
        return f"{self.variant.name}{size}"


def _hooked(parameters: Any, spec: Any) -> Any:
    return ZeroRedundancyOptimizer(parameters, spec.kind, overlap_with_ddp=True, **spec.options)


HOOKED = Variant("zerostep, hook", _hooked)
INTERLEAVED = Variant("zerostep, interleaved hook", _hooked)

ENTRIES = (
    Entry(PLAIN),
    Entry(TORCH),
    Entry(TORCH_VIEW),
    Entry(OURS),
    Entry(OURS_VIEW),
    Entry(HOOKED, hook_with_zero_step),
    Entry(INTERLEAVED, hook_with_zero_step_interleaved),
    Entry(PLAIN, None, SMALL),
    Entry(OURS, None, SMALL),
    Entry(OURS_VIEW, None, SMALL),
    Entry(INTERLEAVED, hook_with_zero_step_interleaved, SMALL),
)


class Trainer:
    """An entry's own model and optimizer on this rank."""

    def __init__(self, entry: Entry, case: Case) -> None:
        assert isinstance(case.model, Text)
        self.module: nn.Module = build(case)
        self._ddp = DDP(self.module, bucket_cap_mb=entry.bucket_mb)
        self._optimizer = entry.variant.make(self._ddp.parameters(), case.optimizer)
        self._window = window(case.model, dist.get_rank())
        self._steps_in_backward = entry.hook is not None
        if entry.hook is not None:
            self._ddp.register_comm_hook(None, entry.hook(allreduce_hook, self._ddp, self._optimizer))

    def train(self) -> None:
        """One step, from one state of all parameters to the next."""
        self._optimizer.zero_grad()
        self._ddp(self._window).backward()
        if not self._steps_in_backward:
            self._optimizer.step()

    def sent(self, interface: str) -> float:
        """What a step sends from this host, in multiples of the parameters' size; collective."""
        dist.barrier()
        before = bytes_sent(interface)
        for _ in range(COUNTED_STEPS):
            self.train()
        dist.barrier()  # all has arrived, so all has left
        size = sum(parameter.nbytes for parameter in self.module.parameters())
        return (bytes_sent(interface) - before) / COUNTED_STEPS / size


def measured_case(batch: int) -> Case:
    """The GPT that is trained, with ``batch`` windows per rank."""
    case = case_named("gpt")
    assert isinstance(case.model, Text)
    return replace(case, model=replace(case.model, batch=batch))


def measure(rounds: int, batch: int, interface: str) -> dict[str, Any]:
    """Time every entry and compare the results; collective. Rank 0's answer speaks for all ranks."""
    case = measured_case(batch)
    gigabits = {direction: _line_rate(direction) for direction in ("one way", "both ways")}
    trainers = {entry.name: Trainer(entry, case) for entry in ENTRIES}
    seconds = interleave({name: trainer.train for name, trainer in trainers.items()}, rounds)
    sent = [trainer.sent(interface) for trainer in trainers.values()]
    plain = list(trainers[PLAIN.name].module.parameters())
    gaps = [largest_difference(plain, trainer.module.parameters()) for trainer in trainers.values()]
    return {
        "gigabits per second": gigabits,
        "seconds": seconds,
        # The loopback interface counts every rank's bytes, and those of strangers.
        "sent over P": dict(zip(trainers, slowest(sent), strict=True)) if interface != LOOPBACK else {},
        "difference": dict(zip(trainers, slowest(gaps), strict=True)),
    }


def _line_rate(direction: Any) -> float:
    if dist.get_world_size() == 1:
        return 0.0
    throughput(direction)  # the first message opens the connection
    return throughput(direction)


def judge(faster: str, slower: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Whether one entry is faster than another by more than the spread of both."""
    ours, theirs = Timing(tuple(seconds[faster])), Timing(tuple(seconds[slower]))
    met = ours.quartiles[2] < theirs.quartiles[0]
    ahead = ours.median < theirs.median
    verdict = "met" if met else "NOT met: the quartiles overlap" if ahead else "NOT met"
    if min(len(ours.seconds), len(theirs.seconds)) < ROUNDS_TO_JUDGE:
        verdict = "too few rounds to judge"
    return {"faster": faster, "slower": slower, "ratio": ours.median / theirs.median, "verdict": verdict}


def bars(seconds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """The interleaved hook against the optimizer without overlap, at each bucket size."""
    pairs = [(ours, peer) for ours in ENTRIES for peer in ENTRIES if ours.bucket_mb == peer.bucket_mb]
    chosen = [(ours, peer) for ours, peer in pairs if ours.variant == INTERLEAVED and peer.variant in (OURS, OURS_VIEW)]
    return [judge(ours.name, peer.name, seconds) for ours, peer in chosen]


def render(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown: the network, a table and the bars."""
    speeds = ", ".join(f"{rate:.3f} Gbit/s {way}" for way, rate in result["gigabits per second"].items())
    lines = [
        f"- Bar: '{bar['faster']}' takes less than '{bar['slower']}', quartiles apart. "
        f"Measured {bar['ratio']:.3f}: {bar['verdict']}."
        for bar in result["bars"]
    ]
    # With more at work on the machine than the ranks themselves, the numbers mean little.
    load = "Load of the machine before and at the end: {:.1f}, {:.1f}".format(*result["load"])
    return (
        f"## {result['title']}: training step\n\nRanks 0 and 1: {speeds}. {load}\n\n{_table(result)}\n\n"
        + "\n".join(lines)
    )


def _table(result: Mapping[str, Any]) -> str:
    timings = {name: Timing(tuple(values)) for name, values in result["seconds"].items()}
    peers = (PLAIN.name, OURS.name)
    header = ["entry", "median ms", "quartiles ms", *(f"/ {peer}" for peer in peers), "sent / P", "numbers"]
    rows = []
    for name, timing in timings.items():
        ratios = [f"{timing.median / timings[peer].median:.3f}" for peer in peers]
        sent = f"{result['sent over P'][name]:.3f}" if result["sent over P"] else "unknown"
        gap = result["difference"][name]
        rows.append([name, *spread_cells(timing), *ratios, sent, "as plain" if gap == 0 else f"off by {gap:.1e}"])
    return markdown(header, rows)


def run(network: AbstractContextManager[list[Host]], rounds: int, batch: int) -> dict[str, Any]:
    """Lay the network, measure on it, and judge."""
    with network as hosts:
        limit = START_SECONDS + ROUND_SECONDS * rounds
        result = run_on(hosts, measure, rounds, batch, hosts[0].interface, seconds=limit)[0]
    text = measured_case(batch).model
    assert isinstance(text, Text)
    title = f"GPT of 10.8 million parameters, {batch} x {text.shape.context} bytes per rank, AdamW"
    return {"title": title, **result, "bars": bars(result["seconds"])}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--network", choices=("loopback", "shaped"), default="loopback")
    parser.add_argument("--rate", default="1gbit", help="speed of a shaped network's links")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds per entry")
    parser.add_argument("--batch", type=int, default=BATCH, help="windows per rank and step")
    parser.add_argument("--json", type=Path, help="also write every round to this file")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.ranks, arguments.batch) < 1:
        parser.error("--rounds, --ranks and --batch must be at least 1")
    return arguments


def main() -> None:
    """Measure and print the table."""
    chosen = _arguments()
    limited = chosen.network == "shaped"
    backend = f"gloo on hosts with links of {chosen.rate}" if limited else "gloo on loopback"
    setting = {**environment(), "ranks": chosen.ranks, "backend": backend}
    print(", ".join(f"{key} {value}" for key, value in setting.items()), end="\n\n", flush=True)
    try:
        network = shaped(chosen.ranks, chosen.rate) if limited else loopback(chosen.ranks)
        load_before = os.getloadavg()[0]
        result = run(network, chosen.rounds, chosen.batch)
    except (NetworkError, LaunchError) as error:
        raise SystemExit(str(error)) from error
    result["load"] = [load_before, os.getloadavg()[0]]
    print(render(result))
    if chosen.json:
        chosen.json.write_text(json.dumps({"environment": setting, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
