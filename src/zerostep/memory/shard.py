"""One bucket of the sharded optimizer on one rank: flat parameters, the owned part, master weights and leaves."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zerostep.dtensors import local_of
from zerostep.memory.bucket_memory import FlatBucket
from zerostep.memory.leaf import Leaf, cut_leaves, split
from zerostep.plan.buckets import padded_size
from zerostep.plan.layout import Layout


class Shard(FlatBucket):
    """A bucket whose parameters have become views of one flat tensor, padded to equal parts if it is cut evenly.

    With `master_dtype`, `master` is a copy of the owned part in that dtype, and the leaves are views of it; otherwise
    they are views of the owned part itself.
    """

    def __init__(
        self, layout: Layout, rank: int, bucket: int, params: Sequence[Tensor], master_dtype: torch.dtype | None
    ) -> None:
        plan = layout.buckets[bucket]
        super().__init__(plan, params, padded_size(plan))
        self._owned, self._plan = plan.owned(rank), plan
        self._names = [layout.params[slot.param].name for slot in plan.slots]
        self._signatures = [_signature(param) for param in self._params]
        self._dtypes, self._devices = [param.dtype for param in self._params], [p.device for p in self._params]
        owned = self.owned
        has_master = master_dtype is not None and owned.is_floating_point() and owned.dtype != master_dtype
        self.master = owned.to(master_dtype) if has_master else None
        updated = owned if self.master is None else self.master
        self.leaves: list[Leaf] = cut_leaves(layout, rank, bucket, updated, params)
        self._versions = self._count_versions()

    @property
    def owned(self) -> Tensor:
        """The part of the flat tensor that this rank owns."""
        return self.memory[self._owned.start : self._owned.stop]

    def sync_with_params(self) -> None:
        """Take over what the user did to the parameters since the last step.

        Parameters whose `.data` was bound to other memory are bound back, and values that were set go to the masters.
        """
        rebound = self.rebound()
        # Check all before binding any, so that an error leaves the parameters as the user set them.
        for position in rebound:
            self._check_unchanged(position)
        if rebound:
            self.attach()
        if self.master is not None and (rebound or self._versions != self._count_versions()):
            # Only the elements that were set: elsewhere the master has bits that the parameter has not.
            changed = self.master.to(self.owned.dtype) != self.owned
            self.master[changed] = self.owned[changed].to(self.master.dtype)
            self._versions = self._count_versions()

    def check_params(self) -> None:
        """Raise `ValueError` if a parameter has another dtype or device than the bucket.

        Shapes are left to `sync_with_params`: this runs in every pass, and must not wait for late parameters.
        """
        # Lists are compared at once, because this is done for every parameter in every pass.
        if [param.dtype for param in self._params] != self._dtypes or [p.device for p in self._params] != self._devices:
            for position in range(len(self._params)):
                self._check_unchanged(position)

    def _check_unchanged(self, position: int) -> None:
        param, name, (shape, dtype, device) = self._params[position], self._names[position], self._signatures[position]
        now = _signature(param)
        if now != (shape, dtype, device):
            raise ValueError(
                f"parameter {name!r} was {dtype} of shape {tuple(shape)} on {device}, and is now {param.dtype} of "
                f"shape {tuple(now[0])} on {param.device}: build the optimizer after the model has its final "
                "shapes, dtype and device"
            )

    def copy_masters_to_params(self) -> None:
        """Copy the masters into the owned part of the parameters."""
        if self.master is not None:
            self.owned.copy_(self.master)

    def round_masters(self, leaves: Sequence[Leaf]) -> None:
        """Copy the masters of some leaves, or of all, into the owned part of the parameters."""
        if len(leaves) == len(self.leaves):
            self.copy_masters_to_params()
        elif self.master is not None:
            for leaf in leaves:
                leaf.view(self.owned).copy_(leaf.tensor)

    def mark_changed(self, used: Collection[int]) -> None:
        """Increment the version counters of the used parameters, whose memory was written through the flat tensor.

        Autograd then raises an error for a graph that saved an old value.
        """
        increment_version([p for p, slot in zip(self._params, self._plan.slots, strict=True) if slot.param in used])
        self._versions = self._count_versions()

    def split_leaf(self, leaf: Leaf) -> list[Leaf]:
        """Replace a leaf by one for each of its fragments."""
        parts, position = split(leaf), self.leaves.index(leaf)
        self.leaves[position : position + 1] = parts
        return parts

    def _count_versions(self) -> list[int]:
        return [param._version for param in self._params]


def _signature(param: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return local_of(param).shape, param.dtype, param.device
