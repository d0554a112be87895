"""All strategies side by side: the memory of the largest and the smallest rank, and the bytes on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from zerostep.plan.buckets import padded_size
from zerostep.plan.layout import Layout
from zerostep.plan.layout_planner import Settings
from zerostep.tools.planner.errors import PlanError
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

__all__ = ["Comparison", "Request", "Row", "bytes_of_ranks", "compare"]

_DDP_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Request:
    """What is asked: a model, how it is trained, and on how many ranks.

    `shards` ranks divide one copy of what is sharded; the others hold further copies. With `in_ddp`, the module of
    `ShardedOptimizer` is wrapped in DDP, which keeps whole gradients.
    """

    source: Source
    recipe: Recipe
    ranks: int
    shards: int
    settings: Settings = field(default_factory=Settings)
    device: str = "cuda"
    in_ddp: bool = False
    gradients_are_views: bool = False

    def check(self) -> None:
        """`PlanError` for what cannot be planned."""
        if self.ranks < 1:
            raise PlanError(f"--ranks must be at least 1, not {self.ranks}")
        if not self.source.trained_elements:
            raise PlanError(f"--model {self.source.title} has only frozen parameters: there is nothing to train")
        if self.shards < 1 or self.ranks % self.shards:
            raise PlanError(f"{self.ranks} ranks cannot be a mesh with {self.shards} in each row: change --mesh")
        try:
            self.settings.check()
        except ValueError as error:
            raise PlanError(str(error)) from error

    @property
    def on_host(self) -> bool:
        """Whether parameters lie in host memory."""
        return self.device == "cpu"


@dataclass(frozen=True)
class Row:
    """One strategy: its largest and smallest rank, the largest rank's state against the mean, bytes sent in a step."""

    strategy: Strategy
    largest: Memory
    smallest: Memory
    imbalance: float
    wire: int


@dataclass(frozen=True)
class Comparison:
    """The answer: a row for each strategy, and what a forecast needs."""

    request: Request
    rows: tuple[Row, ...]
    traffic: Traffic
    buckets: int

    @cached_property
    def plain(self) -> Row:
        """Plain DDP, which all others are measured by."""
        return next(row for row in self.rows if row.strategy is Strategy.DDP)


def compare(request: Request) -> Comparison:
    """Plan every strategy for one request."""
    request.check()
    job, layout = _prepare(request)
    traffic = _traffic(request, layout)
    rows = [_row(strategy, shares, traffic, request) for strategy, shares in _shares(request, job, layout, traffic)]
    return Comparison(request, tuple(rows), traffic, len(layout.buckets))


def bytes_of_ranks(request: Request) -> dict[Strategy, RankBytes]:
    """Every strategy with the memory of every rank."""
    job, layout = _prepare(request)
    return dict(_shares(request, job, layout, _traffic(request, layout)))


def _prepare(request: Request) -> tuple[TrainingJob, Layout]:
    planner = request.recipe.planner(request.settings, request.source, request.device)
    groups = request.recipe.groups(request.source, planner)
    names = [name for name, _ in request.source.params]
    job = TrainingJob(planner, groups, names, request.source.buffer_bytes, request.on_host, request.gradients_are_views)
    return job, planner.plan(groups, request.shards)


def _shares(
    request: Request, job: TrainingJob, layout: Layout, traffic: Traffic
) -> Iterator[tuple[Strategy, RankBytes]]:
    plain = replicated(job)
    yield Strategy.DDP, plain
    yield Strategy.WHOLE, whole_parameters(job, request.ranks)
    if request.in_ddp:
        yield Strategy.SHARDED_IN_DDP, sharded(job, layout, in_ddp=True)
    yield Strategy.SHARDED, sharded(job, layout)
    yield Strategy.FULL, fully_sharded(plain.memory(0), request.shards, max(traffic.units))


def _row(strategy: Strategy, shares: RankBytes, traffic: Traffic, request: Request) -> Row:
    # What is kept of gradients is not under way: the totals of two nearly equal ranks may be the other way round.
    smallest, largest = sorted(map(shares.memory, shares.extremes), key=lambda memory: memory.total)
    wire = round(wire_bytes(strategy, traffic, request.ranks, request.shards))
    return Row(strategy, largest, smallest, shares.imbalance, wire)


def _traffic(request: Request, layout: Layout) -> Traffic:
    trained = [bucket for bucket in layout.buckets if bucket.trainable]
    sizes = [bucket.size if request.on_host else padded_size(bucket) for bucket in trained]
    widths = [getattr(torch, bucket.dtype).itemsize for bucket in trained]
    wide = request.settings.reduce_dtype
    return Traffic(
        reduced=tuple(size * (wide.itemsize if wide else width) for size, width in zip(sizes, widths, strict=True)),
        gathered=tuple(size * width for size, width in zip(sizes, widths, strict=True)),
        ddp=_ddp_buckets(sum(param.nbytes for _, param in request.source.params if param.requires_grad)),
        units=_units(list(request.source.params)),
        elements=request.source.elements,
    )


def _ddp_buckets(total: int) -> tuple[int, ...]:
    """About what DDP makes of its gradients."""
    full, rest = divmod(total, _DDP_BUCKET_BYTES)
    return (_DDP_BUCKET_BYTES,) * full + ((rest,) if rest else ())


def _units(params: list[tuple[str, nn.Parameter]]) -> tuple[int, ...]:
    """The bytes of what full sharding brings together at a time: each numbered block, and all that is in none."""
    found = Counter[str]()
    for name, param in params:
        parts = name.split(".")
        place = next((place for place, part in enumerate(parts) if part.isdigit()), -1)
        found[".".join(parts[: place + 1])] += param.nbytes
    return tuple(found.values())
