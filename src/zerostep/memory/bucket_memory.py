"""The memory of a bucket's parameters as messages: what each owner sends to the other ranks.

`FlatBucket` moves the parameters of a bucket into one flat tensor: an owner's part is then one slice, sent and received
without a copy. Every parameter has a storage of its own over its part of that memory. `ScatteredBucket` leaves every
parameter where it is: a large one is a message of its own, sent from and received into its memory; small ones are
packed together, so that the number of messages depends on the number of bytes and not on the number of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zerostep.comm.transport import BucketMemory, Message
from zerostep.dtensors import is_dtensor, local_of, locals_of
from zerostep.plan.layout import Bucket, Layout, Slot
from zerostep.tensors import flat_alias, is_dense, with_own_storage

# Bytes from which on a parameter is a message of its own, and the most bytes of a packed message. On an accelerator
# copies are cheap and launches are not, so more is packed. All ranks must use the same limits.
_HOST_LIMITS = (512 << 10, 2 << 20)
_ACCELERATOR_LIMITS = (16 << 20, 64 << 20)


def make_bucket_memories(
    layout: Layout, params: Sequence[Tensor], as_views: bool, previous: Sequence[BucketMemory] = ()
) -> list[BucketMemory]:
    """The memory of each bucket that has something to send.

    With `as_views` parameters are moved into flat tensors. Those of `previous` that still hold the same parameters are
    kept; from the others, parameters that still lie there get memory of their own.
    """
    buckets = [bucket for bucket in layout.buckets if bucket.trainable and bucket.size]
    if not as_views:
        return [ScatteredBucket(bucket, params) for bucket in buckets]
    old = [memory for memory in previous if isinstance(memory, FlatBucket)]
    reusable = {memory.bucket: memory for memory in old if memory.holds(params)}
    new = [reusable[bucket] if bucket in reusable else FlatBucket(bucket, params) for bucket in buckets]
    # Only now: what has moved into a new bucket needs no memory of its own.
    for memory in old:
        if memory not in new:
            memory.release()
    return list(new)


def memories_of_all(layout: Layout, params: Sequence[Tensor]) -> list[BucketMemory]:
    """The memory of each bucket wherever its parameters lie now, also of those that no step changes any more."""
    return [ScatteredBucket(bucket, params) for bucket in layout.buckets if bucket.size]


@dataclass(frozen=True)
class InPlaceMessage:
    """A message that is sent from and received into the parameters' own memory."""

    memory: Tensor

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.memory.nbytes

    def pack(self) -> Tensor:
        """The memory itself."""
        return self.memory

    def buffer(self) -> Tensor:
        """The memory itself."""
        return self.memory

    def unpack(self, memory: Tensor) -> None:
        """Nothing to do: the message was received in place."""


@dataclass(frozen=True)
class PackedMessage:
    """A message of several parameters, or of one that is not contiguous, copied through a temporary buffer."""

    parts: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(part.nbytes for part in self.parts)

    def pack(self) -> Tensor:
        """A new buffer with a copy of all parts."""
        if self._flat:
            return torch.cat(self.parts)
        memory = self.buffer()
        torch._foreach_copy_(self._views(memory), self.parts)
        return memory

    def buffer(self) -> Tensor:
        """A new buffer for all parts; the caller keeps it alive until the transfer is done."""
        return self.parts[0].new_empty(sum(self._sizes))

    def unpack(self, memory: Tensor) -> None:
        """Copy a received buffer into the parts."""
        torch._foreach_copy_(self.parts, self._views(memory))

    @cached_property
    def _sizes(self) -> list[int]:
        return [part.numel() for part in self.parts]

    @cached_property
    def _flat(self) -> bool:
        """Whether all parts have one dimension, as those of contiguous parameters do: one call then copies them all."""
        return all(part.dim() == 1 for part in self.parts)

    def _views(self, memory: Tensor) -> tuple[Tensor, ...] | list[Tensor]:
        slices = memory.split(self._sizes)
        if self._flat:
            return slices
        return [piece.view(part.shape) for piece, part in zip(slices, self.parts, strict=True)]


class ScatteredBucket:
    """A bucket of whole parameters that stay in their own memory."""

    def __init__(self, bucket: Bucket, params: Sequence[Tensor]) -> None:
        self._params = [params[slot.param] for slot in bucket.slots]
        self._owners = [bucket.ranks_of(slot)[0] for slot in bucket.slots]
        self._pointers: list[int] = []
        self._messages: dict[int, list[Message]] = {}
        self.attach()

    def attach(self) -> None:
        """Rebuild the messages if some parameter's `.data` was bound to other memory."""
        memories = locals_of(self._params)
        pointers = [memory.data_ptr() for memory in memories]
        if pointers != self._pointers:
            self._pointers = pointers
            by_owner: dict[int, list[Tensor]] = {}
            for memory, owner in zip(memories, self._owners, strict=True):
                by_owner.setdefault(owner, []).append(memory)
            self._messages = {owner: _make_messages(owned) for owner, owned in by_owner.items()}

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._params[0].device

    def messages(self, owner: int) -> Sequence[Message]:
        """The parameters of `owner`: large ones alone, small ones packed."""
        return self._messages.get(owner, ())


