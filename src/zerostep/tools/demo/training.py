"""All ways of training in turn: a few steps of each, with nothing of one under way while another is timed."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerostep.tools.demo.choices import CHOICES, predicted
from zerostep.tools.demo.launch import DemoError, run_ranks
from zerostep.tools.demo.model import GPT, GPTShape, text, windows
from zerostep.tools.demo.report import RankReport, RunReport, Sizes, largest_difference
from zerostep.tools.demo.runs import DdpRun, Run, ShardedRun, synchronise

__all__ = ["DEVICES", "Demo", "Progress", "run_demo"]

SEED = 1234
BATCH = 8
BLOCK = 5
MAX_RANKS = 64
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Demo:
    """What to train, and where; `device` is `None` to take GPUs if there is one for every rank."""

    ranks: int = 2
    steps: int = 30
    optimizer: str = "adamw"
    device: str | None = None

    def check(self) -> None:
        """`DemoError` for what cannot work."""
        if not 1 <= self.ranks <= MAX_RANKS:
            raise DemoError(f"--ranks must be between 1 and {MAX_RANKS}, not {self.ranks}")
        if self.steps < 1:
            raise DemoError(f"--steps must be at least 1, not {self.steps}")
        if self.optimizer not in CHOICES:
            raise DemoError(f"--optimizer must be one of {', '.join(CHOICES)}, not {self.optimizer}")
        if self.device not in (None, *DEVICES):
            raise DemoError(f"--device must be cpu or cuda, not {self.device}")
        if self.device == "cuda" and torch.cuda.device_count() < self.ranks:
            raise DemoError(
                f"--device cuda needs a GPU for each of {self.ranks} ranks, and there are {torch.cuda.device_count()}: "
                "use fewer --ranks or --device cpu"
            )

    @property
    def place(self) -> str:
        """Where it runs."""
        return self.device or ("cuda" if torch.cuda.device_count() >= self.ranks else "cpu")


@dataclass(frozen=True)
class Progress:
    """How far rank 0 is: steps of one run, with its last loss."""

    run: str
    steps: int
    loss: float


def run_demo(demo: Demo, tell: Callable[[Progress], None] | None = None) -> list[RankReport]:
    """Train all ways on local processes; `tell` hears of progress."""
    demo.check()
    with tempfile.TemporaryDirectory() as folder:
        told = _Told(Path(folder, "progress"), tell)
        found = run_ranks(_train, demo.ranks, asdict(demo), str(told.path), device=demo.place, watch=told.look)
        told.look()
    return [RankReport([_run_report(run) for run in runs]) for runs in found]


class _Told:
    """Progress by way of a file to which rank 0 adds lines."""

    def __init__(self, path: Path, tell: Callable[[Progress], None] | None) -> None:
        self.path, self._tell, self._seen = path, tell, 0

    def look(self) -> None:
        """Pass on what is new."""
        if self._tell is None or not self.path.exists():
            return
        *lines, _ = self.path.read_text().split("\n")
        for line in lines[self._seen :]:
            self._tell(Progress(**json.loads(line)))
        self._seen = len(lines)


def _run_report(data: dict[str, Any]) -> RunReport:
    return RunReport(**{**data, "predicted": Sizes(**data["predicted"]), "measured": Sizes(**data["measured"])})


# ---------------------------------------------------------------------- on every rank


@dataclass
class _RunLog:
    run: Run
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


def _train(asked: dict[str, Any], progress: str) -> list[dict[str, Any]]:
    demo = Demo(**asked)
    choice, shape = CHOICES[demo.optimizer], GPTShape()
    device = torch.device(demo.place, dist.get_rank()) if demo.place == "cuda" else torch.device("cpu")
    plans = predicted(choice, _model(shape, device), demo.ranks, device.type == "cpu")[dist.get_rank()]
    models = [_model(shape, device) for _ in range(3)]
    runs: list[Run] = [
        DdpRun(models[0], choice, sharded=False),
        DdpRun(models[1], choice, sharded=True),
        ShardedRun(models[2], choice),
    ]
    logs = [_RunLog(run) for run in runs]
    source, random = text(), torch.Generator().manual_seed(SEED + dist.get_rank())
    for first in range(0, demo.steps, BLOCK):
        count = min(BLOCK, demo.steps - first)
        block = [windows(source, BATCH, shape.context + 1, random).to(device) for _ in range(count)]
        for log in logs:
            _train_block(log, block, device)
            _tell(progress, log)
    plain = list(models[0].parameters())
    differences = [largest_difference(plain, model.parameters()) for model in models]
    sizes = [Sizes(plan.parameters, plan.gradients + plan.scratch_at_end, plan.state) for plan in plans]
    return [_report(*each, demo.steps, device) for each in zip(logs, sizes, differences, strict=True)]


def _model(shape: GPTShape, device: torch.device) -> GPT:
    torch.manual_seed(SEED)
    return GPT(shape).to(device)


def _train_block(log: _RunLog, block: Sequence[Tensor], device: torch.device) -> None:
    synchronise(device)
    dist.barrier()
    waited, start = log.run.waited(), time.perf_counter()
    losses = [log.run.step(window).detach() for window in block]
    log.run.settle()
    synchronise(device)
    log.step_seconds.append((time.perf_counter() - start) / len(block))
    log.waited.append((log.run.waited() - waited) / len(block))
    log.losses += [loss.item() for loss in losses]


def _tell(path: str, log: _RunLog) -> None:
    if dist.get_rank() == 0:
        with Path(path).open("a") as lines:
            lines.write(json.dumps(asdict(Progress(log.run.name, len(log.losses), log.losses[-1]))) + "\n")


def _report(log: _RunLog, sizes: Sizes, difference: float, steps: int, device: torch.device) -> dict[str, Any]:
    # The first block warms up.
    seconds, waited = (values[1:] or values for values in (log.step_seconds, log.waited))
    report = RunReport(
        name=log.run.name,
        predicted=sizes,
        measured=log.run.sizes(),
        step_ms=1e3 * statistics.median(seconds),
        wire_bytes=log.run.wire_bytes(steps),
        counted=log.run.counted,
        exposed_ms=1e3 * statistics.median(waited) if device.type == "cpu" else None,
        first_loss=log.losses[0],
        last_loss=log.losses[-1],
        difference=difference,
    )
    return asdict(report)
