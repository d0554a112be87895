"""The manifest of a checkpoint: what it is, and what every other file in it must be. See docs/checkpoint-format.md."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from zerostep.comm.codec import decode, dtype_name, dtype_named, encode
from zerostep.errors import MALFORMED, CheckpointError
from zerostep.plan.layout import Layout
from zerostep.version import __version__

__all__ = ["NAME", "FileRecord", "GroupRecord", "Manifest", "file_name", "put_small", "take_small"]

NAME = "manifest.json"
FORMAT, VERSION = "zerostep", 1
MOST_BYTES = 256 << 20
_SMALL_TENSOR = 64
_HEX = re.compile(r"[0-9a-f]+")
_KEYS = frozenset(
    "format version written_by id created step layout named orders groups model extra files".split()  # noqa: SIM905
)
_KINDS = {"param": (str, str, int), "buffer": (str, str, int, int), "same": (str, str, str)}


def file_name(rank: int) -> str:
    """The only name that the file of a rank may have."""
    return f"rank-{rank}.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """One file: its name, its size, and the SHA-256 of what is in it."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class GroupRecord:
    """One parameter group: its options, the numbers of its parameters, and the class of its optimizer."""

    options: Mapping[str, Any]
    params: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint described."""

    id: str
    created: int
    step: int
    layout: Layout
    named: bool
    orders: Mapping[int, tuple[int, ...]]
    groups: tuple[GroupRecord, ...]
    model: tuple[tuple[Any, ...], ...] | None
    extra: tuple[Any, ...]
    files: tuple[FileRecord, ...]
    written_by: str = __version__

    def encode(self) -> bytes:
        """The text of `manifest.json`."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "written_by": self.written_by,
            "id": self.id,
            "created": self.created,
            "step": self.step,
            "layout": json.loads(self.layout.to_json()),
            "named": self.named,
            "orders": {str(number): list(order) for number, order in self.orders.items()},
            "groups": [
                {"options": encode(dict(group.options), put_small), "params": list(group.params), "class": group.kind}
                for group in self.groups
            ],
            "model": None if self.model is None else [_encode_entry(entry) for entry in self.model],
            "extra": [encode(extra, put_small) for extra in self.extra],
            "files": [{"name": file.name, "bytes": file.nbytes, "sha256": file.sha256} for file in self.files],
        }
        text = _canonical(body)
        return b'{"sha256":"%s","manifest":%s}\n' % (_digest(text).encode(), text)

    @staticmethod
    def decode(text: bytes, where: str) -> Manifest:
        """What `encode` wrote; `CheckpointError`, which names the file `where`, for anything else."""
        try:
            body = _body(json.loads(text))
            _check_version(body, where)
            return _manifest(body)
        except CheckpointError:
            raise
        except MALFORMED as error:
            story = f"{where} is damaged: {str(error)[:200] or type(error).__name__}"
            raise CheckpointError(f"{story}; load another checkpoint") from error


def _body(found: Any) -> dict[str, Any]:
    """The text may be spaced in any way, but must say what was said when it was signed."""
    body: dict[str, Any] = found["manifest"]
    if set(found) != {"sha256", "manifest"} or found["sha256"] != _digest(_canonical(body)):
        raise ValueError("its SHA-256 is not that of its content")
    return body


def _check_version(body: Mapping[str, Any], where: str) -> None:
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"{where} has the format {str(body['format'])[:80]!r}, not {FORMAT!r}: it is no checkpoint of zerostep; "
            "load another one"
        )
    if type(body["version"]) is not int or body["version"] != VERSION:
        raise CheckpointError(
            f"{where} has format version {str(body['version'])[:80]}; this zerostep, {__version__}, reads version "
            f"{VERSION}: use zerostep {str(body['written_by'])[:80]}, which wrote it, or a later one"
        )


def _manifest(body: Mapping[str, Any]) -> Manifest:
    if set(body) != _KEYS:
        raise ValueError(f"it has other keys than those of version {VERSION}: {str(sorted(set(body) ^ _KEYS))[:80]}")
    layout = Layout.from_json(json.dumps(_exact(body["layout"], dict)))
    for spec in layout.params:
        dtype_named(spec.dtype)
    return Manifest(
        id=_hex(body["id"], 32),
        created=_count(body["created"]),
        step=_count(body["step"]),
        layout=layout,
        named=_exact(body["named"], bool),
        orders=dict(_order(key, value, layout) for key, value in _exact(body["orders"], dict).items()),
        groups=tuple(_group(group, layout) for group in _exact(body["groups"], list)),
        model=None if body["model"] is None else tuple(_model(_exact(body["model"], list), layout)),
        extra=tuple(decode(extra, lambda kind, items: take_small(*items)) for extra in _exact(body["extra"], list)),
        files=tuple(_file(rank, file) for rank, file in enumerate(_files(body["files"], layout))),
        written_by=_exact(body["written_by"], str),
    )