def _make_messages(params: Sequence[Tensor]) -> list[Message]:
    """The messages of one owner's parameters."""
    # Only the order, sizes and device type of parameters may decide here: all ranks must cut the same messages.
    alone_bytes, pack_bytes = _HOST_LIMITS if params[0].device.type == "cpu" else _ACCELERATOR_LIMITS
    messages, packed, left = list[Message](), list[Tensor](), pack_bytes
    for param in params:
        size = param.numel() * param.element_size()
        if size >= alone_bytes:
            messages.append(_make_message([param]))
        elif size:
            if size > left:
                messages.append(_make_message(packed))
                packed, left = [], pack_bytes
            packed.append(param)
            left -= size
    return [*messages, _make_message(packed)] if packed else messages


def _make_message(params: Sequence[Tensor]) -> Message:
    # Elements are sent in logical order, since the memory formats of a parameter may differ between ranks.
    parts = tuple(flat_alias(param) if param.is_contiguous() else param.detach() for param in params)
    return InPlaceMessage(parts[0]) if len(parts) == 1 and params[0].is_contiguous() else PackedMessage(parts)


class FlatBucket:
    """A bucket whose parameters lie in one flat tensor, each with the strides it had and a storage of its own.

    `size` is the length of the flat tensor if it is to be longer than the bucket. The parameters keep the flat tensor
    alive, so it stays allocated as long as one of them lies in it.
    """

    def __init__(self, bucket: Bucket, params: Sequence[Tensor], size: int | None = None) -> None:
        self.bucket = bucket
        self._params = [params[slot.param] for slot in bucket.slots]
        self._any_dtensor = any(map(is_dtensor, self._params))
        self._flat = local_of(self._params[0]).detach().new_zeros(bucket.size if size is None else size)
        self._pointers: list[int] = []
        for slot, memory in zip(bucket.slots, locals_of(self._params), strict=True):
            self._bind(slot, memory)
            self._pointers.append(memory.data_ptr())

    def _bind(self, slot: Slot, memory: Tensor) -> None:
        part = with_own_storage(self._flat, slot.span.start, slot.span.stop)
        strides = memory.stride() if is_dense(memory) else torch.empty(memory.shape, device="meta").stride()
        view = part.as_strided(memory.shape, strides) if part.numel() else part.view(memory.shape)
        view.copy_(memory.detach())
        memory.data = view

    def rebound(self) -> list[int]:
        """The positions in the bucket of parameters whose `.data` was bound to other memory."""
        memories = locals_of(self._params) if self._any_dtensor else self._params
        pairs = zip(memories, self._pointers, strict=True)
        return [position for position, (memory, pointer) in enumerate(pairs) if memory.data_ptr() != pointer]

    def attach(self) -> None:
        """Copy parameters whose `.data` was bound to other memory back into the flat tensor, as views of it."""
        for position in self.rebound():
            self._bind(self.bucket.slots[position], local_of(self._params[position]))

    def holds(self, params: Sequence[Tensor]) -> bool:
        """Whether `params` has this bucket's own parameters at the indices of its slots, still on its device."""
        given = (params[slot.param] if slot.param < len(params) else None for slot in self.bucket.slots)
        pairs = zip(given, self._params, strict=True)
        return all(param is own and own.device == self._flat.device for param, own in pairs)

    def release(self) -> None:
        """Copy the parameters that still lie in the flat tensor into memory of their own."""
        start = self._flat.data_ptr()
        stop = start + self._flat.numel() * self._flat.element_size()
        for memory in locals_of(self._params):
            if start <= memory.data_ptr() < stop and memory.device == self._flat.device:
                memory.data = memory.detach().clone()

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters, in the order of the slots."""
        return self._params

    @property
    def memory(self) -> Tensor:
        """The flat tensor; it may be longer than the bucket."""
        return self._flat

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._flat.device

    def messages(self, owner: int) -> Sequence[Message]:
        """The slice of `owner`, sent from and received into the flat tensor."""
        owned = self.bucket.owned(owner)
        return [InPlaceMessage(self._flat[owned.start : owned.stop])] if owned.length else []
