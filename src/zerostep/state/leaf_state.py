"""The live state of a sharded optimizer's leaves: viewed by parameter, and replaced when a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from zerostep.memory.leaf import Leaf, view_state
from zerostep.plan.groups import Group
from zerostep.state.dtensor_state import as_entry_of
from zerostep.state.param_state import MASTER, Entry, ParamState, SavedState, entry_for, fits_one_leaf, param_states_of
from zerostep.step.bucket_shards import BucketShards
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.step.named_state import NamedState


class LeafStates:
    """The state that the inner optimizers hold for this rank's leaves."""

    def __init__(self, buckets: BucketShards, inners: InnerOptimizers) -> None:
        # Its fields are read on each use: adding a parameter group replaces the layout and the list of parameters.
        self._buckets, self._inners = buckets, inners

    def by_parameter(self) -> dict[Tensor, Entry]:
        """Return the state of each parameter with a part here; if splittable, as flat views of the owned elements."""
        return {
            self._buckets.params[fragment.param]: view_state(entry, leaf, fragment)
            for shard in self._buckets.shards.values()
            for leaf in shard.leaves
            if (entry := self._inners.state(leaf))
            for fragment in leaf.fragments
        }

    def param_states(self) -> Iterator[ParamState]:
        """Yield this rank's part of each parameter's state, masters included, as views of the live tensors."""
        return param_states_of(self._with_masters(), self._buckets.layout, self._buckets.params)

    def _with_masters(self) -> Iterator[tuple[Leaf, Entry]]:
        """Masters are saved even if the optimizer keeps no other state: rounded parameters cannot restore them."""
        for shard in self._buckets.shards.values():
            for leaf in shard.leaves:
                entry = dict(self._inners.state(leaf) or {})
                if shard.master is not None:
                    entry[MASTER] = leaf.tensor.detach()
                if entry:
                    yield leaf, entry

    def load(self, saved: Mapping[int, SavedState], named: NamedState, options: Sequence[Group]) -> None:
        """Replace all state by copies of this rank's part of the saved state, given by parameter index."""
        self.prepare(saved, named, options)()

    def prepare(
        self, saved: Mapping[int, SavedState], named: NamedState, options: Sequence[Group], fresh: bool = False
    ) -> Callable[[], None]:
        """Read this rank's part of the saved state and return a function that replaces all state by it.

        With `fresh`, the saved tensors are used without a copy, and masters that were not saved are made from the
        parameters. Leaves may be split here, before the function is called; that does not change any values.
        """
        entries: dict[Tensor, Entry] = {}
        for shard in self._buckets.shards.values():
            for leaf in list(shard.leaves):
                parts = [leaf]
                if not fits_one_leaf(leaf, saved):
                    parts = shard.split_leaf(leaf)
                    self._inners.replace(leaf, parts)
                entries |= {part.tensor: self._entry(part, saved) for part in parts if part.params[0] in saved}
        masters = {tensor: entry.pop(MASTER) for tensor, entry in entries.items() if MASTER in entry}
        entries = {tensor: entry for tensor, entry in entries.items() if entry}

        def commit() -> None:
            self._inners.load(entries, named, options, fresh)
            self._set_masters(masters, reset_missing=fresh)

        return commit

    def _set_masters(self, masters: Mapping[Tensor, Tensor], reset_missing: bool) -> None:
        for shard in self._buckets.shards.values():
            for leaf in shard.leaves if shard.master is not None else ():
                if leaf.tensor in masters:
                    leaf.tensor.detach().copy_(masters[leaf.tensor])
                elif reset_missing:
                    leaf.tensor.detach().copy_(leaf.view(shard.owned))

    def _entry(self, leaf: Leaf, saved: Mapping[int, SavedState]) -> Entry:
        spec = self._buckets.layout.params[leaf.params[0]]
        if spec.splittable and spec.numel:
            entry = entry_for(leaf, saved)
            _check_divisible(entry, leaf, spec.name)
            return entry
        state = saved[leaf.params[0]]
        values = {key: state.whole(key) for key in state.names()}
        return as_entry_of(leaf.tensor, values, [key for key in values if state.is_per_element(key)])


def _check_divisible(entry: Entry, leaf: Leaf, name: str) -> None:
    """Raise if a shared tensor has more than one element: the parts of a cut parameter can only share a number."""
    for key, value in entry.items():
        if isinstance(value, Tensor) and value.numel() > 1 and value.shape != leaf.tensor.shape:
            raise ValueError(
                f"state {key!r} of parameter {name!r} has shape {tuple(value.shape)} and belongs to the whole "
                'parameter, which is cut by element here: build the optimizer with partition="parameters"'
            )
