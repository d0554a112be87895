"""Elements of one block of a parameter, read from others: whatever the blocks were when they were saved.

A *region* is a block with the order in which its elements lie in memory. What is stored is one region per block; what
is asked for is a range of elements of a live region. Where both are the same, the range is read as it is. Otherwise
only the rows that the range touches are read, a few megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from zerostep.plan.blocks import Block
from zerostep.plan.layout import Span

_CHUNK = 16 << 20  # bytes


@dataclass(frozen=True)
class Region:
    """A block whose elements lie in memory in this order of its dimensions longer than one, the slowest first."""

    block: Block
    order: tuple[int, ...]

    @staticmethod
    def row_major(block: Block) -> Region:
        """A block in row-major order."""
        return Region(block, rows_of(block.sizes))

    def within(self, block: Block) -> Region:
        """A block inside this one, in the same order."""
        return Region(block, tuple(dim for dim in self.order if block.sizes[dim] > 1))

    def strides(self) -> dict[int, int]:
        """How many elements lie between neighbours, for each dimension longer than one."""
        sizes = [self.block.sizes[dim] for dim in reversed(self.order)]
        return dict(zip(reversed(self.order), accumulate(sizes, int.__mul__, initial=1), strict=False))

    def offset_of(self, block: Block) -> int:
        """Where the first element of a block inside this one lies."""
        starts = [own.start - around.start for own, around in zip(block.spans, self.block.spans, strict=True)]
        return sum(starts[dim] * stride for dim, stride in self.strides().items())

    def around(self, span: Span) -> Block:
        """The smallest block that holds some elements; its elements are one range of this memory."""
        spans, start, stop = list(self.block.spans), span.start, span.stop
        for dim, stride in sorted(self.strides().items(), key=lambda item: self.order.index(item[0])):
            first, last = start // stride, (stop - 1) // stride
            spans[dim] = Span(first, last + 1).shift(spans[dim].start)
            if first != last:
                break
            start, stop = start - first * stride, stop - first * stride
        return Block(self.block.shape, tuple(spans))

    def boxes(self, span: Span) -> list[Block]:
        """The blocks that some elements make up, in the order of memory; each is one range of it."""
        if not span.length:
            return []
        box = self.around(span)
        start, inner = self.offset_of(box), self.within(box)
        if span.length == box.numel:
            return [box]
        row, inside = inner.strides()[inner.order[0]], span.shift(-start)
        # The rest of the first row, the whole rows after it, and the begin of the last one.
        edges = sorted({inside.start, -(-inside.start // row) * row, inside.stop // row * row, inside.stop})
        return [found for one, other in pairwise(edges) for found in inner.boxes(Span(one, other))]

    def view(self, flat: Tensor) -> Tensor:
        """All elements, given as they lie in memory, in the shape of the block."""
        strides = self.strides()
        return flat.as_strided(self.block.sizes, [strides.get(dim, 1) for dim in range(len(self.block.sizes))])


@dataclass(frozen=True)
class Source:
    """A stored region; `read` returns a range of its elements, as they lie in memory."""

    region: Region
    read: Callable[[Span], Tensor]


def rows_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """The dimensions longer than one, in row-major order."""
    return tuple(dim for dim, size in enumerate(sizes) if size > 1)


def read_elements(wanted: Region, span: Span, sources: Sequence[Source], dtype: torch.dtype) -> Tensor:
    """Return some elements of a region, flat, as they lie in its memory; the sources cover it."""
    for source in sources:
        if source.region == wanted:
            return source.read(span)
    if not span.length:
        return torch.empty(0, dtype=dtype)
    box = wanted.around(span)
    flat = torch.empty(box.numel, dtype=dtype)
    target = wanted.within(box).view(flat)
    for source in sources:
        for block, values in _pieces(source.region, source.read, source.region.block.intersect(box), dtype):
            target[block.inside(box)] = values
    start = span.start - wanted.offset_of(box)
    return flat[start : start + span.length]


def _pieces(
    region: Region, read: Callable[[Span], Tensor], common: Block, dtype: torch.dtype
) -> Iterator[tuple[Block, Tensor]]:
    """Yield what a source has of a block inside of it; whole rows are read, a chunk at a time, or parts of one."""
    if not common.numel:
        return
    rows = region.order[0] if region.order else None
    row_bytes = dtype.itemsize * (1 if rows is None else region.strides()[rows])
    step = max(1, _CHUNK // row_bytes)
    for part in _slices(common, rows, step):
        around = _with_span(region.block, rows, part.spans[rows]) if rows is not None else region.block
        inner, start = region.within(around), region.offset_of(around)
        if step == 1 and len(region.order) > 1:
            yield from _pieces(inner, lambda span, start=start: read(span.shift(start)), part, dtype)  # type: ignore[misc]
        else:
            yield part, inner.view(read(Span(start, start + around.numel)))[part.inside(around)]


def _slices(block: Block, dim: int | None, step: int) -> Iterator[Block]:
    if dim is None:
        yield block
        return
    span = block.spans[dim]
    for start in range(span.start, span.stop, step):
        yield _with_span(block, dim, Span(start, min(start + step, span.stop)))


def _with_span(block: Block, dim: int, span: Span) -> Block:
    return Block(block.shape, (*block.spans[:dim], span, *block.spans[dim + 1 :]))
