"""The memory of one bucket on one rank: its parameters as one flat tensor, the owned part of it, masters and leaves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zerostep.memory.bucket_memory import FlatBucket
from zerostep.memory.leaf import Leaf, cut_leaves, split
from zerostep.plan.buckets import padded_size
from zerostep.plan.layout import Layout

__all__ = ["Shard"]


class Shard:
    """A bucket whose parameters have become views of one flat tensor, and what this rank owns of it."""

    def __init__(
        self, layout: Layout, rank: int, bucket: int, params: Sequence[Tensor], master_dtype: torch.dtype | None
    ) -> None:
        where = layout.buckets[bucket]
        self._flat_bucket = FlatBucket(where, params, padded_size(where))
        self._owned = where.owned(rank)
        self._params = [params[slot.param] for slot in where.slots]
        self._names = [layout.params[slot.param].name for slot in where.slots]
        self._kinds = [_kind(param) for param in self._params]
        low = self.owned
        wanted = master_dtype is not None and low.is_floating_point() and low.dtype != master_dtype
        self.master = low.to(master_dtype) if wanted else None
        self.leaves: list[Leaf] = cut_leaves(layout, rank, bucket, low if self.master is None else self.master, params)
        self._versions = self._count_versions()

    @property
    def memory(self) -> Tensor:
        """The flat tensor of all parameters, padded."""
        return self._flat_bucket.memory

    @property
    def owned(self) -> Tensor:
        """The part of it that this rank owns."""
        return self.memory[self._owned.start : self._owned.stop]

    def follow(self) -> None:
        """Take back parameters whose `.data` was bound to other memory, and masters of parameters that were set."""
        rebound_params = self._flat_bucket.rebound_params()
        for param in rebound_params:
            self._check(param)
        if rebound_params:
            self._flat_bucket.attach()
        if self.master is not None and (rebound_params or self._versions != self._count_versions()):
            # Only what somebody has set: elsewhere the master knows more than the parameter.
            changed = self.master.to(self.owned.dtype) != self.owned
            self.master[changed] = self.owned[changed].to(self.master.dtype)
            self._versions = self._count_versions()

    def _check(self, stray: Tensor) -> None:
        place = next(place for place, param in enumerate(self._params) if param is stray)
        name, kind = self._names[place], self._kinds[place]
        if _kind(stray) != kind:
            raise ValueError(
                f"parameter {name!r} was {kind[1]} of shape {tuple(kind[0])} on {kind[2]}, and is now {stray.dtype} of "
                f"shape {tuple(stray.shape)} on {stray.device}: build the optimizer after the model has its final "
                "shapes, dtype and device"
            )

    def publish(self) -> None:
        """Bring the masters' new values into the parameters."""
        if self.master is not None:
            self.owned.copy_(self.master)

    def mark_changed(self) -> None:
        """Graphs that saved the parameters must notice that they changed: the memory was written behind their back."""
        increment_version(self._params)
        self._versions = self._count_versions()

    def split_leaf(self, leaf: Leaf) -> list[Leaf]:
        """Replace a leaf by one for each of its fragments."""
        parts, place = split(leaf), self.leaves.index(leaf)
        self.leaves[place : place + 1] = parts
        return parts

    def release(self) -> None:
        """Give private memory back to the parameters."""
        self._flat_bucket.release()

    def _count_versions(self) -> list[int]:
        return [param._version for param in self._params]


def _kind(param: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return param.shape, param.dtype, param.device
