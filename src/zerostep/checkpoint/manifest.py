"""The manifest of a checkpoint: layouts, options and model keys, and size and SHA-256 of every other file.

Decoding trusts nothing: whatever the text is, the result is a valid `Manifest` or a `CheckpointError`. The format is
described in docs/checkpoint-format.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from zerostep.checkpoint.layouts import (
    LayoutRecord,
    StoredBlock,
    WholeParam,
    check_layouts,
    stored_blocks,
    whole_params,
)
from zerostep.comm.codec import decode, dtype_name, dtype_named, encode
from zerostep.errors import MALFORMED, CheckpointError
from zerostep.plan.blocks import Block
from zerostep.plan.layout import Layout, Span
from zerostep.version import __version__

NAME = "manifest.json"
FORMAT, VERSION = "zerostep", 2
MOST_BYTES = 256 << 20
_MOST_ELEMENTS = 64
_HEX = re.compile(r"[0-9a-f]+")
_COMMON = frozenset("format version written_by id created step named groups model extra files".split())  # noqa: SIM905
_KEYS = {1: _COMMON | {"layout", "orders"}, 2: _COMMON | {"ranks", "params", "layouts"}}
# The types in an entry of the model's state dict, by its kind: key, kind, and where the value is stored.
_ENTRY_TYPES = {"param": (str, str, int), "buffer": (str, str, int, int), "same": (str, str, str)}


def file_name(rank: int, layout: int = 0) -> str:
    """Return the name of a rank's file; ranks are counted in each layout."""
    return f"rank-{rank}.safetensors" if not layout else f"layout-{layout}-rank-{rank}.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """One file: its name, its size in bytes and its SHA-256."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class GroupRecord:
    """One parameter group: its options, the indices of its parameters and the class name of its optimizer."""

    options: Mapping[str, Any]
    params: tuple[int, ...]
    optimizer_name: str


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    `ranks` is how many ranks wrote it, `params` has the whole parameters, which all other indices count, `layouts` who
    divided them, `model` the entries of the model's state dict, `extra` one value, or one for each rank. `files` has
    those of the first layout in the order of its ranks, then those of the next.
    """

    id: str
    created: int
    step: int
    ranks: int
    named: bool
    params: tuple[WholeParam, ...]
    layouts: tuple[LayoutRecord, ...]
    groups: tuple[GroupRecord, ...]
    model: tuple[tuple[Any, ...], ...] | None
    extra: tuple[Any, ...]
    files: tuple[FileRecord, ...]
    written_by: str = __version__

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Layout and rank of each file."""
        return _places(self.layouts)

    @cached_property
    def stored(self) -> tuple[tuple[StoredBlock, ...], ...]:
        """For each parameter, where its blocks are stored."""
        return stored_blocks(self.params, self.layouts)

    def encode(self) -> bytes:
        """Return the text of `manifest.json`."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "written_by": self.written_by,
            "id": self.id,
            "created": self.created,
            "step": self.step,
            "ranks": self.ranks,
            "named": self.named,
            "params": [[param.name, param.shape, param.dtype, param.group] for param in self.params],
            "layouts": [_encode_layout(record) for record in self.layouts],
            "groups": [
                {
                    "options": encode_value(dict(group.options)),
                    "params": list(group.params),
                    "class": group.optimizer_name,
                }
                for group in self.groups
            ],
            "model": None if self.model is None else [_encode_entry(entry) for entry in self.model],
            "extra": [encode_value(extra) for extra in self.extra],
            "files": [{"name": file.name, "bytes": file.nbytes, "sha256": file.sha256} for file in self.files],
        }
        text = _canonical(body)
        return b'{"sha256":"%s","manifest":%s}\n' % (_digest(text).encode(), text)

    @staticmethod
    def decode(text: bytes, where: str) -> Manifest:
        """Return the manifest that `encode` wrote; `CheckpointError` for any other text. `where` is the file's name."""
        try:
            body = _body(json.loads(text))
            _check_version(body, where)
            return _manifest(body)
        except CheckpointError:
            raise
        except MALFORMED as error:
            problem = str(error)[:200] or type(error).__name__
            raise CheckpointError(f"{where} is damaged: {problem}; load another checkpoint") from error


def _body(signed: Any) -> dict[str, Any]:
    """Return the manifest's body after checking its SHA-256, which does not depend on white space."""
    body: dict[str, Any] = signed["manifest"]
    if set(signed) != {"sha256", "manifest"} or signed["sha256"] != _digest(_canonical(body)):
        raise ValueError("its SHA-256 is not that of its content")
    return body


