"""The memory of parameters as a transport sees it: each owner's part of a bucket, in pieces.

`FlatParcel` moves the parameters of a bucket into one flat tensor and turns each into a view of it: an owner's part is
then one slice, and nothing is copied. `ScatteredParcel` leaves every parameter where it is: a large one travels from
its own memory into its own memory, and small ones are packed together, so that the number of messages depends on the
number of bytes and never on the number of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerostep.comm.transport import BucketMemory, Message
from zerostep.plan.layout import Bucket, Layout, Slot
from zerostep.tensors import flat_alias, is_dense

__all__ = ["FlatBucket", "InPlaceMessage", "PackedMessage", "ScatteredBucket", "make_bucket_memories"]

# From how many bytes on a parameter travels alone, and how many bytes small ones are packed into, at most. On an
# accelerator a copy is cheap and a launch is dear.
_HOST_LIMITS = (512 << 10, 2 << 20)
_ACCELERATOR_LIMITS = (16 << 20, 64 << 20)


def make_bucket_memories(
    layout: Layout, params: Sequence[Tensor], as_views: bool, previous: Sequence[BucketMemory] = ()
) -> list[BucketMemory]:
    """One parcel for each bucket that has something to send; parcels of `previous` that still fit are kept."""
    kept = {
        bucket_memory.bucket: bucket_memory
        for bucket_memory in previous
        if isinstance(bucket_memory, FlatBucket) and bucket_memory.holds(params)
    }
    buckets = [bucket for bucket in layout.buckets if bucket.trainable and bucket.size]
    if not as_views:
        return [ScatteredBucket(bucket, params) for bucket in buckets]
    bucket_memories = [kept[bucket] if bucket in kept else FlatBucket(bucket, params) for bucket in buckets]
    for bucket_memory in previous:
        if isinstance(bucket_memory, FlatBucket) and bucket_memory not in bucket_memories:
            bucket_memory.release()
    return list(bucket_memories)


@dataclass(frozen=True)
class InPlaceMessage:
    """A piece that is sent from and received into its own memory."""

    memory: Tensor

    def pack(self) -> Tensor:
        """The memory itself."""
        return self.memory

    def buffer(self) -> Tensor:
        """The memory itself."""
        return self.memory

    def unpack(self, memory: Tensor) -> None:
        """It is there already."""


@dataclass(frozen=True)
class PackedMessage:
    """A piece made of several parameters, which pass through scratch memory."""

    parts: tuple[Tensor, ...]

    def pack(self) -> Tensor:
        """A packed copy."""
        memory = self.buffer()
        torch._foreach_copy_(self._views(memory), self.parts)
        return memory

    def buffer(self) -> Tensor:
        """Scratch memory for all parts."""
        return self.parts[0].new_empty(sum(part.numel() for part in self.parts))

    def unpack(self, memory: Tensor) -> None:
        """Unpack."""
        torch._foreach_copy_(self.parts, self._views(memory))

    def _views(self, memory: Tensor) -> list[Tensor]:
        messages = zip(memory.split([part.numel() for part in self.parts]), self.parts, strict=True)
        return [message if part.dim() == 1 else message.view(part.shape) for message, part in messages]


class ScatteredBucket:
    """The parts of a bucket whose parameters stay where they are."""

    def __init__(self, bucket: Bucket, params: Sequence[Tensor]) -> None:
        self._params = [params[slot.param] for slot in bucket.slots]
        self._owners = [bucket.ranks_of(slot)[0] for slot in bucket.slots]
        self._pointers: list[int] = []
        self._messages: dict[int, list[Message]] = {}
        self.attach()

    def attach(self) -> None:
        """Follow parameters whose `.data` was bound to other memory."""
        pointers = [param.data_ptr() for param in self._params]
        if pointers != self._pointers:
            self._pointers = pointers
            by_owner: dict[int, list[Tensor]] = {}
            for param, owner in zip(self._params, self._owners, strict=True):
                by_owner.setdefault(owner, []).append(param)
            self._messages = {owner: _cut(members) for owner, members in by_owner.items()}

    @property
    def device(self) -> torch.device:
        """Where the bucket lies."""
        return self._params[0].device

    def messages(self, owner: int) -> Sequence[Message]:
        """The parameters of `owner`: large ones by themselves, small ones packed."""
        return self._messages.get(owner, ())


def _cut(params: Sequence[Tensor]) -> list[Message]:
    """Pieces of one owner's parameters. Sizes alone decide, so all ranks cut alike."""
    alone, most = _HOST_LIMITS if params[0].device.type == "cpu" else _ACCELERATOR_LIMITS
    messages, pack, buffer = list[Message](), list[Tensor](), most
    for param in params:
        size = param.numel() * param.element_size()
        if size >= alone:
            messages.append(_message([param]))
        elif size:
            if size > buffer:
                messages.append(_message(pack))
                pack, buffer = [], most
            pack.append(param)
            buffer -= size
    return [*messages, _message(pack)] if pack else messages


