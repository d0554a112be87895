"""The second half of a step: inner optimizers on the owned parts, bucket by bucket, and new parameters to everyone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from zerostep.memory.leaf import Leaf
from zerostep.memory.shard import Shard
from zerostep.plan.layout_planner import Settings
from zerostep.step.bucket_shards import BucketShards
from zerostep.step.compiled_update import CompiledUpdates, PreparedUpdates, Update, run_updates
from zerostep.step.gathering import PendingGathers
from zerostep.step.inner_optimizers import InnerOptimizers, PartialSteps
from zerostep.step.labels import PhaseTimer
from zerostep.step.scaled_sum import ScaledSum

# Updates begin while the last sums are in flight; where the host does not wait for sums, one batch is cheapest.
_MOST_PARTIAL_STEPS = 8
_SMALL_BUCKET = 1 << 16  # elements


class Updater:
    """Updates buckets and launches their gathers. All ranks call it for the same buckets."""

    def __init__(
        self,
        buckets: BucketShards,
        gathers: PendingGathers,
        settings: Settings,
        blocks_host: bool,
        timer: PhaseTimer,
    ) -> None:
        self._buckets, self._gathers, self._timer, self._gather = buckets, gathers, timer, settings.gather
        self._most_batches = _MOST_PARTIAL_STEPS if blocks_host else 1
        self.compiled = CompiledUpdates() if settings.compile else None

    def update(
        self, chosen: Sequence[int], inners: InnerOptimizers, grad_of: Callable[[int], ScaledSum], used: Collection[int]
    ) -> BaseException | None:
        """Step on the owned part of the chosen buckets and launch their gathers; the error of the update, if it failed.

        `grad_of` waits for the owned part of a bucket's gradients; `used` are the parameters that have one. Even after
        an error all buckets are launched, with old values: the other ranks wait for them.
        """
        failure: BaseException | None = None
        partial_steps = inners.begin()
        for batch in self._batches(chosen):
            grads = {bucket: grad_of(bucket) for bucket in batch}
            try:
                if failure is None:
                    self.step_on(grads, inners, partial_steps, used)
            except BaseException as error:  # KeyboardInterrupt, too, leaves a step half done
                failure = error
            if self._gather == "step":
                self.launch(batch)
        if failure is None:
            partial_steps.step_rest()
        partial_steps.end()
        return failure

    def launch_deferred(self, chosen: Sequence[int]) -> None:
        """With `gather="forward"`: launch all gathers, in the order in which the next forward pass needs them."""
        if self._gather == "forward":
            # Small buckets hold norms and biases, which forward needs everywhere; then come the first layers.
            sizes = self._buckets.layout.buckets
            self.launch(sorted(chosen, key=lambda bucket: (sizes[bucket].size > _SMALL_BUCKET, -bucket)))
            self.make_late(chosen)

    def send_all(self) -> None:
        """Send the owned part of every bucket and wait: something else than a step has changed parameters."""
        for shard in self._buckets.shards.values():
            shard.copy_masters_to_params()
            shard.mark_changed({slot.param for slot in shard.bucket.slots})
        self.launch(sorted(self._buckets.shards))
        self._gathers.wait()

    def make_late(self, chosen: Iterable[int]) -> None:
        """Let whoever reads parameters of these buckets wait until they are in place."""
        self._gathers.make_late({bucket: self._buckets.shards[bucket].params for bucket in chosen})

    def _batches(self, chosen: Sequence[int]) -> Iterator[Sequence[int]]:
        size = max(1, -(-len(chosen) // self._most_batches))
        for start in range(0, len(chosen), size):
            yield chosen[start : start + size]

    @torch.no_grad()
    def step_on(
        self,
        sums: Mapping[int, ScaledSum],
        inners: InnerOptimizers,
        partial_steps: PartialSteps,
        used: Collection[int],
    ) -> None:
        """Step on the owned part of some buckets, given their gradients by bucket."""
        batch, prepared = list(sums), None if self.compiled is None else self.compiled.begin(inners)
        leaves = {bucket: self._used_leaves(self._buckets.bind(bucket), inners, used) for bucket in batch}
        with self._timer.phase("update", batch[0], batch[-1]):
            rest = list[Leaf]()
            ready = list[tuple[Update, Tensor | None]]()
            for bucket in batch:
                updates, others = self._compiled(bucket, leaves[bucket], sums[bucket], prepared)
                ready += [(update, sums[bucket].factor) for update in updates]
                rest += others
            run_updates(ready)
            self._step_plain(rest, sums, partial_steps)
        for bucket in batch:
            self._buckets.shards[bucket].mark_changed(used)

    def _compiled(
        self, bucket: int, leaves: list[Leaf], given: ScaledSum, prepared: PreparedUpdates | None
    ) -> tuple[list[Update], list[Leaf]]:
        """The compiled updates of a bucket, and the leaves that have none."""
        if prepared is None:
            return [], leaves
        shard = self._buckets.shards[bucket]
        rounded = None if shard.master is None else shard.owned
        found = [prepared.of(leaf, given.unsettled, rounded) for leaf in leaves]
        if None in found:
            given.settled()  # the others read it as it should be
        others = [leaf for leaf, update in zip(leaves, found, strict=True) if update is None]
        return [update for update in found if update is not None], others

    def _step_plain(self, leaves: list[Leaf], sums: Mapping[int, ScaledSum], partial_steps: PartialSteps) -> None:
        """Step on some leaves by the inner optimizers' own `step()`, and round what has masters."""
        try:
            for leaf in leaves:
                leaf.tensor.grad = leaf.view(sums[leaf.bucket].settled()).to(leaf.tensor.dtype)
            partial_steps.step((leaf.group, leaf.tensor) for leaf in leaves)
        finally:
            for leaf in leaves:
                leaf.tensor.grad = None
        for bucket, together in groupby(leaves, key=lambda leaf: leaf.bucket):
            self._buckets.shards[bucket].round_masters(list(together))

    def _used_leaves(self, shard: Shard, inners: InnerOptimizers, used: Collection[int]) -> list[Leaf]:
        """The leaves of a bucket that take part in this step.

        Parameters in one leaf share its state. Where only some of them are used, the leaf is split for good.
        """
        chosen = list[Leaf]()
        for leaf in list(shard.leaves):
            in_use = [index in used for index in leaf.params]
            parts = [leaf]
            if any(in_use) and not all(in_use):
                parts = shard.split_leaf(leaf)
                inners.replace(leaf, parts)
            chosen += [each for each in parts if each.params[0] in used]
        return chosen

    def launch(self, batch: Iterable[int]) -> None:
        """Launch gathers. The order must be the same on all ranks."""
        for bucket in batch:
            memory = self._buckets.shards[bucket].memory
            with self._timer.phase("gather", bucket):
                pending = self._buckets.exchange(bucket).gather(memory, self._buckets.layout.buckets[bucket])
                self._gathers.add(bucket, pending)
