"""A progress bar for large files: on rank 0, on a terminal, and only if rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LONG = 64 << 20  # bytes


@contextmanager
def progress(title: str, total: int, rank: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of bytes done since its last call."""
    if rank or total < _LONG or not sys.stderr.isatty():
        yield lambda count: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ImportError:
        yield lambda count: None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
