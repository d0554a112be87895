"""A checkpoint opened for reading: any element range of any state, at any world size.

Opening checks everything that can be checked without reading the tensors; `verify` compares the files' checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerostep.checkpoint.directory import read_manifest
from zerostep.checkpoint.manifest import Manifest
from zerostep.checkpoint.tensor_file import TensorFile, digest_of
from zerostep.comm.codec import decode, dtype_named
from zerostep.errors import MALFORMED, CheckpointError
from zerostep.plan.layout import ParamSpec, Span
from zerostep.state.param_state import MASTER, order_of, shaped

# Returns a tensor of a file by its name, or something in its place.
Take = Callable[[TensorFile, str], Any]


def verify(path: Path, manifest: Manifest, files: Iterable[int], advance: Callable[[int], None]) -> None:
    """Compare the files of these ranks with their checksums; `CheckpointError` if one differs."""
    for rank in files:
        record = manifest.files[rank]
        try:
            digest = digest_of(path / record.name, advance)
        except OSError as error:
            raise CheckpointError(f"{path / record.name} cannot be read: {error}; load another checkpoint") from error
        if digest != record.sha256:
            raise CheckpointError(
                f"{path / record.name} is damaged: its SHA-256 is {digest[:16]}..., the manifest has "
                f"{record.sha256[:16]}...; load another checkpoint"
            )


@dataclass(frozen=True)
class _StoredPart:
    """The state of one part of a parameter: its file, keys of per-element state, and encoded shared state."""

    file: TensorFile
    span: Span
    per_element: tuple[str, ...]
    shared: Mapping[str, Any]


class Reader:
    """The state and the weights in a checkpoint, by the index that each parameter had when it was saved."""

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = read_manifest(path) if manifest is None else manifest
        self._files: list[TensorFile] = []
        for rank, record in enumerate(self.manifest.files):
            file = TensorFile(path / record.name)
            if (file.metadata.get("id"), file.metadata.get("rank")) != (self.manifest.id, rank):
                raise file.damage_error("it is the file of another rank or of another checkpoint")
            self._files.append(file)
        self._parts = self._find_parts()

    # ------------------------------------------------------------------ what it holds, checked on opening

    def _find_parts(self) -> dict[int, list[_StoredPart]]:
        parts_of: dict[int, list[_StoredPart]] = {}
        for rank, file in enumerate(self._files):
            owned = {fragment.param: fragment.part for fragment in self.manifest.layout.fragments(rank)}
            with _reporting_damage(file):
                for index, start, stop, per_element, shared in file.metadata["state"]:
                    part = _StoredPart(file, Span(start, stop), tuple(per_element), dict(shared))
                    self._check_part(part, index, owned.pop(index))  # a second entry for it is a KeyError
                    parts_of.setdefault(index, []).append(part)
                self._check_values(file)
                self._check_weights(file, rank)
        self._check_complete(parts_of)
        return {index: sorted(parts, key=lambda part: part.span.start) for index, parts in parts_of.items()}

    def _check_part(self, part: _StoredPart, index: int, owned: Span) -> None:
        if part.span != owned:
            raise ValueError(f"it holds {part.span} of parameter {index}, and the layout gives it {owned}")
        for key in part.per_element:
            name = f"state.{index}.{key}"
            if part.file.shape(name) != (part.span.length,):
                raise ValueError(f"{name!r} has shape {part.file.shape(name)} for {part.span.length} elements")
            part.file.dtype(name)

    def _check_values(self, file: TensorFile) -> None:
        """Raise unless each tensor in shared and global state exists and is referred to once.

        With repeated references, a small file could make a reader allocate any amount of memory.
        """
        names: list[str] = []

        def take(kind: str, items: list[Any]) -> Tensor:
            names.append(_tensor_name(items))
            file.shape(names[-1]), file.dtype(names[-1])
            return torch.empty(0)

        for _, _, _, _, shared in file.metadata["state"]:
            for value in shared.values():
                decode(value, take)
        for value in file.metadata["others"].values():
            decode(value, take)
        if len(names) != len(set(names)):
            raise ValueError("a tensor stands in two places")

    def _check_weights(self, file: TensorFile, rank: int) -> None:
        owned = {fragment.param: fragment.part for fragment in self.manifest.layout.fragments(rank)}
        for _, kind, *rest in self.manifest.model or ():
            if kind == "param" and rest[0] in owned:
                name, shape = f"model.{rest[0]}", (owned[rest[0]].length,)
                if (file.shape(name), file.dtype(name)) != (shape, self.weight_dtype(rest[0])):
                    raise ValueError(
                        f"{name!r} has shape {file.shape(name)} and is {file.dtype(name)}, unlike its parameter"
                    )
            elif kind == "buffer" and rest[0] == rank:
                name = f"buffer.{rest[1]}"
                file.shape(name), file.dtype(name)

    def _check_complete(self, parts_of: Mapping[int, Sequence[_StoredPart]]) -> None:
        """Raise unless all parts of a parameter have the same state, or none of them any."""
        for index, parts in parts_of.items():
            owners = self.manifest.layout.fragments_of(index)
            if len(parts) != len(owners) or not all(_same_state(index, parts[0], part) for part in parts):
                name = self.manifest.layout.params[index].name
                raise CheckpointError(
                    f"{self.path} is damaged: the parts of parameter {name!r} do not belong together; load another one"
                )

    @property
    def with_state(self) -> list[int]:
        """The indices of the parameters that have state."""
        return sorted(self._parts)

    def per_element_keys(self, index: int) -> dict[str, torch.dtype]:
        """Return the keys of a parameter's per-element state, with dtypes."""
        parts = self._parts.get(index, ())
        return {key: part.file.dtype(f"state.{index}.{key}") for part in parts[:1] for key in part.per_element}

    def shared_keys(self, index: int) -> list[str]:
        """Return the keys of a parameter's shared state."""
        return [key for part in self._parts.get(index, ())[:1] for key in part.shared]

    # ------------------------------------------------------------------ values

    def elements(self, index: int, key: str, span: Span) -> Tensor:
        """Return some elements of per-element state, in the order of the saved parameter's memory."""
        return self._elements(index, f"state.{index}.{key}", span)

    def value(self, index: int, key: str, take: Take = TensorFile.whole) -> Any:
        """Return a value of a parameter's shared state; `take` reads each tensor in it."""
        part = self._parts[index][0]
        return self._value(part.file, part.shared[key], take)

    def global_state(self, take: Take = TensorFile.whole) -> dict[str, Any]:
        """Return the state that belongs to no parameter; `take` reads each tensor in it."""
        file = self._files[0]
        return {key: self._value(file, value, take) for key, value in file.metadata["others"].items()}

    def weight(self, index: int, span: Span) -> Tensor:
        """Return some elements of a parameter, in the order of its memory when it was saved."""
        return self._elements(index, f"model.{index}", span)

    @cached_property
    def with_weights(self) -> frozenset[int]:
        """The indices of the parameters that the model's state dict had."""
        return frozenset(rest[0] for _, kind, *rest in self.manifest.model or () if kind == "param")

    def weight_dtype(self, index: int) -> torch.dtype:
        """Return the dtype of a stored parameter."""
        return dtype_named(self.spec(index).dtype)

    def buffer(self, rank: int, position: int, take: Take = TensorFile.whole) -> Any:
        """Return a tensor of the model that is not a parameter of the optimizer."""
        return take(self._files[rank], f"buffer.{position}")

    def spec(self, index: int) -> ParamSpec:
        """Return the spec of a parameter."""
        return self.manifest.layout.params[index]

    def order(self, index: int) -> tuple[int, ...]:
        """Return the order of the saved parameter's dimensions in memory, from the slowest to the fastest."""
        order = self.manifest.orders.get(index)
        return tuple(d for d, size in enumerate(self.spec(index).shape) if size > 1) if order is None else order

    def _elements(self, index: int, name: str, span: Span) -> Tensor:
        fragments = self.manifest.layout.fragments_of(index)
        chunks = []
        for fragment in fragments:
            wanted = fragment.part.intersect(span)
            if wanted.length:
                inside = wanted.shift(-fragment.part.start)
                chunks.append(self._files[fragment.rank].read(name, inside.start, inside.stop))
        if not chunks:
            return self._files[fragments[0].rank].read(name, 0, 0)
        return torch.cat(chunks) if len(chunks) > 1 else chunks[0]

    def _value(self, file: TensorFile, tree: Any, take: Take) -> Any:
        with _reporting_damage(file):
            return decode(tree, lambda kind, items: take(file, _tensor_name(items)))


