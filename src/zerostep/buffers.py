"""The memory of parameters as a transport sees it: the spans of a bucket, with or without moving the parameters.

`FlatParcel` moves the parameters of a bucket into one flat tensor and turns each into a view of it; spans are then
slices, and nothing is copied. `ScatteredParcel` leaves every parameter where it is and passes spans through scratch
memory that lives only while it travels: three spans at most, which is 3/N of a bucket on N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerostep.layout import Bucket, Layout, Slot
from zerostep.transport import Parcel

__all__ = ["FlatParcel", "ScatteredParcel", "flat_alias", "is_dense", "make_parcels"]


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


def make_parcels(
    layout: Layout, params: Sequence[Tensor], as_views: bool, previous: Sequence[Parcel] = ()
) -> list[Parcel]:
    """One parcel for each bucket that has something to send; parcels of `previous` that still fit are kept."""
    kept = {parcel.bucket: parcel for parcel in previous if isinstance(parcel, FlatParcel) and parcel.holds(params)}
    buckets = [bucket for bucket in layout.buckets if bucket.trainable and bucket.size]
    if not as_views:
        return [ScatteredParcel(bucket, params) for bucket in buckets]
    parcels = [kept[bucket] if bucket in kept else FlatParcel(bucket, params) for bucket in buckets]
    for parcel in previous:
        if isinstance(parcel, FlatParcel) and parcel not in parcels:
            parcel.release()
    return list(parcels)


class ScatteredParcel:
    """The spans of a bucket whose parameters stay where they are."""

    def __init__(self, bucket: Bucket, params: Sequence[Tensor]) -> None:
        self._params = [params[slot.param] for slot in bucket.slots]
        self._owners = [bucket.ranks_of(slot.span)[0] for slot in bucket.slots]
        self._world_size = len(bucket.cuts) - 1
        self.attach()

    def attach(self) -> None:
        """Follow parameters whose `.data` was bound to other memory."""
        pointers = [param.data_ptr() for param in self._params]
        if pointers == getattr(self, "_pointers", None):
            return
        self._pointers = pointers
        self._parts: list[list[Tensor]] = [[] for _ in range(self._world_size)]
        for param, owner in zip(self._params, self._owners, strict=True):
            # In logical order: the memory formats of different ranks need not agree.
            self._parts[owner].append(flat_alias(param) if param.is_contiguous() else param.detach())

    @property
    def device(self) -> torch.device:
        """Where the bucket lies."""
        return self._params[0].device

    def outgoing(self, rank: int) -> Tensor:
        """The span of this rank: the parameter itself if there is only one, else a packed copy."""
        span = self.inbox(rank)
        if not self._in_place(rank):
            parts = self._parts[rank]
            torch._foreach_copy_(_views(span, parts), parts)
        return span

    def inbox(self, owner: int) -> Tensor:
        """The only parameter of `owner`, or scratch memory for several."""
        parts = self._parts[owner]
        if self._in_place(owner):
            return parts[0]
        return self._params[0].detach().new_empty(sum(part.numel() for part in parts))

    def deliver(self, owner: int, span: Tensor) -> None:
        """Unpack the span of another rank."""
        if not self._in_place(owner):
            parts = self._parts[owner]
            torch._foreach_copy_(parts, _views(span, parts))

    def _in_place(self, owner: int) -> bool:
        parts = self._parts[owner]
        return len(parts) == 1 and parts[0].is_contiguous() and parts[0].dim() == 1


class FlatParcel:
    """The spans of a bucket whose parameters are views of one flat tensor, each with the strides it had."""

    def __init__(self, bucket: Bucket, params: Sequence[Tensor]) -> None:
        self.bucket = bucket
        self._params = [params[slot.param] for slot in bucket.slots]
        self._flat = self._params[0].detach().new_empty(bucket.size)
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

    def attach(self) -> None:
        """Take back parameters whose `.data` was bound to other memory, with the values they have now."""
        for slot, param, pointer in zip(self.bucket.slots, self._params, self._pointers, strict=True):
            if param.data_ptr() != pointer:
                self._bind(slot, param)

    def holds(self, params: Sequence[Tensor]) -> bool:
        """Whether these are the very parameters that live here."""
        found = (params[slot.param] if slot.param < len(params) else None for slot in self.bucket.slots)
        return all(here is there for here, there in zip(found, self._params, strict=True))

    def release(self) -> None:
        """Give private memory to the parameters that still live here."""
        start = self._flat.data_ptr()
        stop = start + self._flat.numel() * self._flat.element_size()
        for param in self._params:
            if start <= param.data_ptr() < stop and param.device == self._flat.device:
                param.data = param.detach().clone()

    @property
    def device(self) -> torch.device:
        """Where the bucket lies."""
        return self._flat.device

    def outgoing(self, rank: int) -> Tensor:
        """The slice of this rank."""
        return self.inbox(rank)

    def inbox(self, owner: int) -> Tensor:
        """The slice of `owner`, received in place."""
        owned = self.bucket.owned(owner)
        return self._flat[owned.start : owned.stop]

    def deliver(self, owner: int, span: Tensor) -> None:
        """The span was received in place."""


def _views(span: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    pieces = span.split([part.numel() for part in parts])
    return [piece if part.dim() == 1 else piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
