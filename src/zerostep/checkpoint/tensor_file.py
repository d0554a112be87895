"""One safetensors file: written and hashed in a stream, read by element range.

The safetensors library needs all tensors in memory to write and computes no hash, so files are written here. When one
is read, the library validates the header.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, BinaryIO, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zerostep.checkpoint.manifest import FileRecord
from zerostep.comm.codec import dtype_name, dtype_named
from zerostep.errors import MALFORMED, CheckpointError

Advance = Callable[[int], None]

METADATA = "zerostep"
_UNBOUNDED = 0  # maxsize of a queue without a limit
_LONGEST_HEADER = 90_000_000
_CHUNK = 8 << 20
_MOST_READ = 1 << 30  # Linux reads at most 2 GiB in one call
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class _Described(Protocol):
    """A tensor or the description of one."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...


D = TypeVar("D", bound=_Described)


# ---------------------------------------------------------------------- writing


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], advance: Advance
) -> FileRecord:
    """Write contiguous tensors of any device and force them to disk; at most two chunks are copied at a time."""
    # Chunks of tensors in host memory are views and cost nothing, so the hash may lag behind by any number of them.
    in_place = all(tensor.device.type == "cpu" for tensor in tensors.values())
    max_queued = _UNBOUNDED if in_place else 1
    return write_streamed(path, tensors, metadata, _chunks, advance, max_queued)


def write_streamed(
    path: Path,
    tensors: Mapping[str, D],
    metadata: Mapping[str, Any],
    chunks: Callable[[D], Iterable[Tensor]],
    advance: Advance,
    max_queued: int = 1,
) -> FileRecord:
    """Write tensors chunk by chunk and force them to disk; `chunks` is called for each when its turn comes.

    A second thread hashes the chunks; at most `max_queued` of them wait for it (0: any number).
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))  # keeps each one aligned
    as_bytes = {
        name: [dtype_name(tensor.dtype), list(tensor.shape)]
        for name, tensor in ordered.items()
        if not has_name(tensor.dtype)
    }
    header = header_of(ordered, {METADATA: json.dumps({**metadata, "dtypes": as_bytes})})
    if len(header) > _LONGEST_HEADER:
        raise CheckpointError(
            f"{path.name} would need a header of {len(header)} bytes, and readers take at most {_LONGEST_HEADER}: the "
            "optimizer keeps too much that is not a tensor"
        )
    pieces = (memory_of(chunk) for tensor in ordered.values() for chunk in chunks(tensor))
    with open(path, "xb", buffering=0) as file:
        digest, nbytes = _stream(file, chain([memoryview(header)], pieces), advance, max_queued)
    return FileRecord(path.name, nbytes, digest)


def write_bytes(path: Path, text: bytes) -> None:
    """Write a small file and force it to disk."""
    with open(path, "xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Force the entries of a directory to disk: a new or renamed file survives a crash only after that."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def has_name(dtype: torch.dtype) -> bool:
    """Whether safetensors has a name for a dtype."""
    return dtype in _NAMES


def header_of(tensors: Mapping[str, _Described], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with these tensors in this order; a dtype without a name is stored as bytes."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    ends = list(accumulate((tensor.nbytes for tensor in tensors.values()), initial=0))
    for (name, tensor), start, stop in zip(tensors.items(), ends, ends[1:], strict=False):
        shape = list(tensor.shape) if has_name(tensor.dtype) else [tensor.nbytes]
        header[name] = {"dtype": _NAMES.get(tensor.dtype, "U8"), "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    memory = _bytes_of(tensor)
    for start in range(0, memory.numel(), _CHUNK):
        yield memory[start : start + _CHUNK].cpu()


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, not copied; the view keeps the memory alive."""
    return _bytes_of(tensor).numpy().data


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _stream(file: BinaryIO, pieces: Iterator[memoryview], advance: Advance, max_queued: int) -> tuple[str, int]:
    """Write all pieces and return their SHA-256 and size; hashing goes on while this thread waits for the disk."""
    hasher, total = hashlib.sha256(), 0
    queue: Queue[memoryview | None] = Queue(max_queued)

    def hash_all() -> None:
        while (piece := queue.get()) is not None:
            hasher.update(piece)

    # Not an executor: those refuse work while the interpreter shuts down, when a background save may still run.
    thread = Thread(target=hash_all, name="zerostep-hash", daemon=True)
    thread.start()
    try:
        for piece in pieces:
            queue.put(piece)  # blocks while the queue is full
            _write_all(file, piece)
            total += len(piece)
            advance(len(piece))
        os.fsync(file.fileno())
    finally:
        queue.put(None)
        thread.join()
    return hasher.hexdigest(), total


