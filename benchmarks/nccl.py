"""Training steps over NCCL, all entries in one run: a rank for every device, or two ranks that share the only one.

Run as ``python -m benchmarks.nccl [--case NAME,..] [--entries KEY,..] [--rounds N] [--json OUT] [--profile FOLDER]``.

Two ranks on one device are two hosts to NCCL, which then talks over loopback: its own order of collectives, streams and
kernels, at about 1.8 GB/s in each direction. What that cannot say: anything about NVLink or a network adapter, about
more than two ranks, and about collectives that are small: the two processes take turns on the device, some milliseconds
each, so that the shortest one takes up to 4 ms here and some 20 microseconds elsewhere. Both ranks' kernels share one
device, so computing takes twice its time.

*steady* is the device's time from step to step in the middle of a run, *single* the time of one step from an idle
device until everything is in place, *host* the part of it until the call returns, *clip* a steady step that also clips
the norm of the gradients.
"""

import argparse
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from benchmarks.launch import LaunchError, run_on
from benchmarks.machine import hardware, versions
from benchmarks.network import LOOPBACK, loopback
from benchmarks.peers.entries import ENTRIES, NAMED, PLAIN, Entry
from benchmarks.peers.trainer import Loop, Trainer
from benchmarks.timing import Timing, markdown
from zerostep.tools.demo import GPT, GPTShape, largest_difference

KEYS = (
    *("compute", "ddp", "ddp-tuned", "torch", "torch-view", "torch-hook", "torch-interleaved", "fsdp2"),
    *("drop-in", "hook", "interleaved", "step", "forward", "forward-fused", "forward-compiled", "forward-ddp"),
    *("backward", "backward-step"),
)
WARMUP, STEPS, CASE_SECONDS, MAX_NORM = 3, 2, 280, 1.0
WIRE_BYTES = 100 << 20
OPTIONS = {"lr": 1e-4}

Rows = list[dict[str, Any]]


# ---------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """A GPT with float32 parameters, and the windows that each rank trains it on."""

    name: str
    title: str
    shape: GPTShape
    windows: int
    autocast: bool

    def model(self) -> nn.Module:
        """Build the model, with the same values at every call."""
        torch.manual_seed(0)
        return _GPT(self.shape, self.autocast).cuda()

    def data(self, rank: int) -> Tensor:
        """The windows of a rank."""
        size = (self.windows, self.shape.context + 1)
        return torch.randint(self.shape.vocabulary, size, generator=torch.Generator().manual_seed(rank)).cuda()


class _GPT(GPT):
    def __init__(self, shape: GPTShape, autocast: bool) -> None:
        super().__init__(shape)
        self._autocast = autocast

    def forward(self, window: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self._autocast):
            return super().forward(window)


_WIDE = GPTShape(context=512, width=1024, heads=16, layers=12, vocabulary=256)
_EMBEDDED = GPTShape(context=512, width=512, heads=8, layers=8, vocabulary=32_000)
CASES = (
    Case("network", "network-bound: 152 million parameters in 12 blocks, bfloat16 matrix products", _WIDE, 8, True),
    Case(
        "balanced",
        "balanced: 58 million parameters in 8 blocks and two embeddings, bfloat16 matrix products",
        _EMBEDDED,
        160,
        True,
    ),
    Case("compute", "compute-bound: the same with TF32 matrix products", _EMBEDDED, 160, False),
)


# ---------------------------------------------------------------------- on a rank


