"""Reduce, update, gather: the moving parts of a sharded optimizer, without torch's optimizer face.

======== ====================================================================================================
arrive   autograd has finished a gradient: it is copied into its bucket, and a full bucket is launched
settle   the backward passes are over: the rest is launched, and ranks tell each other what they have used
update   bucket by bucket, as the sums come in: the inner optimizers step on the owned parts
gather   the new parameters go to everyone; waited for at the end of the step or in the next forward pass
======== ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Condition, RLock
from weakref import WeakMethod, ref

import torch
from torch import Tensor

from zerostep.comm.exchange import Exchange, PendingInts
from zerostep.comm.exchange import connect as connect_exchange
from zerostep.comm.mesh import Ranks
from zerostep.comm.transport import TransportError
from zerostep.errors import InterruptedPassError
from zerostep.memory.leaf import Leaf
from zerostep.memory.shard import Shard
from zerostep.plan.buckets import padded_size
from zerostep.plan.layout import Fragment, Layout
from zerostep.plan.layout_planner import Settings
from zerostep.step.gathering import PendingGathers
from zerostep.step.grad_ops import ShardedGradOps
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.step.reduction import Reduction, ReductionPlan
from zerostep.step.reference import ReferenceOptimizer
from zerostep.step.sharded_grad import ShardedGradient
from zerostep.step.stats import PhaseTimer
from zerostep.tensors import flat_alias

__all__ = [
    "Engine",
]

# Updates begin while the last sums are still on their way; where nobody waits for sums, one step is cheapest.
_MOST_PARTIAL_STEPS = 8
_BITS = 62
_FEW = 1 << 16  # elements


class Engine:
    """One rank's part in the steps of a group of ranks. `reduces` is false where DDP does that."""

    def __init__(
        self,
        ranks: Ranks,
        layout: Layout,
        params: Sequence[Tensor],
        settings: Settings,
        reduces: bool,
        timer: PhaseTimer,
    ) -> None:
        self.ranks, self.settings, self.timer = ranks, settings, timer
        self.rank = ranks.shards.rank
        self.params, self.layout = list(params), layout
        self.lock = RLock()
        self._arrival = Condition(self.lock)
        self._reduces = reduces
        self._exchange_for: dict[torch.device, Exchange] = {}
        self._connect()
        first = next(iter(self._exchange_for))
        same = ranks.everyone is ranks.shards
        self.shared = self._exchange_for[first]
        self._control = self.shared if same else connect_exchange(ranks.everyone, first)
        self._sum_replicas = ranks.replica_all_reduce(first)
        self.shards: dict[int, Shard] = {}
        self.pending_gathers = PendingGathers(timer)
        self._stand_ins: dict[int, ShardedGradient] = {}
        self._accumulating: set[int] = set()
        self.grad_ops = ShardedGradOps(self)
        self._pending_mask: PendingInts | None = None
        self._pending_status: PendingInts | None = None
        self.failure: Exception | None = None
        self.on_backward: Callable[[bool], None] | None = None
        self.joining: Callable[[], bool] = lambda: False
        self.used_elsewhere: set[int] = set()
        self.passes_ended = False
        self.paused = False
        self.reference: ReferenceOptimizer | None = None
        self.reduction = self._make_reduction()

    def _connect(self) -> None:
        """Collective: all ranks meet the devices in the order of the buckets."""
        for bucket in self.layout.buckets:
            device = self.params[bucket.slots[0].param].device
            if device not in self._exchange_for:
                self._exchange_for[device] = connect_exchange(self.ranks.shards, device)

    def _make_reduction(self) -> Reduction:
        firsts = [self.params[bucket.slots[0].param] for bucket in self.layout.buckets]
        wanted = self.settings.reduce_dtype
        plan = ReductionPlan(
            self.layout,
            self.rank,
            self.params,
            [self._exchange_for[param.device] for param in firsts],
            [wanted if wanted is not None and param.is_floating_point() else param.dtype for param in firsts],
            1.0 / self.ranks.everyone.world_size,
            self.settings.reduction == "all",
        )
        begin = WeakMethod(self._begin_backward)  # no cycle: hooks must see this engine go when its optimizer goes
        return Reduction(plan, self._sum_replicas, self.timer, lambda: _call(begin))

    def _begin_backward(self) -> None:
        if self.on_backward is not None:
            accumulate = (self.params[index].grad for index in self.reduction.used)
            self.on_backward(not any(isinstance(grad, ShardedGradient) for grad in accumulate))

    def extend(self, layout: Layout, params: Sequence[Tensor]) -> None:
        """Go on with a layout that has further buckets; collective."""
        before = self.reduction
        self.params, self.layout = list(params), layout
        self._connect()
        self.reduction = self._make_reduction()
        self.reduction.take_over(before)

    # ------------------------------------------------------------------ memory

    def bind(self, bucket: int) -> Shard:
        """Move the parameters of a bucket into one flat tensor, if that has not been done yet."""
        if bucket not in self.shards:
            self.shards[bucket] = Shard(self.layout, self.rank, bucket, self.params, self.settings.master_dtype)
        return self.shards[bucket]

    def follow(self) -> None:
        """Notice parameters that were bound to other memory, or set."""
        for shard in self.shards.values():
            shard.follow()

    # ------------------------------------------------------------------ gradients come

    def arrived(self, index: int) -> None:
        """Autograd has finished a gradient of a bare module."""
        if self.paused:
            return
        with self.lock, self._noting_failure():
            grad, accumulate = self._take_grad(index)
            if grad is None:
                return
            self._note_grad(index, grad, accumulate)
            done = self.reduction.arrive(index, grad, accumulate)
            self.params[index].grad = self.stand_in(index)
            if done and self.settings.reduction == "all":
                self._set_whole_grads()

    def arrived_in_ddp(self, index: int, grad: Tensor | None) -> None:
        """DDP has a gradient ready; its own `.grad` is dealt with when backward is over."""
        accumulate = index in self._accumulating
        with self.lock, self._noting_failure():
            if grad is not None:
                self._note_grad(index, grad, accumulate)
            self.reduction.arrive(index, grad, accumulate)
            self._accumulating.discard(index)
            self._arrival.notify_all()

    def await_passes(self, count: int) -> None:
        """Wait until another thread has brought as many backward passes to their end."""
        with self._arrival:
            self._arrival.wait_for(lambda: self.reduction.passes >= count and not self.reduction.open)

    def _note_grad(self, index: int, grad: Tensor, accumulate: bool) -> None:
        self.passes_ended = False
        if self.reference is not None:
            self.reference.note(index, grad, accumulate)

    def shadow_backward(self, fresh: bool) -> None:
        """Take part in a backward pass of others, with zeros; `fresh` if they have no gradients to add to."""
        with self.lock, self._noting_failure():
            if fresh:
                self.drop_all()
                for param in self.params:
                    param.grad = None  # of this rank's own last pass
            self.passes_ended = False
            self.reduction.launch_missing()
            self.reduction.finish()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """After an error on the way nobody knows what the others have got."""
        try:
            yield
        except InterruptedPassError:
            raise
        except Exception as error:
            self.failure = error
            raise

    def release_stand_in(self, index: int) -> None:
        """DDP is about to accumulate: it must find no stand-in, but we remember that there was one."""
        param = self.params[index]
        if isinstance(param.grad, ShardedGradient):
            self._accumulating.add(index)
            param.grad = None

    def stand_in(self, index: int) -> ShardedGradient:
        """What stands for a gradient whose parts have gone to their owners."""
        if index not in self._stand_ins:
            self._stand_ins[index] = ShardedGradient(self.params[index], index, ref(self.grad_ops))
        return self._stand_ins[index]

    def place_stand_ins(self) -> None:
        """Let no one read a gradient that is only this rank's own."""
        for index in self.reduction.used:
            self.params[index].grad = self.stand_in(index)

    def _take_grad(self, index: int) -> tuple[Tensor | None, bool]:
        grad = self.params[index].grad
        if isinstance(grad, ShardedGradient):
            if grad is not self._stand_ins.get(index):
                raise RuntimeError(
                    "another ShardedOptimizer holds the gradient of this parameter: drop it before building a new one"
                )
            return grad.take_arrived(), True
        return grad, False

    # ------------------------------------------------------------------ backward is over

    def end_passes(self) -> None:
        """End the backward passes of this step, and learn which parameters some rank has used."""
        with self.lock:
            if not self._reduces:
                self._use_present_grads()
            elif self.passes_ended:
                self._drop_unset_grads()
            else:
                self.grad_ops.drop_norms()
                self._drop_unset_grads()
                self._take_manual_grads()
                self._start_used_mask()
                self.passes_ended = True
                if self.reference is not None:
                    self.reference.check_sums(self.whole_gradients())

    def _drop_unset_grads(self) -> None:
        """Notice gradients that somebody has set to `None`."""
        if self.settings.reduction == "all" and self.passes_ended:
            self._use_present_grads()
            return
        gone = [
            index
            for index in self.reduction.used
            if self.params[index].grad is None and index not in self._accumulating
        ]
        if gone:
            if self.reduction.open:
                self.reduction.launch_missing()
            self.reduction.finish()
            self.reduction.drop(gone)
            self.reduction.zero_stale()
        self._accumulating.clear()

    def _take_manual_grads(self) -> None:
        """Launch what no hook has brought: gradients set by hand, and of parameters that have just become trainable."""
        whole = self.settings.reduction == "all"
        for index, param in enumerate(self.params):
            grad = param.grad
            if grad is None or (type(grad) is ShardedGradient and grad.arrived is None):
                continue
            # A whole gradient that came through a hook is a sum already; it counts again where a further pass began.
            if param.requires_grad and not (whole and index in self.reduction.used and not self.reduction.open):
                self.arrived(index)
        if self.reduction.open or not self.reduction.passes:
            # Without a backward pass here, the others wait for this rank in theirs.
            self.reduction.launch_missing()

    def _start_used_mask(self) -> None:
        self.wait_used_mask()
        self.used_elsewhere = set()
        count = len(self.params)
        flags = [index in self.reduction.used for index in range(count)]
        words = [sum(1 << bit for bit, flag in enumerate(flags[i : i + _BITS]) if flag) for i in range(0, count, _BITS)]
        with self.timer.phase("meet"):
            pending_mask = self._control.start_all_gather_ints([self.reduction.passes, *words])
        complete = all(flag or not param.requires_grad for flag, param in zip(flags, self.params, strict=True))
        if complete and self.reduction.passes:
            # Whatever the others have used, everything counts. They are heard at the end of the step.
            self._pending_mask = pending_mask if self._control.blocks_host else None
        else:
            self._apply_used_mask(pending_mask)
        self.reduction.passes = 0
        if self.settings.reduction == "all":
            self._set_whole_grads()
            self._use_present_grads()

    def _apply_used_mask(self, pending_mask: PendingInts) -> None:
        with self.timer.waiting("meet"):
            rows = pending_mask.wait()
        while self.reduction.passes < max(row[0] for row in rows):
            self.reduction.launch_missing()
        known = set(self.reduction.used)
        for index in range(len(self.params)):
            if any(row[1 + index // _BITS] >> (index % _BITS) & 1 for row in rows):
                self.reduction.used.add(index)
        self.used_elsewhere = self.reduction.used - known
        if self.settings.reduction == "scatter":
            self.place_stand_ins()

    def wait_used_mask(self) -> None:
        """Take note of what the others have told, if nobody has listened yet."""
        pending_mask, self._pending_mask = self._pending_mask, None
        if pending_mask is not None:
            with self.timer.waiting("meet"):
                pending_mask.wait()

    @property
    def blocks_host(self) -> bool:
        """Whether ranks wait for each other on the host."""
        return self._control.blocks_host

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        exchanges = {id(exchange): exchange for exchange in [*self._exchange_for.values(), self._control]}
        found, sum_replicas = list(exchanges.values()), self._sum_replicas.bytes_moved
        return (
            sum_replicas + sum(exchange.bytes_sent for exchange in found),
            sum_replicas + sum(exchange.bytes_received for exchange in found),
        )

    def finish(self) -> None:
        """Have all sums of this step."""
        self.end_passes()
        self.reduction.finish()

    # ------------------------------------------------------------------ whole gradients

    def _set_whole_grads(self) -> None:
        """Where everybody gets all gradients: put them where users look for them."""
        self.reduction.finish()
        for index in self.reduction.used:
            bucket, span = self.layout.place_of(index)
            param = self.params[index]
            handed_out = param.grad is not None and type(param.grad) is not ShardedGradient
            if bucket not in self.reduction.sums or handed_out:
                continue
            place = self.reduction.sums[bucket][span.start : span.stop]
            param.grad = place.as_strided(param.shape, param.stride(), place.storage_offset()).to(param.dtype)
        self.reduction.sums = {}

    def _use_present_grads(self) -> None:
        self.reduction.used = {index for index, param in enumerate(self.params) if param.grad is not None}

    def _owned_gradients(self, bucket: int) -> Tensor:
        """The owned part of a bucket, from whole gradients."""
        if self.settings.reduction == "scatter":
            return self.reduction.sums[bucket]
        owned = self.layout.buckets[bucket].owned(self.rank)
        first = self.params[self.layout.buckets[bucket].slots[0].param]
        found = torch.zeros(owned.length, dtype=first.dtype, device=first.device)
        for fragment in self.layout.fragments_in(bucket, self.rank):
            grad = self.params[fragment.param].grad
            if grad is not None:
                place = fragment.place.shift(-owned.start)
                found[place.start : place.stop].copy_(_stretch(grad, self.params[fragment.param], fragment))
        return found

    def whole_gradients(self) -> dict[int, Tensor]:
        """The sums of all used parameters, brought together on every rank; for proofs, not for training."""
        if self.settings.reduction == "all":
            return {index: _filled(self.params[index]) for index in self.reduction.used}
        self.reduction.finish()
        found: dict[int, Tensor] = {}
        for bucket in self.used_buckets():
            where, sums = self.layout.buckets[bucket], self.reduction.sums[bucket]
            memory = sums.new_zeros(padded_size(where))
            owned = where.owned(self.rank)
            memory[owned.start : owned.stop].copy_(sums)
            self._exchange_for[memory.device].gather(memory, where).wait()
            for slot in where.slots:
                like, place = self.params[slot.param], memory[slot.span.start : slot.span.stop]
                found[slot.param] = place.as_strided(like.shape, like.stride(), place.storage_offset())
        return {index: found[index] for index in self.reduction.used}

    # ------------------------------------------------------------------ update and gather

    def update(self, inners: InnerOptimizers) -> None:
        """Step on the owned parts, bucket by bucket, and send what is new.

        If that fails on this rank, what is owned is sent as it is: the others wait for it, and are told afterwards.
        """
        buckets, failure = self.used_buckets(), None
        iteration = inners.begin()
        with torch.no_grad():
            for batch in self._batches(buckets):
                for bucket in batch:
                    self.reduction.finish(bucket)
                try:
                    if failure is None:
                        self._partial_step(batch, inners, iteration.step)
                except Exception as error:
                    failure = error
                if self.settings.gather == "step":
                    self.launch(batch)
        iteration.end()
        self._pending_status = (
            self._control.start_all_gather_ints([failure is not None]) if self._control.blocks_host else None
        )
        if self.settings.gather == "forward":
            # The next forward pass needs the first parameters first, and norms and biases everywhere.
            self.launch(sorted(buckets, key=lambda bucket: (self.layout.buckets[bucket].size > _FEW, -bucket)))
        if failure is not None:
            self.pending_gathers.wait()
            raise failure

    def failed(self) -> list[int]:
        """The ranks whose last update failed."""
        pending_status, self._pending_status = self._pending_status, None
        if pending_status is None:
            return []
        with self.timer.waiting("meet"):
            return [rank for rank, row in enumerate(pending_status.wait()) if row[0]]

    def recover(self) -> None:
        """Take note of what was told before something failed, so as to begin anew."""
        self.failure = None
        with suppress(TransportError):
            self.pending_gathers.wait()
            self.wait_used_mask()
            self.failed()

    def used_buckets(self) -> list[int]:
        """The buckets in which some rank has used some parameter, the same on all ranks."""
        return sorted({self.layout.place_of(index)[0] for index in self.reduction.used})

    def launch(self, buckets: Iterable[int]) -> None:
        """Start sending the owned parts of some buckets."""
        for bucket in buckets:
            shard, where = self.shards[bucket], self.layout.buckets[bucket]
            with self.timer.phase("gather", bucket):
                exchange = self._exchange_for[shard.memory.device]
                self.pending_gathers.launched(bucket, exchange.gather(shard.memory, where))

    def _batches(self, buckets: Sequence[int]) -> Iterator[Sequence[int]]:
        most = _MOST_PARTIAL_STEPS if self._control.blocks_host else 1
        size = max(1, -(-len(buckets) // most))
        for start in range(0, len(buckets), size):
            yield buckets[start : start + size]

    def _partial_step(
        self, batch: Sequence[int], inners: InnerOptimizers, step: Callable[[Sequence[Leaf]], None]
    ) -> None:
        leaves = list[Leaf]()
        try:
            for bucket in batch:
                self.bind(bucket)
                leaves += self._ready(bucket, inners)
            with self.timer.phase("update", batch[0], batch[-1]):
                step(leaves)
        finally:
            for leaf in leaves:
                leaf.tensor.grad = None
        for bucket in batch:
            self.shards[bucket].publish()
            self.shards[bucket].mark_changed()

    def _ready(self, bucket: int, inners: InnerOptimizers) -> list[Leaf]:
        """The leaves of a bucket that take part, with their gradients."""
        shard, gradients = self.shards[bucket], self._owned_gradients(bucket)
        ready = list[Leaf]()
        for leaf in list(shard.leaves):
            used = [index in self.reduction.used for index in leaf.params]
            parts = [leaf]
            if any(used) and not all(used):
                parts = shard.split_leaf(leaf)
                inners.replace(leaf, parts)
            ready += [part for part in parts if part.params[0] in self.reduction.used]
        for leaf in ready:
            leaf.tensor.grad = leaf.view(gradients).to(leaf.tensor.dtype)
        return ready

    def drop_all(self) -> None:
        """All gradients were dropped."""
        with self.lock:
            if self.reduction.open:
                self.reduction.launch_missing()
            self.reduction.drop()
            self.reduction.passes = 0
            if self.reference is not None:
                self.reference.drop()
            self._accumulating.clear()
            self.grad_ops.drop_norms()
            self.passes_ended = False


def _call(method: WeakMethod[Callable[[], None]]) -> None:
    found = method()
    if found is not None:
        found()


def _filled(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad.to_dense()


def _stretch(grad: Tensor, param: Tensor, fragment: Fragment) -> Tensor:
    """A fragment of a whole gradient, in the order of the parameter's memory."""
    if grad.layout != torch.strided:
        grad = grad.to_dense()
    if grad.stride() != param.stride():
        grad = torch.empty_like(param).copy_(grad)
    return flat_alias(grad)[fragment.part.start : fragment.part.stop]
