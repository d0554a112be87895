"""Render a comparison as tables for a terminal and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from zerostep.tools.planner.comparison import Comparison, Request, Row
from zerostep.tools.planner.forecast import Compute, Network, StepTime, Strategy, step_time
from zerostep.tools.planner.memory import Memory
from zerostep.tools.tables import make_table

PARTS = ("parameters", "gradients", "state", "masters", "buffers", "scratch")
_FORECAST_RANKS = (8, 64, 512, 4096)
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_MIN_OF_UNIT = 10  # the largest total is at least so many of the unit it is shown in


@dataclass(frozen=True)
class Forecast:
    """The step times of all strategies at several numbers of ranks."""

    compute: Compute
    network: Network
    times: dict[int, dict[Strategy, StepTime]]


def forecast(comparison: Comparison, compute: Compute, network: Network) -> Forecast:
    """Forecast the step times of all strategies, from few ranks to thousands, and at the requested number."""
    request = comparison.request
    ranks_in_row = request.shards if request.shards != request.ranks else 1
    counts = sorted({count for count in (*_FORECAST_RANKS, request.ranks) if count % ranks_in_row == 0})
    times = {
        count: {row.strategy: _time(row, comparison, compute, network, count) for row in comparison.rows}
        for count in counts
    }
    return Forecast(compute, network, times)


def _time(row: Row, comparison: Comparison, compute: Compute, network: Network, count: int) -> StepTime:
    request, settings = comparison.request, comparison.request.settings
    shards = request.shards if request.shards != request.ranks else count
    return step_time(
        row.strategy, comparison.traffic, compute, network, count, shards, settings.gather, settings.update
    )


# ---------------------------------------------------------------------- text


def scale(comparison: Comparison) -> tuple[float, str]:
    """Return the size and the name of the unit in which to show bytes, chosen by the largest total."""
    largest = max(row.largest.total for row in comparison.rows)
    return next(((size, name) for size, name in _UNITS if largest >= _MIN_OF_UNIT * size), _UNITS[-1])


def as_text(comparison: Comparison, times: Forecast | None, plain: bool) -> RenderableType:
    """Return all tables and notes, for a terminal or, `plain`, for a file."""
    box = None if plain else SIMPLE_HEAD
    parts: list[RenderableType] = [_about(comparison), "", _memory_table(comparison, box), "", *_notes(comparison)]
    if times is not None:
        parts += ["", _time_table(comparison, times, box), "", *_time_notes(times)]
    return Group(*parts)


def _about(comparison: Comparison) -> str:
    request, source = comparison.request, comparison.request.source
    trained = "" if source.trained_elements == source.elements else f", {source.trained_elements:,} trained"
    where, elements = f"{request.ranks} ranks", f"{source.elements:,} parameters{trained}, {_dtypes(request)}"
    if request.tp > 1:
        where = f"{request.ranks * request.tp} ranks, {request.ranks} of data x {request.tp} of tensor parallelism"
        elements = f"{source.whole_elements:,} parameters, {_dtypes(request)}; on a rank {source.elements:,}{trained}"
    if request.shards != request.ranks:
        where += f", {request.ranks // request.shards} copies of {request.shards} shards"
    return "\n".join(
        [
            f"model      {source.title}: {elements}",
            f"optimizer  {request.recipe.title}{_settings(request)}",
            f"ranks      {where}, {'host memory' if request.on_host else 'accelerators'}, {comparison.buckets} buckets",
        ]
    )


def _dtypes(request: Request) -> str:
    elements = Counter[str]()
    for _, param in request.source.params:
        elements[str(param.dtype).removeprefix("torch.")] += param.numel()
    return " and ".join(name for name, _ in elements.most_common())


def _settings(request: Request) -> str:
    settings = request.settings
    named = {"masters in": settings.master_dtype, "sums in": settings.reduce_dtype}
    texts = [f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in named.items() if dtype is not None]
    if settings.partition != "auto":
        texts.append(f"partition by {settings.partition}")
    if settings.update == "backward":
        texts.append("updated inside backward")
    return "".join(f", {each}" for each in texts)


def _memory_table(comparison: Comparison, box: Any) -> Table:
    size, unit = scale(comparison)
    title = f"memory per rank in {unit}: the largest rank, and below it the smallest where they differ"
    names = ("strategy", "params", "grads", *PARTS[2:], "total", "of DDP", "imbalance", "wire")
    table = make_table(names, left=("strategy",), title=title, title_style="", box=box)
    table.columns[1 + len(PARTS)].style = "cyan"
    for row in comparison.rows:
        largest, smallest = _cells(row.largest, size), _cells(row.smallest, size)
        share = percent(row.largest.total / comparison.plain.largest.total)
        table.add_row(row.strategy.value, *largest, share, f"{row.imbalance:.2f}", _two_decimals(row.wire / size))
        if smallest != largest:
            table.add_row("  smallest", *smallest, style="dim")
    return table


def _cells(memory: Memory, size: float) -> list[str]:
    return [_two_decimals(getattr(memory, part) / size) for part in (*PARTS, "total")]


def _two_decimals(value: float) -> str:
    if not value:
        return "0"
    return f"{value:.2f}" if value >= 0.005 else "<0.01"


def percent(share: float) -> str:
    """Return a share in percent, with a decimal where it is small."""
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def _notes(comparison: Comparison) -> list[str]:
    request = comparison.request
    notes = [
        "scratch: what communication takes at the worst moment of backward. Not counted: activations, temporaries of",
        "the update, and what the allocator and the backend keep. wire: what a rank sends in a step.",
    ]
    if request.tp > 1:
        notes += [
            "tp: shown is the rank of tensor parallelism that holds most. What tensor parallelism itself sends, for",
            "activations and their gradients, is not in wire.",
        ]
    if request.settings.master_dtype is not None:
        notes.append(
            "DDP and ZeroRedundancyOptimizer keep no masters themselves: counted as if the optimizer class kept them."
        )
    return notes


def _time_table(comparison: Comparison, times: Forecast, box: Any) -> Table:
    names = [row.strategy.value for row in comparison.rows]
    title = "milliseconds per step; how many of them wait for the network, and their error bar"
    table = make_table(("ranks", *names), left=("ranks",), title=title, title_style="", box=box)
    for count, by_strategy in times.times.items():
        table.add_row(f"{count:,}", *map(_time_cell, by_strategy.values()))
    return table


def _time_cell(time: StepTime) -> str:
    total, exposed, least, most = (f"{1e3 * part:,.0f}" for part in (time.total, time.exposed, time.least, time.most))
    return f"{total} ({exposed}; {least} - {most})"


def _time_notes(times: Forecast) -> list[str]:
    network, compute = times.network, times.compute
    return [
        f"a ring model: {network.bandwidth / 1e9:g} GB/s and {network.latency * 1e6:g} us for each message, "
        f"{compute.flops / 1e12:g} TFLOP/s, {compute.tokens:,} tokens per rank;",
        f"the error bar: collectives that take {network.error:.0%} less or more",
    ]


# ---------------------------------------------------------------------- JSON


def as_json(comparison: Comparison, times: Forecast | None) -> dict[str, Any]:
    """Return the comparison in bytes and seconds, unrounded."""
    request, settings = comparison.request, comparison.request.settings
    content = {
        "model": request.source.title,
        "elements": request.source.elements,
        "trained_elements": request.source.trained_elements,
        "optimizer": request.recipe.title,
        "ranks": request.ranks,
        "shards": request.shards,
        "tp": request.tp,
        "device": request.device,
        "settings": {name: _plain(value) for name, value in asdict(settings).items()},
        "buckets": comparison.buckets,
        "strategies": {row.strategy.value: _row(row) for row in comparison.rows},
    }
    return content if times is None else {**content, "forecast": _seconds(times)}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int, float)) else str(value).removeprefix("torch.")


def _row(row: Row) -> dict[str, Any]:
    ranks = {"largest": row.largest, "smallest": row.smallest}
    by_rank = {name: {**asdict(memory), "total": memory.total} for name, memory in ranks.items()}
    return {**by_rank, "imbalance": row.imbalance, "wire_bytes": row.wire}


def _seconds(times: Forecast) -> dict[str, Any]:
    rows = {
        str(count): {strategy.value: asdict(time) for strategy, time in by_strategy.items()}
        for count, by_strategy in times.times.items()
    }
    return {"compute": asdict(times.compute), "network": asdict(times.network), "seconds": rows}
