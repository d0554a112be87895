"""`zerostep inspect`: what a checkpoint contains, how much each rank owned, and whether every file is intact."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from zerostep.checkpoint.directory import read_manifest
from zerostep.checkpoint.manifest import Manifest
from zerostep.checkpoint.progress import progress
from zerostep.checkpoint.reader import Reader, verify
from zerostep.comm.codec import dtype_name
from zerostep.errors import CheckpointError
from zerostep.tools.tables import make_table

EPILOG = """\b
Examples:
  zerostep inspect checkpoints/step-1200
  zerostep inspect checkpoints/step-1200 --json --no-verify
"""


@dataclass(frozen=True)
class FileSummary:
    """One rank's file and what the rank owned; `trouble` is the error found in it, or `None`."""

    name: str
    bytes: int
    elements: int
    parameters: int
    trouble: str | None


@dataclass(frozen=True)
class Contents:
    """What `--json` prints: field names are its keys. `state` has bytes by state key and dtype; empty if damaged."""

    path: str
    step: int
    created: str
    written_by: str
    world_size: int
    optimizers: list[str]
    parameters: int
    elements: int
    named: bool
    model_entries: int | None
    state: dict[str, int]
    extra: list[str]
    files: list[FileSummary]
    verified: bool


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A directory that zerostep.save() wrote.")],
    check: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare every file with its checksum.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> int:
    """Show what is inside a checkpoint, which ranks hold what, and whether it is intact."""
    contents = _contents(checkpoint, check)
    if as_json:
        typer.echo(json.dumps(asdict(contents), indent=2))
    else:
        _print(contents, Console(highlight=False))
    return 1 if any(file.trouble for file in contents.files) else 0


def _contents(path: Path, check: bool) -> Contents:
    manifest = read_manifest(path)
    files = _files(path, manifest, check)
    intact = not any(file.trouble for file in files)
    return Contents(
        path=str(path),
        step=manifest.step,
        created=datetime.fromtimestamp(manifest.created / 1e9, UTC).isoformat(timespec="seconds"),
        written_by=manifest.written_by,
        world_size=manifest.ranks,
        optimizers=[group.optimizer_name for group in manifest.groups],
        parameters=len(manifest.params),
        elements=sum(param.numel for param in manifest.params),
        named=manifest.named,
        model_entries=None if manifest.model is None else len(manifest.model),
        state=_state(path, manifest) if intact else {},
        extra=sorted({key for extra in manifest.extra if isinstance(extra, dict) for key in extra}),
        files=files,
        verified=check,
    )


def _files(path: Path, manifest: Manifest, check: bool) -> list[FileSummary]:
    summaries = []
    with progress(f"verifying {path.name}", sum(file.nbytes for file in manifest.files)) as advance:
        stored = {place for places in manifest.stored for place in places}
        for number, (record, (layout, rank)) in enumerate(zip(manifest.files, manifest.places, strict=True)):
            trouble = None
            try:
                verify(path, manifest, [number] if check else [], advance)
            except CheckpointError as error:
                trouble = str(error)
            owned = manifest.layouts[layout].layout.fragments(rank)
            fragments = [fragment for fragment in owned if (layout, fragment.param) in stored]
            elements = sum(fragment.part.length for fragment in fragments)
            summaries.append(FileSummary(record.name, record.nbytes, elements, len(fragments), trouble))
    return summaries


def _state(path: Path, manifest: Manifest) -> dict[str, int]:
    sizes = Counter[str]()
    reader = Reader(path, manifest)
    for index in reader.with_state:
        numel = reader.spec(index).numel
        for key, dtype in reader.per_element_keys(index).items():
            sizes[f"{key} ({dtype_name(dtype)})"] += numel * dtype.itemsize
    return dict(sizes)


def _print(contents: Contents, console: Console) -> None:
    write = partial(console.print, soft_wrap=True)
    write(f"{contents.path}: step {contents.step}, {contents.world_size} ranks, {contents.created}")
    optimizers = ", ".join(
        f"{name} x {count}" if count > 1 else name for name, count in Counter(contents.optimizers).items()
    )
    names = "by name" if contents.named else "by position"
    write(f"{contents.parameters:,} parameters of {contents.elements:,} elements, {names}; groups: {optimizers}")
    weights = "not saved" if contents.model_entries is None else f"{contents.model_entries:,} entries of a state dict"
    write(f"model: {weights}; extra: {', '.join(contents.extra) or 'nothing by name'}")
    for key, size in contents.state.items():
        write(f"state: {key}, {_size(size)}")
    console.print(_table(contents.files, contents.verified))
    troubles = [file.trouble for file in contents.files if file.trouble]
    for trouble in troubles:
        write(trouble)
    if not troubles:
        write("intact: every file has its checksum" if contents.verified else "complete; checksums not compared")


def _table(files: Sequence[FileSummary], verified: bool) -> Table:
    names = ("file", "size", "elements", "parameters", "checksum")
    table = make_table(names, left=("file", "checksum"))
    for file in files:
        state = "not compared" if not verified else "DAMAGED" if file.trouble else "right"
        table.add_row(file.name, _size(file.bytes), f"{file.elements:,}", f"{file.parameters:,}", state)
    return table


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} bytes"
