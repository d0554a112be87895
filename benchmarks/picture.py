"""Ratios to plain DDP as horizontal bars, with quartiles, and the bound as a line.

Run as ``python -m benchmarks.picture RESULT.json OUT.png|OUT.svg`` for a file that ``benchmarks.sharded`` wrote.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.entries import BOUND, ENTRIES, NAMED, PLAIN, WIRE, Entry, Role
from benchmarks.timing import Timing

COLORS: Mapping[Role, str] = {"bound": "#b9b9b9", "plain": "#6f6f6f", "peer": "#d08a3e", "ours": "#2f6f9f"}
BOUND_COLOR = "#b03030"
LABELS: Mapping[Role, str] = {"plain": "DDP, unsharded", "peer": "other sharded optimizers", "ours": "zerostep"}


@dataclass(frozen=True)
class Line:
    """One bar: the ratio of its median to plain DDP's, and those of its quartiles."""

    entry: Entry
    low: float
    median: float
    high: float


def lines(seconds: Mapping[str, Sequence[float]]) -> list[Line]:
    """Everything that trains, the fastest first."""
    plain = Timing(tuple(seconds[PLAIN.key])).median
    shown = [entry for entry in (*ENTRIES, *NAMED) if entry.key in seconds and entry.role != "bound"]
    found = [Line(entry, *(value / plain for value in Timing(tuple(seconds[entry.key])).quartiles)) for entry in shown]
    return sorted(found, key=lambda line: line.median)


def floor(seconds: Mapping[str, Sequence[float]]) -> float:
    """What remains of plain DDP's step when computing and the network overlap perfectly."""
    bounds = [Timing(tuple(seconds[entry.key])).median for entry in (BOUND, WIRE) if entry.key in seconds]
    return max(bounds) / Timing(tuple(seconds[PLAIN.key])).median


def draw(results: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Draw one panel for each result."""
    from matplotlib.figure import Figure

    heights = [1.1 + 0.27 * len(lines(result["seconds"])) for result in results]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    panels = figure.subplots(len(results), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, result in zip(panels, results, strict=True):
        _panel(panel, result)
    figure.savefig(target, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)


def _panel(panel: Any, result: Mapping[str, Any]) -> None:
    bars = lines(result["seconds"])
    places = range(len(bars))
    errors = [[bar.median - bar.low for bar in bars], [bar.high - bar.median for bar in bars]]
    colors = [COLORS[bar.entry.role] for bar in bars]
    panel.barh(places, [bar.median for bar in bars], color=colors, height=0.72)
    whiskers = {"fmt": "none", "ecolor": "#222222", "elinewidth": 1, "capsize": 2}
    panel.errorbar([bar.median for bar in bars], places, xerr=errors, **whiskers)
    panel.set_yticks(places, [bar.entry.name for bar in bars], fontsize=8)
    panel.invert_yaxis()
    _marks(panel, floor(result["seconds"]))
    _numbers(panel, bars)
    _legend(panel, bars, floor(result["seconds"]))
    where = "loopback" if result["rate"] is None else f"links of {result['rate'].replace('gbit', ' Gbit/s')}"
    panel.set_title(f"{result['title']}, {where}", fontsize=9, loc="left", x=0)
    panel.set_xlabel("step time / plain DDP: median, whiskers at the quartiles; less is better", fontsize=8)


def _marks(panel: Any, bound: float) -> None:
    panel.axvline(1, color="#6f6f6f", linewidth=0.8)
    panel.axvline(bound, color=BOUND_COLOR, linewidth=1.2, linestyle="--")
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(axis="x", labelsize=8)


def _numbers(panel: Any, bars: Sequence[Line]) -> None:
    for place, bar in enumerate(bars):
        panel.annotate(
            f"{bar.median:.2f}", (bar.high, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8
        )
    panel.set_xlim(0, 1.1 * max(bar.high for bar in bars))


def _legend(panel: Any, bars: Sequence[Line], bound: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    roles = {bar.entry.role for bar in bars}
    handles: list[Any] = [Patch(color=COLORS[role], label=label) for role, label in LABELS.items() if role in roles]
    handles.append(Line2D([], [], color=BOUND_COLOR, linestyle="--", label=f"bound: perfect overlap, {bound:.2f}"))
    panel.legend(handles=handles, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def main() -> None:
    """Draw a stored result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    chosen = parser.parse_args()
    draw(json.loads(chosen.result.read_text())["results"], chosen.picture)


if __name__ == "__main__":
    main()