def _same_state(index: int, one: _StoredPart, other: _StoredPart) -> bool:
    """Whether two parts of a parameter have state of the same keys and dtypes."""
    return (one.per_element, set(one.shared)) == (other.per_element, set(other.shared)) and all(
        one.file.dtype(f"state.{index}.{key}") == other.file.dtype(f"state.{index}.{key}") for key in one.per_element
    )


@contextmanager
def _reporting_damage(file: TensorFile) -> Iterator[None]:
    """Convert parsing errors into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except MALFORMED as error:
        problem = str(error)[:200] or type(error).__name__
        raise file.damage_error(f"it does not say well what is in it: {problem}") from error


def _tensor_name(items: Sequence[Any]) -> str:
    (position,) = items
    if type(position) is not int:
        raise ValueError(f"{str(position)[:80]!r} stands where the place of a tensor is needed")
    return f"tensor.{position}"


class StoredState:
    """The saved state of one parameter, in the memory order of the live parameter; tensors are read on request.

    Weights that were saved in a wider dtype than the live parameter's serve as masters.
    """

    def __init__(self, reader: Reader, index: int, param: Tensor, with_weights: bool) -> None:
        self._reader, self._index, self._param = reader, index, param
        wider = (
            with_weights and index in reader.with_weights and reader.weight_dtype(index).itemsize > param.dtype.itemsize
        )
        self._per_element = list(reader.per_element_keys(index))
        self._weights_as_masters = wider and MASTER not in self._per_element
        self._per_element += [MASTER] if self._weights_as_masters else []

    def names(self) -> list[str]:
        """The keys of all values."""
        return [*self._per_element, *self._reader.shared_keys(self._index)]

    def is_per_element(self, key: str) -> bool:
        """Whether a value has one number for each element."""
        return key in self._per_element

    def elements(self, key: str, part: Span) -> Tensor:
        """Return some elements of a per-element value, in the order of the live parameter's memory."""
        read = partial(self._reader.elements, self._index, key)
        if key == MASTER and self._weights_as_masters:
            read = partial(self._reader.weight, self._index)
        return in_order(self._reader, self._index, self._param, part, read)

    def whole(self, key: str) -> Any:
        """Return a value as an unsharded optimizer has it."""
        if key not in self._per_element:
            return self._reader.value(self._index, key)
        return shaped(self.elements(key, Span(0, self._param.numel())), self._param)


def in_order(reader: Reader, index: int, param: Tensor, span: Span, read: Callable[[Span], Tensor]) -> Tensor:
    """Return elements that `read` gives in the saved order of memory, in the order of the live parameter's memory.

    Where the orders differ, the whole parameter is read.
    """
    saved, live = reader.order(index), order_of(param)
    if saved == live or not param.numel():
        return read(span)
    flat = read(Span(0, param.numel()))
    by_dimension = flat.view([param.shape[dim] for dim in saved]).permute([saved.index(dim) for dim in sorted(saved)])
    reordered = by_dimension.permute([sorted(live).index(dim) for dim in live])
    return reordered.reshape(-1)[span.start : span.stop].clone()
