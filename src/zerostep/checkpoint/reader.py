"""A checkpoint opened for reading: any elements of any block of a state, whatever ranks and blocks it was saved by.

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
from zerostep.checkpoint.layouts import StoredBlock, WholeParam
from zerostep.checkpoint.manifest import Manifest
from zerostep.checkpoint.regions import Region, Source, read_elements, rows_of
from zerostep.checkpoint.tensor_file import TensorFile, digest_of
from zerostep.comm.codec import decode, dtype_named
from zerostep.errors import MALFORMED, CheckpointError
from zerostep.plan.blocks import whole
from zerostep.plan.layout import Span
from zerostep.state.param_state import MASTER, shaped

# Returns a tensor of a file by its name, or something in its place.
Take = Callable[[TensorFile, str], Any]


def verify(path: Path, manifest: Manifest, files: Iterable[int], advance: Callable[[int], None]) -> None:
    """Compare the files of these numbers with their checksums; `CheckpointError` if one differs."""
    for number in files:
        record = manifest.files[number]
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
    """The state of one part of a stored block: its file, keys of per-element state, and encoded shared state.

    `param` is the index in the file: that of the file's layout.
    """

    file: TensorFile
    param: int
    span: Span
    per_element: tuple[str, ...]
    shared: Mapping[str, Any]

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of per-element state."""
        return {key: self.file.dtype(f"state.{self.param}.{key}") for key in self.per_element}


class Reader:
    """The state and the weights in a checkpoint, by the indices of whole parameters."""

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = read_manifest(path) if manifest is None else manifest
        self._files: dict[tuple[int, int], TensorFile] = {}
        for place, record in zip(self.manifest.places, self.manifest.files, strict=True):
            file = TensorFile(path / record.name)
            if (file.metadata.get("id"), file.metadata.get("layout", 0), file.metadata.get("rank")) != (
                self.manifest.id,
                *place,
            ):
                raise file.damage_error("it is the file of another rank or of another checkpoint")
            self._files[place] = file
        self._parts = self._find_parts()

    # ------------------------------------------------------------------ what it holds, checked on opening

    def _find_parts(self) -> dict[int, list[_StoredPart]]:
        """The stored parts of each parameter that has state."""
        parts_of: dict[int, list[_StoredPart]] = {}
        for (layout, rank), file in self._files.items():
            owned, whole_of = self._owned(layout, rank), self.manifest.layouts[layout].whole
            with _reporting_damage(file):
                self._check_weights(file, layout, owned)
                for param, start, stop, per_element, shared in file.metadata["state"]:
                    part = _StoredPart(file, param, Span(start, stop), tuple(per_element), dict(shared))
                    _check_part(part, owned.pop(param))  # a second entry for it is a KeyError
                    parts_of.setdefault(whole_of[param], []).append(part)
                self._check_values(file)
        self._check_buffers()
        self._check_complete(parts_of)
        return parts_of

    def _owned(self, layout: int, rank: int) -> dict[int, Span]:
        """What a rank owned and its file has to hold."""
        fragments = self.manifest.layouts[layout].layout.fragments(rank)
        return {each.param: each.part for each in fragments if self._is_stored(layout, each.param)}

    def _is_stored(self, layout: int, param: int) -> bool:
        return StoredBlock(layout, param) in self._stored

    @cached_property
    def _stored(self) -> frozenset[StoredBlock]:
        return frozenset(place for places in self.manifest.stored for place in places)

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

    def _check_weights(self, file: TensorFile, layout: int, owned: Mapping[int, Span]) -> None:
        whole_of = self.manifest.layouts[layout].whole
        for param, part in owned.items():
            if whole_of[param] in self.with_weights:
                name, expected = f"model.{param}", ((part.length,), self.weight_dtype(whole_of[param]))
                if (file.shape(name), file.dtype(name)) != expected:
                    raise ValueError(
                        f"{name!r} has shape {file.shape(name)} and is {file.dtype(name)}, unlike its parameter"
                    )

    def _check_buffers(self) -> None:
        for _, kind, *rest in self.manifest.model or ():
            if kind == "buffer":
                with _reporting_damage(self._file(rest[0])):
                    self.buffer(rest[0], rest[1], TensorFile.shape), self.buffer(rest[0], rest[1], TensorFile.dtype)

    def _check_complete(self, parts_of: Mapping[int, Sequence[_StoredPart]]) -> None:
        """Raise unless all parts of a parameter have the same state, or none of them any."""
        for index, parts in parts_of.items():
            places = self.manifest.stored[index]
            owners = sum(len(self.manifest.layouts[at.layout].layout.fragments_of(at.param)) for at in places)
            if len(parts) != owners or not all(_same_state(parts[0], part) for part in parts):
                name = self.manifest.params[index].name
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
        return parts[0].dtypes() if parts else {}

    def shared_keys(self, index: int) -> list[str]:
        """Return the keys of a parameter's shared state."""
        return [key for part in self._parts.get(index, ())[:1] for key in part.shared]

    # ------------------------------------------------------------------ values

    def elements(self, index: int, key: str, span: Span, region: Region | None = None) -> Tensor:
        """Return some elements of per-element state, in the order of memory of a region: by default of `region`."""
        sources = [self._source(place, f"state.{place.param}.{key}") for place in self.manifest.stored[index]]
        return read_elements(region or self.region(index), span, sources, self.per_element_keys(index)[key])

    def weight(self, index: int, span: Span, region: Region | None = None) -> Tensor:
        """Return some elements of a parameter, in the order of memory of a region: by default of `region`."""
        sources = [self._source(place, f"model.{place.param}") for place in self.manifest.stored[index]]
        return read_elements(region or self.region(index), span, sources, self.weight_dtype(index))

    def value(self, index: int, key: str, take: Take = TensorFile.whole) -> Any:
        """Return a value of a parameter's shared state; `take` reads each tensor in it."""
        part = self._parts[index][0]
        return self._value(part.file, part.shared[key], take)

    def global_state(self, take: Take = TensorFile.whole) -> dict[str, Any]:
        """Return the state that belongs to no parameter; `take` reads each tensor in it."""
        file = self._file(0)
        return {key: self._value(file, value, take) for key, value in file.metadata["others"].items()}

    @cached_property
    def with_weights(self) -> frozenset[int]:
        """The indices of the parameters that the model's state dict had."""
        return frozenset(rest[0] for _, kind, *rest in self.manifest.model or () if kind == "param")

    def weight_dtype(self, index: int) -> torch.dtype:
        """Return the dtype of a stored parameter."""
        return dtype_named(self.spec(index).dtype)

    def buffer(self, number: int, position: int, take: Take = TensorFile.whole) -> Any:
        """Return a tensor of the model that is not a parameter of the optimizer, from the file of this number."""
        return take(self._file(number), f"buffer.{position}")

    def spec(self, index: int) -> WholeParam:
        """Return name, shape, dtype and group of a parameter."""
        return self.manifest.params[index]

    def region(self, index: int) -> Region:
        """Return the whole parameter, in the order of memory in which it was saved.

        If it was saved in blocks, that is the order of the first, with the dimensions of which it has one element
        before the others.
        """
        spec, place = self.spec(index), self.manifest.stored[index][0]
        first, rows = self.manifest.layouts[place.layout].region(place.param), rows_of(spec.shape)
        missing = tuple(dim for dim in rows if dim not in first.order)
        usual = first.order == rows_of(first.block.sizes)
        return Region(whole(spec.shape), rows if usual else (*missing, *first.order))

    def _source(self, place: StoredBlock, name: str) -> Source:
        return Source(self.manifest.layouts[place.layout].region(place.param), partial(self._read, place, name))

    def _read(self, place: StoredBlock, name: str, span: Span) -> Tensor:
        fragments = self.manifest.layouts[place.layout].layout.fragments_of(place.param)
        chunks = []
        for fragment in fragments:
            wanted = fragment.part.intersect(span)
            if wanted.length:
                inside = wanted.shift(-fragment.part.start)
                chunks.append(self._files[place.layout, fragment.rank].read(name, inside.start, inside.stop))
        if not chunks:
            return self._files[place.layout, fragments[0].rank].read(name, 0, 0)
        return torch.cat(chunks) if len(chunks) > 1 else chunks[0]

    def _file(self, number: int) -> TensorFile:
        return self._files[self.manifest.places[number]]

    def _value(self, file: TensorFile, tree: Any, take: Take) -> Any:
        with _reporting_damage(file):
            return decode(tree, lambda kind, items: take(file, _tensor_name(items)))


