"""A checkpoint that is open for reading: any span of any state, whoever wrote it and however many ranks there were.

Opening checks everything that can be checked without the tensors' bytes; `verify` checks those.
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

__all__ = ["Reader", "StoredState", "verify"]

# Finds a tensor in a file by its name, or what stands for it.
Take = Callable[[TensorFile, str], Any]


def verify(path: Path, manifest: Manifest, files: Iterable[int], advance: Callable[[int], None]) -> None:
    """Compare some files of a checkpoint, by number, with their checksums; `CheckpointError` if one differs."""
    for number in files:
        record = manifest.files[number]
        try:
            found = digest_of(path / record.name, advance)
        except OSError as error:
            raise CheckpointError(f"{path / record.name} cannot be read: {error}; load another checkpoint") from error
        if found != record.sha256:
            raise CheckpointError(
                f"{path / record.name} is damaged: its SHA-256 is {found[:16]}..., the manifest has "
                f"{record.sha256[:16]}...; load another checkpoint"
            )


@dataclass(frozen=True)
class _StoredPart:
    """Where the state of a part of a parameter is."""

    file: TensorFile
    part: Span
    per_element: tuple[str, ...]
    shared: Mapping[str, Any]


class Reader:
    """The state and the weights in a checkpoint, by the number that each parameter had when it was written."""

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = read_manifest(path) if manifest is None else manifest
        self._files: list[TensorFile] = []
        for rank, record in enumerate(self.manifest.files):
            self._files.append(TensorFile(path / record.name))
            self._check_identity(self._files[-1], rank)
        self._parts = self._find_parts()

    # ------------------------------------------------------------------ what is there

    def _check_identity(self, file: TensorFile, rank: int) -> None:
        if (file.about.get("id"), file.about.get("rank")) != (self.manifest.id, rank):
            raise file.trouble("it is the file of another rank or of another checkpoint")

    def _find_parts(self) -> dict[int, list[_StoredPart]]:
        found: dict[int, list[_StoredPart]] = {}
        for rank, file in enumerate(self._files):
            owned = {fragment.param: fragment.part for fragment in self.manifest.layout.fragments(rank)}
            with _telling_of(file):
                for number, start, stop, like, rest in file.about["state"]:
                    part_ = _StoredPart(file, Span(start, stop), tuple(like), dict(rest))
                    self._check_part(part_, number, owned.pop(number))  # which comes once
                    found.setdefault(number, []).append(part_)
                self._check_values(file)
                self._check_weights(file, rank)
        self._check_complete(found)
        return {number: sorted(parts, key=lambda part_: part_.part.start) for number, parts in found.items()}

    def _check_part(self, part_: _StoredPart, number: int, owned: Span) -> None:
        if part_.part != owned:
            raise ValueError(f"it holds {part_.part} of parameter {number}, and the layout gives it {owned}")
        for key in part_.per_element:
            name = f"state.{number}.{key}"
            if part_.file.shape(name) != (part_.part.length,):
                raise ValueError(f"{name!r} has shape {part_.file.shape(name)} for {part_.part.length} elements")
            part_.file.dtype(name)

    def _check_values(self, file: TensorFile) -> None:
        """Each tensor among the values is there and stands in one place: text must not multiply what is in the file."""
        places: list[str] = []

        def take(kind: str, items: list[Any]) -> Tensor:
            places.append(_place(items))
            file.shape(places[-1]), file.dtype(places[-1])
            return torch.empty(0)

        for _, _, _, _, rest in file.about["state"]:
            for value in rest.values():
                decode(value, take)
        for value in file.about["others"].values():
            decode(value, take)
        if len(places) != len(set(places)):
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

    def _check_complete(self, found: Mapping[int, Sequence[_StoredPart]]) -> None:
        """A parameter has state in all its parts, of the same kinds, or in none."""
        for number, parts in found.items():
            owners = [each.rank for each in self.manifest.layout.fragments_of(number)]
            first = parts[0]
            alike = all(
                (each.per_element, set(each.shared)) == (first.per_element, set(first.shared)) for each in parts
            )
            dtypes = (
                {tuple(each.file.dtype(f"state.{number}.{key}") for key in first.per_element) for each in parts}
                if alike
                else ()
            )
            if len(parts) != len(owners) or len(dtypes) != 1:
                name = self.manifest.layout.params[number].name
                raise CheckpointError(
                    f"{self.path} is damaged: the parts of parameter {name!r} do not belong together; load another one"
                )

    @property
    def with_state(self) -> list[int]:
        """The numbers of the parameters that have state."""
        return sorted(self._parts)

    def per_element_keys(self, number: int) -> dict[str, torch.dtype]:
        """The state of a parameter that is like it, with its dtypes."""
        found = self._parts.get(number, ())
        return {key: each.file.dtype(f"state.{number}.{key}") for each in found[:1] for key in each.per_element}

    def shared_keys(self, number: int) -> list[str]:
        """The other state of a parameter."""
        return [key for each in self._parts.get(number, ())[:1] for key in each.shared]

    # ------------------------------------------------------------------ values

    def elements(self, number: int, key: str, part: Span) -> Tensor:
        """Some elements of state that is like its parameter, in the order of the parameter's memory at the time."""
        return self._elements(number, f"state.{number}.{key}", part)

    def value(self, number: int, key: str, take: Take = TensorFile.whole) -> Any:
        """State that belongs to a whole parameter; `take` finds each tensor in it."""
        part_ = self._parts[number][0]
        return self._value(part_.file, part_.shared[key], take)

    def others(self, take: Take = TensorFile.whole) -> dict[str, Any]:
        """State that belongs to no parameter."""
        file = self._files[0]
        return {key: self._value(file, value, take) for key, value in file.about["others"].items()}

    def weight(self, number: int, part: Span) -> Tensor:
        """Some elements of a parameter, in the order of its memory at the time."""
        return self._elements(number, f"model.{number}", part)

    def has_weight(self, number: int) -> bool:
        """Whether the model's state dict had this parameter."""
        return number in self._weights

    @cached_property
    def _weights(self) -> frozenset[int]:
        return frozenset(rest[0] for _, kind, *rest in self.manifest.model or () if kind == "param")

    def weight_dtype(self, number: int) -> torch.dtype:
        """The dtype of a stored parameter."""
        return dtype_named(self.spec(number).dtype)

    def buffer(self, rank: int, place: int, take: Take = TensorFile.whole) -> Any:
        """A tensor of the model that the optimizer did not hold."""
        return take(self._files[rank], f"buffer.{place}")

    def buffer_shape(self, rank: int, place: int) -> tuple[int, ...]:
        """The shape of a tensor of the model that the optimizer did not hold."""
        return self._files[rank].shape(f"buffer.{place}")

    def spec(self, number: int) -> ParamSpec:
        """The parameter of a number."""
        return self.manifest.layout.params[number]

    def order(self, number: int) -> tuple[int, ...]:
        """In which order the parameter's dimensions lay in memory."""
        found = self.manifest.orders.get(number)
        return tuple(d for d, size in enumerate(self.spec(number).shape) if size > 1) if found is None else found

    def _elements(self, number: int, name: str, part: Span) -> Tensor:
        parts = []
        for fragment in self.manifest.layout.fragments_of(number):
            wanted = fragment.part.intersect(part)
            if wanted.length:
                inside = wanted.shift(-fragment.part.start)
                parts.append(self._files[fragment.rank].read(name, inside.start, inside.stop))
        if not parts:
            owner = self.manifest.layout.fragments_of(number)[0].rank
            return self._files[owner].read(name, 0, 0)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _value(self, file: TensorFile, tree: Any, take: Take) -> Any:
        with _telling_of(file):
            return decode(tree, lambda kind, items: take(file, _place(items)))


