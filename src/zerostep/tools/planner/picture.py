"""Draw a comparison with matplotlib: one stacked bar for each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerostep.tools.errors import PlanError
from zerostep.tools.planner.comparison import Comparison
from zerostep.tools.planner.report import PARTS, percent, scale

_LABELS = {"buffers": "model buffers", "scratch": "communication scratch"}
# Colours that differ in lightness too, for people who cannot distinguish some hues.
_COLOURS = ("#332288", "#88ccee", "#117733", "#ddcc77", "#aa4499", "#cc6677")
_LIGHT = ("#88ccee", "#ddcc77")
_MIN_LABELLED_WIDTH = 0.045  # of the longest bar; narrower parts have no room for a number


def check_path(path: Path) -> None:
    """Raise `PlanError` for a path to which no picture can be written."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise PlanError(f"--plot {path} is neither .png nor .svg: give the picture one of these endings")
    if not path.parent.is_dir():
        raise PlanError(f"--plot {path} cannot be written: {path.parent} is not a directory: make it first")


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture, in the format of the path's ending; call `check_path` first."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise PlanError(f"--plot needs {missing.name}: pip install 'zerostep[cli]'") from missing
    with rc_context({"svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(9, 1.9 + 0.62 * len(comparison.rows)), layout="constrained")
        axes = figure.subplots()
        _bars(axes, comparison)
        _label_axes(axes, comparison)
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise PlanError(f"--plot {path} cannot be written: {error.strerror}: choose another place") from error


def _bars(axes: Any, comparison: Comparison) -> None:
    size, unit = scale(comparison)
    longest = max(row.largest.total for row in comparison.rows) / size
    parts = [part for part in PARTS if any(getattr(row.largest, part) for row in comparison.rows)]
    names = [row.strategy.value.replace(" in DDP", "\nin DDP") for row in comparison.rows]
    left = [0.0] * len(names)
    for part in parts:
        colour = _COLOURS[PARTS.index(part)]
        widths = [getattr(row.largest, part) / size for row in comparison.rows]
        bars = axes.barh(
            names, widths, left=left, color=colour, label=_LABELS.get(part, part), edgecolor="white", linewidth=0.4
        )
        inside = [_three_digits(width) if width > _MIN_LABELLED_WIDTH * longest else "" for width in widths]
        axes.bar_label(bars, inside, label_type="center", fontsize=8, color="black" if colour in _LIGHT else "white")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for position, (total, row) in enumerate(zip(left, comparison.rows, strict=True)):
        share = row.largest.total / comparison.plain.largest.total
        text = f"{_three_digits(total)} {unit} ({percent(share)})"
        axes.text(total + 0.01 * longest, position, text, va="center", fontsize=9)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _label_axes(axes: Any, comparison: Comparison) -> None:
    size, unit = scale(comparison)
    longest = max(row.largest.total for row in comparison.rows) / size
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * longest)
    axes.set_xlabel(f"{unit} on the largest rank, without activations")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(_title(comparison), loc="left", fontsize=11, pad=34)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=9,
        borderaxespad=0.2, handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip


def _title(comparison: Comparison) -> str:
    request = comparison.request
    masters = request.settings.master_dtype
    with_masters = "" if masters is None else f", {str(masters).removeprefix('torch.')} masters"
    return f"{request.source.title}, {request.recipe.title}{with_masters}: memory per rank on {request.ranks:,} ranks"
