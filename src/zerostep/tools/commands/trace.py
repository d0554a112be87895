"""`zerostep trace`: one step of a training script as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from zerostep.tools.tracing.events import RankTrace, TraceError, in_order, read
from zerostep.tools.tracing.intervals import total
from zerostep.tools.tracing.step import StepView, common_step, view

__all__ = ["CONTEXT", "EPILOG", "trace"]

EPILOG = """\b
Examples:
  zerostep trace train.py --lr 0.1 --ranks 2 --step 5 --out step.svg --out step.png
  zerostep trace train.py --out step.svg --chrome step.json
  zerostep trace --read rank0.json --read rank1.json --out step.png
"""

CONTEXT = {"ignore_unknown_options": True}
_STEP = 5


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
    timeout: Annotated[float, typer.Option(help="Seconds until the step must be there.")] = 600.0,
) -> int:
    """Draw one training step: compute, reduce, update, gather of each bucket and rank, and what was waited for.

    The script runs as under torchrun, and is ended after the step.
    """
    from zerostep.tools.tracing.picture import check_paths, draw

    pictures = out or ([Path("trace.svg")] if chrome is None else [])
    check_paths(pictures)
    console = Console()
    traces = _collected(console, script, arguments or [], reads or [], ranks, step, timeout)
    number = common_step(traces, step)
    views = [view(trace, number) for trace in traces]
    draw(views, number, script.name if script is not None else "profile", pictures)
    if chrome is not None:
        _write_chrome(chrome, traces, views)
    console.print(_table(views))
    console.print(f"step {number}: {', '.join(map(str, [*pictures, *([chrome] if chrome else [])]))}", soft_wrap=True)
    return 0


def _collected(
    console: Console,
    script: Path | None,
    arguments: Sequence[str],
    reads: Sequence[Path],
    ranks: int,
    step: int | None,
    timeout: float,
) -> list[RankTrace]:
    if (script is None) == (not reads):
        raise TraceError("name either a script or, with --read, the traces of all ranks: see zerostep trace --help")
    if script is None:
        return in_order([read(path, place) for place, path in enumerate(reads)])
    from zerostep.tools.tracing.collect import TraceJob, collect

    number = _STEP if step is None else step
    with console.status(f"running {script.name} on {ranks} ranks up to step {number}"):
        return collect(TraceJob(script, arguments, ranks, number, timeout))


def _write_chrome(path: Path, traces: Sequence[RankTrace], views: Sequence[StepView]) -> None:
    from zerostep.tools.tracing.chrome import write

    try:
        write(path, traces, views)
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}; choose another --chrome") from error


def _table(views: Sequence[StepView]) -> Table:
    phases = sorted({phase for view in views for phase in view.exposed})
    table = Table(
        box=SIMPLE_HEAD, title="milliseconds; exposed in all, and by phase", title_justify="left", pad_edge=False
    )
    names = ["rank", "step", "forward", "backward", "update", "exposed", *phases]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for found in views:
        hosted = [total(found.host[kind]) / 1e3 for kind in ("forward", "backward", "update")]
        waited = [total(found.exposed.get(phase, [])) / 1e3 for phase in phases]
        numbers = [found.window.length / 1e3, *hosted, found.exposed_ms, *waited]
        table.add_row(str(found.rank), *(f"{number:.2f}" for number in numbers))
    return table
