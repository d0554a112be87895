"""Train all ways in turn, a block of steps of each, and report what each rank measured.

Blocks alternate so that a change in the machine's load affects all ways alike; nothing of one way is under way while
another is timed.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from zerostep.plan.layout_planner import Settings
from zerostep.tools.demo.launch import run_ranks
from zerostep.tools.demo.model import GPT, GPTShape, text, windows
from zerostep.tools.demo.report import RunReport, Sizes, largest_difference
from zerostep.tools.demo.runs import GATHER, DdpRun, ShardedRun, synchronise
from zerostep.tools.errors import DemoError
from zerostep.tools.planner.comparison import Request, bytes_of_ranks
from zerostep.tools.planner.forecast import Strategy
from zerostep.tools.planner.memory import Memory
from zerostep.tools.planner.recipe import Recipe, Rule
from zerostep.tools.planner.sources import Source

SEED = 1234
BATCH = 8
BLOCK = 5  # steps
MAX_RANKS = 64
CHOICES: Mapping[str, Recipe] = {
    "adamw": Recipe(Rule(optim.AdamW, {"lr": 1e-3})),
    "sgd": Recipe(Rule(optim.SGD, {"lr": 0.1, "momentum": 0.9})),
    "muon": Recipe(Rule(optim.AdamW, {"lr": 1e-3}), Rule(optim.Muon, {"lr": 0.01})),
    "adafactor": Recipe(Rule(optim.Adafactor, {"lr": 0.01})),
}


@dataclass(frozen=True)
class Demo:
    """What to train, and where; without a `device`, on GPUs if there is one for every rank."""

    ranks: int = 2
    steps: int = 30
    optimizer: str = "adamw"
    device: str | None = None

    def check(self) -> None:
        """Raise `DemoError` for values that cannot work."""
        if not 1 <= self.ranks <= MAX_RANKS:
            raise DemoError(f"--ranks must be between 1 and {MAX_RANKS}, not {self.ranks}")
        if self.steps < 1:
            raise DemoError(f"--steps must be at least 1, not {self.steps}")
        if self.optimizer not in CHOICES:
            raise DemoError(f"--optimizer must be one of {', '.join(CHOICES)}, not {self.optimizer}")
        if self.device not in (None, "cpu", "cuda"):
            raise DemoError(f"--device must be cpu or cuda, not {self.device}")
        if self.device == "cuda" and torch.cuda.device_count() < self.ranks:
            raise DemoError(
                f"--device cuda needs a GPU for each of {self.ranks} ranks, and there are {torch.cuda.device_count()}: "
                "use fewer --ranks or --device cpu"
            )

    @property
    def device_type(self) -> str:
        """The device that it runs on, cpu or cuda."""
        return self.device or ("cuda" if torch.cuda.device_count() >= self.ranks else "cpu")


@dataclass(frozen=True)
class Progress:
    """The steps that rank 0 has made of one run, and its last loss."""

    run: str
    steps: int
    loss: float


def run_demo(demo: Demo, on_progress: Callable[[Progress], None] | None = None) -> list[list[RunReport]]:
    """Train all ways on local processes and return the reports of each rank; `on_progress` is called in this one."""
    demo.check()
    with tempfile.TemporaryDirectory() as folder:
        reader = _ProgressReader(Path(folder, "progress"), on_progress)
        results = run_ranks(
            _train, demo.ranks, asdict(demo), str(reader.path), device=demo.device_type, watch=reader.poll
        )
        reader.poll()
    return [[_run_report(run) for run in runs] for runs in results]


class _ProgressReader:
    """Reads progress from a file to which rank 0 appends lines."""

    def __init__(self, path: Path, on_progress: Callable[[Progress], None] | None) -> None:
        self.path, self._on_progress, self._lines_read = path, on_progress, 0

    def poll(self) -> None:
        """Report the lines that are new."""
        if self._on_progress is None or not self.path.exists():
            return
        # The last element is empty, or a line that rank 0 has written in part: it is left for the next poll.
        *lines, _ = self.path.read_text().split("\n")
        for line in lines[self._lines_read :]:
            self._on_progress(Progress(**json.loads(line)))
        self._lines_read = len(lines)


def _run_report(data: dict[str, Any]) -> RunReport:
    return RunReport(**{**data, "predicted": Sizes(**data["predicted"]), "measured": Sizes(**data["measured"])})


# ---------------------------------------------------------------------- on every rank


@dataclass
class _RunLog:
    run: DdpRun | ShardedRun
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


def _train(demo_fields: dict[str, Any], progress_path: str) -> list[dict[str, Any]]:
    demo = Demo(**demo_fields)
    recipe, shape = CHOICES[demo.optimizer], GPTShape()
    device = torch.device(demo.device_type, dist.get_rank()) if demo.device_type == "cuda" else torch.device("cpu")
    plans = predicted(recipe, _model(shape, device), demo.ranks, device.type)[dist.get_rank()]
    models = [_model(shape, device) for _ in range(4)]
    logs = [
        _RunLog(DdpRun(models[0], recipe, sharded=False)),
        _RunLog(DdpRun(models[1], recipe, sharded=True)),
        _RunLog(ShardedRun(models[2], recipe, "step")),
        _RunLog(ShardedRun(models[3], recipe, "backward")),
    ]
    source, random = text(), torch.Generator().manual_seed(SEED + dist.get_rank())
    for first in range(0, demo.steps, BLOCK):
        count = min(BLOCK, demo.steps - first)
        block = [windows(source, BATCH, shape.context + 1, random).to(device) for _ in range(count)]
        for log in logs:
            _train_block(log, block, device)
            _write_progress(progress_path, log)
    plain = list(models[0].parameters())
    differences = [largest_difference(plain, model.parameters()) for model in models]
    sizes = [Sizes(plan.parameters, plan.gradients + plan.scratch_at_end, plan.state) for plan in plans]
    return [_report(*each, demo.steps, device) for each in zip(logs, sizes, differences, strict=True)]


def predicted(recipe: Recipe, model: nn.Module, ranks: int, device: str) -> list[list[Memory]]:
    """Return the planned memory of each rank: of plain DDP, the drop-in, and `ShardedOptimizer` in both ways."""
    source = Source("demo", tuple(model.named_parameters()), tuple(model.buffers()))
    request = Request(source, recipe, ranks, ranks, Settings(gather=GATHER), device, gradients_are_views=True)
    plans = bytes_of_ranks(request)
    inside = bytes_of_ranks(replace(request, settings=replace(request.settings, update="backward")))
    plain, whole = plans[Strategy.DDP].memory(0), plans[Strategy.WHOLE]
    both = plans[Strategy.SHARDED], inside[Strategy.SHARDED]
    return [[plain, whole.memory(rank), *(each.memory(rank) for each in both)] for rank in range(ranks)]


def _model(shape: GPTShape, device: torch.device) -> GPT:
    torch.manual_seed(SEED)
    return GPT(shape).to(device)


def _train_block(log: _RunLog, block: Sequence[Tensor], device: torch.device) -> None:
    synchronise(device)
    dist.barrier()  # or the first step would also wait for ranks that are still at the block before
    waited, start = log.run.waited(), time.perf_counter()
    losses = [log.run.step(window).detach() for window in block]
    log.run.settle()
    synchronise(device)
    log.step_seconds.append((time.perf_counter() - start) / len(block))
    log.waited.append((log.run.waited() - waited) / len(block))
    log.losses += [loss.item() for loss in losses]


def _write_progress(path: str, log: _RunLog) -> None:
    if dist.get_rank() == 0:
        with Path(path).open("a") as lines:
            lines.write(json.dumps(asdict(Progress(log.run.name, len(log.losses), log.losses[-1]))) + "\n")


def _report(log: _RunLog, sizes: Sizes, difference: float, steps: int, device: torch.device) -> dict[str, Any]:
    # The first block is the warm-up; it counts only where it is the only one.
    seconds, waited = (values[1:] or values for values in (log.step_seconds, log.waited))
    report = RunReport(
        name=log.run.name,
        predicted=sizes,
        measured=log.run.sizes(),
        step_ms=1e3 * statistics.median(seconds),
        wire_bytes=log.run.wire_bytes(steps),
        exposed_ms=1e3 * statistics.median(waited) if device.type == "cpu" else None,
        first_loss=log.losses[0],
        last_loss=log.losses[-1],
        difference=difference,
    )
    return asdict(report)