def _check_version(body: Mapping[str, Any], where: str) -> None:
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"{where} has the format {str(body['format'])[:80]!r}, not {FORMAT!r}: it is no checkpoint of zerostep; "
            "load another one"
        )
    if type(body["version"]) is not int or body["version"] not in _KEYS:
        raise CheckpointError(
            f"{where} has format version {str(body['version'])[:80]}; this zerostep, {__version__}, reads versions up "
            f"to {VERSION}: use zerostep {str(body['written_by'])[:80]}, which wrote it, or a later one"
        )


def _manifest(body: Mapping[str, Any]) -> Manifest:
    version = body["version"]
    if set(body) != _KEYS[version]:
        different = str(sorted(set(body) ^ _KEYS[version]))[:80]
        raise ValueError(f"it has other keys than those of version {version}: {different}")
    params, layouts = (_one_layout if version == 1 else _layouts)(body)
    for param in params:
        dtype_named(param.dtype)
    check_layouts(params, layouts)
    files = _exact(body["files"], list)
    expected = sum(record.layout.world_size for record in layouts)
    if len(files) != expected:  # before anything is made for each rank: a layout of nothing may have any number of them
        raise ValueError(f"it lists {len(files)} files for {expected} ranks")
    places = _places(layouts)
    return Manifest(
        id=_hex(body["id"], 32),
        created=_count(body["created"]),
        step=_count(body["step"]),
        ranks=layouts[0].layout.world_size if version == 1 else _count(body["ranks"]),
        named=_exact(body["named"], bool),
        params=params,
        layouts=layouts,
        groups=tuple(_group(group, params) for group in _exact(body["groups"], list)),
        model=None if body["model"] is None else tuple(_model(_exact(body["model"], list), params, places)),
        extra=tuple(decode_value(extra) for extra in _exact(body["extra"], list)),
        files=tuple(_file(*place, file) for place, file in zip(places, files, strict=True)),
        written_by=_exact(body["written_by"], str),
    )


# ---------------------------------------------------------------------- parameters and layouts


def _one_layout(body: Mapping[str, Any]) -> tuple[tuple[WholeParam, ...], tuple[LayoutRecord, ...]]:
    """Version 1 has one layout, of whole parameters."""
    layout = Layout.from_json(json.dumps(_exact(body["layout"], dict)))
    return whole_params(layout.params), (LayoutRecord.of_whole(layout, _orders(body["orders"], layout)),)


def _layouts(body: Mapping[str, Any]) -> tuple[tuple[WholeParam, ...], tuple[LayoutRecord, ...]]:
    params = tuple(_param(*_exact(param, list)) for param in _exact(body["params"], list))
    layouts = tuple(_layout(record, params) for record in _exact(body["layouts"], list))
    if not layouts:
        raise ValueError("it has no layout")
    return params, layouts


def _param(name: Any, shape: Any, dtype: Any, group: Any) -> WholeParam:
    sizes = tuple(_count(size) for size in _exact(shape, list))
    return WholeParam(_exact(name, str), sizes, _exact(dtype, str), _count(group))


def _layout(record: Any, params: Sequence[WholeParam]) -> LayoutRecord:
    if set(_exact(record, dict)) != {"layout", "blocks", "orders"}:
        raise ValueError(f"a layout has other keys: {str(sorted(record))[:80]}")
    layout = Layout.from_json(json.dumps(_exact(record["layout"], dict)))
    blocks = [_exact(block, list) for block in _exact(record["blocks"], list)]
    if len(blocks) != len(layout.params):
        raise ValueError(f"{len(blocks)} blocks stand for {len(layout.params)} parameters")
    found = [
        _block(index, offsets, spec.shape, params) for (index, offsets), spec in zip(blocks, layout.params, strict=True)
    ]
    whole, places = tuple(index for index, _ in found), tuple(block for _, block in found)
    return LayoutRecord(layout, whole, places, _orders(record["orders"], layout))


def _block(index: Any, offsets: Any, sizes: tuple[int, ...], params: Sequence[WholeParam]) -> tuple[int, Block]:
    number, starts = _index(index, params), [_count(start) for start in _exact(offsets, list)]
    spans = tuple(Span(start, start + size) for start, size in zip(starts, sizes, strict=True))
    return number, Block(params[number].shape, spans)


def _encode_layout(record: LayoutRecord) -> dict[str, Any]:
    blocks = zip(record.whole, record.blocks, strict=True)
    return {
        "layout": json.loads(record.layout.to_json()),
        "blocks": [[index, [span.start for span in block.spans]] for index, block in blocks],
        "orders": {str(index): list(order) for index, order in record.orders.items()},
    }


def _places(layouts: Sequence[LayoutRecord]) -> tuple[tuple[int, int], ...]:
    return tuple((number, rank) for number, each in enumerate(layouts) for rank in range(each.layout.world_size))


