"""The update inside ShardedOptimizer.step() on a CUDA device, against the speed of memory.

Run as ``python -m benchmarks.update [--elements 800e6] [--rounds N] [--json OUT] [--profile]``. One rank; AdamW in
float32 reads parameter, gradient and two moments and writes all but the gradient, 28 bytes for each element; with
masters it reads a gradient of two bytes and writes a parameter of two bytes besides, which are 28 again.

*update* is the device's time between the first and the last kernel of the update while the host runs ahead: for a
plain optimizer all of `step()`, for ours what is left of it without reduction and gather. *alone* is the time of a
whole `step()` that starts on an idle device and is waited for, and *host* the time until it returns; ours reduces
buckets of zeros in it, because no backward pass has gone before.
"""

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.optim import AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

from benchmarks.bars import bar_lines
from benchmarks.machine import hardware, versions
from benchmarks.timing import markdown
from zerostep import ShardedOptimizer
from zerostep.comm.exchange import StreamExchange
from zerostep.comm.transport import GroupTransport
from zerostep.step.update import Updater

BYTES_PER_ELEMENT = 28
BLOCKS = 64
WARMUP, AHEAD = 5, 60_000_000  # cycles: about 30 milliseconds
BAR, COMPILED_BAR = 0.8, 0.9
DEVICE = torch.device("cuda", 0)

Step = Callable[[], object]


@dataclass(frozen=True)
class Entry:
    """One row: what is updated, and by whom."""

    shape: str
    fused: bool
    bucket_mb: float | None = None  # plain torch if there is none
    nccl: bool = False  # through a group of one rank, which a world of one does without
    compiled: bool = False
    masters: bool = False  # bfloat16 parameters

    @property
    def bar(self) -> float:
        """The least part of the speed of copies that is asked for."""
        return COMPILED_BAR if self.compiled else BAR

    @property
    def name(self) -> str:
        """The row's first cell."""
        kernel = "compiled" if self.compiled else "fused" if self.fused else "default"
        what = f"{self.shape}{', bf16 and masters' if self.masters else ''}"
        if self.bucket_mb is None:
            return f"{what}, torch AdamW, {kernel}"
        way = " through NCCL" if self.nccl else ""
        return f"{what}, ShardedOptimizer, {kernel}, {self.bucket_mb:g} MB{way}"


FLAT, GPT = Entry("flat", True, 5), Entry("GPT", True, 5)
ENTRIES = [
    *[Entry(shape, fused, bucket) for shape in ("flat", "GPT") for fused in (True, False) for bucket in (None, 5)],
    *[Entry("GPT", True, bucket) for bucket in (25, 100, 400)],
    *[Entry("GPT", True, bucket, nccl=True) for bucket in (5, 25, 100, 400)],
    *[Entry(shape, True, 100, masters=True) for shape in ("flat", "GPT")],
]
COMPILED = [
    Entry(shape, False, 100, compiled=True, masters=masters) for masters in (False, True) for shape in ("flat", "GPT")
]
ENTRIES += COMPILED


# ------------------------------------------------------------------------------------------------ what is updated


def _shapes(shape: str, elements: int) -> list[tuple[int, ...]]:
    """One flat parameter, or the matrices, biases and norms of a transformer's blocks."""
    if shape == "flat":
        return [(elements,)]
    width = max(16, 16 * round(math.sqrt(elements / (12 * BLOCKS)) / 16))
    linear: list[tuple[int, ...]] = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    block = [each for matrix in linear for each in (matrix, (matrix[0],))] + [(width,)] * 4
    return block * BLOCKS


class Weights(nn.Module):
    """Parameters with gradients, and nothing to compute."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes)

    def receive_gradients(self) -> None:
        """Set all gradients by hand."""
        for param in self.parameters():
            param.grad = torch.randn_like(param)


def _optimizer(entry: Entry, model: nn.Module) -> Optimizer:
    options: dict[str, Any] = {"lr": 1e-4, "fused": True if entry.fused else None}
    if entry.bucket_mb is None:
        return AdamW(model.parameters(), **options)
    ours: dict[str, Any] = {"compile": entry.compiled, "master_dtype": torch.float32 if entry.masters else None}
    with through_nccl(entry.nccl):
        return ShardedOptimizer(model, AdamW, bucket_mb=entry.bucket_mb, **ours, **options)


@contextmanager
def through_nccl(nccl: bool) -> Iterator[None]:
    """Optimizers built here call NCCL, although their group has one rank."""
    if not nccl:
        yield
        return
    world = dist.group.WORLD
    assert world is not None
    through = StreamExchange(GroupTransport(world, DEVICE))
    with patch("zerostep.step.bucket_shards.connect_exchange", lambda ranks, device: through):
        yield


# -------------------------------------------------------------------------------------------------------- timing


@contextmanager
def _marked(events: list[torch.cuda.Event]) -> Iterator[None]:
    """Note an event before and behind each update of ours, on the current stream."""
    original = Updater.step_on

    def step_on(*arguments: Any) -> None:
        events.append(_event())
        original(*arguments)
        events.append(_event())

    with patch.object(Updater, "step_on", step_on):
        yield


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _updates(step: Step, rounds: int) -> list[float]:
    """Seconds on the device of each update; of all of `step` if there is none of ours in it."""
    found = list[float]()
    for _ in range(rounds):
        events = list[torch.cuda.Event]()
        torch.cuda._sleep(AHEAD)  # the host gets ahead
        first = _event()
        with _marked(events):
            step()
        last = _event()
        torch.cuda.synchronize()
        pairs = zip(events[::2], events[1::2], strict=True)
        found.append(sum(start.elapsed_time(stop) for start, stop in pairs) / 1e3 or first.elapsed_time(last) / 1e3)
    return found


def alone(step: Step, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of steps that start on an idle device: until the host goes on, and until the device is done."""
    host, whole = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    return host, whole


