"""The harness on CUDA, in a few minutes: the local update, memory against the plan, host time, several ranks.

Run as ``python -m benchmarks.gpu [--elements 400e6] [--rounds N] [--parts NAME,..] [--json OUT]``. Five parts: the
update against the speed of copies (`benchmarks.update`, its main rows); the host's time for a step beside DDP's
(`benchmarks.host_cuda`); one rank of many, simulated, with its memory against the plan; two ranks that share one device
over Gloo, for the numbers alone; and training steps over NCCL (`benchmarks.nccl`). A part that fails says why.
"""

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.optim import AdamW

from benchmarks import host_cuda, nccl, update
from benchmarks.launch import LaunchError, run_on
from benchmarks.machine import hardware, versions
from benchmarks.network import loopback
from benchmarks.peers.entries import PLAIN, entries_of
from benchmarks.peers.trainer import Trainer
from benchmarks.scale import SHAPES, Setting, Update, plan
from benchmarks.silence import alone_among
from benchmarks.timing import markdown
from benchmarks.workloads import workload_named
from zerostep import ShardedOptimizer
from zerostep.tools.demo import GPT, largest_difference

RANKS = (1, 8, 64, 1024, 4096)
UPDATES = (
    update.Entry("flat", True),
    update.Entry("flat", True, 100),
    update.Entry("GPT", True),
    update.Entry("GPT", True, 100),
    update.Entry("GPT", True, 100, masters=True),
    *update.COMPILED,
)
SHARED = ("ddp", "drop-in", "hook", "interleaved", "step", "forward", "forward-ddp", "forward-ddp-all", "backward")
STEPS, JOB_SECONDS, NCCL_ROUNDS = 4, 120, 3

Rows = list[dict[str, Any]]


# ---------------------------------------------------------------------- the update


def updates(elements: int, rounds: int) -> dict[str, Any]:
    """The main rows of `benchmarks.update`."""
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    try:
        copies = update.copy_seconds(elements, rounds)
        found = [update.measure(entry, elements, rounds) for entry in UPDATES]
    finally:
        dist.destroy_process_group()
    return {"copy bytes per second": 8 * elements / median(copies), "entries": found, "bars": []}


# ---------------------------------------------------------------------- one rank of many