def _message(params: Sequence[Tensor]) -> Message:
    # In logical order: the memory formats of different ranks need not agree.
    parts = tuple(flat_alias(param) if param.is_contiguous() else param.detach() for param in params)
    return InPlaceMessage(parts[0]) if len(parts) == 1 and params[0].is_contiguous() else PackedMessage(parts)


class FlatBucket:
    """The parts of a bucket whose parameters are views of one flat tensor, each with the strides it had."""

    def __init__(self, bucket: Bucket, params: Sequence[Tensor], size: int | None = None) -> None:
        self.bucket = bucket
        self._params = [params[slot.param] for slot in bucket.slots]
        self._flat = self._params[0].detach().new_zeros(bucket.size if size is None else size)
        self._pointers: list[int] = []
        for slot, param in zip(bucket.slots, self._params, strict=True):
            self._bind(slot, param)
            self._pointers.append(param.data_ptr())

    def _bind(self, slot: Slot, param: Tensor) -> None:
        place = self._flat[slot.span.start : slot.span.stop]
        strides = param.stride() if is_dense(param) else torch.empty(param.shape, device="meta").stride()
        view = place.as_strided(param.shape, strides) if place.numel() else place.view(param.shape)
        view.copy_(param.detach())
        param.data = view

    def rebound_params(self) -> list[Tensor]:
        """The parameters whose `.data` was bound to other memory."""
        pairs = zip(self._params, self._pointers, strict=True)
        return [param for param, pointer in pairs if param.data_ptr() != pointer]

    def attach(self) -> None:
        """Take back parameters whose `.data` was bound to other memory, with the values they have now."""
        for slot, param, pointer in zip(self.bucket.slots, self._params, self._pointers, strict=True):
            if param.data_ptr() != pointer:
                self._bind(slot, param)

    def holds(self, params: Sequence[Tensor]) -> bool:
        """Whether these are the very parameters that live here, on the device where they lived."""
        found = (params[slot.param] if slot.param < len(params) else None for slot in self.bucket.slots)
        pairs = zip(found, self._params, strict=True)
        return all(here is there and there.device == self._flat.device for here, there in pairs)

    def release(self) -> None:
        """Give private memory to the parameters that still live here."""
        start = self._flat.data_ptr()
        stop = start + self._flat.numel() * self._flat.element_size()
        for param in self._params:
            if start <= param.data_ptr() < stop and param.device == self._flat.device:
                param.data = param.detach().clone()

    @property
    def memory(self) -> Tensor:
        """The flat tensor; it may be longer than the bucket."""
        return self._flat

    @property
    def device(self) -> torch.device:
        """Where the bucket lies."""
        return self._flat.device

    def messages(self, owner: int) -> Sequence[Message]:
        """The slice of `owner`, sent and received in place."""
        owned = self.bucket.owned(owner)
        return [InPlaceMessage(self._flat[owned.start : owned.stop])] if owned.length else []
