"""The host's time for a training step on a CUDA device: until the call returns, with the device idle before it.

One rank that calls NCCL for everything, as a rank of many would; a GPT of 12 blocks and 148 parameters with few
windows, so that the device never holds up the host. Part of `benchmarks.gpu`.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks import update
from benchmarks.timing import markdown
from zerostep import ShardedOptimizer
from zerostep.tools.demo import GPT, GPTShape

SHAPE, WINDOWS, WARMUP = GPTShape(context=128, width=1024, heads=16, layers=12), 2, 5
OPTIONS: dict[str, Any] = {"lr": 1e-4, "fused": True}
BARE, PLAIN = "forward and backward", "DDP, fused AdamW"

Step = Callable[[], object]


def measure(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of each round, by entry; all take turns."""
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    try:
        steps = _entries()
        found: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(WARMUP + rounds):
            for name, step in steps.items():
                gc.collect()
                gc.disable()
                (host,), _ = update.alone(step, 1)
                gc.enable()
                if turn >= WARMUP:
                    found[name].append(1e3 * host)
        return [{"entry": name, "ms": taken} for name, taken in found.items()]
    finally:
        dist.destroy_process_group()


def _entries() -> dict[str, Step]:
    data = torch.randint(SHAPE.vocabulary, (WINDOWS, SHAPE.context + 1), device="cuda")
    sharded = {
        f'sharded, gather="{gather}"{", clip" if clip else ""}': _sharded(data, clip, gather=gather)
        for gather in ("step", "forward")
        for clip in (False, True)
    }
    plain = {PLAIN: _plain(data, False), f"{PLAIN}, clip": _plain(data, True)}
    return {
        BARE: _bare(data),
        **plain,
        **sharded,
        'sharded, update="backward"': _sharded(data, False, update="backward"),
    }


def _model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(SHAPE).cuda()


def _bare(data: Tensor) -> Step:
    model = _model()

    def step() -> None:
        model.zero_grad()
        model(data).backward()

    return step


def _plain(data: Tensor, clip: bool) -> Step:
    model = _model()
    optimizer = AdamW(model.parameters(), **OPTIONS)
    return _step(DistributedDataParallel(model), optimizer, data, _torch_clip(model) if clip else None)


def _torch_clip(model: nn.Module) -> Step:
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _sharded(data: Tensor, clip: bool, **options: Any) -> Step:
    model = _model()
    with update.through_nccl(True):
        optimizer = ShardedOptimizer(model, AdamW, **options, **OPTIONS)
    return _step(model, optimizer, data, (lambda: optimizer.clip_grad_norm_(1.0)) if clip else None)


def _step(module: nn.Module, optimizer: Any, data: Tensor, clip: Step | None) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        module(data).backward()
        if clip is not None:
            clip()
        optimizer.step()

    return step


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as Markdown."""
    plain = median(next(row["ms"] for row in rows if row["entry"] == PLAIN))
    return markdown(["entry", "host ms", "spread", f"/ {PLAIN}"], [_cells(row, plain) for row in rows])


def _cells(row: Mapping[str, Any], plain: float) -> list[str]:
    low, middle, high = quantiles(row["ms"], n=4, method="inclusive")
    return [row["entry"], f"{middle:.2f}", f"{low:.2f} - {high:.2f}", f"{middle / plain:.3f}"]
