"""`reshard`: rewrite a checkpoint for another number of ranks, offline, a chunk at a time.

`load` reads any checkpoint at any world size, so this is never required; it avoids that many ranks read the same few
files.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerostep.checkpoint.directory import locked_draft, publish
from zerostep.checkpoint.export import open_verified
from zerostep.checkpoint.layouts import LayoutRecord
from zerostep.checkpoint.manifest import FileRecord, file_name
from zerostep.checkpoint.progress import progress
from zerostep.checkpoint.reader import Reader, Take
from zerostep.checkpoint.regions import Region
from zerostep.checkpoint.single_file import check_free, new_draft
from zerostep.checkpoint.stored_tensor import StoredTensor
from zerostep.checkpoint.tensor_file import TensorFile, write_streamed
from zerostep.comm.codec import encode
from zerostep.errors import CheckpointError
from zerostep.plan.layout import Layout, ParamSpec, Span
from zerostep.plan.partition import divide, plan
from zerostep.version import __version__

Entries = tuple[tuple[Any, ...], ...]


def reshard(path: str | os.PathLike[str], out: str | os.PathLike[str], world_size: int) -> None:
    """Rewrite a checkpoint as `world_size` ranks would have saved it. Offline: one process, no GPU.

    Arguments:
        path: the checkpoint. It is verified first, and stays as it is.
        out: the directory to write. It must not exist yet, and appears when it is complete.
        world_size: the new number of ranks. Loading the result gives what loading the original gives.
    """
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size must be a number of ranks, at least 1; got {world_size!r}")
    source, target = Path(os.path.abspath(path)), Path(os.path.abspath(out))
    if target.name.startswith("."):
        raise CheckpointError(f"{target.name!r} begins with a dot, as unfinished checkpoints do: choose another name")
    check_free(target)
    reader = open_verified(source)
    _write(reader, target, _divided(reader, world_size))


def _divided(reader: Reader, world_size: int) -> Layout:
    """A layout of the whole parameters: that of the checkpoint divided anew, or a new one if it has several."""
    first, *others = reader.manifest.layouts
    if not others and all(block.is_whole for block in first.blocks):
        return divide(first.layout, world_size)
    return plan([_spec(reader, index) for index in range(len(reader.manifest.params))], world_size)


def _spec(reader: Reader, index: int) -> ParamSpec:
    place = reader.manifest.stored[index][0]
    return replace(reader.manifest.layouts[place.layout].layout.params[place.param], shape=reader.spec(index).shape)


def _write(reader: Reader, target: Path, layout: Layout) -> None:
    token, old = secrets.token_hex(16), reader.manifest
    entries = None if old.model is None else _entries(reader, old.model, layout.world_size)
    with new_draft(target, token) as draft, locked_draft(draft):
        files = _write_files(reader, draft, token, layout, entries)
        # The original's time plus one: the copy must not become the newest checkpoint of a series.
        new = replace(old, id=token, created=old.created + 1, ranks=layout.world_size, model=entries, files=files)
        new = replace(new, layouts=(LayoutRecord.of_whole(layout, _orders(reader)),))
        check_free(target)
        publish(draft, target, replace(new, written_by=__version__))


def _orders(reader: Reader) -> dict[int, tuple[int, ...]]:
    regions = {index: reader.region(index) for index in range(len(reader.manifest.params))}
    return {index: region.order for index, region in regions.items() if region != Region.row_major(region.block)}


# ---------------------------------------------------------------------- the model's entries


def _entries(reader: Reader, model: Entries, world_size: int) -> Entries:
    """Return the model's entries, each buffer assigned to the rank that has fewest bytes to write."""
    loads, entries = [0] * world_size, []
    for position, (key, kind, *rest) in enumerate(model):
        if kind == "buffer":
            rank = loads.index(min(loads))
            loads[rank] += reader.buffer(rest[0], rest[1], StoredTensor.in_file).nbytes
            rest = [rank, position]
        entries.append((key, kind, *rest))
    return tuple(entries)


# ---------------------------------------------------------------------- the file of each rank


@dataclass(frozen=True)
class _NewFile:
    """One rank's file before it is written; its tensors are still in the files of the original."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def encode(self, read: Callable[[Take], Any]) -> Any:
        """Encode the value that `read` returns; its tensors are added to this file without reading them."""
        stored: deque[StoredTensor] = deque()

        def take(file: TensorFile, name: str) -> Tensor:
            stored.append(StoredTensor.in_file(file, name))
            return torch.empty(stored[-1].shape, dtype=stored[-1].dtype, device="meta")

        def put(tensor: Tensor) -> list[Any]:
            position = len(self.tensors)
            self.tensors[f"tensor.{position}"] = stored.popleft()  # encoding visits them in the order of decoding
            return ["stored", position]

        return encode(read(take), put)


def _file(reader: Reader, token: str, layout: Layout, entries: Entries | None, rank: int) -> _NewFile:
    file, with_state = _NewFile(), set(reader.with_state)
    parts = {fragment.param: fragment.part for fragment in layout.fragments(rank)}
    state = [_state(reader, file, index, part) for index, part in parts.items() if index in with_state]
    global_state = {
        key: file.encode(lambda take, key=key: reader.global_state(take)[key])  # type: ignore[misc]
        for key in (reader.global_state(StoredTensor.in_file) if rank == 0 else ())
    }
    file.metadata.update({"id": token, "rank": rank, "state": state, "others": global_state})
    for position, (_, kind, *rest) in enumerate(entries or ()):
        if kind == "param" and rest[0] in parts:
            file.tensors[f"model.{rest[0]}"] = StoredTensor.weight(reader, rest[0]).part(parts[rest[0]])
        elif kind == "buffer" and rest[0] == rank and reader.manifest.model is not None:
            old = reader.manifest.model[position][2:]
            file.tensors[f"buffer.{rest[1]}"] = reader.buffer(old[0], old[1], StoredTensor.in_file)
    return file


def _state(reader: Reader, file: _NewFile, index: int, part: Span) -> list[Any]:
    per_element = list(reader.per_element_keys(index))
    for key in per_element:
        file.tensors[f"state.{index}.{key}"] = StoredTensor.per_element(reader, index, key).part(part)
    shared = {
        key: file.encode(lambda take, key=key: reader.value(index, key, take))  # type: ignore[misc]
        for key in reader.shared_keys(index)
    }
    return [index, part.start, part.stop, per_element, shared]


def _write_files(
    reader: Reader, draft: Path, token: str, layout: Layout, entries: Entries | None
) -> tuple[FileRecord, ...]:
    records = []
    total = sum(file.nbytes for file in reader.manifest.files)
    with progress(f"writing {layout.world_size} files", total) as advance:
        for rank in range(layout.world_size):
            file = _file(reader, token, layout, entries, rank)
            path = draft / file_name(rank)
            records.append(write_streamed(path, file.tensors, file.metadata, StoredTensor.chunks, advance))
    return tuple(records)
