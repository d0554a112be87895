"""Leaves: the tensors that the inner optimizers hold, views of the memory that this rank owns.

An atomic parameter has a leaf of its own shape; of a DTensor that its mesh divides, the leaf is a DTensor, too.
Splittable neighbours of one group are one flat leaf together, so that a thousand small parameters cost an optimizer no
more than one large one. With master weights, leaves are views of those
instead of the parameters.

Parameters in one leaf share its state, such as a step counter. When one of them has to be left out of a step, the leaf
is split for good into one for each parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from zerostep.dtensors import as_like, local_of, sharding_groups
from zerostep.plan.layout import Fragment, Layout, Span


@dataclass(frozen=True, eq=False)
class Leaf:
    """Neighbouring fragments under one optimizer; `span` is their range in the owned part of the bucket."""

    bucket: int
    span: Span
    group: int
    fragments: tuple[Fragment, ...]
    tensor: nn.Parameter

    @property
    def params(self) -> list[int]:
        """The indices of the parameters that have a part in this leaf."""
        return [fragment.param for fragment in self.fragments]

    def view(self, shard: Tensor) -> Tensor:
        """This leaf's elements of `shard`, a tensor over the whole owned part, in the leaf's own shape."""
        part, own = shard[self.span.start : self.span.stop], local_of(self.tensor)
        return as_like(part if own.dim() == 1 else part.as_strided(own.shape, own.stride()), self.tensor)


def cut_leaves(layout: Layout, rank: int, bucket: int, shard: Tensor, params: Sequence[Tensor]) -> list[Leaf]:
    """The leaves of the part of a bucket that `rank` owns; `shard` is the memory of that part."""
    start = layout.buckets[bucket].owned(rank).start
    fragments = layout.fragments_in(bucket, rank)
    leaves = list[Leaf]()
    for (group, _, is_whole), run in groupby(fragments, key=lambda fragment: _leaf_key(layout, fragment)):
        members = tuple(run)
        like = params[members[0].param] if is_whole else None
        leaf = _make_leaf(bucket, group, members, start, shard, None if like is None else local_of(like))
        # An optimizer that needs the whole of a matrix then works on the whole of it, over the mesh.
        if like is not None and sharding_groups(like) and not layout.params[members[0].param].splittable:
            leaf = replace(leaf, tensor=nn.Parameter(as_like(leaf.tensor.detach(), like)))
        leaves.append(leaf)
    return leaves


def _leaf_key(layout: Layout, fragment: Fragment) -> tuple[int, int, bool]:
    """Neighbours with equal keys share a leaf; atomic and empty parameters have a key, and a leaf, of their own."""
    spec = layout.params[fragment.param]
    is_whole = not (spec.splittable and spec.numel)
    return spec.group, fragment.param if is_whole else -1, is_whole


def _make_leaf(
    bucket: int, group: int, fragments: tuple[Fragment, ...], start: int, shard: Tensor, like: Tensor | None
) -> Leaf:
    """A leaf over `shard`, which begins at address `start` of the bucket: flat, or with the strides of `like`."""
    first, last = fragments[0], fragments[-1]
    span = Span(first.place.start - start, last.place.stop - start) if first.part.length else Span(0, 0)
    part = shard[span.start : span.stop]
    if like is not None:
        part = part.as_strided(like.shape, like.stride()) if part.numel() else part.view(like.shape)
    return Leaf(bucket, span, group, fragments, nn.Parameter(part))


def split(leaf: Leaf) -> list[Leaf]:
    """One leaf for each fragment, over the same memory."""
    leaves, start = [], leaf.fragments[0].place.start
    for fragment in leaf.fragments:
        span = fragment.place.shift(-start)
        tensor = nn.Parameter(leaf.tensor.detach()[span.start : span.stop])
        leaves.append(Leaf(leaf.bucket, span.shift(leaf.span.start), leaf.group, (fragment,), tensor))
    return leaves


def view_state(entry: dict[str, Any], leaf: Leaf, fragment: Fragment) -> dict[str, Any]:
    """One fragment's part of a leaf's state: views of tensors of the leaf's shape, all other values as they are."""
    if len(leaf.fragments) == 1:
        return entry
    start = leaf.fragments[0].place.start
    elements = slice(fragment.place.start - start, fragment.place.stop - start)
    return {
        key: value[elements] if isinstance(value, Tensor) and value.shape == leaf.tensor.shape else value
        for key, value in entry.items()
    }


def clone_scalars(entry: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state with its own scalar tensors: after a split, step counters advance separately."""
    return {
        key: value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value for key, value in entry.items()
    }
