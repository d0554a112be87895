"""Blocks: which part of a whole parameter a rank's tensor is, where a mesh divides parameters in another dimension.

A layout divides a rank's own tensors among the ranks that hold the same ones. With tensor parallelism such a tensor is
itself a block of a larger parameter: a box in each dimension. Of an ordinary parameter the block is all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from zerostep.plan.layout import Span


@dataclass(frozen=True)
class Block:
    """A box in a tensor of `shape`: in each dimension the elements of one span."""

    shape: tuple[int, ...]
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.spans) or any(
            span.stop > size for span, size in zip(self.spans, self.shape, strict=False)
        ):
            raise ValueError(f"a block must lie inside its tensor of shape {self.shape}, got {self.spans}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the block itself."""
        return tuple(span.length for span in self.spans)

    @property
    def numel(self) -> int:
        """Number of elements of the block."""
        return math.prod(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether the block is the whole tensor."""
        return self.sizes == self.shape

    def intersect(self, other: Block) -> Block:
        """What two blocks of one tensor both cover; without elements if they do not overlap."""
        if self.shape != other.shape:
            raise ValueError(f"blocks of different tensors, of shapes {self.shape} and {other.shape}")
        return Block(self.shape, tuple(a.intersect(b) for a, b in zip(self.spans, other.spans, strict=True)))

    def inside(self, outer: Block) -> tuple[slice, ...]:
        """Where this block lies in the memory of `outer`, which contains it: an index for each dimension."""
        pairs = zip(self.spans, outer.spans, strict=True)
        return tuple(slice(own.start - around.start, own.stop - around.start) for own, around in pairs)


def whole(shape: tuple[int, ...]) -> Block:
    """The block that is all of a tensor."""
    return Block(shape, tuple(Span(0, size) for size in shape))


def block_of(tensor: Tensor) -> Block:
    """The block of a parameter that this rank holds: the whole of an ordinary tensor, the local part of a DTensor."""
    with torch._C.DisableTorchFunctionSubclass():  # a late parameter would wait
        block = whole(tuple(tensor.shape))
    if not isinstance(tensor, DTensor):
        return block
    coordinate = tensor.device_mesh.get_coordinate() or ()
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            block = _chunk(block, placement.dim, coordinate[dim], tensor.device_mesh.size(dim))
    return block


def _chunk(block: Block, dim: int, position: int, parts: int) -> Block:
    """The part at `position` of a block that is divided into `parts` chunks, all but the last ones of equal size."""
    span = block.spans[dim]
    size = -(-span.length // parts)
    start = min(span.start + position * size, span.stop)
    chunk = Span(start, min(start + size, span.stop))
    return Block(block.shape, (*block.spans[:dim], chunk, *block.spans[dim + 1 :]))
