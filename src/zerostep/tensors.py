"""Helpers on tensors that every room may use: density, flat aliases, scratch memory."""

from __future__ import annotations

from bisect import bisect_left, insort

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

# Where DLPack passes memory on by address. Elsewhere, as on the meta device, there is no second storage over it.
_DLPACK_DEVICES = frozenset(("cpu", "cuda", "xpu"))
# Inductor's kernels for accelerators take a parameter for aligned to this many bytes if its offset in its storage is.
_KERNEL_ALIGNMENT = 16
_HOST_DEVICES = frozenset(("cpu",))


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


def recorded_event(device: torch.device) -> torch.Event:
    """An event behind all that was launched on the current stream of an accelerator."""
    event = torch.Event(device)
    # Without a stream it would be one of the current device, which may be another.
    event.record(torch.accelerator.current_stream(device))
    return event


def flat_alias(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, sharing its storage and version counter but not its graph."""
    alias = tensor.detach()
    return alias.view(-1) if alias.is_contiguous() else alias.as_strided((alias.numel(),), (1,))


def with_own_storage(flat: Tensor, start: int, stop: int) -> Tensor:
    """The elements `start` to `stop` of a flat tensor: the same memory, but a storage with no other elements in it.

    Whoever asks for storages, as safetensors does, finds a tensor that shares nothing with its neighbours, and
    `torch.save` writes none of them. On an accelerator the storage may begin some bytes earlier, at an aligned address.
    The result keeps the memory of `flat` alive. Where DLPack cannot pass it on, this is a view of `flat`.
    """
    if type(flat) is not Tensor or flat.device.type not in _DLPACK_DEVICES:
        return flat[start:stop]
    # The allocator of an accelerator ignores `record_stream` for memory that came by DLPack: a stream that reads a
    # parameter must be waited for before the last reference to its bucket goes, not only to the parameter. Exchanges
    # record the flat tensor itself.
    gap = 0 if flat.device.type in _HOST_DEVICES else _misalignment(flat, start)
    part = flat.view(torch.uint8)[(start - gap) * flat.itemsize : stop * flat.itemsize]
    alias: Tensor = from_dlpack(to_dlpack(part)).view(flat.dtype)
    return alias[gap:] if gap else alias


def _misalignment(flat: Tensor, start: int) -> int:
    """The number of elements between `start` and the last aligned address before it."""
    return flat[start:].data_ptr() % _KERNEL_ALIGNMENT // flat.itemsize


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
