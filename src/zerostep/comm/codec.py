"""Nested Python values as JSON text plus a list of tensors: what travels between ranks instead of a pickle.

Numbers, text, `None`, lists, tuples, dicts and tensors survive unchanged. Anything else is refused by name: a value
that only pickle could carry would let one rank run code on another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerostep.tensors import is_dense

__all__ = ["Packed", "TensorSpec", "decode", "dtype_name", "dtype_named", "encode", "pack", "specs", "unpack"]

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that travels beside the text, in memory order."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Memory for the tensor."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Packed:
    """A value as text and tensors; the text says which tensor stands where."""

    text: bytes
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all the tensors' elements."""
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in self.tensors)


def pack(value: Any) -> Packed:
    """Take `value` apart; `TypeError` names the first type that cannot travel, and where it stands."""
    tensors: list[Tensor] = []

    def put(tensor: Tensor) -> list[Any]:
        tensors.append(tensor)
        return ["tensor", len(tensors) - 1]

    tree = encode(value, put)
    head = [[list(tensor.shape), list(tensor.stride()), dtype_name(tensor.dtype)] for tensor in tensors]
    return Packed(json.dumps([head, tree], separators=(",", ":")).encode(), tuple(tensors))


def specs(text: bytes) -> tuple[TensorSpec, ...]:
    """The tensors that belong to `text`, so that memory can be made ready for them; `ValueError` if it is malformed."""
    with _refusing():
        head, _ = _parse(text)
        return tuple(_spec(*entry) for entry in head)


def unpack(text: bytes, tensors: Sequence[Tensor]) -> Any:
    """Put a value together again; `ValueError` if `text` is malformed."""
    with _refusing():
        head, tree = _parse(text)
        if len(head) != len(tensors):
            raise ValueError(f"the text speaks of {len(head)} tensors, {len(tensors)} came with it")
        return decode(tree, lambda kind, items: tensors[range(len(tensors)).index(*items)])


@contextmanager
def _refusing() -> Iterator[None]:
    """Text comes from another rank: whatever is wrong with it is a `ValueError`."""
    try:
        yield
    except (TypeError, IndexError, OverflowError, RuntimeError) as error:
        raise ValueError(f"not a packed value: {error}") from error


def _spec(shape: list[int], strides: list[int], name: str) -> TensorSpec:
    """Refuses what would make two elements share memory or leave gaps: sizes come from another rank."""
    found = TensorSpec(tuple(shape), tuple(strides), dtype_named(name))
    if min(found.strides, default=0) < 0 or not is_dense(
        torch.empty_strided(found.shape, found.strides, dtype=found.dtype, device="meta")
    ):
        raise ValueError(f"a tensor of shape {shape} with strides {strides} does not fill its memory")
    return found


def _parse(text: bytes) -> tuple[list[Any], Any]:
    found = json.loads(text)
    if not (isinstance(found, list) and len(found) == 2 and isinstance(found[0], list)):
        raise ValueError("not a packed value")
    return found[0], found[1]


def encode(value: Any, put: Callable[[Tensor], list[Any]], path: str = "value") -> Any:
    """A value as JSON has it: plain ones stand for themselves, others are a list whose first entry says what it is.

    `put` stores a tensor and returns the list that stands for it. `TypeError` for what cannot travel.
    """
    if isinstance(value, Tensor):
        return put(_plain(value, path))
    if isinstance(value, torch.dtype):
        return ["dtype", dtype_name(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return ["float", str(float(value))]
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, complex):
        return ["complex", encode(value.real, put), encode(value.imag, put)]
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(encode(item, put, f"{path}[{i}]") for i, item in enumerate(value))]
    if isinstance(value, Mapping):
        return ["dict", *_encode_items(value, put, path)]
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot travel between ranks or into a "
        "checkpoint: only numbers, text, None, lists, tuples, dicts and tensors can; convert it to one of these first"
    )


def _plain(tensor: Tensor, path: str) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise TypeError(
            f"{path} is a {torch.typename(tensor)} with layout {tensor.layout}, which cannot travel between ranks: "
            "only dense tensors without a subclass can; convert it first"
        )
    found = tensor.detach().resolve_conj().resolve_neg()
    return found if is_dense(found) else found.contiguous()


def _encode_items(value: Mapping[Any, Any], put: Callable[[Tensor], list[Any]], path: str) -> list[Any]:
    return [
        [encode(key, put, f"{path} key {key!r}"), encode(item, put, f"{path}[{key!r}]")] for key, item in value.items()
    ]


def decode(tree: Any, take: Callable[[str, list[Any]], Tensor]) -> Any:
    """The value that `encode` wrote. `take` finds a tensor, given the kind and the rest of the list that stands for it.

    Malformed text raises one of the errors that Python has for it.
    """
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind in ("tensor", "stored"):
        return take(kind, items)
    if kind == "dtype":
        return dtype_named(*items)
    if kind == "float":
        return float(*items)
    if kind == "complex":
        return complex(*(decode(item, take) for item in items))
    if kind == "dict":
        return {decode(key, take): decode(item, take) for key, item in items}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(decode(item, take) for item in items)
    raise ValueError(f"not a packed value: {kind!r}")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in text."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name; `ValueError` if there is none."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of this torch ({torch.__version__})")
    return found