def _write_all(file: BinaryIO, piece: memoryview) -> None:
    while piece:  # an unbuffered write may take only a part
        piece = piece[file.write(piece) :]


def digest_of(path: Path, advance: Advance) -> str:
    """Return the SHA-256 of a file."""
    hasher, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            advance(count)
    return hasher.hexdigest()


# ---------------------------------------------------------------------- reading


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys: this parser and the library's could choose different values."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key comes twice")
    return unique


class TensorFile:
    """A file of tensors, opened for each read and never kept open; `metadata` is what was given to the writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._check_header()
            with open(path, "rb", buffering=0) as file:
                self._read_header(file)
        except OSError as error:
            raise self._read_error(error) from error
        except (SafetensorError, *MALFORMED) as error:
            raise self.damage_error(f"its header is not sound: {str(error)[:200]}") from error

    def _read_header(self, file: BinaryIO) -> None:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size), object_pairs_hook=_unique_keys)
        metadata = header.pop("__metadata__")[METADATA]
        self.metadata: dict[str, Any] = json.loads(metadata, object_pairs_hook=_unique_keys)
        self._start, self._entries = 8 + size, header
        self._as_bytes = {
            name: self._check_as_bytes(name, *described) for name, described in self.metadata["dtypes"].items()
        }

    def _check_header(self) -> None:
        """Let the library check sizes, types and offsets before memory is allocated by them."""
        with safe_open(self.path, framework="pt") as file:
            if METADATA not in (file.metadata() or {}):
                raise ValueError("zerostep did not write it")

    def _check_as_bytes(self, name: str, dtype_text: str, shape: list[int]) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and shape of a tensor that is stored as bytes; `ValueError` if the bytes do not fit."""
        dtype, entry = dtype_named(dtype_text), self._entry(name)
        valid = entry["dtype"] == "U8" and all(type(size) is int and size >= 0 for size in shape)
        if not valid or entry["shape"] != [math.prod(shape) * dtype.itemsize]:
            raise ValueError(f"{name!r} does not have the bytes of a tensor of shape {shape}")
        return dtype, tuple(shape)

    def damage_error(self, problem: str) -> CheckpointError:
        """Return the exception to raise for a damaged file."""
        return CheckpointError(f"{self.path} is damaged: {problem[:300]}; load another checkpoint")

    def _read_error(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be read: {error}; see to that, then load again")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._as_bytes[name][1] if name in self._as_bytes else tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        dtype = (
            self._as_bytes[name][0] if name in self._as_bytes else SAFETENSORS_DTYPES.get(self._entry(name)["dtype"])
        )
        if dtype is None:
            raise self.damage_error(f"{name!r} is of a dtype that is not known, {self._entry(name)['dtype']!r}")
        return dtype

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return the elements from `start` to `stop` of a flattened tensor, in host memory."""
        dtype, (begin, end) = self.dtype(name), self._entry(name)["data_offsets"]
        if not 0 <= start <= stop or begin + stop * dtype.itemsize > end:
            raise self.damage_error(f"{name!r} is shorter than {stop} elements")
        elements = torch.empty(stop - start, dtype=dtype)
        self._fill(self._start + begin + start * dtype.itemsize, memory_of(elements))
        return elements

    def whole(self, name: str) -> Tensor:
        """Return a whole tensor in its own shape."""
        shape = self.shape(name)
        return self.read(name, 0, torch.Size(shape).numel()).reshape(shape)

    def _fill(self, offset: int, buffer: memoryview) -> None:
        try:
            with open(self.path, "rb", buffering=0) as file:
                while buffer:
                    count = os.preadv(file.fileno(), [buffer[:_MOST_READ]], offset)
                    if not count:
                        raise self.damage_error("it ends too early")
                    offset, buffer = offset + count, buffer[count:]
        except OSError as error:
            raise self._read_error(error) from error

    def _entry(self, name: str) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = self._entries[name]
        except KeyError:
            raise self.damage_error(f"it has no tensor {name!r}") from None
        return entry
