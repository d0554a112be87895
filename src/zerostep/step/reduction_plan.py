"""What a reduction of gradients needs to know, and never changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import and_
from typing import NamedTuple

import torch
from torch import Tensor

from zerostep.comm.exchange import Exchange
from zerostep.dtensors import is_dtensor, locals_of
from zerostep.plan.layout import Layout, Span
from zerostep.plan.layout_planner import Settings

# On an accelerator a call costs the host as much as copying megabytes costs the device.
_SMALL_ON_HOST, _SMALL_ON_ACCELERATOR = 1 << 14, 1 << 23


class Run(NamedTuple):
    """Parameters that lie side by side in a bucket."""

    params: tuple[int, ...]
    span: Span


@dataclass(frozen=True)
class ReductionPlan:
    """Who owns what, how each bucket travels, in which dtype it is summed, and the factor of each rank's gradient.

    `exchanges` and `dtypes` have an entry per bucket. With `whole`, every rank gets the whole of every sum. Gradients
    with fewer than `small` elements cost less to copy than a call: they are held and copied with their neighbours.
    `positions` are the places of the parameters in the model.
    """

    layout: Layout
    rank: int
    params: Sequence[Tensor]
    exchanges: Sequence[Exchange]
    dtypes: Sequence[torch.dtype]
    scale: float
    whole: bool
    small: int = _SMALL_ON_HOST
    positions: Sequence[int] = ()

    @cached_property
    def bucket_of(self) -> list[int]:
        """The bucket of each parameter."""
        return [self.layout.place_of(param)[0] for param in range(len(self.layout.params))]

    @cached_property
    def held_back(self) -> list[bool]:
        """For each parameter, whether its gradients are held until their bucket is launched."""
        return [spec.numel < self.small for spec in self.layout.params]

    @cached_property
    def members(self) -> list[tuple[int, ...]]:
        """The parameters of each bucket, in the order of its memory."""
        return [tuple(slot.param for slot in bucket.slots) for bucket in self.layout.buckets]

    def first_position(self, bucket: int) -> int:
        """The place in the model of the parameter of a bucket whose gradient comes last."""
        return min((self.positions[param] for param in self.members[bucket]), default=0)

    def holdable(self) -> bytes:
        """For each parameter, whether any dense gradient of it may be held as it is: its elements lie in order now."""
        with torch._C.DisableTorchFunctionSubclass():  # a late parameter would wait
            memories = self.params if all(self.countable) else locals_of(self.params)
            contiguous = [memory.is_contiguous() for memory in memories]
        return bytes(map(and_, self.held_back, contiguous))

    @cached_property
    def countable(self) -> bytes:
        """For each parameter, whether its gradients may be left in `.grad` until their bucket is launched.

        Not those of DTensors: partial sums are added up over the mesh as they arrive, in an order that all ranks of
        the mesh share. Their buckets may differ.
        """
        return bytes(not is_dtensor(param) for param in self.params)

    def runs(self, holdable: bytes) -> list[list[Run]]:
        """The neighbours in each bucket whose gradients may be held."""
        return [list(self._runs_in(bucket, holdable)) for bucket in range(len(self.layout.buckets))]

    def _runs_in(self, bucket: int, holdable: bytes) -> Iterator[Run]:
        slots = self.layout.buckets[bucket].slots
        for held, together in groupby(slots, key=lambda slot: bool(holdable[slot.param])):
            if held:
                run = tuple(together)
                yield Run(tuple(slot.param for slot in run), Span(run[0].span.start, run[-1].span.stop))

    def trained(self, trainable: Sequence[bool]) -> dict[int, frozenset[int]]:
        """The trainable parameters of each bucket, in launch order; buckets without one are left out."""
        slots = ((index, bucket.slots) for index, bucket in enumerate(self.layout.buckets))
        members = {index: frozenset(slot.param for slot in those if trainable[slot.param]) for index, those in slots}
        return {index: params for index, params in members.items() if params}


def make_plan(
    layout: Layout,
    rank: int,
    params: Sequence[Tensor],
    exchanges: Sequence[Exchange],
    settings: Settings,
    scale: float,
    positions: Sequence[int] = (),
) -> ReductionPlan:
    """The plan of an optimizer with these settings; buckets are summed in their own dtype, or in that of `settings`."""
    firsts, wanted = [params[bucket.slots[0].param] for bucket in layout.buckets], settings.reduce_dtype
    dtypes = [wanted if wanted is not None and param.is_floating_point() else param.dtype for param in firsts]
    small = small_on(all(param.device.type == "cpu" for param in firsts))
    return ReductionPlan(layout, rank, params, exchanges, dtypes, scale, settings.reduction == "all", small, positions)


def small_on(host: bool) -> int:
    """The number of elements below which gradients are held until their bucket is full, on a host or an accelerator."""
    return _SMALL_ON_HOST if host else _SMALL_ON_ACCELERATOR
