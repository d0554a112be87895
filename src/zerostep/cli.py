"""The command line. Its libraries come with the extra ``cli``."""

import logging
import sys
from typing import TYPE_CHECKING, Annotated

try:
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as missing:
    sys.stderr.write(f"zerostep: the command line needs {missing.name}: pip install 'zerostep[cli]'\n")
    sys.exit(2)

if TYPE_CHECKING:
    from zerostep.demo import RankReport, RunReport

app = typer.Typer(add_completion=False)


@app.callback()
def zerostep() -> None:
    """Optimizer-state sharding for PyTorch data-parallel training."""


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Local processes to train with.")] = 2,
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 30,
) -> int:
    """Train a small GPT with plain DDP and with sharded state; compare memory, time and numbers."""
    from zerostep.demo import run_demo, verdict

    console = Console()
    with console.status("training both ways"):
        reports = run_demo(ranks, steps)
    passed, line = verdict(reports)
    console.print(_table(reports), line, sep="")
    return 0 if passed else 1


def _table(reports: "list[RankReport]") -> Table:
    title = "sizes in MB, state also as a ratio to plain DDP's, loss of first and last step"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for name in ("rank", "run", "params", "grads", "state", "ratio", "step ms", "first", "last"):
        table.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
    for rank, report in enumerate(reports):
        table.add_row(str(rank), "plain DDP", *_cells(report.plain, report.plain))
        table.add_row(str(rank), "zerostep", *_cells(report.sharded, report.plain))
    return table


def _cells(run: "RunReport", plain: "RunReport") -> list[str]:
    sizes = (run.parameter_bytes, run.gradient_bytes, run.state_bytes)
    return [
        *(f"{size / 1e6:.2f}" for size in sizes),
        f"{run.state_bytes / plain.state_bytes:.2f}",
        f"{run.step_ms:.1f}",
        f"{run.first_loss:.4f}",
        f"{run.last_loss:.4f}",
    ]


def main() -> None:
    """Run the command line; an error the user can act on is one line and exit code 2."""
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it reports every rank it stops
    try:
        status = app(standalone_mode=False)
    except typer.Abort:
        status = 130
    except Exception as error:
        sys.stderr.write(f"zerostep: {_message(error)}\n")
        status = 2
    sys.exit(status)


def _message(error: Exception) -> str:
    from zerostep.demo import DemoError

    if isinstance(error, DemoError):
        return str(error)
    if hasattr(error, "format_message"):  # a usage error, whose class has moved between typer's versions
        return str(error.format_message())
    raise error


if __name__ == "__main__":
    main()
