"""Helpers on tensors that every room may use: density, flat aliases, scratch memory."""

from __future__ import annotations

from bisect import bisect_left, insort

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Scratch", "flat_alias", "is_dense"]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gaps or overlaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat_alias(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, sharing its storage and version counter but not its graph."""
    found = tensor.detach()
    return found.view(-1) if found.is_contiguous() else found.as_strided((found.numel(),), (1,))


class Scratch:
    """Host memory that is used again: fresh pages cost more than what is written to them.

    Whoever takes some gives it back, or lets it go for good.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # by size: every other rank may have a room here
        self._lent: dict[int, StorageWeakRef] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory that nobody else has; what it holds is anybody's guess."""
        size = numel * dtype.itemsize
        place = bisect_left(self._free, size, key=Tensor.numel)
        fits = place < len(self._free) and self._free[place].numel() <= 2 * size
        base = self._free.pop(place) if fits else torch.empty(size, dtype=torch.uint8)
        self._lent[base.data_ptr()] = StorageWeakRef(base.untyped_storage())
        return base[:size].view(dtype)

    def give(self, memory: Tensor) -> None:
        """Take back what was lent; of others' memory, nothing is kept."""
        lent = self._lent.pop(memory.data_ptr(), None)
        if lent is not None and not lent.expired():
            insort(self._free, torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage()), key=Tensor.numel)

    def trim(self) -> None:
        """Let go of what nobody has."""
        self._free = []
        self._lent = {place: lent for place, lent in self._lent.items() if not lent.expired()}
