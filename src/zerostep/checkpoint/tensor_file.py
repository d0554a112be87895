"""One file of tensors: written in a stream, hashed on the way, read by the span.

The bytes are those of safetensors. Its library writes only what lies in memory in one piece, and hashes nothing; so the
writing is done here. Whether a header is sound is for the library to say.
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
from typing import Any, BinaryIO, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zerostep.checkpoint.manifest import FileRecord
from zerostep.comm.codec import dtype_name, dtype_named
from zerostep.errors import MALFORMED, CheckpointError

__all__ = [
    "TensorFile",
    "digest_of",
    "has_name",
    "header_of",
    "memory_of",
    "sync_directory",
    "write_bytes",
    "write_streamed",
    "write_tensors",
]

Advance = Callable[[int], None]

METADATA = "zerostep"
_ALL = 0  # a queue without an end
_LONGEST_HEADER = 90_000_000
_CHUNK = 8 << 20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Described(Protocol):
    """A tensor, or what will be one."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...


# ---------------------------------------------------------------------- writing


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any], advance: Advance) -> FileRecord:
    """Write contiguous tensors, wherever they lie, and force them to disk; at most two chunks are held at a time."""
    in_place = all(tensor.device.type == "cpu" for tensor in tensors.values())  # then chunks are no memory of their own
    behind = _ALL if in_place else 1
    return write_streamed(path, tensors, about, lambda name: _chunks(tensors[name]), advance, behind)


def write_streamed(
    path: Path,
    tensors: Mapping[str, Described],
    about: Mapping[str, Any],
    chunks: Callable[[str], Iterable[Tensor]],
    advance: Advance,
    behind: int = 1,
) -> FileRecord:
    """Write tensors that come in pieces: `chunks` has those of a name, in order, and only when their turn has come.

    They are hashed beside, at most so many chunks `behind`.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))  # keeps each one aligned
    odd = {
        name: [dtype_name(tensor.dtype), list(tensor.shape)]
        for name, tensor in ordered.items()
        if not has_name(tensor.dtype)
    }
    header = header_of(ordered, {METADATA: json.dumps({**about, "dtypes": odd})})
    if len(header) > _LONGEST_HEADER:
        raise CheckpointError(
            f"{path.name} would need a header of {len(header)} bytes, and readers take at most {_LONGEST_HEADER}: the "
            "optimizer keeps too much that is not a tensor"
        )
    pieces = (memory_of(chunk) for name in ordered for chunk in chunks(name))
    with open(path, "xb", buffering=0) as file:
        digest, nbytes = _stream(file, chain([memoryview(header)], pieces), advance, behind)
    return FileRecord(path.name, nbytes, digest)


def write_bytes(path: Path, text: bytes) -> None:
    """Write a small file and force it to disk."""
    with open(path, "xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Force the names in a directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def has_name(dtype: torch.dtype) -> bool:
    """Whether safetensors has a name for a dtype."""
    return dtype in _NAMES


def header_of(tensors: Mapping[str, Described], metadata: Mapping[str, str]) -> bytes:
    """How a file begins whose tensors follow in this order; those of a dtype without a name are called bytes."""
    found: dict[str, Any] = {"__metadata__": dict(metadata)}
    ends = list(accumulate((tensor.nbytes for tensor in tensors.values()), initial=0))
    for (name, tensor), start, stop in zip(tensors.items(), ends, ends[1:], strict=False):
        shape = list(tensor.shape) if has_name(tensor.dtype) else [tensor.nbytes]
        found[name] = {"dtype": _NAMES.get(tensor.dtype, "U8"), "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    memory = _bytes_of(tensor)
    for start in range(0, memory.numel(), _CHUNK):
        yield memory[start : start + _CHUNK].cpu()


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied."""
    return _bytes_of(tensor).numpy().data


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _stream(file: BinaryIO, pieces: Iterator[memoryview], advance: Advance, behind: int) -> tuple[str, int]:
    """Another thread hashes what is written here, and has time to catch up while the disk is busy."""
    total = 0
    with _Hashing(behind) as hashing:
        for piece in pieces:
            hashing.add(piece)
            _write_all(file, piece)
            total += len(piece)
            advance(len(piece))
        os.fsync(file.fileno())
    return hashing.hexdigest(), total


