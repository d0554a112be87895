"""Plain DDP and DDP with sharded optimizer state side by side: local ranks, one seed, the same data, real text."""

import json
import math
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Optimizer

from zerostep import ZeroRedundancyOptimizer

SEED = 1234
BATCH = 8
LEARNING_RATE = 1e-3
TEXT_BYTES = 1 << 20
MAX_RANKS = 64
EXACT_WORLD = 2  # up to here a sum of gradients has only one order, so anything but equality is an error


class DemoError(RuntimeError):
    """The demonstration cannot run; the message is one line for the user."""


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a byte-level GPT."""

    context: int = 64
    width: int = 160
    heads: int = 5
    layers: int = 4
    vocabulary: int = 256


class GPT(nn.Module):
    """A causal transformer whose forward pass takes windows of ``context + 1`` bytes and returns the loss."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Parameter(0.02 * torch.randn(shape.context, shape.width))
        self.blocks = nn.ModuleList(_block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(shape.context))

    def forward(self, window: Tensor) -> Tensor:
        """Return the mean cross-entropy of every next byte."""
        hidden = self.token(window[:, :-1]) + self.position
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def _block(shape: GPTShape) -> nn.Module:
    return nn.TransformerEncoderLayer(
        shape.width, shape.heads, 4 * shape.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


@dataclass(frozen=True)
class RunReport:
    """What one training run cost on one rank, and where its loss went."""

    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    step_ms: float
    first_loss: float
    last_loss: float


@dataclass(frozen=True)
class RankReport:
    """Both runs of one rank; ``difference`` is the largest between their final parameters, 0.0 if bit-equal."""

    plain: RunReport
    sharded: RunReport
    difference: float


def verdict(reports: list[RankReport]) -> tuple[bool, str]:
    """Return whether the runs agree as far as this number of ranks promises it, and a line that says so."""
    difference = max(report.difference for report in reports)
    if difference == 0:
        return True, "parameters after the last step: bit-equal on every rank"
    line = f"parameters after the last step: NOT bit-equal, largest difference {difference:.3g}"
    return len(reports) > EXACT_WORLD, line


@dataclass
class _Run:
    model: DDP
    optimizer: Optimizer
    inner: Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, window: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(window)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def report(self) -> RunReport:
        parameters = list(self.model.parameters())
        state = (value for entry in self.inner.state.values() for value in entry.values())
        return RunReport(
            parameter_bytes=_bytes(parameters),
            gradient_bytes=_bytes(p.grad for p in parameters),
            state_bytes=_bytes(state),
            step_ms=1e3 * statistics.median(self.seconds),
            first_loss=self.losses[0],
            last_loss=self.losses[-1],
        )


def run_demo(ranks: int, steps: int) -> list[RankReport]:
    """Train both ways on ``ranks`` local processes and compare."""
    if not 1 <= ranks <= MAX_RANKS:
        raise DemoError(f"--ranks must be between 1 and {MAX_RANKS}, not {ranks}")
    if steps < 1:
        raise DemoError(f"--steps must be at least 1, not {steps}")
    return [_rank_report(data) for data in run_ranks(_train, ranks, steps)]


def run_ranks(job: Callable[..., object], ranks: int, *arguments: object) -> list[Any]:
    """Run ``job(*arguments)`` on local Gloo ranks of one thread each; return what each returned, passed on as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_rank_main, (job, ranks, folder, arguments), nprocs=ranks)
        except (ProcessRaisedException, ProcessExitedException) as error:
            raise DemoError(f"rank {error.error_index} failed: {str(error).strip().splitlines()[-1]}") from error
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _rank_main(rank: int, job: Callable[..., object], ranks: int, folder: str, arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    meeting = Path(folder, "store").as_uri()
    dist.init_process_group("gloo", meeting, timeout=timedelta(minutes=2), world_size=ranks, rank=rank)
    try:
        Path(folder, f"{rank}.json").write_text(json.dumps(job(*arguments)))
    finally:
        dist.destroy_process_group()


def _train(steps: int) -> dict[str, Any]:
    plain, sharded = _run(sharded=False), _run(sharded=True)
    text = _text()
    random = torch.Generator().manual_seed(SEED + dist.get_rank())
    for _ in range(steps):
        window = _windows(text, random)
        plain.step(window)
        sharded.step(window)
    difference = largest_difference(plain.model.parameters(), sharded.model.parameters())
    return asdict(RankReport(plain.report(), sharded.report(), difference))


def _run(sharded: bool) -> _Run:
    torch.manual_seed(SEED)
    model = DDP(GPT(GPTShape()))
    if not sharded:
        optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
        return _Run(model, optimizer, optimizer)
    wrapper = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=LEARNING_RATE)
    return _Run(model, wrapper, wrapper.optim)


def _text() -> Tensor:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)[:TEXT_BYTES]
    if len(text) <= GPTShape().context:
        raise DemoError("the sources of the Python standard library, the demo's text, are not installed")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: Tensor, random: torch.Generator) -> Tensor:
    length = GPTShape().context + 1
    starts = torch.randint(len(text) - length + 1, (BATCH, 1), generator=random)
    return text[starts + torch.arange(length)].long()


def largest_difference(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """Return the largest absolute difference of two lists of tensors: 0.0 if equal, infinite if one is not finite."""
    gaps = [(a - b).abs().max().item() for a, b in zip(left, right, strict=True) if not torch.equal(a, b)]
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)


def _bytes(values: Iterable[object]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _rank_report(data: dict[str, Any]) -> RankReport:
    return RankReport(RunReport(**data["plain"]), RunReport(**data["sharded"]), data["difference"])
