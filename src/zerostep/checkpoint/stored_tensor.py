"""Tensors on disk whose shape, strides and dtype are known before their elements are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from zerostep.checkpoint.reader import Reader
from zerostep.checkpoint.tensor_file import TensorFile
from zerostep.plan.layout import Span
from zerostep.state.param_state import order_of
from zerostep.tensors import flat_alias, is_dense

_CHUNK = 4 << 20  # bytes
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A dense tensor; `read` returns any range of its elements, in the order of its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Span], Tensor]

    @staticmethod
    def in_file(file: TensorFile, name: str) -> StoredTensor:
        """Return a whole tensor of a file."""
        shape, strides = file.shape(name), torch.empty(file.shape(name), device="meta").stride()
        return StoredTensor(shape, strides, file.dtype(name), lambda span: file.read(name, span.start, span.stop))

    @staticmethod
    def in_memory(tensor: Tensor) -> StoredTensor:
        """Wrap a tensor in memory; a copy only if it is not dense or not in host memory."""
        whole = tensor.detach().cpu()
        whole = whole if is_dense(whole) else whole.contiguous()
        flat = flat_alias(whole)
        return StoredTensor(
            tuple(whole.shape), whole.stride(), whole.dtype, lambda span: flat[span.start : span.stop].clone()
        )

    @staticmethod
    def per_element(reader: Reader, index: int, key: str) -> StoredTensor:
        """Return the per-element state `key` of a whole parameter, in the parameter's shape and strides."""
        return _shaped(reader, index, reader.per_element_keys(index)[key], partial(reader.elements, index, key))

    @staticmethod
    def weight(reader: Reader, index: int) -> StoredTensor:
        """Return a whole parameter."""
        return _shaped(reader, index, reader.weight_dtype(index), partial(reader.weight, index))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    def part(self, part: Span) -> StoredTensor:
        """Return some of its elements, flat."""
        return StoredTensor((part.length,), (1,), self.dtype, lambda span: self.read(span.shift(part.start)))

    def chunks(self) -> Iterator[Tensor]:
        """Yield all elements in chunks, in the order of memory."""
        step = _CHUNK // self.dtype.itemsize
        for start in range(0, self.numel, step):
            yield self.read(Span(start, min(start + step, self.numel)))

    def rows(self) -> Iterator[Tensor]:
        """Yield all elements in chunks, in row-major order; a tensor with another memory order is read as a whole."""
        if torch.empty_strided(self.shape, self.strides, device="meta").is_contiguous():
            return self.chunks()
        return _halves(self.read(Span(0, self.numel)).as_strided(self.shape, self.strides))


def _shaped(reader: Reader, index: int, dtype: torch.dtype, read: Callable[[Span], Tensor]) -> StoredTensor:
    shape = reader.spec(index).shape
    return StoredTensor(shape, _strides(shape, reader.region(index).order), dtype, read)


def _halves(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in row-major order; at most one chunk is copied at a time."""
    if tensor.nbytes <= _CHUNK:
        yield tensor.contiguous()
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    for half in tensor.chunk(2, dim):
        yield from _halves(half)


def _strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor with this order of dimensions; those of length one as torch chooses them."""
    for memory_format in (torch.contiguous_format, _FORMATS.get(len(shape), torch.contiguous_format)):
        usual = torch.empty(shape, device="meta", memory_format=memory_format)
        if order_of(usual) == order:
            return usual.stride()
    steps = list(accumulate((shape[dim] for dim in reversed(order)), int.__mul__, initial=1))
    stride_of = dict(zip(reversed(order), steps, strict=False))
    return tuple(stride_of.get(dim, 1) for dim in range(len(shape)))