def _group(found: Mapping[str, Any], layout: Layout) -> GroupRecord:
    options = decode(found["options"], lambda kind, items: take_small(*items))
    params = tuple(_index(number, layout) for number in _exact(found["params"], list))
    return GroupRecord(_exact(options, dict), params, _exact(found["class"], str))


def _model(entries: Sequence[Any], layout: Layout) -> list[tuple[Any, ...]]:
    """Every key once, everything it points to there."""
    found: dict[str, tuple[Any, ...]] = {}
    for entry in entries:
        key, kind, *rest = _exact(entry, list)
        if kind != "value" and tuple(map(type, entry)) != _KINDS[kind]:
            raise ValueError(f"{str(entry)[:80]} does not describe an entry of a model")
        if kind == "value":
            (tree,) = rest
            rest = [decode(tree, lambda kind, items: take_small(*items))]
        if kind == "param":
            _index(rest[0], layout)
        if kind == "buffer" and not (0 <= rest[0] < layout.world_size and rest[1] >= 0):
            raise ValueError(f"{str(entry)[:80]} is stored nowhere")
        if _exact(key, str) in found or (kind == "same" and found[rest[0]][1] == "same"):
            raise ValueError(f"the model's {key[:80]!r} is described twice, or by a chain")
        found[key] = (key, kind, *rest)
    return list(found.values())


def _encode_entry(entry: Sequence[Any]) -> list[Any]:
    key, kind, *rest = entry
    return [key, kind, encode(rest[0], put_small)] if kind == "value" else list(entry)


def _files(found: Any, layout: Layout) -> list[Any]:
    files: list[Any] = _exact(found, list)
    if len(files) != layout.world_size:
        raise ValueError(f"it lists {len(files)} files for {layout.world_size} ranks")
    return files


def _file(rank: int, found: Mapping[str, Any]) -> FileRecord:
    if found["name"] != file_name(rank):
        raise ValueError(f"it calls the file of rank {rank} {str(found['name'])[:80]!r} instead of {file_name(rank)!r}")
    return FileRecord(found["name"], _count(found["bytes"]), _hex(found["sha256"], 64))


def put_small(tensor: Tensor) -> list[Any]:
    """A small tensor, such as a learning rate, as text."""
    if tensor.numel() > _SMALL_TENSOR:
        raise TypeError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be part of a manifest, only tensors of up to "
            f"{_SMALL_TENSOR} elements can: keep it in the model or in the state of a parameter"
        )
    values = [encode(value, put_small) for value in tensor.detach().cpu().reshape(-1).tolist()]
    return ["tensor", dtype_name(tensor.dtype), list(tensor.shape), values]


def take_small(name: str, shape: list[int], values: list[Any]) -> Tensor:
    """The tensor that `put_small` wrote."""
    if len(values) > _SMALL_TENSOR or prod(map(_count, shape)) != len(values):
        raise ValueError(f"a tensor of shape {str(shape)[:80]} does not have {len(values)} elements")
    found = [decode(value, lambda kind, items: take_small(*items)) for value in values]
    return torch.tensor(found, dtype=dtype_named(name)).reshape(shape)


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _index(number: Any, layout: Layout) -> int:
    return range(len(layout.params))[_count(number)]


def _order(key: str, found: Any, layout: Layout) -> tuple[int, tuple[int, ...]]:
    number, order = _index(int(key), layout), tuple(_count(dim) for dim in _exact(found, list))
    if sorted(order) != [dim for dim, size in enumerate(layout.params[number].shape) if size > 1]:
        raise ValueError(f"{order} is no order of the dimensions of parameter {number}")
    return number, order


def _hex(value: Any, digits: int) -> str:
    if not (isinstance(value, str) and len(value) == digits and _HEX.fullmatch(value)):
        raise ValueError(f"{str(value)[:80]!r} stands where {digits} hex digits are needed")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:80]!r} stands where a count is needed")
    return value


def _exact(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:80]!r} stands where a {kind.__name__} is needed")
    return value
