"""Every bucket of a layout on this rank: parameters, flat memory of those that are trained, and how it travels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zerostep.comm.exchange import Exchange
from zerostep.comm.exchange import connect as connect_exchange
from zerostep.comm.mesh import Ranks
from zerostep.memory.leaf import Leaf
from zerostep.memory.shard import Shard
from zerostep.plan.layout import Bucket, Layout, Span


class OwnedMasters(NamedTuple):
    """The owned elements of a bucket, their masters, and which of them belong to each parameter."""

    owned: Tensor
    master: Tensor
    places: Sequence[tuple[int, Span]]


class BucketShards:
    """The buckets and their flat memory. A bucket gets flat memory when one of its parameters is trained first."""

    def __init__(
        self, ranks: Ranks, layout: Layout, params: Sequence[Tensor], master_dtype: torch.dtype | None
    ) -> None:
        self._ranks, self._master_dtype = ranks, master_dtype
        self._exchanges: dict[torch.device, Exchange] = {}
        self._shards: dict[int, Shard] = {}
        self.extend(layout, params)

    def extend(self, layout: Layout, params: Sequence[Tensor]) -> None:
        """Go on with a layout that has further buckets; a collective."""
        self._layout, self._params = layout, list(params)
        # All ranks meet the devices in bucket order, so they connect in the same order.
        for bucket in layout.buckets:
            device = self._first_param(bucket).device
            if device not in self._exchanges:
                self._exchanges[device] = connect_exchange(self._ranks.shards, device)

    @property
    def rank(self) -> int:
        """This rank among those that divide the buckets."""
        return self._ranks.shards.rank

    @property
    def layout(self) -> Layout:
        """Where every element of every parameter lies."""
        return self._layout

    @property
    def params(self) -> Sequence[Tensor]:
        """All parameters, in the order of the layout's specs."""
        return self._params

    @property
    def shards(self) -> Mapping[int, Shard]:
        """The flat memory of each bucket that has some, by bucket."""
        return self._shards

    @property
    def exchanges(self) -> list[Exchange]:
        """One exchange per device, that of the first bucket in front."""
        return list(self._exchanges.values())

    def exchange(self, bucket: int) -> Exchange:
        """How a bucket travels."""
        return self._exchanges[self._first_param(self._layout.buckets[bucket]).device]

    def buckets_of(self, params: Sequence[int]) -> list[int]:
        """The buckets that hold some parameters, in launch order."""
        return sorted({self._layout.place_of(index)[0] for index in params})

    def bind(self, bucket: int) -> Shard:
        """Move the parameters of a bucket into flat memory, unless that was done before."""
        if bucket not in self._shards:
            self._shards[bucket] = Shard(self._layout, self.rank, bucket, self._params, self._master_dtype)
        return self._shards[bucket]

    def bind_trainable(self) -> list[Leaf]:
        """Bind buckets with trainable parameters that are not bound yet; their leaves."""
        unbound = [
            index
            for index, bucket in enumerate(self._layout.buckets)
            if index not in self._shards and any(self._params[slot.param].requires_grad for slot in bucket.slots)
        ]
        return [leaf for index in unbound for leaf in self.bind(index).leaves]

    def check_params(self) -> None:
        """Raise `ValueError` if a parameter was cast or moved since its bucket was bound."""
        for shard in self._shards.values():
            shard.check_params()

    def follow_params(self) -> None:
        """Notice parameters that were bound to other memory, or whose values were set, since the last step."""
        for shard in self._shards.values():
            shard.sync_with_params()

    def masters(self) -> Iterator[OwnedMasters]:
        """What this rank owns of each bucket that has masters."""
        for bucket, shard in self._shards.items():
            if shard.master is not None:
                start = self._layout.buckets[bucket].owned(self.rank).start
                fragments = self._layout.fragments_in(bucket, self.rank)
                yield OwnedMasters(
                    shard.owned, shard.master, [(each.param, each.place.shift(-start)) for each in fragments]
                )

    def _first_param(self, bucket: Bucket) -> Tensor:
        return self._params[bucket.slots[0].param]
