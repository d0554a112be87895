"""`reshard`: a checkpoint for another number of ranks, offline, a chunk at a time.

`load` reads any checkpoint at any world size, so no run needs this; it spares many ranks from reading the same few
files.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerostep.checkpoint.directory import claimed, draft_of, publish
from zerostep.checkpoint.export import opened
from zerostep.checkpoint.manifest import FileRecord, file_name
from zerostep.checkpoint.progress import progress
from zerostep.checkpoint.reader import Reader
from zerostep.checkpoint.single_file import check_free
from zerostep.checkpoint.stored_tensor import StoredTensor
from zerostep.checkpoint.tensor_file import TensorFile, write_streamed
from zerostep.comm.codec import encode
from zerostep.errors import CheckpointError
from zerostep.plan.divide import divide
from zerostep.plan.layout import Layout, Span
from zerostep.version import __version__

__all__ = ["reshard"]

Advance = Callable[[int], None]
Entries = tuple[tuple[Any, ...], ...]


def reshard(path: str | os.PathLike[str], out: str | os.PathLike[str], world_size: int) -> None:
    """Write a checkpoint once more, as `world_size` ranks would have. Offline: one process, no GPU.

    Arguments:
        path: the checkpoint. It is verified first, and stays as it is.
        out: the directory to make. It must not exist yet; it appears when it is complete.
        world_size: for how many ranks. Loading the result gives what loading the original gives.
    """
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size must be a number of ranks, at least 1; got {world_size!r}")
    source, target = Path(os.path.abspath(path)), Path(os.path.abspath(out))
    if target.name.startswith("."):
        raise CheckpointError(f"{target.name!r} begins with a dot, as unfinished checkpoints do: choose another name")
    check_free(target)
    with opened(source) as reader:
        _write(reader, target, divide(reader.manifest.layout, world_size))


def _write(reader: Reader, target: Path, layout: Layout) -> None:
    token = secrets.token_hex(16)
    draft, old = draft_of(target, token), reader.manifest
    entries = None if old.model is None else _entries(reader, old.model, layout.world_size)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with claimed(draft):
            files = _write_files(reader, draft, token, layout, entries)
            # Of the time of its original, so that it is not taken for the newest of a series.
            new = replace(old, id=token, created=old.created + 1, layout=layout, model=entries, files=files)
            check_free(target)
            publish(draft, target, replace(new, written_by=__version__))
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error}; nothing is left of it: make room, or choose another place"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


# ---------------------------------------------------------------------- who will own what


def _entries(reader: Reader, model: Entries, world_size: int) -> Entries:
    """The model's entries, with buffers where least has to be written."""
    loads, found = [0] * world_size, []
    for place, (key, kind, *rest) in enumerate(model):
        if kind == "buffer":
            rank = loads.index(min(loads))
            loads[rank] += reader.buffer(rest[0], rest[1], StoredTensor.in_file).nbytes
            rest = [rank, place]
        found.append((key, kind, *rest))
    return tuple(found)


# ---------------------------------------------------------------------- what each of them will have


@dataclass(frozen=True)
class _NewFile:
    """One rank's file before it is written: its tensors are still in those of the original."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def encoded(self, read: Callable[[Callable[[TensorFile, str], Any]], Any]) -> Any:
        """A value that `read` finds, as text; its tensors, which no one reads now, become some of this file."""
        stored: deque[StoredTensor] = deque()

        def take(file: TensorFile, name: str) -> Tensor:
            stored.append(StoredTensor.in_file(file, name))
            return torch.empty(stored[-1].shape, dtype=stored[-1].dtype, device="meta")

        def put(tensor: Tensor) -> list[Any]:
            place = len(self.tensors)
            self.tensors[f"tensor.{place}"] = stored.popleft()  # encoding meets them as decoding did
            return ["stored", place]

        return encode(read(take), put)


def _file(reader: Reader, token: str, layout: Layout, entries: Entries | None, rank: int) -> _NewFile:
    found, held = _NewFile(), set(reader.with_state)
    parts = {each.param: each.part for each in layout.fragments(rank)}
    state = [_state(reader, found, number, part) for number, part in parts.items() if number in held]
    others = {
        key: found.encoded(lambda take, key=key: reader.others(take)[key])  # type: ignore[misc]
        for key in (reader.others(StoredTensor.in_file) if rank == 0 else ())
    }
    found.about.update({"id": token, "rank": rank, "state": state, "others": others})
    for place, (_, kind, *rest) in enumerate(entries or ()):
        if kind == "param" and rest[0] in parts:
            found.tensors[f"model.{rest[0]}"] = StoredTensor.weight(reader, rest[0]).part(parts[rest[0]])
        elif kind == "buffer" and rest[0] == rank and reader.manifest.model is not None:
            old = reader.manifest.model[place][2:]
            found.tensors[f"buffer.{rest[1]}"] = reader.buffer(old[0], old[1], StoredTensor.in_file)
    return found


def _state(reader: Reader, file: _NewFile, number: int, part: Span) -> list[Any]:
    like = list(reader.per_element_keys(number))
    for key in like:
        file.tensors[f"state.{number}.{key}"] = StoredTensor.per_element(reader, number, key).part(part)
    rest = {
        key: file.encoded(lambda take, key=key: reader.value(number, key, take))  # type: ignore[misc]
        for key in reader.shared_keys(number)
    }
    return [number, part.start, part.stop, like, rest]


def _write_files(
    reader: Reader, draft: Path, token: str, layout: Layout, entries: Entries | None
) -> tuple[FileRecord, ...]:
    found = []
    total = sum(file.nbytes for file in reader.manifest.files)
    with progress(f"writing {layout.world_size} files", total) as advance:
        for rank in range(layout.world_size):
            file = _file(reader, token, layout, entries, rank)
            found.append(
                write_streamed(draft / file_name(rank), file.tensors, file.about, _chunks_of(file.tensors), advance)
            )
    return tuple(found)


def _chunks_of(tensors: Mapping[str, StoredTensor]) -> Callable[[str], Any]:
    return lambda name: tensors[name].chunks()