class _Hashing:
    """A thread that hashes what it is given, in order, and is done at the end of the context.

    A plain one: the interpreter lets those go on that a background save starts while all else comes to its end.
    """

    def __init__(self, behind: int) -> None:
        self._hasher = hashlib.sha256()
        self._pieces: Queue[memoryview | None] = Queue(behind)
        self._thread = Thread(target=self._run, name="zerostep-hash", daemon=True)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._hasher.update(piece)

    def add(self, piece: memoryview) -> None:
        """Hash this, too; waits if there is too much to do already."""
        self._pieces.put(piece)

    def hexdigest(self) -> str:
        """What came out, after the end of the context."""
        return self._hasher.hexdigest()

    def __enter__(self) -> _Hashing:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._pieces.put(None)
        self._thread.join()


def _write_all(file: BinaryIO, piece: memoryview) -> None:
    while piece:
        piece = piece[file.write(piece) :]


def digest_of(path: Path, advance: Advance) -> str:
    """The SHA-256 of a file."""
    hasher, room = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(room):
            hasher.update(room[:count])
            advance(count)
    return hasher.hexdigest()


# ---------------------------------------------------------------------- reading


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What one parser takes for the value of a key that comes twice, another does not."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


class TensorFile:
    """A file of tensors. Nothing is read but the header and what is asked for, and the file is never kept open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._check_header()
            with open(path, "rb", buffering=0) as file:
                self._read_header(file)
        except OSError as error:
            raise self._unread(error) from error
        except (SafetensorError, *MALFORMED) as error:
            raise self.trouble(f"its header is not sound: {str(error)[:200]}") from error

    def _read_header(self, file: BinaryIO) -> None:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size), object_pairs_hook=_without_twins)
        self.about: dict[str, Any] = json.loads(header.pop("__metadata__")[METADATA], object_pairs_hook=_without_twins)
        self._start, self._entries = 8 + size, header
        self._odd = {name: self._odd_kind(name, *kind) for name, kind in self.about["dtypes"].items()}

    def _check_header(self) -> None:
        """The library checks sizes, types and offsets, before anything is allocated by them."""
        with safe_open(self.path, framework="pt") as found:
            if METADATA not in (found.metadata() or {}):
                raise ValueError("zerostep did not write it")

    def _odd_kind(self, name: str, dtype: str, shape: list[int]) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of a tensor that is stored as bytes."""
        found, entry = dtype_named(dtype), self._entry(name)
        sound = entry["dtype"] == "U8" and all(type(size) is int and size >= 0 for size in shape)
        if not sound or entry["shape"] != [math.prod(shape) * found.itemsize]:
            raise ValueError(f"{name!r} does not have the bytes of a tensor of shape {shape}")
        return found, tuple(shape)

    def trouble(self, story: str) -> CheckpointError:
        """What to raise about this file."""
        return CheckpointError(f"{self.path} is damaged: {story[:300]}; load another checkpoint")

    def _unread(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.path} cannot be read: {error}; see to that, then load again")

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._odd[name][1] if name in self._odd else tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        found = self._odd[name][0] if name in self._odd else _DTYPES.get(self._entry(name)["dtype"])
        if found is None:
            raise self.trouble(f"{name!r} is of a dtype that is not known, {self._entry(name)['dtype']!r}")
        return found

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """The elements from `start` to `stop` of a tensor, as if it were flat, in host memory."""
        dtype, (begin, end) = self.dtype(name), self._entry(name)["data_offsets"]
        if not 0 <= start <= stop or begin + stop * dtype.itemsize > end:
            raise self.trouble(f"{name!r} is shorter than {stop} elements")
        found = torch.empty(stop - start, dtype=dtype)
        self._fill(self._start + begin + start * dtype.itemsize, memory_of(found))
        return found

    def whole(self, name: str) -> Tensor:
        """A whole tensor in its own shape."""
        shape = self.shape(name)
        return self.read(name, 0, torch.Size(shape).numel()).reshape(shape)

    def _fill(self, place: int, room: memoryview) -> None:
        try:
            with open(self.path, "rb", buffering=0) as file:
                while room:
                    count = os.preadv(file.fileno(), [room[: 1 << 30]], place)
                    if not count:
                        raise self.trouble("it ends too early")
                    place, room = place + count, room[count:]
        except OSError as error:
            raise self._unread(error) from error

    def _entry(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._entries[name]
        except KeyError:
            raise self.trouble(f"it has no tensor {name!r}") from None
        return found