# ---------------------------------------------------------------------- groups, the model and files


def _group(group: Mapping[str, Any], whole: Sequence[WholeParam]) -> GroupRecord:
    params = tuple(_index(index, whole) for index in _exact(group["params"], list))
    return GroupRecord(_exact(decode_value(group["options"]), dict), params, _exact(group["class"], str))


def _model(
    entries: Sequence[Any], params: Sequence[WholeParam], places: Sequence[tuple[int, int]]
) -> list[tuple[Any, ...]]:
    """Return the decoded entries: each key once, and each reference to something that exists."""
    decoded: dict[str, tuple[Any, ...]] = {}
    for entry in entries:
        key, kind, *rest = _exact(entry, list)
        if kind != "value" and tuple(map(type, entry)) != _ENTRY_TYPES[kind]:
            raise ValueError(f"{str(entry)[:80]} does not describe an entry of a model")
        if kind == "value":
            (tree,) = rest
            rest = [decode_value(tree)]
        if kind == "param":
            _index(rest[0], params)
        if kind == "buffer" and not (0 <= rest[0] < len(places) and rest[1] >= 0):
            raise ValueError(f"{str(entry)[:80]} is stored nowhere")
        if _exact(key, str) in decoded or (kind == "same" and decoded[rest[0]][1] == "same"):
            raise ValueError(f"the model's {key[:80]!r} is described twice, or by a chain")
        decoded[key] = (key, kind, *rest)
    return list(decoded.values())


def _encode_entry(entry: Sequence[Any]) -> list[Any]:
    key, kind, *rest = entry
    return [key, kind, encode_value(rest[0])] if kind == "value" else list(entry)


def _file(layout: int, rank: int, file: Mapping[str, Any]) -> FileRecord:
    name = file_name(rank, layout)
    if file["name"] != name:
        raise ValueError(f"it calls the file of rank {rank} {str(file['name'])[:80]!r} instead of {name!r}")
    return FileRecord(name, _count(file["bytes"]), _hex(file["sha256"], 64))


def encode_value(value: Any, path: str = "value") -> Any:
    """Convert a nested value into JSON values; small tensors, such as a learning rate, become text.

    `TypeError`, which names the `path` of the value, for anything else.
    """
    return encode(value, _encode_tensor, path)


def decode_value(tree: Any) -> Any:
    """Return the value that `encode_value` converted; malformed input raises one of `MALFORMED`."""
    return decode(tree, lambda kind, items: _decode_tensor(*items))


def _encode_tensor(tensor: Tensor) -> list[Any]:
    if tensor.numel() > _MOST_ELEMENTS:
        raise TypeError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be part of a manifest, only tensors of up to "
            f"{_MOST_ELEMENTS} elements can: keep it in the model or in the state of a parameter"
        )
    values = [encode_value(value) for value in tensor.detach().cpu().reshape(-1).tolist()]
    return ["tensor", dtype_name(tensor.dtype), list(tensor.shape), values]


def _decode_tensor(name: str, shape: list[int], values: list[Any]) -> Tensor:
    if len(values) > _MOST_ELEMENTS or prod(map(_count, shape)) != len(values):
        raise ValueError(f"a tensor of shape {str(shape)[:80]} does not have {len(values)} elements")
    elements = [decode_value(value) for value in values]
    return torch.tensor(elements, dtype=dtype_named(name)).reshape(shape)


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _index(value: Any, params: Sequence[Any]) -> int:
    return range(len(params))[_count(value)]


def _orders(orders: Any, layout: Layout) -> dict[int, tuple[int, ...]]:
    return dict(_order(key, dims, layout) for key, dims in _exact(orders, dict).items())


def _order(key: str, dims: Any, layout: Layout) -> tuple[int, tuple[int, ...]]:
    index, order = _index(int(key), layout.params), tuple(_count(dim) for dim in _exact(dims, list))
    if sorted(order) != [dim for dim, size in enumerate(layout.params[index].shape) if size > 1]:
        raise ValueError(f"{order} is no order of the dimensions of parameter {index}")
    return index, order


def _hex(value: Any, digits: int) -> str:
    if not (isinstance(value, str) and len(value) == digits and _HEX.fullmatch(value)):
        raise ValueError(f"{str(value)[:80]!r} stands where {digits} hex digits are needed")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:  # not isinstance: True is no count
        raise ValueError(f"{str(value)[:80]!r} stands where a count is needed")
    return value


def _exact(value: Any, wanted: type[Any]) -> Any:
    if type(value) is not wanted:
        raise ValueError(f"{str(value)[:80]!r} stands where a {wanted.__name__} is needed")
    return value