def _check_part(part: _StoredPart, owned: Span) -> None:
    if part.span != owned:
        raise ValueError(f"it holds {part.span} of parameter {part.param}, and the layout gives it {owned}")
    for key, dtype in part.dtypes().items():
        name = f"state.{part.param}.{key}"
        if part.file.shape(name) != (part.span.length,):
            raise ValueError(f"{name!r} has shape {part.file.shape(name)} and is {dtype}, unlike its part")


def _same_state(one: _StoredPart, other: _StoredPart) -> bool:
    """Whether two parts of a parameter have state of the same keys and dtypes."""
    return (one.per_element, set(one.shared)) == (other.per_element, set(other.shared)) and (
        one.dtypes() == other.dtypes()
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
    """The saved state of one parameter, as a live region of it holds it; tensors are read on request.

    `param` is this rank's tensor: the region in memory. Weights that were saved in a wider dtype serve as masters.
    """

    def __init__(self, reader: Reader, index: int, region: Region, param: Tensor, with_weights: bool) -> None:
        self._reader, self._index, self._region, self._param = reader, index, region, param
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
        """Return some elements of a per-element value, in the order of the live region's memory."""
        if key == MASTER and self._weights_as_masters:
            return self._reader.weight(self._index, part, self._region)
        return self._reader.elements(self._index, key, part, self._region)

    def whole(self, key: str) -> Any:
        """Return a value as an optimizer of this rank's tensor has it; shared state belongs to the whole parameter."""
        if key not in self._per_element:
            return self._reader.value(self._index, key)
        return shaped(self.elements(key, Span(0, self._param.numel())), self._param)
