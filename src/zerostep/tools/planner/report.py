"""What a comparison says, as tables for people and as JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from zerostep.tools.planner.comparison import Comparison, Request, Row
from zerostep.tools.planner.forecast import Compute, Network, StepTime, Strategy, step_time
from zerostep.tools.planner.memory import Memory

__all__ = ["PARTS", "Forecast", "as_json", "as_text", "forecast", "percent", "scale"]

PARTS = ("parameters", "gradients", "state", "masters", "buffers", "scratch")
_COUNTS = (8, 64, 512, 4096)
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_ENOUGH = 10  # of a unit, so that one decimal is worth reading


@dataclass(frozen=True)
class Forecast:
    """The step times of all strategies at several numbers of ranks."""

    compute: Compute
    network: Network
    times: dict[int, dict[Strategy, StepTime]]


def forecast(found: Comparison, compute: Compute, network: Network) -> Forecast:
    """From few ranks to thousands, and the number that was asked for."""
    request = found.request
    ranks_in_row = request.shards if request.shards != request.ranks else 1
    counts = sorted({count for count in (*_COUNTS, request.ranks) if count % ranks_in_row == 0})
    times = {
        count: {row.strategy: _time(row, found, compute, network, count) for row in found.rows} for count in counts
    }
    return Forecast(compute, network, times)


def _time(row: Row, found: Comparison, compute: Compute, network: Network, count: int) -> StepTime:
    request = found.request
    shards = request.shards if request.shards != request.ranks else count
    return step_time(row.strategy, found.traffic, compute, network, count, shards, request.settings.gather)


# ---------------------------------------------------------------------- text


def scale(found: Comparison) -> tuple[float, str]:
    """The unit in which the largest total reads well."""
    largest = max(row.largest.total for row in found.rows)
    return next(((size, name) for size, name in _UNITS if largest >= _ENOUGH * size), _UNITS[-1])


def as_text(found: Comparison, times: Forecast | None, plain: bool) -> RenderableType:
    """Everything, for a terminal or, `plain`, for a file."""
    box = None if plain else SIMPLE_HEAD
    parts: list[RenderableType] = [_about(found), "", _memory_table(found, box), "", *_notes(found)]
    if times is not None:
        parts += ["", _time_table(found, times, box), "", *_time_notes(times)]
    return Group(*parts)


def _about(found: Comparison) -> str:
    request, source = found.request, found.request.source
    trained = "" if source.trained_elements == source.elements else f", {source.trained_elements:,} trained"
    where = f"{request.ranks} ranks"
    if request.shards != request.ranks:
        where += f", {request.ranks // request.shards} copies of {request.shards} shards"
    return "\n".join(
        [
            f"model      {source.title}: {source.elements:,} parameters{trained}, {_dtypes(request)}",
            f"optimizer  {request.recipe.title}{_settings(request)}",
            f"ranks      {where}, {'host memory' if request.on_host else 'accelerators'}, {found.buckets} buckets",
        ]
    )


def _dtypes(request: Request) -> str:
    found = Counter[str]()
    for _, param in request.source.params:
        found[str(param.dtype).removeprefix("torch.")] += param.numel()
    return " and ".join(name for name, _ in found.most_common())


def _settings(request: Request) -> str:
    settings = request.settings
    named = {"masters in": settings.master_dtype, "sums in": settings.reduce_dtype}
    said = [f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in named.items() if dtype is not None]
    if settings.partition != "auto":
        said.append(f"partition by {settings.partition}")
    return "".join(f", {each}" for each in said)


def _table(title: str, names: Sequence[str], box: Any) -> Table:
    table = Table(box=box, title=title, title_justify="left", title_style="", pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if table.columns else "left", no_wrap=True)
    return table


def _memory_table(found: Comparison, box: Any) -> Table:
    size, unit = scale(found)
    title = f"memory per rank in {unit}: the largest rank, and below it the smallest where they differ"
    table = _table(title, ("strategy", "params", "grads", *PARTS[2:], "total", "of DDP", "imbalance", "wire"), box)
    table.columns[1 + len(PARTS)].style = "cyan"
    for row in found.rows:
        table.add_row(row.strategy.value, *_cells(row.largest, size), *_comparisons(row, found, size))
        if _differ(row, size):
            table.add_row("  smallest", *_cells(row.smallest, size), style="dim")
    return table


def _cells(memory: Memory, size: float) -> list[str]:
    return [_number(getattr(memory, part) / size) for part in (*PARTS, "total")]


def _number(value: float) -> str:
    if not value:
        return "0"
    return f"{value:.2f}" if value >= 0.005 else "<0.01"


def _comparisons(row: Row, found: Comparison, size: float) -> list[str]:
    share = row.largest.total / found.plain.largest.total
    return [percent(share), f"{row.imbalance:.2f}", _number(row.wire / size)]


def percent(share: float) -> str:
    """A share, with a decimal where it is small."""
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def _differ(row: Row, size: float) -> bool:
    return _cells(row.largest, size) != _cells(row.smallest, size)


def _notes(found: Comparison) -> list[str]:
    request = found.request
    notes = [
        "scratch: what communication takes at the worst moment of backward. Not counted: activations, temporaries of",
        "the update, and what the allocator and the backend keep. wire: what a rank sends in a step.",
    ]
    if request.settings.master_dtype is not None:
        notes.append(
            "DDP and ZeroRedundancyOptimizer keep no masters themselves: counted as if the optimizer class kept them."
        )
    return notes


def _time_table(found: Comparison, times: Forecast, box: Any) -> Table:
    names = [row.strategy.value for row in found.rows]
    title = "milliseconds per step; how many of them wait for the network, and their error bar"
    table = _table(title, ("ranks", *names), box)
    for count, by_strategy in times.times.items():
        cells = [_time_cell(time) for time in by_strategy.values()]
        table.add_row(f"{count:,}", *cells)
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


def as_json(found: Comparison, times: Forecast | None) -> dict[str, Any]:
    """Bytes and seconds, unrounded."""
    request, settings = found.request, found.request.settings
    answer = {
        "model": request.source.title,
        "elements": request.source.elements,
        "trained_elements": request.source.trained_elements,
        "optimizer": request.recipe.title,
        "ranks": request.ranks,
        "shards": request.shards,
        "device": request.device,
        "settings": {name: _plain(value) for name, value in asdict(settings).items()},
        "buckets": found.buckets,
        "strategies": {row.strategy.value: _row(row) for row in found.rows},
    }
    return answer if times is None else {**answer, "forecast": _seconds(times)}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, int, float)) else str(value).removeprefix("torch.")


def _row(row: Row) -> dict[str, Any]:
    ranks = {"largest": row.largest, "smallest": row.smallest}
    memory = {name: {**asdict(found), "total": found.total} for name, found in ranks.items()}
    return {**memory, "imbalance": row.imbalance, "wire_bytes": row.wire}


def _seconds(times: Forecast) -> dict[str, Any]:
    rows = {
        str(count): {strategy.value: asdict(time) for strategy, time in by_strategy.items()}
        for count, by_strategy in times.times.items()
    }
    return {"compute": asdict(times.compute), "network": asdict(times.network), "seconds": rows}
