"""The live state of a sharded optimizer's leaves, seen by parameter, and replaced by what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from zerostep.memory.leaf import Leaf, view_state
from zerostep.plan.groups import Group
from zerostep.state.param_state import MASTER, Entry, ParamState, SavedState, entry_for, fits_one_leaf, param_states_of
from zerostep.step.bucket_shards import BucketShards
from zerostep.step.inner_optimizers import InnerOptimizers

__all__ = ["LeafStates"]


class LeafStates:
    """What the inner optimizers know about this rank's leaves."""

    def __init__(self, buckets: BucketShards, inners: InnerOptimizers) -> None:
        self._buckets, self._inners = buckets, inners

    def __iter__(self) -> Iterator[tuple[Leaf, Entry]]:
        for shard in self._buckets.shards.values():
            for leaf in shard.leaves:
                entry = self._inners.state(leaf)
                if entry:
                    yield leaf, entry

    def by_parameter(self) -> dict[Tensor, Entry]:
        """The state of each parameter that has a part here; where it may be cut, flat views of the owned elements."""
        return {
            self._buckets.params[fragment.param]: view_state(entry, leaf, fragment)
            for leaf, entry in self
            for fragment in leaf.fragments
        }

    def shares(self) -> Iterator[ParamState]:
        """This rank's shares of the whole state, masters included; views of the live tensors."""
        return param_states_of(self._with_masters(), self._buckets.layout, self._buckets.params)

    def _with_masters(self) -> Iterator[tuple[Leaf, Entry]]:
        """Masters are state even where an optimizer keeps nothing else: parameters are too coarse to make them from."""
        for shard in self._buckets.shards.values():
            for leaf in shard.leaves:
                entry = dict(self._inners.state(leaf) or {})
                if shard.master is not None:
                    entry[MASTER] = leaf.tensor.detach()
                if entry:
                    yield leaf, entry

    def load(self, saved: Mapping[int, SavedState], options: Sequence[Group]) -> None:
        """Replace all state by copies of this rank's fragments of what was saved, by number."""
        self.prepare(saved, options)()

    def prepare(
        self, saved: Mapping[int, SavedState], options: Sequence[Group], fresh: bool = False
    ) -> Callable[[], None]:
        """Read this rank's fragments of what was saved; what is returned replaces all state by them.

        What is `fresh` belongs to nobody else and need not be copied; and then masters that were not saved are made
        from the parameters.
        """
        chosen: dict[Tensor, Entry] = {}
        for shard in self._buckets.shards.values():
            for leaf in list(shard.leaves):
                parts = [leaf]
                if not fits_one_leaf(leaf, saved):
                    parts = shard.split_leaf(leaf)
                    self._inners.replace(leaf, parts)
                chosen |= {part.tensor: self._entry(part, saved) for part in parts if part.params[0] in saved}
        masters = {tensor: entry.pop(MASTER) for tensor, entry in chosen.items() if MASTER in entry}
        chosen = {tensor: entry for tensor, entry in chosen.items() if entry}

        def commit() -> None:
            self._inners.load(chosen, options, fresh)
            self._set_masters(masters, others_too=fresh)

        return commit

    def _set_masters(self, masters: Mapping[Tensor, Tensor], others_too: bool) -> None:
        for shard in self._buckets.shards.values():
            for leaf in shard.leaves if shard.master is not None else ():
                if leaf.tensor in masters:
                    leaf.tensor.detach().copy_(masters[leaf.tensor])
                elif others_too:
                    leaf.tensor.detach().copy_(leaf.view(shard.owned))

    def _entry(self, leaf: Leaf, saved: Mapping[int, SavedState]) -> Entry:
        spec = self._buckets.layout.params[leaf.params[0]]
        if spec.splittable and spec.numel:
            found_entry = entry_for(leaf, saved)
            _check_divisible(found_entry, leaf, spec.name)
            return found_entry
        found = saved[leaf.params[0]]
        return {key: found.whole(key) for key in found.names()}


def _check_divisible(entry: Entry, leaf: Leaf, name: str) -> None:
    """State that belongs to a whole parameter can be shared by its parts only if it is a number."""
    for key, value in entry.items():
        if isinstance(value, Tensor) and value.numel() > 1 and value.shape != leaf.tensor.shape:
            raise ValueError(
                f"state {key!r} of parameter {name!r} has shape {tuple(value.shape)} and belongs to the whole "
                'parameter, which is cut by element here: build the optimizer with partition="parameters"'
            )
