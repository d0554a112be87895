"""The live state of a sharded optimizer's leaves, seen by parameter, and replaced by what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from zerostep.checkpoint.fragments import Entry, entries, entry_for, fits_one_leaf
from zerostep.engine import Engine
from zerostep.groups import Group
from zerostep.inners import InnerOptimizers
from zerostep.leaves import Leaf, view_state

__all__ = ["LeafStates"]

# Beside what the optimizer keeps, a checkpoint has the masters: parameters are too coarse to make them from.
MASTER = "master"


class LeafStates:
    """What the inner optimizers know about this rank's leaves."""

    def __init__(self, engine: Engine, inners: InnerOptimizers) -> None:
        self._engine, self._inners = engine, inners

    def __iter__(self) -> Iterator[tuple[Leaf, Entry]]:
        for shard in self._engine.shards.values():
            for leaf in shard.leaves:
                entry = self._inners.state(leaf)
                if entry:
                    yield leaf, entry

    def by_parameter(self) -> dict[Tensor, Entry]:
        """The state of each parameter that has a part here; where it may be cut, flat views of the owned elements."""
        return {
            self._engine.params[fragment.param]: view_state(entry, leaf, fragment)
            for leaf, entry in self
            for fragment in leaf.fragments
        }

    def share(self) -> list[dict[str, Any]]:
        """This rank's share of the whole state, ready to travel."""
        shards = self._engine.shards
        found = [
            (leaf, entry if shards[leaf.bucket].master is None else {**entry, MASTER: leaf.tensor.detach()})
            for leaf, entry in self
        ]
        return entries(found, self._engine.layout)

    def load(self, saved: Mapping[int, Entry], options: Sequence[Group]) -> None:
        """Replace all state by this rank's fragments of the state of whole parameters, by number."""
        chosen: dict[Tensor, Entry] = {}
        for shard in self._engine.shards.values():
            for leaf in list(shard.leaves):
                parts = [leaf]
                if not fits_one_leaf(leaf, saved, self._engine.params):
                    parts = shard.split_leaf(leaf)
                    self._inners.replace(leaf, parts)
                chosen |= {part.tensor: self._entry(part, saved) for part in parts if part.params[0] in saved}
        masters = {tensor: entry.pop(MASTER) for tensor, entry in chosen.items() if MASTER in entry}
        self._inners.load(chosen, options)
        for shard in self._engine.shards.values():
            for leaf in shard.leaves:
                if shard.master is not None and leaf.tensor in masters:
                    leaf.tensor.detach().copy_(masters[leaf.tensor])

    def _entry(self, leaf: Leaf, saved: Mapping[int, Entry]) -> Entry:
        first = leaf.params[0]
        spec = self._engine.layout.params[first]
        cut = spec.splittable and spec.numel
        return entry_for(leaf, saved, self._engine.params) if cut else dict(saved[first])
