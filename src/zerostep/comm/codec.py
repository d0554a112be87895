"""Nested Python values as JSON text plus a list of tensors: sent between ranks and written to files, never a pickle.

Numbers, text, `None`, lists, tuples, dicts, dtypes and tensors come back unchanged. Any other type raises `TypeError`:
only pickle could carry it, and unpickling would let one rank run code on another.
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

_JSON_TYPES = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Packed:
    """A value as text and tensors; the text refers to tensors by index."""

    text: bytes
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all the tensors' elements."""
        return sum(tensor.nbytes for tensor in self.tensors)


def pack(value: Any) -> Packed:
    """Encode `value`; `TypeError` names the first type that cannot be sent, and its path in the value.

    The tensors alias those of `value` where they are dense: do not change them before they are sent.
    """
    tensors: list[Tensor] = []

    def store(tensor: Tensor) -> list[Any]:
        tensors.append(tensor)
        return ["tensor", len(tensors) - 1]

    tree = encode(value, store)
    head = [[list(tensor.shape), list(tensor.stride()), dtype_name(tensor.dtype)] for tensor in tensors]
    return Packed(json.dumps([head, tree], separators=(",", ":")).encode(), tuple(tensors))


def specs(text: bytes) -> tuple[Tensor, ...]:
    """The tensors that belong to `text`, on the meta device; `ValueError` if it is malformed."""
    with _malformed_as_value_error():
        head, _ = _parse(text)
        return tuple(_tensor_spec(*entry) for entry in head)


def empty(spec: Tensor, device: torch.device) -> Tensor:
    """Memory for a tensor, with exactly its strides, which `torch.empty_like` would change."""
    return torch.empty_strided(spec.shape, spec.stride(), dtype=spec.dtype, device=device)


def unpack(text: bytes, tensors: Sequence[Tensor]) -> Any:
    """The value of `text` and `tensors`, which it aliases; `ValueError` if `text` is malformed."""
    with _malformed_as_value_error():
        head, tree = _parse(text)
        if len(head) != len(tensors):
            raise ValueError(f"the text speaks of {len(head)} tensors, {len(tensors)} came with it")
        # `range.index` raises for a negative index, which would name a tensor from the end.
        return decode(tree, lambda kind, items: tensors[range(len(tensors)).index(*items)])


@contextmanager
def _malformed_as_value_error() -> Iterator[None]:
    """Convert what malformed text from another rank makes Python raise into `ValueError`."""
    try:
        yield
    except (TypeError, IndexError, OverflowError, RuntimeError) as error:
        raise ValueError(f"not a packed value: {error}") from error


def _tensor_spec(shape: list[int], strides: list[int], name: str) -> Tensor:
    """A checked spec: the numbers come from another rank, and must not make elements overlap or leave gaps."""
    dtype = dtype_named(name)
    if min(strides, default=0) >= 0:
        spec = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
        if is_dense(spec):
            return spec
    raise ValueError(f"a tensor of shape {shape} with strides {strides} does not fill its memory")


def _parse(text: bytes) -> tuple[list[Any], Any]:
    parsed = json.loads(text)
    if not (isinstance(parsed, list) and len(parsed) == 2 and isinstance(parsed[0], list)):
        raise ValueError("not a packed value")
    return parsed[0], parsed[1]


def encode(value: Any, store: Callable[[Tensor], list[Any]], path: str = "value") -> Any:
    """A value as JSON: numbers, text and `None` as they are, others as a list that begins with the kind of the value.

    `store` keeps a dense tensor and returns the list to write in its place. `TypeError`, with `path`, for other types.
    """
    if isinstance(value, Tensor):
        return store(_as_dense(value, path))
    if isinstance(value, torch.dtype):
        return ["dtype", dtype_name(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return ["float", str(float(value))]
    if isinstance(value, _JSON_TYPES):
        return value
    if isinstance(value, complex):
        return ["complex", encode(value.real, store), encode(value.imag, store)]
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(encode(item, store, f"{path}[{i}]") for i, item in enumerate(value))]
    if isinstance(value, Mapping):
        return ["dict", *_encode_items(value, store, path)]
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot travel between ranks or into a "
        "checkpoint: only numbers, text, None, lists, tuples, dicts and tensors can; convert it to one of these first"
    )


def _as_dense(tensor: Tensor, path: str) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise TypeError(
            f"{path} is a {torch.typename(tensor)} with layout {tensor.layout}, which cannot travel between ranks: "
            "only dense tensors without a subclass can; convert it first"
        )
    # Conjugate and negative bits are lost when memory is sent as bytes.
    resolved = tensor.detach().resolve_conj().resolve_neg()
    return resolved if is_dense(resolved) else resolved.contiguous()


def _encode_items(value: Mapping[Any, Any], store: Callable[[Tensor], list[Any]], path: str) -> list[Any]:
    return [
        [encode(key, store, f"{path} key {key!r}"), encode(item, store, f"{path}[{key!r}]")]
        for key, item in value.items()
    ]


def decode(tree: Any, load: Callable[[str, list[Any]], Tensor]) -> Any:
    """The value that `encode` wrote. `load` returns a tensor, given the kind and the other items of its list.

    A malformed tree raises any of the errors in `zerostep.errors.MALFORMED`: callers convert them.
    """
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind in ("tensor", "stored"):
        return load(kind, items)
    if kind == "dtype":
        return dtype_named(*items)
    if kind == "float":
        return float(*items)
    if kind == "complex":
        return complex(*(decode(item, load) for item in items))
    if kind == "dict":
        return {decode(key, load): decode(item, load) for key, item in items}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(decode(item, load) for item in items)
    raise ValueError(f"not a packed value: {kind!r}")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype with this name; `ValueError` if there is none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of this torch ({torch.__version__})")
    return dtype