def measured(name: str, keys: Sequence[str], rounds: int, folder: str | None) -> dict[str, Any]:
    """All entries of a case; collective. Times are the slowest rank's, the rest is rank 0's own."""
    _use_nccl()
    case = next(case for case in CASES if case.name == name)
    wire = _wire()
    data, trainers, rows = case.data(dist.get_rank()), dict[str, Trainer](), list[dict[str, Any]]()
    held = dict[str, int]()
    for entry in [entry for entry in (*ENTRIES, *NAMED) if entry.key in keys]:
        before = torch.cuda.memory_allocated()
        try:
            trainers[entry.key] = _built(entry, case, data)
            held[entry.key] = torch.cuda.memory_allocated() - before
        except Exception as error:  # whatever a peer raises is its row
            traceback.print_exc()
            rows.append({"entry": entry.name, "reason": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
    gaps = _gaps(trainers)
    times = _timed(trainers, data, rounds, held)
    names = {entry.key: entry.name for entry in (*ENTRIES, *NAMED)}
    found = [{"entry": names[key], "difference": gaps[key], **times[key]} for key in trainers]
    if folder is not None:
        _profile(trainers, data, f"{folder}/{name}")
    parameters = sum(param.numel() for param in case.model().parameters())
    return {"case": case.title, "parameters": parameters, "wire": wire, "rows": [*found, *rows]}


def _use_nccl() -> None:
    rank, devices = dist.get_rank(), torch.cuda.device_count()
    torch.cuda.set_device(rank % devices)
    torch.set_float32_matmul_precision("high")
    if devices < dist.get_world_size():
        # NCCL refuses two ranks on one device of one host, so each is a host of its own.
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME=LOOPBACK)


def _wire() -> dict[str, float]:
    """Gigabytes per second that collectives of one size move, counted as the bytes that each rank sends."""
    world = dist.get_world_size()
    whole = torch.zeros(WIRE_BYTES, dtype=torch.uint8, device="cuda")
    part = torch.zeros(WIRE_BYTES // world, dtype=torch.uint8, device="cuda")
    sent = WIRE_BYTES * (world - 1) / world
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "all-reduce": (2 * sent, lambda: dist.all_reduce(whole)),
        "reduce-scatter": (sent, lambda: dist.reduce_scatter_tensor(part, whole)),
        "all-gather": (sent, lambda: dist.all_gather_into_tensor(whole, part)),
    }
    return {name: 1e-9 * moved / _seconds_of(call) for name, (moved, call) in calls.items()}


def _seconds_of(call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _built(entry: Entry, case: Case, data: Tensor) -> Trainer:
    trainer = entry.build(case.model, AdamW, OPTIONS)
    for _ in range(WARMUP):
        trainer.step(data)
    trainer.settle()
    torch.cuda.synchronize()
    return trainer


def _gaps(trainers: Mapping[str, Trainer]) -> dict[str, float]:
    """How far each entry's parameters are from those of plain DDP after the same steps."""
    if PLAIN.key not in trainers:
        return dict.fromkeys(trainers, float("nan"))
    plain = trainers[PLAIN.key].full_parameters()
    return {key: largest_difference(plain, trainer.full_parameters()) for key, trainer in trainers.items()}


def _timed(
    trainers: Mapping[str, Trainer], data: Tensor, rounds: int, held: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, list[float]]] = {key: {} for key in trainers}
    for turn in range(rounds):
        order = list(trainers)[turn % len(trainers) :] + list(trainers)[: turn % len(trainers)]
        for key in order:
            for name, value in _one_round(trainers[key], data, held[key]).items():
                found[key].setdefault(name, []).append(value)
    return {
        key: {name: _slowest(values) if name != "peak bytes" else values for name, values in each.items()}
        for key, each in found.items()
    }


def _slowest(seconds: Sequence[float]) -> list[float]:
    rounds = torch.tensor(seconds, dtype=torch.float64, device="cuda")
    dist.all_reduce(rounds, dist.ReduceOp.MAX)
    return [float(value) for value in rounds]


def _one_round(trainer: Trainer, data: Tensor, held: int) -> dict[str, float]:
    """Times, and the most memory of this entry alone: what it holds between steps, and what a step adds to that."""
    gc.collect()
    gc.disable()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - held
    host, single = _from_idle(trainer, data)
    steady = _steady(trainer, partial(trainer.step, data))
    peak = float(torch.cuda.max_memory_allocated() - others)
    found = {"steady": steady, "single": single, "host": host, "peak bytes": peak}
    if isinstance(trainer, Loop) and trainer.clips:
        found["clip"] = _steady(trainer, partial(trainer.clipped_step, data, MAX_NORM))
    gc.enable()
    return found


def _steady(trainer: Trainer, step: Callable[[], object]) -> float:
    """Seconds on the device from step to step; one goes before, and its end stands for what the last one leaves."""
    torch.cuda.synchronize()
    dist.barrier()
    step()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(STEPS):
        step()
    stop.record()
    trainer.settle()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / STEPS / 1e3


def _from_idle(trainer: Trainer, data: Tensor) -> tuple[float, float]:
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    trainer.step(data)
    host = time.perf_counter() - start
    trainer.settle()
    torch.cuda.synchronize()
    return host, time.perf_counter() - start


def _profile(trainers: Mapping[str, Trainer], data: Tensor, stem: str) -> None:
    for key, trainer in trainers.items():
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            for _ in range(3):
                trainer.step(data)
            trainer.settle()
            torch.cuda.synchronize()
        found.export_chrome_trace(f"{stem}-{key}-{dist.get_rank()}.json.gz")


# ---------------------------------------------------------------------- report


def run_case(name: str, keys: Sequence[str], rounds: int, folder: str | None = None) -> dict[str, Any]:
    """Start the ranks of one case; rank 0's answer speaks for all."""
    ranks = max(2, torch.cuda.device_count())
    with loopback(ranks) as hosts:
        job = (hosts, measured, name, keys, rounds, folder)
        found: dict[str, Any] = run_on(*job, seconds=CASE_SECONDS, backend="nccl")[0]
    return {**found, "ranks": ranks}


def render(result: Mapping[str, Any]) -> str:
    """Return one case as Markdown."""
    plain = next((row for row in result["rows"] if row["entry"] == PLAIN.name and "steady" in row), None)
    wire = ", ".join(f"{name} {speed:.2f} GB/s" for name, speed in result["wire"].items())
    header = ["entry", "steady ms", "spread", f"/ {PLAIN.name}", "single", "host", f"host / {PLAIN.name}", "clip"]
    rows = [_cells(row, plain) for row in result["rows"]]
    head = f"{result['case']}; {result['ranks']} ranks; {wire}."
    return f"{head}\n\n{markdown([*header, 'peak MiB', 'numbers'], rows)}"


def _cells(row: Mapping[str, Any], plain: Mapping[str, Any] | None) -> list[str]:
    if "reason" in row:
        return [row["entry"], *["-"] * 8, row["reason"]]
    low, middle, high = (1e3 * value for value in Timing(tuple(row["steady"])).quartiles)
    ratio, host_ratio = (_ratio(row, plain, key) for key in ("steady", "host"))
    single, host = (f"{1e3 * median(row[key]):.1f}" for key in ("single", "host"))
    clip = f"{1e3 * median(row['clip']):.1f}" if "clip" in row else "-"
    numbers = f"as {PLAIN.name}" if row["difference"] == 0 else f"off by {row['difference']:.1e}"
    peak = f"{max(row['peak bytes']) / 2**20:.0f}"
    return [
        *(row["entry"], f"{middle:.1f}", f"{low:.1f} - {high:.1f}", ratio, single, host, host_ratio, clip, peak),
        numbers,
    ]


def _ratio(row: Mapping[str, Any], plain: Mapping[str, Any] | None, key: str) -> str:
    return "-" if plain is None else f"{median(row[key]) / median(plain[key]):.3f}"


def all_cases(names: Sequence[str], keys: Sequence[str], rounds: int, folder: str | None = None) -> Rows:
    """Every case by itself; one that fails says why."""
    found = []
    for name in names:
        try:
            found.append(run_case(name, keys, rounds, folder))
        except LaunchError as error:
            found.append({"case": name, "failed": str(error)})
    return found


def render_all(results: Sequence[Mapping[str, Any]]) -> str:
    """Return all cases as Markdown."""
    return "\n\n".join(
        f"{each['case']} failed: {each['failed']}" if "failed" in each else render(each) for each in results
    )


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nccl", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", default=",".join(case.name for case in CASES))
    parser.add_argument("--entries", default=",".join(KEYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write every round to this file")
    parser.add_argument("--profile", help="also write a profile of every entry and rank to this folder")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark measures CUDA devices, and there is none")
    results = all_cases(chosen.case.split(","), chosen.entries.split(","), chosen.rounds, chosen.profile)
    environment = {"versions": versions(), "hardware": {**hardware(), "device": torch.cuda.get_device_name()}}
    print(*(f"{key} {value}" for part in environment.values() for key, value in part.items()), sep=", ", end="\n\n")
    print(render_all(results))
    if chosen.json:
        chosen.json.write_text(json.dumps({**environment, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
