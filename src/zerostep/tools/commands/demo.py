"""`zerostep demo`: memory, step time and parity of plain DDP and both sharded optimizers on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from zerostep.tools.demo import Demo, Progress, RunReport, compare_runs, run_demo
from zerostep.tools.tables import make_table

EPILOG = """\b
Examples:
  zerostep demo
  zerostep demo --ranks 4 --optimizer muon
  zerostep demo --steps 100 --device cpu
"""

_LINES = 4  # progress lines of one run where there is no terminal


def demo(
    ranks: Annotated[int, typer.Option(help="Local processes to train with.")] = 2,
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 30,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, muon (with AdamW) or adafactor.")] = "adamw",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda with a GPU for each rank, else cpu")
    ] = None,
) -> int:
    """Train a small GPT with plain DDP, the drop-in and ShardedOptimizer; compare memory, time and numbers."""
    console = Console()
    settings = Demo(ranks, steps, optimizer, device)
    settings.check()
    where = "over NCCL, a GPU each" if settings.device_type == "cuda" else "over Gloo, on the CPU"
    count = f"{ranks} ranks" if ranks > 1 else "1 rank"
    title = f"{count} {where}: a GPT on the standard library's sources, {optimizer}, {steps} steps"
    console.print(title, soft_wrap=True)
    with _display(console, settings) as on_progress:
        reports = run_demo(settings, on_progress)
    passed, lines = compare_runs(reports)
    console.print(_memory_table(reports), _cost_table(reports), sep="")
    console.print(*_notes(reports), *lines, sep="\n", soft_wrap=True)
    return 0 if passed else 1


@contextmanager
def _display(console: Console, settings: Demo) -> Iterator[Callable[[Progress], None]]:
    """Yield a callback that shows progress: as bars on a terminal, as a few plain lines anywhere else."""
    if not console.is_terminal:
        yield lambda progress: _print_line(console, settings, progress)
        return
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Bars(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        starting = bars.add_task("starting the ranks", total=None, loss="")
        tasks = dict[str, TaskID]()

        def show(progress: Progress) -> None:
            bars.update(starting, visible=False)
            if progress.run not in tasks:
                tasks[progress.run] = bars.add_task(progress.run, total=settings.steps, loss="")
            bars.update(tasks[progress.run], completed=progress.steps, loss=f"loss {progress.loss:.3f}")

        yield show


def _print_line(console: Console, settings: Demo, progress: Progress) -> None:
    every = max(1, settings.steps // _LINES)
    # Progress comes in blocks of up to 5 steps, so the steps to print are rarely hit exactly.
    if progress.steps == settings.steps or progress.steps % every < min(every, 5):
        text = f"{progress.run}: step {progress.steps} of {settings.steps}, loss {progress.loss:.3f}"
        console.print(text, soft_wrap=True)


def _memory_table(reports: Sequence[Sequence[RunReport]]) -> Table:
    title = "memory of the fullest rank in MB, predicted / measured"
    table = make_table(("run", "params", "gradients", "state", "total"), left=("run",), title=title)
    for index in range(len(reports[0])):
        run = max((runs[index] for runs in reports), key=lambda run: run.measured.total)
        pairs = [
            (getattr(run.predicted, name), getattr(run.measured, name))
            for name in ("parameters", "gradients", "state", "total")
        ]
        table.add_row(run.name, *(f"{a / 1e6:.2f} / {b / 1e6:.2f}" for a, b in pairs))
    return table


def _cost_table(reports: Sequence[Sequence[RunReport]]) -> Table:
    names = ("run", "step ms", "sent MB", "exposed ms", "first loss", "last loss")
    table = make_table(names, left=("run",), title="a step of the slowest rank")
    for index in range(len(reports[0])):
        runs = [runs[index] for runs in reports]
        table.add_row(runs[0].name, *_costs(runs))
    return table


def _costs(runs: Sequence[RunReport]) -> list[str]:
    exposed = [run.exposed_ms for run in runs if run.exposed_ms is not None]
    return [
        f"{max(run.step_ms for run in runs):.1f}",
        f"{max(run.wire_bytes for run in runs) / 1e6:.2f}",
        f"{max(exposed):.1f}" if exposed else "-",
        f"{runs[0].first_loss:.4f}",
        f"{runs[0].last_loss:.4f}",
    ]


def _notes(reports: Sequence[Sequence[RunReport]]) -> list[str]:
    lines = [
        "drop-in: ZeroRedundancyOptimizer in DDP. Gradients: at the end of backward, with what is under way.",
        'In backward: ShardedOptimizer(update="backward"), which updates each bucket inside backward.',
        "Sent: by a rank in a step, counted by ShardedOptimizer, computed for the others.",
        "Exposed: the part of a step in which a rank waited for others. Losses are rank 0's.",
        "",
    ]
    if any(run.exposed_ms is None for run in reports[0]):
        lines.insert(-1, "On GPUs the host does not wait; zerostep trace shows what is exposed there.")
    return lines
