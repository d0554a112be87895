"""A file that `torch.load(..., weights_only=True)` reads, written without holding what is in it.

`torch.save` wants all tensors in memory. Its format is a zip archive, stored and not compressed: `data.pkl` has the
values, with a reference wherever a tensor's bytes are needed, and `data/0`, `data/1`, ... have these bytes.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO
from zipfile import ZipFile, ZipInfo

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from zerostep.checkpoint.stored_tensor import StoredTensor
from zerostep.checkpoint.tensor_file import memory_of

__all__ = ["write_pt"]

_ROOT, _VERSION, _PROTOCOL = "archive", b"3\n", 2
_ALIGNMENT = 64  # so that torch.load(..., mmap=True) gives tensors that begin where torch wants them
_PADDING = b"FB"  # how torch marks the bytes that it puts in for that
_LOCAL_HEADER, _ZIP64_EXTRA, _ZIP64_FROM = 30, 20, 1 << 31
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}


def write_pt(file: BinaryIO, value: Any, advance: Callable[[int], None]) -> None:
    """Write a nested value; a `StoredTensor` in it becomes a tensor, and one that stands twice the same tensor."""
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(value)
    with ZipFile(file, "w") as archive:
        archive.writestr(ZipInfo(f"{_ROOT}/data.pkl"), text.getvalue())
        archive.writestr(ZipInfo(f"{_ROOT}/byteorder"), sys.byteorder)
        for number, tensor in enumerate(pickler.tensors):
            _write(archive, file, f"{_ROOT}/data/{number}", tensor, advance)
        archive.writestr(ZipInfo(f"{_ROOT}/version"), _VERSION)


def _write(archive: ZipFile, file: BinaryIO, name: str, tensor: StoredTensor, advance: Callable[[int], None]) -> None:
    entry, large = ZipInfo(name), tensor.nbytes >= _ZIP64_FROM
    head = file.tell() + _LOCAL_HEADER + len(name) + (_ZIP64_EXTRA if large else 0) + 2 * len(_PADDING)
    gap = -head % _ALIGNMENT
    entry.extra = _PADDING + gap.to_bytes(2, "little") + bytes(gap)
    with archive.open(entry, "w", force_zip64=large) as record:
        for chunk in tensor.chunks():
            record.write(memory_of(chunk))
            advance(chunk.nbytes)


@dataclass(frozen=True)
class _Storage:
    """What stands for a tensor's bytes in the text."""

    record: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    """Writes what `torch.save` writes, and lists the tensors whose bytes must follow."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.tensors: list[StoredTensor] = []

    def persistent_id(self, obj: Any) -> Any:
        return obj.record if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (Tensor, StoredTensor)):
            return NotImplemented
        tensor = obj if isinstance(obj, StoredTensor) else StoredTensor.in_memory(obj)
        self.tensors.append(tensor)
        return self._rebuilt(tensor, str(len(self.tensors) - 1))

    def _rebuilt(self, tensor: StoredTensor, key: str) -> tuple[Any, ...]:
        kind = _STORAGES.get(tensor.dtype)
        hooks: OrderedDict[str, Any] = OrderedDict()  # OrderedDict[str, Any]() would remember its types in the file
        place = 0, tensor.shape, tensor.strides, False, hooks
        if kind is not None:
            return _rebuild_tensor_v2, (_Storage(("storage", kind, key, "cpu", tensor.numel)), *place)
        storage = _Storage(("storage", torch.UntypedStorage, key, "cpu", tensor.nbytes))
        return _rebuild_tensor_v3, (storage, *place, tensor.dtype)
