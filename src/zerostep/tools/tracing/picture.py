"""Draw one step of all ranks on one time axis, with matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zerostep.tools.errors import TraceError
from zerostep.tools.tracing.intervals import Interval
from zerostep.tools.tracing.step import StepView

_FORMATS = (".svg", ".png", ".pdf")
_COLOURS = {
    "forward": ("#a6cee3", "forward, and work outside of the rest"),
    "backward": ("#2c7fb8", "backward"),
    "step": ("#d0d0d0", "step(): launches and bookkeeping"),
    "update": ("#41ab5d", "update of the owned part"),
    "device": ("#6b7a8f", "kernels"),
    "reduce": ("#d4b9da", "gradients on their way"),
    "gather": ("#fdd49e", "parameters on their way"),
    "other": ("#c49c94", "other messages on their way"),
    "exposed": ("#d7191c", "waiting: communication that is not hidden"),
}
_ROW_HEIGHT = 0.26  # inches
_MAX_LABELS = 40
_FONT = 8


def check_paths(paths: Iterable[Path]) -> None:
    """Raise `TraceError` for a path to which no picture can be written."""
    for path in paths:
        if path.suffix.lower() not in _FORMATS:
            raise TraceError(f"{path} is no picture: its name must end with {', '.join(_FORMATS)}")
        if not path.parent.is_dir():
            raise TraceError(f"{path.parent} is not a folder: create it, or choose another --out")


def draw(views: Sequence[StepView], step: int, title: str, paths: Iterable[Path]) -> None:
    """Draw all ranks below each other and write the picture to every path."""
    figure = _figure(views, step, title)
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _figure(views: Sequence[StepView], step: int, title: str) -> Any:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise TraceError(f"pictures need {missing.name}: pip install 'zerostep[cli]'") from missing

    begin = min(view.window.start for view in views)
    rows = [_row_names(view) for view in views]
    with rc_context({"font.size": _FONT, "svg.hashsalt": "zerostep", "axes.axisbelow": True}):
        height = 1.35 + sum(_ROW_HEIGHT * len(names) + 0.42 for names in rows)
        figure = Figure(figsize=(10.5, height), layout="constrained")
        ratios = [len(names) for names in rows]
        axes = figure.subplots(len(views), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for axis, view, names in zip(axes, views, rows, strict=True):
            _draw_rank(axis, view, names, begin)
        axes[-1].set_xlabel("milliseconds since the first rank ended the step before")
        axes[0].set_xlim(0, max(view.window.stop for view in views) / 1e3 - begin / 1e3)
        figure.suptitle(f"{title}, step {step}", fontsize=_FONT + 3, x=0.01, ha="left")
        _legend(figure, views)
    return figure


def _row_names(view: StepView) -> list[str]:
    return ["host", *(["device"] if view.device else []), *view.rows]


def _draw_rank(axis: Any, view: StepView, names: Sequence[str], begin: float) -> None:
    rows = {name: row for row, name in enumerate(names)}
    # Later bars are drawn over earlier ones: waits over the communication they belong to.
    for activity, spans in view.host.items():
        _bars(axis, spans, rows["host"], _COLOURS[activity][0], begin)
    if view.device:
        _bars(axis, view.device, rows["device"], _COLOURS["device"][0], begin)
    for comm in view.comm_spans:
        colour = _COLOURS[comm.phase.split()[0]][0]
        _bars(axis, [comm.span], rows[comm.row], colour, begin)
        _bars(axis, comm.waits, rows[comm.row], _COLOURS["exposed"][0], begin)
    for update in view.updates:
        for row in update.rows:
            _bars(axis, [update.span], rows[row], _COLOURS["update"][0], begin)
    for spans in view.exposed.values():
        _bars(axis, spans, rows["host"], _COLOURS["exposed"][0], begin)
    _label_axis(axis, view, names, begin)


def _bars(axis: Any, spans: Iterable[Interval], row: int, colour: str, begin: float) -> None:
    bars = [((span.start - begin) / 1e3, span.length / 1e3) for span in spans]
    axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, linewidth=0)


def _label_axis(axis: Any, view: StepView, names: Sequence[str], begin: float) -> None:
    every = -(-len(names) // _MAX_LABELS)
    axis.set_yticks(range(0, len(names), every), [names[row] for row in range(0, len(names), every)])
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axis.axvline((view.window.stop - begin) / 1e3, color="#444444", linewidth=0.8, linestyle=":")
    axis.spines[["top", "right", "left"]].set_visible(False)
    parts = ", ".join(
        f"{phase} {sum(span.length for span in spans) / 1e3:.2f}" for phase, spans in view.exposed.items()
    )
    exposed = f"exposed communication {view.exposed_ms:.2f} ms" + (f" ({parts})" if parts else "")
    title = f"rank {view.rank}: {view.window.length / 1e3:.2f} ms, {exposed}"
    axis.set_title(title, loc="left", fontsize=_FONT + 1, fontweight="bold")


def _legend(figure: Any, views: Sequence[StepView]) -> None:
    from matplotlib.patches import Patch

    present = {activity for view in views for activity, spans in view.host.items() if spans} | {"exposed"}
    present |= {"device"} if any(view.device for view in views) else set()
    phases = {comm.phase.split()[0] for view in views for comm in view.comm_spans}
    shown = [entry for name, entry in _COLOURS.items() if name in present | phases]
    patches = [Patch(facecolor=colour, label=label) for colour, label in shown]
    figure.legend(handles=patches, loc="outside lower left", ncols=4, frameon=False, fontsize=_FONT)
