"""Compare all strategies: memory of the largest and the smallest rank, and bytes sent in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from zerostep.comm.codec import dtype_named
from zerostep.plan.buckets import padded_size
from zerostep.plan.layout import Layout
from zerostep.plan.layout_planner import Settings
from zerostep.tools.errors import PlanError
from zerostep.tools.planner.forecast import Strategy, Traffic, wire_bytes
from zerostep.tools.planner.memory import (
    Memory,
    RankBytes,
    TrainingJob,
    fully_sharded,
    replicated,
    sharded,
    whole_parameters,
)
from zerostep.tools.planner.recipe import Recipe
from zerostep.tools.planner.sources import Source

_DDP_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Request:
    """What to plan: a model, its optimizers, and the number of ranks.

    `shards` ranks divide one copy of what is sharded; the other ranks hold further copies. With `in_ddp`,
    `ShardedOptimizer` over a DDP module is compared too, which keeps whole gradients. With tensor parallelism of `tp`
    ranks, `source` is what one of them holds, and `ranks` are those that hold the same.
    """

    source: Source
    recipe: Recipe
    ranks: int
    shards: int
    settings: Settings = field(default_factory=Settings)
    device: str = "cuda"
    in_ddp: bool = False
    gradients_are_views: bool = False
    tp: int = 1

    def check(self) -> None:
        """Raise `PlanError` for what cannot be planned."""
        if self.ranks < 1:
            raise PlanError(f"--ranks must be at least 1, not {self.ranks}")
        if not self.source.trained_elements:
            raise PlanError(f"--model {self.source.title} has only frozen parameters: there is nothing to train")
        if self.shards < 1 or self.ranks % self.shards:
            raise PlanError(f"{self.ranks} ranks cannot be a mesh with {self.shards} in each row: change --mesh")
        if self.in_ddp and self.settings.update == "backward":
            raise PlanError("--update backward takes a module without DDP: drop --no-shard-gradients")
        try:
            self.settings.check()
        except ValueError as error:
            raise PlanError(str(error)) from error

    @property
    def on_host(self) -> bool:
        """Whether parameters are in host memory."""
        return self.device == "cpu"


@dataclass(frozen=True)
class Row:
    """One strategy: memory of its largest and smallest rank, and the bytes a rank sends in a step (`wire`).

    `imbalance` is the largest rank's state and masters, divided by the mean of all ranks.
    """

    strategy: Strategy
    largest: Memory
    smallest: Memory
    imbalance: float
    wire: int


@dataclass(frozen=True)
class Comparison:
    """The result: a row for each strategy, and the traffic from which a forecast is made."""

    request: Request
    rows: tuple[Row, ...]
    traffic: Traffic
    buckets: int

    @property
    def plain(self) -> Row:
        """The row of plain DDP, the baseline."""
        return self.row(Strategy.DDP)

    def row(self, strategy: Strategy) -> Row:
        """The row of one strategy."""
        return next(row for row in self.rows if row.strategy is strategy)


def compare(request: Request) -> Comparison:
    """Plan every strategy; raise `PlanError` if that cannot be done."""
    request.check()
    job, layout = _prepare(request)
    traffic = _traffic(request, layout)
    strategies = _rank_bytes(request, job, layout, traffic)
    rows = [_row(strategy, rank_bytes, traffic, request) for strategy, rank_bytes in strategies]
    return Comparison(request, tuple(rows), traffic, len(layout.buckets))


def compare_largest(requests: Sequence[Request]) -> Comparison:
    """Plan what each rank of tensor parallelism holds, and return the plan of the one that needs most.

    Its rows have the smallest rank of all.
    """
    distinct = {_shapes(request): request for request in reversed(requests)}  # of equal ones the first
    plans = [compare(request) for request in reversed(distinct.values())]
    largest = max(plans, key=lambda plan: plan.row(Strategy.SHARDED).largest.total)
    rows = [
        replace(row, smallest=min((plan.row(row.strategy).smallest for plan in plans), key=lambda memory: memory.total))
        for row in largest.rows
    ]
    return replace(largest, rows=tuple(rows))


def _shapes(request: Request) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, param.shape) for name, param in request.source.params)


def bytes_of_ranks(request: Request) -> dict[Strategy, RankBytes]:
    """Return the bytes of every rank, by strategy; `request` is not checked."""
    job, layout = _prepare(request)
    return dict(_rank_bytes(request, job, layout, _traffic(request, layout)))


def _prepare(request: Request) -> tuple[TrainingJob, Layout]:
    planner = request.recipe.planner(request.settings, request.source, request.device)
    groups = request.recipe.complete_groups(request.source, planner)
    source, names = request.source, [name for name, _ in request.source.params]
    wholes: dict[Tensor, tuple[int, ...]] = {
        param: shape for (_, param), shape in zip(source.params, source.whole_shapes, strict=False)
    }
    job = TrainingJob(planner, groups, names, source.buffer_bytes, request.on_host, request.gradients_are_views, wholes)
    return job, planner.plan(groups, request.shards)


def _rank_bytes(
    request: Request, job: TrainingJob, layout: Layout, traffic: Traffic
) -> Iterator[tuple[Strategy, RankBytes]]:
    plain = replicated(job)
    yield Strategy.DDP, plain
    yield Strategy.WHOLE, whole_parameters(job, request.ranks)
    if request.in_ddp:
        yield Strategy.SHARDED_IN_DDP, sharded(job, layout, in_ddp=True)
    yield Strategy.SHARDED, sharded(job, layout)
    yield Strategy.FULL, fully_sharded(plain.memory(0), request.shards, max(traffic.units))


def _row(strategy: Strategy, rank_bytes: RankBytes, traffic: Traffic, request: Request) -> Row:
    # `extremes` ignores gradients and scratch, so the totals of two nearly equal ranks may be the other way round.
    smallest, largest = sorted(map(rank_bytes.memory, rank_bytes.extremes), key=lambda memory: memory.total)
    wire = round(wire_bytes(strategy, traffic, request.ranks, request.shards))
    return Row(strategy, largest, smallest, rank_bytes.imbalance, wire)


def _traffic(request: Request, layout: Layout) -> Traffic:
    trained = [
        (bucket.size if request.on_host else padded_size(bucket), dtype_named(bucket.dtype))
        for bucket in layout.buckets
        if bucket.trainable
    ]
    reduce_dtype = request.settings.reduce_dtype
    return Traffic(
        reduced=tuple(size * (reduce_dtype or dtype).itemsize for size, dtype in trained),
        gathered=tuple(size * dtype.itemsize for size, dtype in trained),
        ddp=_ddp_buckets(sum(param.nbytes for _, param in request.source.params if param.requires_grad)),
        units=_units(list(request.source.params)),
        elements=request.source.elements,
    )


def _ddp_buckets(total: int) -> tuple[int, ...]:
    """Return the approximate sizes of DDP's buckets."""
    full, rest = divmod(total, _DDP_BUCKET_BYTES)
    return (_DDP_BUCKET_BYTES,) * full + ((rest,) if rest else ())


def _units(params: list[tuple[str, nn.Parameter]]) -> tuple[int, ...]:
    """Return the bytes that full sharding gathers at a time: of each numbered block, and of all other parameters."""
    sizes = Counter[str]()
    for name, param in params:
        parts = name.split(".")
        number_index = next((index for index, part in enumerate(parts) if part.isdigit()), -1)
        sizes[".".join(parts[: number_index + 1])] += param.nbytes
    return tuple(sizes.values())
