"""How per-element state of a parameter is cut into regions of a tensor for `torch.distributed.checkpoint` (DCP).

Of an ordinary parameter that tensor is flat, its elements in memory order, and what a rank owns is one range. Of a
DTensor it has the shape of the whole parameter, as DCP has it for DTensors themselves, and what a rank owns is a few
boxes in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from zerostep.checkpoint.regions import Region
from zerostep.dtensors import is_dtensor, local_of
from zerostep.integrations.dcp_tensor import region, region_of
from zerostep.plan.blocks import Block
from zerostep.plan.layout import Span
from zerostep.state.param_state import order_of


@dataclass(frozen=True)
class Pieces:
    """The regions of one parameter: of its flat memory, or of the whole parameter that a block lies in."""

    shape: tuple[int, ...]
    block: Region | None

    def regions(self, span: Span) -> list[ChunkStorageMetadata]:
        """The regions that some elements of this rank's tensor make up."""
        if self.block is None:
            return [region((span.start,), (span.length,))]
        return [region_of(box) for box in self._boxes(self.block, span)]

    def split(self, span: Span, flat: Tensor) -> list[Tensor]:
        """These elements, given flat, as one tensor for each region; views."""
        if self.block is None:
            return [flat]
        return [
            self.block.within(box).view(flat[start : start + box.numel])
            for box in self._boxes(self.block, span)
            for start in [self.block.offset_of(box) - span.start if box.numel else 0]
        ]

    def join(self, span: Span, tensors: Sequence[Tensor]) -> Tensor:
        """These elements, flat, from one tensor for each region."""
        if self.block is None:
            return tensors[0]
        found = [tensor.new_empty(tensor.numel()) for tensor in tensors]
        for box, flat, tensor in zip(self._boxes(self.block, span), found, tensors, strict=True):
            self.block.within(box).view(flat).copy_(tensor)
        return torch.cat(found) if found else torch.empty(0)

    def _boxes(self, block: Region, span: Span) -> list[Block]:
        """An empty parameter has one box, so that DCP knows of it."""
        return block.boxes(span) if block.block.numel or 0 not in self.shape else [block.block]


def pieces_of(param: Tensor, block: Block) -> Pieces:
    """The pieces of a parameter."""
    if is_dtensor(param):
        return Pieces(block.shape, Region(block, order_of(local_of(param))))
    return Pieces((param.numel(),), None)
