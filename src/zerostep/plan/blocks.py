"""Blocks: which part of a whole parameter a rank's tensor is, where a mesh divides parameters in another dimension.

A layout divides a rank's own tensors among the ranks that hold the same ones. With tensor parallelism such a tensor is
itself a block of a larger parameter: a box in each dimension. Of an ordinary parameter the block is all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from zerostep.dtensors import local_ranges
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
    shape, ranges = local_ranges(tensor)
    return Block(shape, tuple(Span(start, stop) for start, stop in ranges))
