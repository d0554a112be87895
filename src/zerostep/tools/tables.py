"""The tables that commands print."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


def make_table(names: Sequence[str], left: Collection[str] = (), **options: Any) -> Table:
    """Return an empty table with right-aligned columns, except those in `left`; `options` are those of rich's Table."""
    table = Table(**{"box": SIMPLE_HEAD, "title_justify": "left", "pad_edge": False, **options})
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table
