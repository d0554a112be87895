"""What a step costs the host as models and groups of ranks grow, as a picture.

Run as ``python -m benchmarks.growth HOST.json SCALE.json OUT.png|OUT.svg`` for files that ``benchmarks.host`` and
``benchmarks.scale`` wrote.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.host import BARE

Rows = Sequence[Mapping[str, Any]]


def draw(host: Rows, scale: Rows, target: Path) -> None:
    """Draw the time of each parameter against their number, and of a step against the number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_parameters(left, host)
    _draw_ranks(right, scale)
    for panel in (left, right):
        panel.set_xscale("log")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(fontsize=7, frameon=False)
    figure.savefig(target, dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None)


def _draw_parameters(panel: Any, rows: Rows) -> None:
    for name in dict.fromkeys(row["entry"] for row in rows if row["entry"] != BARE):
        found = sorted((row for row in rows if row["entry"] == name), key=lambda row: row["parameters"])
        middle = [row["median"] for row in found]
        errors = [[row["median"] - row["low"] for row in found], [row["high"] - row["median"] for row in found]]
        panel.errorbar([row["parameters"] for row in found], middle, yerr=errors, marker="o", capsize=2, label=name)
    panel.set_ylim(bottom=0)
    panel.set_title("host time for each parameter over forward and backward", fontsize=9)
    panel.set_xlabel("parameters", fontsize=8)
    panel.set_ylabel("microseconds: median and quartiles", fontsize=8)


def _draw_ranks(panel: Any, rows: Rows) -> None:
    for model in dict.fromkeys(row["parameters"] for row in rows):
        for collectives, way in ((False, "messages"), (True, "collectives")):
            found = [row for row in rows if row["parameters"] == model and row["collectives"] == collectives]
            found.sort(key=lambda row: row["ranks"])
            times = [1e3 * row["step seconds"] for row in found]
            panel.plot([row["ranks"] for row in found], times, marker="o", label=f"{model / 1e6:.0f} M, {way}")
    panel.set_yscale("log")
    panel.set_title("a step over computing, other ranks silent", fontsize=9)
    panel.set_xlabel("ranks", fontsize=8)
    panel.set_ylabel("milliseconds", fontsize=8)


def main() -> None:
    """Draw two stored results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=(__doc__ or "").splitlines()[0])
    for name in ("host", "scale", "picture"):
        parser.add_argument(name, type=Path)
    chosen = parser.parse_args()
    host, scale = (json.loads(path.read_text())["rows"] for path in (chosen.host, chosen.scale))
    draw(host, scale, chosen.picture)


if __name__ == "__main__":
    main()