def _timed(step: Step, rounds: int) -> dict[str, list[float]]:
    for _ in range(WARMUP):
        step()
    gc.collect()
    gc.disable()
    device = _updates(step, rounds)
    host, whole = alone(step, rounds)
    gc.enable()
    return {"update": device, "alone": whole, "host": host}


def copy_seconds(elements: int, rounds: int) -> list[float]:
    """Seconds per copy of a float32 tensor on the device, which reads and writes 4 bytes for each element."""
    source, target = torch.randn(elements, device=DEVICE), torch.empty(elements, device=DEVICE)
    return _timed(lambda: target.copy_(source), rounds)["update"]


def measure(entry: Entry, elements: int, rounds: int) -> dict[str, Any]:
    """All rounds of one entry."""
    step, count, details = _prepared(entry, elements)
    try:
        seconds = _timed(step, rounds)
        return {"entry": entry.name, "bar": entry.bar, "elements": count, **details, "seconds": seconds}
    finally:
        del step
        _clean_up()


def _prepared(entry: Entry, elements: int) -> tuple[Step, int, dict[str, int]]:
    """A step, the number of elements it updates, and of how many buckets and parameters."""
    torch.manual_seed(0)
    model = Weights(_shapes(entry.shape, elements), torch.bfloat16 if entry.masters else torch.float32)
    optimizer = _optimizer(entry, model)
    model.receive_gradients()
    optimizer.step()
    params: list[Tensor] = list(model.parameters())
    buckets = optimizer.stats().buckets if isinstance(optimizer, ShardedOptimizer) else 0
    return optimizer.step, sum(each.numel() for each in params), {"parameters": len(params), "buckets": buckets}


def _clean_up() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def profiled(entry: Entry, elements: int) -> str:
    """What one step does, on the host and on the device."""
    step, _, _ = _prepared(entry, elements)
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    table = "\n".join(
        found.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=60)
        for order in ("self_cuda_time_total", "self_cpu_time_total")
    )
    del step
    _clean_up()
    return f"### {entry.name}\n\n```\n{table}\n```\n"


# -------------------------------------------------------------------------------------------------------- report


def render(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown: the speed of copies, a table and the bar."""
    header = ["entry", "parameters", "buckets", "update ms", "TB/s", "/ copy", "alone ms", "alone / copy", "host ms"]
    rows = [_row(each, result["copy bytes per second"]) for each in result["entries"]]
    head = f"Copies move {result['copy bytes per second'] / 1e12:.3f} TB/s, read and written."
    return f"{head}\n\n{markdown(header, rows)}\n\n{bar_lines(result['bars'])}\n"


def _row(found: Mapping[str, Any], copy: float) -> list[str]:
    device, alone, host = (median(found["seconds"][key]) for key in ("update", "alone", "host"))
    moved = BYTES_PER_ELEMENT * found["elements"]
    counts = [str(found["parameters"]), str(found["buckets"] or "-")]
    speeds = [f"{1e3 * device:.2f}", f"{moved / device / 1e12:.3f}", f"{moved / device / copy:.3f}"]
    return [found["entry"], *counts, *speeds, f"{1e3 * alone:.2f}", f"{moved / alone / copy:.3f}", f"{1e3 * host:.2f}"]


def _verdict(found: Mapping[str, Any], copy: float) -> dict[str, Any]:
    """Hold an update against the speed of copies."""
    ratio = BYTES_PER_ELEMENT * found["elements"] / median(found["seconds"]["update"]) / copy
    text = f"'{found['entry']}' moves at least {found['bar']:g} of the bytes per second of copies"
    return {"bar": text, "ratio": ratio, "verdict": "met" if ratio >= found["bar"] else "NOT met"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.update", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=lambda text: int(float(text)), default=800_000_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write every round to this file")
    parser.add_argument("--profile", action="store_true", help="also print what the fused steps spend their time on")
    return parser.parse_args()


def main() -> None:
    """Measure everything and print a table."""
    arguments = _arguments()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark measures a CUDA device, and there is none")
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    environment = {"versions": versions(), "hardware": {**hardware(), "device": torch.cuda.get_device_name(DEVICE)}}
    print(*(f"{key} {value}" for part in environment.values() for key, value in part.items()), sep=", ", end="\n\n")
    result = _measured(arguments.elements, arguments.rounds)
    print(render(result), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({**environment, **result}, indent=1) + "\n")
    for entry in [FLAT, GPT] if arguments.profile else []:
        print(profiled(entry, arguments.elements), flush=True)
    dist.destroy_process_group()


def _measured(elements: int, rounds: int) -> dict[str, Any]:
    copies = copy_seconds(elements, rounds)
    entries = [measure(entry, elements, rounds) for entry in ENTRIES]
    copies += copy_seconds(elements, rounds)  # the device may have become slower meanwhile
    speed = 2 * 4 * elements / median(copies)
    held = [entry.name for entry in (FLAT, *COMPILED)]
    bars = [_verdict(found, speed) for found in entries if found["entry"] in held]
    return {"copy seconds": copies, "copy bytes per second": speed, "entries": entries, "bars": bars}


if __name__ == "__main__":
    main()
