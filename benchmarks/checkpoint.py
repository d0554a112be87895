"""Checkpoints against torch's own ways to write one: time, and memory above the state itself.

Run as ``python -m benchmarks.checkpoint [--gigabytes G] [--ranks N] [--rounds N] [--folder DIR] [--json OUT]``. All run
in the same processes, in interleaved rounds, on the same AdamW state; a round counts as long as its slowest rank. Ours
hash what they write and force it to disk; DCP forces it to disk and hashes nothing; `torch.save` does neither. What
torch's own sharded optimizer needs is measured on a sixteenth of the state in every round, and once in full.
"""

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import AdamW

import zerostep
from benchmarks.launch import run_on
from benchmarks.machine import hardware, versions
from benchmarks.memory import peak_growth
from benchmarks.network import loopback
from benchmarks.timing import Timing, markdown, slowest, spread_cells
from zerostep.checkpoint import tensor_file
from zerostep.checkpoint.directory import read_manifest
from zerostep.checkpoint.reader import verify

STATE_BYTES = 8  # AdamW's, for each float of a parameter
TENSOR = 1 << 22  # elements
FRACTION = 16
SECONDS = 480
MIB = 1 << 20

SAVE, RETURN, COMPLETE, LOAD = (
    "zerostep save",
    "zerostep wait=False, return",
    "zerostep wait=False, complete",
    "zerostep load",
)
UNHASHED = "zerostep save, not hashed"
VERIFY, DCP_SAVE, DCP_LOAD = "zerostep, verification alone", "DCP save", "DCP load"
PART, FULL = "torch consolidate + save, 1/16", "torch consolidate + save"


class Tensors(nn.Module):
    """So many elements, in tensors of a usual size."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        sizes = [TENSOR] * (elements // TENSOR) + ([elements % TENSOR] if elements % TENSOR else [])
        self.all = nn.ParameterList([torch.linspace(-1, 1, size) for size in sizes])

    def train_once(self, optimizer: Any) -> None:
        """A step that gives the optimizer its state, without a forward pass."""
        for param in self.all:
            param.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@dataclass
class Contest:
    """The same state held by ours and by torch, and what each takes to write and read it; collective."""

    folder: Path
    seconds: dict[str, list[float]] = field(default_factory=dict)
    growth: dict[str, list[float]] = field(default_factory=dict)
    count: int = 0

    def record(self, name: str, action: Callable[[], object]) -> None:
        """Time one call from a barrier, and the growth of memory meanwhile, on the slowest and on the largest rank."""
        elapsed: list[float] = []
        growth = peak_growth(lambda: elapsed.append(_timed(action)))
        self.note(name, elapsed[0], -1 if growth is None else growth)

    def note(self, name: str, seconds: float, growth: float) -> None:
        """Remember what the slowest and the largest rank had."""
        found = slowest([seconds, growth])
        self.seconds.setdefault(name, []).append(found[0])
        self.growth.setdefault(name, []).append(found[1])

    def fresh(self) -> Path:
        """A path that nobody has used."""
        self.count += 1
        return self.folder / f"step-{self.count}"


def _timed(action: Callable[[], object]) -> float:
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _settled() -> None:
    """What earlier rounds left for the disk must not count for the next."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def _gone(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    _settled()