@contextmanager
def _telling_of(file: TensorFile) -> Iterator[None]:
    """What malformed text makes Python raise, as what it means."""
    try:
        yield
    except CheckpointError:
        raise
    except MALFORMED as error:
        raise file.trouble(f"it does not say well what is in it: {str(error)[:200] or type(error).__name__}") from error


def _place(items: Sequence[Any]) -> str:
    (place,) = items
    if type(place) is not int:
        raise ValueError(f"{str(place)[:80]!r} stands where the place of a tensor is needed")
    return f"tensor.{place}"


class StoredState:
    """The state of one parameter in a checkpoint, for a parameter of today; reads only what is asked for.

    Weights that were saved in a wider dtype than the parameter has today are as good as masters.
    """

    def __init__(self, reader: Reader, number: int, param: Tensor, with_weights: bool) -> None:
        self._reader, self._number, self._param = reader, number, param
        wider = with_weights and reader.has_weight(number) and _is_wider(reader.weight_dtype(number), param.dtype)
        self._weights_as_masters = wider and MASTER not in reader.per_element_keys(number)

    @cached_property
    def _like(self) -> list[str]:
        return [*self._reader.per_element_keys(self._number), *([MASTER] if self._weights_as_masters else [])]

    def names(self) -> list[str]:
        """The names of all its pieces."""
        return [*self._like, *self._reader.shared_keys(self._number)]

    def is_per_element(self, key: str) -> bool:
        """Whether a piece has one number for each element."""
        return key in self._like

    def elements(self, key: str, part: Span) -> Tensor:
        """Some elements of a piece that is like the parameter, in the order of its memory now."""
        if key == MASTER and self._weights_as_masters:
            return in_order(self._reader, self._number, self._param, part, partial(self._reader.weight, self._number))
        return in_order(
            self._reader, self._number, self._param, part, partial(self._reader.elements, self._number, key)
        )

    def whole(self, key: str) -> Any:
        """A piece as an unsharded optimizer has it."""
        if key not in self._like:
            return self._reader.value(self._number, key)
        return shaped(self.elements(key, Span(0, self._param.numel())), self._param)


def in_order(reader: Reader, number: int, param: Tensor, part: Span, read: Callable[[Span], Tensor]) -> Tensor:
    """What `read` finds of a parameter, in the order of its memory now, which may not be that of the checkpoint."""
    then, now = reader.order(number), order_of(param)
    if then == now or not param.numel():
        return read(part)
    flat = read(Span(0, param.numel()))
    shape = param.shape
    rows = flat.view([shape[dim] for dim in then]).permute([then.index(dim) for dim in sorted(then)])
    turned = rows.permute([sorted(now).index(dim) for dim in now])
    return turned.reshape(-1)[part.start : part.stop].clone()


def _is_wider(one: torch.dtype, other: torch.dtype) -> bool:
    return one.itemsize > other.itemsize