def one_of(ranks: int, update_in: Update, rounds: int) -> dict[str, Any]:
    """Memory and time of the middle rank, on the larger GPT, with the other ranks silent."""
    setting = Setting("large", ranks, ranks // 2, True, "cuda", update_in)
    shape = SHAPES[setting.model]
    torch.manual_seed(0)
    model = GPT(shape).cuda()
    data = torch.randint(shape.vocabulary, (4, shape.context + 1), device="cuda")
    alone = _host_and_whole(lambda: _pass(model, data), rounds)
    model.zero_grad()
    _clean_up()
    parameters = sum(param.nbytes for param in model.parameters())
    with alone_among(ranks, setting.rank, collectives=True):
        planned, before = plan(setting, model), torch.cuda.memory_allocated()
        start = time.perf_counter()
        # Fused: the other implementations allocate temporaries of their own, which no plan knows.
        optimizer = ShardedOptimizer(model, AdamW, lr=1e-3, fused=True, update=update_in)
        torch.cuda.synchronize()
        construct = time.perf_counter() - start
        train = partial(_train, model, optimizer, data)
        train()
        optimizer.zero_grad()
        _clean_up()
        held = torch.cuda.memory_allocated() - before  # flat parameters stand where the user's own stood
        left = _left_by_backward(model, optimizer, data)
        peak = _peak_of_gradients(model, optimizer)
        host, whole = _host_and_whole(train, rounds)
        step = _host_and_whole_of_step(model, optimizer, data, rounds)
    return {
        "ranks": ranks,
        "update": update_in,
        "gradient bytes after backward": left,
        "planned gradient bytes": planned.gradients + planned.scratch_at_end,
        "peak gradient bytes": peak,
        "planned peak gradient bytes": planned.gradients + planned.scratch,
        "buckets": optimizer.stats().buckets,
        "construct seconds": construct,
        "grown bytes": held,
        "planned bytes": planned.parameters + planned.state + planned.masters - parameters,
        "compute host seconds": alone[0],
        "compute seconds": alone[1],
        "host seconds": host,
        "seconds": whole,
        "step host seconds": step[0],
        "step seconds": step[1],
    }


def _pass(model: nn.Module, data: Tensor) -> None:
    model.zero_grad()
    model(data).backward()


def _left_by_backward(model: nn.Module, optimizer: ShardedOptimizer, data: Tensor) -> int:
    """Bytes that a backward pass leaves on the device: gradients, and buckets that are in flight."""
    before = torch.cuda.memory_allocated()
    _pass(model, data)
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - before
    optimizer.step()
    optimizer.zero_grad()
    return left


def _peak_of_gradients(model: nn.Module, optimizer: ShardedOptimizer) -> int:
    """Bytes at the worst moment of a backward pass that needs no activations: gradients and buckets alone."""
    optimizer.synchronize()
    loss = sum(param.sum() for param in model.parameters())
    assert isinstance(loss, Tensor)
    _clean_up()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss.backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    optimizer.step()
    optimizer.zero_grad()
    return peak


def _train(model: nn.Module, optimizer: Any, data: Tensor) -> None:
    optimizer.zero_grad()
    model(data).backward()
    optimizer.step()


def _host_and_whole(action: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Medians of the seconds until the host goes on, and until the device is done."""
    for _ in range(3):
        action()
    host, whole = update.alone(action, rounds)
    return median(host), median(whole)


def _host_and_whole_of_step(
    model: nn.Module, optimizer: ShardedOptimizer, data: Tensor, rounds: int
) -> tuple[float, float]:
    found = []
    for _ in range(rounds):
        _pass(model, data)
        found.append(update.alone(optimizer.step, 1))
        optimizer.zero_grad()
    return median(host[0] for host, _ in found), median(whole[0] for _, whole in found)


def _clean_up() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


# ---------------------------------------------------------------------- several ranks


def compare(keys: Sequence[str]) -> Rows:
    """Train every entry on CUDA and compare with plain DDP; collective. Rank 0's answer speaks for all."""
    workload = workload_named("gpt")
    data = workload.data(dist.get_rank()).cuda()
    trainers, rows = dict[str, Trainer](), list[dict[str, Any]]()
    for entry in [entry for entry in entries_of(keys) if entry.key in keys]:
        try:
            make = partial(_on_device, workload.model)
            trainer = entry.build(make, workload.optimizer.kind, workload.optimizer.options)
            for _ in range(STEPS):
                trainer.step(data)
            trainer.settle()
            trainers[entry.key] = trainer
        except Exception as error:  # whatever a peer raises is its row
            traceback.print_exc()
            rows.append({"entry": entry.name, "reason": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
    plain = trainers[PLAIN.key].full_parameters()
    gaps = {key: largest_difference(plain, trainer.full_parameters()) for key, trainer in trainers.items()}
    names = {entry.key: entry.name for entry in entries_of(keys)}
    found = [{"entry": names[key], "difference": gap} for key, gap in gaps.items()]
    return [*found, *rows]


def _on_device(make: Callable[[], nn.Module]) -> nn.Module:
    return make().cuda()


def on_one_device() -> Rows:
    """Two ranks that share a device, over Gloo."""
    with loopback(2) as hosts:
        return list(run_on(hosts, compare, SHARED, seconds=JOB_SECONDS)[0])


# ---------------------------------------------------------------------- report


def render(result: Mapping[str, Any]) -> str:
    """Return all parts as Markdown; a part that failed is a line."""
    titles: dict[str, tuple[str, Callable[[Any], str]]] = {
        "update": (f"The update, {len(UPDATES)} ways", update.render),
        "host": ("The host's time for a step: GPT of 12 blocks, 148 parameters", host_cuda.render),
        "one of many": ("One rank of many, the others silent: GPT, 4 windows, AdamW", _render_scale),
        "one device": (
            "Two ranks on one device, over Gloo: GPT of 10.8 million parameters, numbers alone",
            _render_rows,
        ),
        "nccl": ("Training steps over NCCL", nccl.render_all),
    }
    return "\n\n".join(
        f"## {title}\n\n{draw(result[key]) if not isinstance(result[key], str) else result[key]}"
        for key, (title, draw) in titles.items()
        if key in result
    )


def _render_scale(rows: Rows) -> str:
    header = ["ranks", "update", "buckets", "construct s", "grown MiB", "/ plan", "after backward MiB", "plan MiB"]
    header += ["peak of backward MiB", "plan MiB"]
    header += ["host ms", "host ms of step()", "step() ms", "all ms", "compute host ms", "compute ms"]
    return markdown(header, [_scale_cells(row) for row in rows])


def _scale_cells(row: Mapping[str, Any]) -> list[str]:
    times = ("host seconds", "step host seconds", "step seconds", "seconds", "compute host seconds", "compute seconds")
    memory = [f"{row['grown bytes'] / 2**20:.2f}", f"{row['grown bytes'] / max(1, row['planned bytes']):.3f}"]
    moments = ("gradient bytes after backward", "peak gradient bytes")
    planned = ("planned gradient bytes", "planned peak gradient bytes")
    columns = [key for pair in zip(moments, planned, strict=True) for key in pair]
    gradients = [f"{row[key] / 2**20:.2f}" for key in columns]
    counts = [str(row["ranks"]), row["update"], str(row["buckets"]), f"{row['construct seconds']:.2f}"]
    return [*counts, *memory, *gradients, *(f"{1e3 * row[key]:.2f}" for key in times)]


def _render_rows(rows: Rows) -> str:
    return markdown(["entry", "numbers"], [[row["entry"], _numbers(row)] for row in rows])


def _numbers(row: Mapping[str, Any]) -> str:
    if "reason" in row:
        return str(row["reason"])
    return f"as {PLAIN.name}" if row["difference"] == 0 else f"off by {row['difference']:.1e}"


def _part(action: Callable[[], Any]) -> Any:
    """A part's result, or why there is none."""
    try:
        return action()
    except (LaunchError, RuntimeError, ValueError, TypeError) as error:
        traceback.print_exc()
        return f"Failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        _clean_up()


def main() -> None:
    """Measure every part, print it, and keep it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=lambda text: int(float(text)), default=400_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--parts", help="only these, by name")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark measures a CUDA device, and there is none")
    environment = {"versions": versions(), "hardware": {**hardware(), "device": torch.cuda.get_device_name()}}
    parts: dict[str, Callable[[], Any]] = {
        "update": lambda: updates(chosen.elements, chosen.rounds),
        "host": lambda: host_cuda.measure(chosen.rounds),
        "one of many": lambda: [one_of(ranks, each, chosen.rounds) for ranks in RANKS for each in get_args(Update)],
        "one device": on_one_device,
        "nccl": lambda: nccl.all_cases([case.name for case in nccl.CASES], nccl.KEYS, NCCL_ROUNDS),
    }
    wanted = chosen.parts.split(",") if chosen.parts else list(parts)
    result = {**environment, **{name: _part(parts[name]) for name in wanted}}
    print(*(f"{key} {value}" for part in environment.values() for key, value in part.items()), sep=", ", end="\n\n")
    print(render(result))
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
