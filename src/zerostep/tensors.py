"""Helpers on tensors that every room may use: density, flat aliases, scratch memory."""

from __future__ import annotations

from bisect import bisect_left, insort

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one range of memory without gaps or overlaps, in any order of dimensions."""
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
    alias = tensor.detach()
    return alias.view(-1) if alias.is_contiguous() else alias.as_strided((alias.numel(),), (1,))


class Scratch:
    """A pool of memory that is used again: on the host, fresh pages cost more than writing to them.

    Memory that is not returned with `free` is released when its last reference goes.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._free: list[Tensor] = []  # by size, as bytes: there may be one for every other rank
        # By storage, held weakly: memory that is dropped instead of freed must not stay alive through this table. The
        # weak reference keeps the address of the storage object from being used for another one.
        self._in_use: dict[int, StorageWeakRef] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory that is not in use; its content is undefined."""
        size = numel * dtype.itemsize
        index = bisect_left(self._free, size, key=Tensor.numel)
        fits = index < len(self._free) and self._free[index].numel() <= 2 * size
        base = self._free.pop(index) if fits else torch.empty(size, dtype=torch.uint8, device=self._device)
        storage = base.untyped_storage()
        self._in_use[storage._cdata] = StorageWeakRef(storage)
        return base[:size].view(dtype)

    def free(self, memory: Tensor) -> None:
        """Return memory to the pool; memory from elsewhere is ignored."""
        storage = memory.untyped_storage()
        if self._in_use.pop(storage._cdata, None) is not None:
            base = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            insort(self._free, base, key=Tensor.numel)

    def trim(self) -> None:
        """Release all memory that is not in use."""
        self._free = []
        self._in_use = {key: storage for key, storage in self._in_use.items() if not storage.expired()}

    @property
    def free_bytes(self) -> int:
        """Bytes that the pool holds for later."""
        return sum(base.numel() for base in self._free)
