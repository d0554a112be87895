"""`zerostep trace`: draw one step of a training script, or of profiles that torch.profiler wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from zerostep.tools.errors import TraceError
from zerostep.tools.tables import make_table
from zerostep.tools.tracing.chrome import merged
from zerostep.tools.tracing.collect import TraceJob, collect
from zerostep.tools.tracing.events import RankTrace, read, sort_by_rank
from zerostep.tools.tracing.intervals import total
from zerostep.tools.tracing.picture import check_paths, draw
from zerostep.tools.tracing.step import StepView, common_step, view_step

EPILOG = """\b
Examples:
  zerostep trace train.py --lr 0.1 --ranks 2 --step 5 --out step.svg --out step.png
  zerostep trace train.py --out step.svg --chrome step.json
  zerostep trace --read rank0.json --read rank1.json --out step.png
"""

CONTEXT = {"ignore_unknown_options": True}
_STEP = 5
_TABLE_WIDTH = 100


def trace(
    script: Annotated[
        Path | None, typer.Argument(help="A training script, as for torchrun.", show_default=False)
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Its arguments. After --, options that zerostep trace has too.", show_default=False),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Local processes to run the script on.")] = 2,
    step: Annotated[
        int | None, typer.Option(help=f"Which step; {_STEP} of a script, the last of traces.", show_default=False)
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="A picture: .svg, .png or .pdf. May be repeated.", show_default="trace.svg"),
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(help="One trace of all ranks, for ui.perfetto.dev.", show_default=False)
    ] = None,
    reads: Annotated[
        list[Path] | None,
        typer.Option(
            "--read", help="Run nothing: read a trace of torch.profiler, one for each rank.", show_default=False
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds within which the step must be reached.")] = 600.0,
) -> int:
    """Draw one training step: compute, reduce, update, gather of each bucket and rank, and what was waited for.

    The script runs as under torchrun, and is ended after the step.
    """
    pictures = out or ([Path("trace.svg")] if chrome is None else [])
    check_paths(pictures)
    console = Console()
    if (script is None) == (not reads):
        raise TraceError("name either a script or, with --read, the traces of all ranks: see zerostep trace --help")
    if script is None:
        traces = sort_by_rank([read(path, index) for index, path in enumerate(reads or [])])
    else:
        job = TraceJob(script, arguments or [], ranks, _STEP if step is None else step, timeout)
        with console.status(f"running {script.name} on {ranks} ranks up to step {job.step}"):
            traces = collect(job)
    number = common_step(traces, step)
    views = [view_step(trace, number) for trace in traces]
    draw(views, number, script.name if script is not None else "profile", pictures)
    if chrome is not None:
        _write_chrome(chrome, traces, views)
    Console(width=max(_TABLE_WIDTH, console.width)).print(_table(views))  # so that no column is cut
    console.print(f"step {number}: {', '.join(map(str, [*pictures, *([chrome] if chrome else [])]))}", soft_wrap=True)
    return 0


def _write_chrome(path: Path, traces: Sequence[RankTrace], views: Sequence[StepView]) -> None:
    try:
        path.write_text(json.dumps(merged(traces, views)))
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}; choose another --chrome") from error


def _table(views: Sequence[StepView]) -> Table:
    phases = sorted({phase for view in views for phase in view.exposed})
    names = ["rank", "step", "forward", "backward", "update", "exposed", *phases]
    table = make_table(names, title="milliseconds; exposed in all, and by phase")
    for view in views:
        activities = [total(view.host[activity]) / 1e3 for activity in ("forward", "backward", "update")]
        waits = [total(view.exposed.get(phase, [])) / 1e3 for phase in phases]
        milliseconds = [view.window.length / 1e3, *activities, view.exposed_ms, *waits]
        table.add_row(str(view.rank), *(f"{value:.2f}" for value in milliseconds))
    return table
