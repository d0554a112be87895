"""`consolidate`: write a checkpoint as one file for plain torch, offline, with at most one parameter in memory."""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from zerostep.checkpoint.directory import read_manifest
from zerostep.checkpoint.progress import progress
from zerostep.checkpoint.pt_file import write_pt
from zerostep.checkpoint.reader import Reader, verify
from zerostep.checkpoint.single_file import check_free, new_file
from zerostep.checkpoint.stored_tensor import StoredTensor
from zerostep.checkpoint.tensor_file import has_name, header_of, memory_of
from zerostep.errors import CheckpointError
from zerostep.state.missing import complete_state_dict
from zerostep.state.param_state import MASTER

Tree = dict[Any, Any]

_SUFFIXES = {"optimizer": (".pt",), "model": (".pt", ".safetensors")}


def consolidate(
    path: str | os.PathLike[str], out: str | os.PathLike[str], part: str = "optimizer", *, masters: bool = False
) -> None:
    """Write a checkpoint that `save` wrote as one file that plain torch reads. Offline: one process, no GPU.

    Arguments:
        path: the checkpoint. It is verified first.
        out: the file to write. It must not exist yet, and appears when it is complete.
        part: `"optimizer"` writes the state dict that the unsharded optimizer would have; `out` ends in `.pt`, and
            `torch.load(out, weights_only=True)` reads it. `"model"` writes the model's state dict, to a `.pt` or a
            `.safetensors` file.
        masters: with `part="optimizer"`, also write masters, as the state `"master"`; plain optimizers ignore it.
    """
    source, target = Path(os.path.abspath(path)), Path(os.path.abspath(out))
    if part not in _SUFFIXES:
        raise ValueError(f"part must be 'optimizer' or 'model', got {part!r}")
    if target.suffix not in _SUFFIXES[part]:
        suffixes = " or ".join(_SUFFIXES[part])
        raise CheckpointError(f"{target.name!r} must end in {suffixes} for part={part!r}: choose such a name")
    check_free(target)
    reader = open_verified(source)
    tree = _model(reader) if part == "model" else _optimizer(reader, masters)
    write = _write_pt if target.suffix == ".pt" else _write_safetensors
    with new_file(target) as file:
        write(target, tree, file)


def open_verified(path: Path) -> Reader:
    """Open a checkpoint after comparing all its files with their checksums."""
    manifest = read_manifest(path)
    with progress(f"verifying {path.name}", sum(file.nbytes for file in manifest.files)) as advance:
        verify(path, manifest, range(len(manifest.files)), advance)
    return Reader(path, manifest)


# ---------------------------------------------------------------------- state dicts of tensors on disk


def _optimizer(reader: Reader, masters: bool) -> Tree:
    """Return the optimizer's state dict, with tensors that are still on disk."""
    state: Tree = {index: _entry(reader, index, masters) for index in reader.with_state}
    return complete_state_dict(state | reader.global_state(StoredTensor.in_file), _groups(reader))


def _entry(reader: Reader, index: int, masters: bool) -> Tree:
    """Return the state of a parameter, shared state first, as in torch's optimizers."""
    shared = {key: reader.value(index, key, StoredTensor.in_file) for key in reader.shared_keys(index)}
    keys = [key for key in reader.per_element_keys(index) if masters or key != MASTER]
    entry = shared | {key: StoredTensor.per_element(reader, index, key) for key in keys}
    return {sys.intern(key): value for key, value in entry.items()}  # a pickle writes each string object once


def _groups(reader: Reader) -> list[Tree]:
    """Return the parameter groups; a parameter that is listed twice has a name at each position."""
    names = iter(param.name for param in reader.manifest.params)
    groups = []
    for group in reader.manifest.groups:
        group_names = list(islice(names, len(group.params)))
        named = {"param_names": group_names} if reader.manifest.named else {}
        groups.append({**named, **group.options, "params": list(group.params)})
    return groups


def _model(reader: Reader) -> Tree:
    """Return the model's state dict, with tensors that are still on disk; tied ones are the same object."""
    if reader.manifest.model is None:
        raise CheckpointError(
            f"{reader.path} was saved without model=, so it has no weights: take a checkpoint saved with model="
        )
    state_dict: Tree = {}
    for key, kind, *rest in reader.manifest.model:
        if kind == "param":
            state_dict[key] = StoredTensor.weight(reader, *rest)
        elif kind == "buffer":
            state_dict[key] = reader.buffer(rest[0], rest[1], StoredTensor.in_file)
        else:
            state_dict[key] = state_dict[rest[0]] if kind == "same" else rest[0]
    return state_dict


# ---------------------------------------------------------------------- writing


def _write_pt(out: Path, tree: Tree, file: Any) -> None:
    with progress(f"writing {out.name}", _size(tree)) as advance:
        write_pt(file, tree, advance)


def _size(tree: Any) -> int:
    if isinstance(tree, StoredTensor):
        return tree.nbytes
    return sum(map(_size, tree.values())) if isinstance(tree, dict) else 0


def _write_safetensors(out: Path, tree: Tree, file: Any) -> None:
    """Write each tensor once; the metadata maps the other names of a tied tensor to the name it is written under."""
    names: dict[StoredTensor, str] = {}
    aliases: dict[str, str] = {}
    for key, tensor in tree.items():
        _check_storable(out, key, tensor)
        if names.setdefault(tensor, key) != key:
            aliases[key] = names[tensor]
    tensors = {key: tensor for tensor, key in sorted(names.items(), key=lambda item: -item[0].dtype.itemsize)}
    file.write(header_of(tensors, {"format": "pt", **aliases}))
    with progress(f"writing {out.name}", _size(tensors)) as advance:
        for tensor in tensors.values():
            for chunk in tensor.rows():
                file.write(memory_of(chunk))
                advance(chunk.nbytes)


def _check_storable(out: Path, key: str, value: Any) -> None:
    if not isinstance(value, StoredTensor):
        raise CheckpointError(
            f"{key!r} is a {type(value).__name__}, and {out.name} can hold only tensors: export to .pt"
        )
    if not has_name(value.dtype):
        raise CheckpointError(f"{key!r} has the dtype {value.dtype}, which {out.name} cannot hold: export to .pt")