def measure(gigabytes: float, rounds: int, folder: str, full: bool) -> dict[str, Any]:
    """All rounds of everything; collective. Rank 0's answer speaks for all ranks."""
    contest, elements = Contest(Path(folder)), int(gigabytes * 1e9) // STATE_BYTES
    model = Tensors(elements)
    optimizer = zerostep.ShardedOptimizer(model, AdamW)
    model.train_once(optimizer)
    plain = _plain_tensors(optimizer)
    smaller = Tensors(elements // FRACTION)
    peer = TorchZero(smaller.parameters(), AdamW)
    smaller.train_once(peer)
    for turn in range(rounds + 1):  # the first one warms up
        for probe in _turned([_ours, _background, _dcp, _unhashed], turn):
            probe(contest, optimizer, plain)
        _consolidated(contest, PART, peer)
        if turn == 0:
            contest.seconds, contest.growth = {}, {}
    shard = max(slowest([float(sum(tensor.nbytes for tensor in plain.values()))]))
    del optimizer, plain, model
    if full:
        _in_full(contest, elements)
    return {"seconds": contest.seconds, "growth": contest.growth, "shard": shard}


def _turned(probes: list[Any], turn: int) -> list[Any]:
    return probes[turn % len(probes) :] + probes[: turn % len(probes)]


def _plain_tensors(optimizer: Any) -> dict[str, Tensor]:
    """What this rank owns, as DCP likes it best: tensors with memory of their own, under names of their own."""
    return {
        f"{dist.get_rank()}.{number}.{key}": value.clone()
        for number, entry in enumerate(optimizer.state.values())
        for key, value in entry.items()
        if isinstance(value, Tensor) and value.dim()
    }


class NoHash:
    """In place of SHA-256, to see what it costs."""

    def update(self, piece: object) -> None:
        """Nothing."""

    def hexdigest(self) -> str:
        """Not the digest of anything."""
        return "0" * 64


def _unhashed(contest: Contest, optimizer: Any, plain: Mapping[str, Tensor]) -> None:
    path = contest.fresh()
    with patch.object(tensor_file, "hashlib", SimpleNamespace(sha256=NoHash)):
        contest.record(UNHASHED, lambda: zerostep.save(path, optimizer))
    _gone(path)


def _ours(contest: Contest, optimizer: Any, plain: Mapping[str, Tensor]) -> None:
    path = contest.fresh()
    contest.record(SAVE, lambda: zerostep.save(path, optimizer))
    manifest = read_manifest(path)
    contest.record(VERIFY, lambda: verify(path, manifest, [dist.get_rank()], lambda count: None))
    contest.record(LOAD, lambda: zerostep.load(path, optimizer))
    _gone(path)


def _background(contest: Contest, optimizer: Any, plain: Mapping[str, Tensor]) -> None:
    path, returned = contest.fresh(), list[float]()

    def action() -> None:
        start = time.perf_counter()
        pending = zerostep.save(path, optimizer, wait=False)
        returned.append(time.perf_counter() - start)
        assert pending is not None
        pending.wait()

    contest.record(COMPLETE, action)
    contest.note(RETURN, returned[0], 0.0)
    contest.growth[RETURN][-1] = contest.growth[COMPLETE][-1]
    _gone(path)


def _dcp(contest: Contest, optimizer: Any, plain: dict[str, Tensor]) -> None:
    path = contest.fresh()
    contest.record(DCP_SAVE, lambda: dcp_save(plain, checkpoint_id=path))
    contest.record(DCP_LOAD, lambda: dcp_load(plain, checkpoint_id=path))
    _gone(path)


def _consolidated(contest: Contest, name: str, peer: Any) -> None:
    path = contest.fresh()

    def action() -> None:
        peer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            torch.save(peer.state_dict(), path)
        dist.barrier()

    contest.record(name, action)
    _gone(path)


def _in_full(contest: Contest, elements: int) -> None:
    model = Tensors(elements)
    peer = TorchZero(model.parameters(), AdamW)
    model.train_once(peer)
    _consolidated(contest, FULL, peer)


# ---------------------------------------------------------------------- what it means


@dataclass(frozen=True)
class Limit:
    """A figure, and what it may be at most."""

    text: str
    value: float
    limit: float

    def verdict(self) -> dict[str, Any]:
        """As it is written down."""
        words = "met" if self.value <= self.limit else "NOT met"
        return {"bar": self.text, "value": self.value, "limit": self.limit, "verdict": words}


def judge(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Hold the medians against the bars."""
    median = {name: Timing(tuple(values)).median for name, values in result["seconds"].items()}
    whole = median.get(FULL, FRACTION * median[PART])
    source = "measured once in full" if FULL in median else "extrapolated from a sixteenth"
    found = [
        Limit(f"save, over torch's consolidation and torch.save ({source})", median[SAVE] / whole, 1 / 20),
        Limit("save, over DCP's", median[SAVE] / median[DCP_SAVE], 1.0),
        Limit("growth of memory in a save, MiB", max(result["growth"][SAVE]) / MIB, 64.0),
        Limit("growth in a save in the background above a copy of the shard, MiB", _above(result, COMPLETE), 64.0),
        Limit("growth in a load above the shard, MiB", _above(result, LOAD), 64.0),
        Limit("what hashing adds to a save, over the save", 1 - median[UNHASHED] / median[SAVE], 0.1),
        Limit("verification alone, over the save", median[VERIFY] / median[SAVE], 0.1),
    ]
    return [each.verdict() for each in found]


def _above(result: Mapping[str, Any], name: str) -> float:
    return float((max(result["growth"][name]) - result["shard"]) / MIB)


def render(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown: a table and the bars."""
    save = Timing(tuple(result["seconds"][SAVE])).median
    rows = []
    for name, seconds in result["seconds"].items():
        timing = Timing(tuple(seconds))
        scale = FRACTION if name == PART else 1
        rate = result["gigabytes"] / scale / timing.median
        growth = max(result["growth"][name]) / MIB
        cells = [*spread_cells(timing), f"{rate:.2f}", f"{timing.median / save:.3f}", f"{growth:.0f}"]
        rows.append([name, str(len(seconds)), *cells])
    header = ["", "rounds", "median ms", "quartiles ms", "GB/s", "/ save", "peak above, MiB"]
    bars = [
        f"- Bar: {bar['bar']}: at most {bar['limit']:g}. Measured {bar['value']:.3f}: {bar['verdict']}."
        for bar in result["bars"]
    ]
    return f"{markdown(header, rows)}\n\n" + "\n".join(bars)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="optimizer state of all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; the system's temporary folder if not given")
    parser.add_argument("--no-full", action="store_true", help="measure torch's consolidation on a sixteenth only")
    parser.add_argument("--json", type=Path, help="also write every round to this file")
    return parser.parse_args()


def main() -> None:
    """Run everything and print the table."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, loopback(arguments.ranks) as hosts:
        given = arguments.gigabytes, arguments.rounds, folder, not arguments.no_full
        answer = run_on(hosts, measure, *given, seconds=SECONDS)[0]
    about = {"gigabytes": arguments.gigabytes, "ranks": arguments.ranks, "backend": "gloo on loopback", "threads": 1}
    result = {**versions(), **hardware(), **about, **answer, "bars": judge(answer)}
    print(render(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
