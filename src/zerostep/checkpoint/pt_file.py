"""Write a file for `torch.load(..., weights_only=True)` without holding its tensors in memory.

`torch.save` needs all tensors in memory. Its format is an uncompressed zip archive: `data.pkl` has the values, with a
reference in place of each tensor's bytes, and `data/0`, `data/1`, ... have these bytes.
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

_ROOT, _VERSION, _PROTOCOL = "archive", b"3\n", 2
_ALIGNMENT = 64  # so that torch.load(..., mmap=True) gives aligned tensors
_PADDING = b"FB"  # the id of the extra field in which torch puts the padding
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
    """Write a nested value; each `StoredTensor` in it loads as a tensor, the same one wherever it occurs again."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(value)
    with ZipFile(file, "w") as archive:
        archive.writestr(ZipInfo(f"{_ROOT}/data.pkl"), pickled.getvalue())
        archive.writestr(ZipInfo(f"{_ROOT}/byteorder"), sys.byteorder)
        for index, tensor in enumerate(pickler.tensors):
            _write_tensor(archive, file, f"{_ROOT}/data/{index}", tensor, advance)
        archive.writestr(ZipInfo(f"{_ROOT}/version"), _VERSION)


def _write_tensor(
    archive: ZipFile, file: BinaryIO, name: str, tensor: StoredTensor, advance: Callable[[int], None]
) -> None:
    entry, large = ZipInfo(name), tensor.nbytes >= _ZIP64_FROM
    # The padding follows from where this entry's data begins, so headers must have exactly the sizes given here.
    head = file.tell() + _LOCAL_HEADER + len(name) + (_ZIP64_EXTRA if large else 0) + 2 * len(_PADDING)
    gap = -head % _ALIGNMENT
    entry.extra = _PADDING + gap.to_bytes(2, "little") + bytes(gap)
    with archive.open(entry, "w", force_zip64=large) as record:
        for chunk in tensor.chunks():
            record.write(memory_of(chunk))
            advance(chunk.nbytes)


@dataclass(frozen=True)
class _Storage:
    """The reference in `data.pkl` to a tensor's bytes."""

    record: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    """Writes what `torch.save` writes, and collects the tensors whose bytes must follow."""

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
        return self._rebuild_call(tensor, str(len(self.tensors) - 1))

    def _rebuild_call(self, tensor: StoredTensor, key: str) -> tuple[Any, ...]:
        storage_class = _STORAGES.get(tensor.dtype)
        hooks: OrderedDict[str, Any] = OrderedDict()  # OrderedDict[str, Any]() would write its types into the file
        arguments = 0, tensor.shape, tensor.strides, False, hooks
        if storage_class is not None:
            return _rebuild_tensor_v2, (_Storage(("storage", storage_class, key, "cpu", tensor.numel)), *arguments)
        storage = _Storage(("storage", torch.UntypedStorage, key, "cpu", tensor.nbytes))
        return _rebuild_tensor_v3, (storage, *arguments, tensor.dtype)
