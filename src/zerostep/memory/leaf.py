"""What the inner optimizers hold: leaves, tensors that share memory with the fragments this rank owns.

An atomic parameter has a leaf of its own shape. Splittable neighbours of one group are one flat leaf together, so that
a thousand small parameters cost an optimizer no more than one large one. Where masters are kept, leaves share the
memory of those instead.

Parameters in one leaf share its state, such as a step counter. When one of them has to sit out a step, the leaf is
split, once and for all, into one for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from zerostep.plan.layout import Fragment, Layout, Span

__all__ = ["Leaf", "clone_scalars", "cut_leaves", "split", "view_state"]


@dataclass(frozen=True, eq=False)
class Leaf:
    """Neighbouring fragments under one optimizer; `span` is their place in the part of the bucket that is owned."""

    bucket: int
    span: Span
    group: int
    fragments: tuple[Fragment, ...]
    tensor: nn.Parameter

    @property
    def params(self) -> list[int]:
        """The parameters that have a part here."""
        return [fragment.param for fragment in self.fragments]

    def view(self, shard: Tensor) -> Tensor:
        """The elements of this leaf in a tensor of the owned part, in the leaf's own shape."""
        part = shard[self.span.start : self.span.stop]
        return part if self.tensor.dim() == 1 else part.as_strided(self.tensor.shape, self.tensor.stride())


def cut_leaves(layout: Layout, rank: int, bucket: int, shard: Tensor, params: Sequence[Tensor]) -> list[Leaf]:
    """The leaves of the part of a bucket that `rank` owns; `shard` is the memory of that part."""
    start = layout.buckets[bucket].owned(rank).start
    fragments = layout.fragments_in(bucket, rank)
    found = list[Leaf]()
    for (group, _, atomic), run in groupby(fragments, key=lambda fragment: _kind(layout, fragment)):
        members = tuple(run)
        found.append(_leaf(bucket, group, members, start, shard, params[members[0].param] if atomic else None))
    return found


def _kind(layout: Layout, fragment: Fragment) -> tuple[int, int, bool]:
    """Fragments of one kind share a leaf; what cannot be cut, or has nothing to cut, is a kind of its own."""
    spec = layout.params[fragment.param]
    whole = not (spec.splittable and spec.numel)
    return spec.group, fragment.param if whole else -1, whole


def _leaf(bucket: int, group: int, run: tuple[Fragment, ...], start: int, shard: Tensor, like: Tensor | None) -> Leaf:
    span = Span(run[0].place.start - start, run[-1].place.stop - start) if run[0].part.length else Span(0, 0)
    part = shard[span.start : span.stop]
    if like is not None:
        part = part.as_strided(like.shape, like.stride()) if part.numel() else part.view(like.shape)
    return Leaf(bucket, span, group, run, nn.Parameter(part))


def split(leaf: Leaf) -> list[Leaf]:
    """One leaf for each fragment, over the same memory."""
    found, start = [], leaf.fragments[0].place.start
    for fragment in leaf.fragments:
        inside = fragment.place.shift(-start)
        tensor = nn.Parameter(leaf.tensor.detach()[inside.start : inside.stop])
        found.append(Leaf(leaf.bucket, inside.shift(leaf.span.start), leaf.group, (fragment,), tensor))
    return found


def view_state(entry: dict[str, Any], leaf: Leaf, fragment: Fragment) -> dict[str, Any]:
    """One fragment's part of the state of a leaf: views of what is shaped like the leaf, everything else as it is."""
    if len(leaf.fragments) == 1:
        return entry
    start = leaf.fragments[0].place.start
    stretch = slice(fragment.place.start - start, fragment.place.stop - start)
    return {
        key: value[stretch] if isinstance(value, Tensor) and value.shape == leaf.tensor.shape else value
        for key, value in entry.items()
    }


def clone_scalars(entry: dict[str, Any]) -> dict[str, Any]:
    """A state whose scalars are its own: after a split, counters go separate ways."""
    return {
        key: value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value for key, value in entry.items()
    }
