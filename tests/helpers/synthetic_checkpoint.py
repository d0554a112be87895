"""Checkpoints of any layout and state, written without an optimizer or a process group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerostep.checkpoint.directory import publish
from zerostep.checkpoint.layouts import LayoutRecord, whole_params
from zerostep.checkpoint.manifest import FileRecord, GroupRecord, Manifest, file_name
from zerostep.checkpoint.tensor_file import write_tensors
from zerostep.comm.codec import encode
from zerostep.plan.layout import Layout

ID = "0123456789abcdef" * 2


@dataclass(frozen=True)
class Made:
    """The content of a checkpoint: per parameter its flat state, its other state and its flat weights."""

    layout: Layout
    like: Mapping[int, Mapping[str, Tensor]]
    rest: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[int, Tensor] = field(default_factory=dict)
    buffers: Mapping[int, tuple[int, Tensor]] = field(default_factory=dict)
    model: Sequence[tuple[Any, ...]] | None = None
    groups: Sequence[GroupRecord] = ()
    orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    named: bool = True
    extra: Sequence[Any] = ()

    def write(self, path: Path) -> Path:
        """Make the directory."""
        path.mkdir()
        files = tuple(self._write_rank(path, rank) for rank in range(self.layout.world_size))
        groups = tuple(self.groups) or (GroupRecord({"lr": 0.1}, tuple(range(len(self.layout.params))), "AdamW"),)
        model = None if self.model is None else tuple(self.model)
        manifest = Manifest(
            id=ID,
            created=5,
            step=3,
            ranks=self.layout.world_size,
            named=self.named,
            params=whole_params(self.layout.params),
            layouts=(LayoutRecord.of_whole(self.layout, self.orders),),
            groups=groups,
            model=model,
            extra=tuple(self.extra),
            files=files,
        )
        draft = path.rename(path.with_name(f".{path.name}"))
        publish(draft, path, replace(manifest, written_by="0"))
        return path

    def _write_rank(self, path: Path, rank: int) -> FileRecord:
        tensors: dict[str, Tensor] = {}
        parts = {each.param: each.part for each in self.layout.fragments(rank)}

        def put(tensor: Tensor) -> list[Any]:
            place = len(tensors)
            tensors[f"tensor.{place}"] = tensor.contiguous()
            return ["stored", place]

        state = []
        for number, part in parts.items():
            if number in self.like:
                tensors |= {
                    f"state.{number}.{key}": value[part.start : part.stop] for key, value in self.like[number].items()
                }
                rest = {key: encode(value, put) for key, value in self.rest.get(number, {}).items()}
                state.append([number, part.start, part.stop, list(self.like[number]), rest])
            if number in self.weights:
                tensors[f"model.{number}"] = self.weights[number][part.start : part.stop]
        tensors |= {f"buffer.{place}": value for place, (owner, value) in self.buffers.items() if owner == rank}
        others = {key: encode(value, put) for key, value in self.others.items()} if rank == 0 else {}
        about = {"id": ID, "rank": rank, "state": state, "others": others}
        return write_tensors(path / file_name(rank), tensors, about, lambda count: None)


def flat(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Elements that are all different, as far as the dtype allows."""
    found = torch.arange(size * dtype.itemsize, dtype=torch.int64).mul(37).add(seed).to(torch.uint8)
    return found.view(dtype) if size else torch.empty(0, dtype=dtype)


def bits(tensor: Tensor) -> bytes:
    """A tensor's elements in row-major order, to be compared where there may be NaNs."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
