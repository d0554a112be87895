"""One rank's part in the steps of `ShardedOptimizer`, without torch's optimizer interface.

=========== =================================================================================================
arrived     autograd has finished a gradient: it is copied into its bucket, and a full bucket is launched
end_passes  the backward passes are over: the rest is launched, and ranks exchange which parameters they used
update      bucket by bucket, as the sums arrive: the inner optimizers step on the owned parts
gather      the new parameters go to everyone; waited for at the end of the step or in the next forward pass
=========== =================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Condition, RLock
from weakref import ref

from torch import Tensor

from zerostep.comm.exchange import Exchange, PendingInts
from zerostep.comm.exchange import connect as connect_exchange
from zerostep.comm.mesh import Ranks
from zerostep.errors import InterruptedPassError, TransportError
from zerostep.plan.layout import Layout
from zerostep.plan.layout_planner import Settings
from zerostep.step.bucket_shards import BucketShards
from zerostep.step.gathering import PendingGathers
from zerostep.step.grad_ops import ShardedGradOps
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.step.labels import PhaseTimer
from zerostep.step.reduction import Reduction
from zerostep.step.reduction_plan import ReductionPlan
from zerostep.step.reference import ReferenceOptimizer
from zerostep.step.sharded_grad import ShardedGradient
from zerostep.step.stand_ins import StandIns
from zerostep.step.update import Updater
from zerostep.step.used_mask import pack_mask, union_of_masks
from zerostep.step.weak import weakly
from zerostep.step.whole_grads import gather_sums, present_grads, set_whole_grads


class Engine:
    """Reduce, update, gather. `reduces` is false where DDP does the first.

    Hooks run on autograd's threads, everything else on the caller's; `lock` keeps them apart. In a join context the
    thread of a join hook runs steps, too.
    """

    def __init__(
        self,
        ranks: Ranks,
        layout: Layout,
        params: Sequence[Tensor],
        settings: Settings,
        reduces: bool,
        timer: PhaseTimer,
    ) -> None:
        self._ranks, self._settings, self._reduces, self._timer = ranks, settings, reduces, timer
        self.lock = RLock()
        self._arrival = Condition(self.lock)
        self.buckets = BucketShards(ranks, layout, params, settings.master_dtype)
        first = self.buckets.params[layout.buckets[0].slots[0].param].device
        same = ranks.everyone is ranks.shards
        self._control: Exchange = self.buckets.exchanges[0] if same else connect_exchange(ranks.everyone, first)
        self._sum_replicas = ranks.replica_all_reduce(first)
        # Weakly: without a cycle, this engine goes with its optimizer, and its hooks are removed then.
        self.reduction = Reduction(self._plan(), self._sum_replicas, timer, weakly(self._begin_pass))
        self.gathers = PendingGathers(timer)
        self._updater = Updater(self.buckets, self.reduction, self.gathers, settings, self.blocks_host, timer)
        self.grad_ops = ShardedGradOps(ref(self), self.buckets, self.reduction, ranks.shards, settings.reduction)
        self._stand_ins = StandIns(self.buckets, ref(self.grad_ops))
        self._pending_mask: PendingInts | None = None
        self._pending_status: PendingInts | None = None
        self._failure: Exception | None = None
        self._on_backward: Callable[[bool], None] | None = None
        self._joining: Callable[[], bool] = lambda: False
        self._used_elsewhere: set[int] = set()
        self._passes_ended = self._paused = False
        self._reference: ReferenceOptimizer | None = None

    def _plan(self) -> ReductionPlan:
        layout, params, wanted = self.buckets.layout, self.buckets.params, self._settings.reduce_dtype
        firsts = [params[bucket.slots[0].param] for bucket in layout.buckets]
        return ReductionPlan(
            layout=layout,
            rank=self.buckets.rank,
            params=params,
            exchanges=[self.buckets.exchange(bucket) for bucket in range(len(layout.buckets))],
            dtypes=[wanted if wanted is not None and param.is_floating_point() else param.dtype for param in firsts],
            scale=1.0 / self._ranks.everyone.world_size,  # so that sums over the ranks are averages
            whole=self._whole,
        )

    @property
    def _whole(self) -> bool:
        """Whether every rank gets all gradients."""
        return self._settings.reduction == "all"

    def extend(self, layout: Layout, params: Sequence[Tensor]) -> None:
        """Go on with a layout that has further buckets; a collective."""
        self.buckets.extend(layout, params)
        self.reduction.extend(self._plan())

    @property
    def blocks_host(self) -> bool:
        """Whether ranks wait for each other on the host."""
        return self._control.blocks_host

    @property
    def failure(self) -> Exception | None:
        """The error that left a backward pass half done."""
        return self._failure

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        exchanges = {id(exchange): exchange for exchange in [*self.buckets.exchanges, self._control]}.values()
        between_replicas = self._sum_replicas.bytes_moved
        return (
            between_replicas + sum(exchange.bytes_sent for exchange in exchanges),
            between_replicas + sum(exchange.bytes_received for exchange in exchanges),
        )

    # ------------------------------------------------------------------ what callers attach

    def set_reference(self, reference: ReferenceOptimizer | None) -> None:
        """Show all gradients to a reference optimizer, which compares their sums; `None` ends that."""
        self._reference = reference

    def enter_join(self, joining: Callable[[], bool], on_backward: Callable[[bool], None] | None) -> None:
        """A join context begins. `on_backward` is called before each pass: with true if it adds to no earlier one."""
        self._joining, self._on_backward = joining, on_backward

    def stop_announcing(self) -> None:
        """Call `on_backward` no more: this rank has joined, or the context has ended."""
        self._on_backward = None

    def joining(self) -> bool:
        """Whether a join context is active."""
        return self._joining()

    @property
    def is_paused(self) -> bool:
        """Whether gradients only add up in `.grad`."""
        return self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, gradients add up in `.grad` and are not reduced."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # ------------------------------------------------------------------ gradients arrive

    def _begin_pass(self) -> None:
        if self._on_backward is not None:
            grads = (self.buckets.params[index].grad for index in self.reduction.used)
            self._on_backward(not any(isinstance(grad, ShardedGradient) for grad in grads))

    def arrived(self, index: int) -> None:
        """Autograd has finished a gradient of a bare module; runs on autograd's thread, inside a hook."""
        if self._paused:
            return
        with self.lock, self._noting_failure():
            grad, accumulate = self._stand_ins.take_grad(index)
            if grad is None:
                return
            self._note_grad(index, grad, accumulate)
            done = self.reduction.arrive(index, grad, accumulate)
            self._stand_ins.place_one(index)
            if done and self._whole:
                self._set_whole_grads()

    def arrived_in_ddp(self, index: int, grad: Tensor | None) -> None:
        """DDP has a gradient ready; `.grad` is replaced when backward is over."""
        accumulate = self._stand_ins.was_removed(index)
        with self.lock, self._noting_failure():
            if grad is not None:
                self._note_grad(index, grad, accumulate)
            self.reduction.arrive(index, grad, accumulate)
            self._stand_ins.forget_removed(index)
            self._arrival.notify_all()

    def before_ddp_accumulates(self, index: int) -> None:
        """DDP is about to add to `.grad`, and must find no stand-in there."""
        self._stand_ins.remove(index)

    def after_ddp_backward(self) -> None:
        """DDP is done with `.grad`: replace it by stand-ins."""
        self._stand_ins.place(self.reduction.used)

    def await_passes(self, count: int) -> None:
        """Wait until another thread has ended `count` backward passes."""
        with self._arrival:
            self._arrival.wait_for(lambda: self.reduction.passes >= count and not self.reduction.open)

    def _note_grad(self, index: int, grad: Tensor, accumulate: bool) -> None:
        self._passes_ended = False
        if self._reference is not None:
            self._reference.note(index, grad, accumulate)

    def shadow_backward(self, fresh: bool) -> None:
        """Take part in a backward pass of the other ranks, with zeros; `fresh` if it adds to no earlier pass."""
        with self.lock, self._noting_failure():
            if fresh:
                self.drop_all()
                for param in self.buckets.params:
                    param.grad = None  # of this rank's own last pass
            self._passes_ended = False
            self.reduction.launch_missing()
            self.reduction.finish()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Remember an error after which ranks may have reduced different buckets."""
        try:
            yield
        except InterruptedPassError:
            raise
        except Exception as error:
            self._failure = error
            raise

    # ------------------------------------------------------------------ backward is over

    def end_passes(self) -> None:
        """End the backward passes of this step, and learn which parameters some rank has used."""
        with self.lock:
            if not self._reduces:
                self._use_present_grads()
            elif self._passes_ended:
                self._drop_unset_grads()
            else:
                self.grad_ops.drop_norms()
                self._drop_unset_grads()
                self._take_manual_grads()
                self._exchange_used_mask()
                self._passes_ended = True
                if self._reference is not None:
                    self._reference.check_sums(self.whole_gradients())

    @property
    def passes_ended(self) -> bool:
        """Whether the passes of this step have ended, so that all ranks know which parameters are used."""
        return self._passes_ended

    @property
    def used_elsewhere(self) -> Collection[int]:
        """Parameters that only other ranks have used in this step."""
        return self._used_elsewhere

    def finish(self) -> None:
        """Wait for all sums of this step."""
        self.end_passes()
        self.reduction.finish()

    def _drop_unset_grads(self) -> None:
        """Drop the gradients of parameters whose `.grad` was set to `None`."""
        if self._whole and self._passes_ended:
            self._use_present_grads()
            return
        params, removed = self.buckets.params, self._stand_ins.was_removed
        unset = [index for index in self.reduction.used if params[index].grad is None and not removed(index)]
        if unset:
            if self.reduction.open:
                self.reduction.launch_missing()
            self.reduction.finish()
            self.reduction.drop(unset)
            self.reduction.zero_stale()
        self._stand_ins.forget_removed()

    def _take_manual_grads(self) -> None:
        """Reduce gradients that no hook has seen: set by hand, or of parameters that have just become trainable."""
        for index, param in enumerate(self.buckets.params):
            grad = param.grad
            if grad is None or (type(grad) is ShardedGradient and grad.arrived is None):
                continue
            # A whole gradient that came through a hook is a sum already, unless a further pass has begun since.
            is_sum = self._whole and index in self.reduction.used and not self.reduction.open
            if param.requires_grad and not is_sum:
                self.arrived(index)
        if self.reduction.open or not self.reduction.passes:
            # A rank without a backward pass must launch all buckets, too: the others wait for them in theirs.
            self.reduction.launch_missing()

    def _exchange_used_mask(self) -> None:
        self.wait_used_mask()
        self._used_elsewhere = set()
        params, reduction, own = self.buckets.params, self.reduction, self.reduction.used
        used = [index in own for index in range(len(params))]
        with self._timer.phase("control"):
            pending = self._control.start_all_gather_ints([reduction.passes, *pack_mask(used)])
        complete = all(flag or not param.requires_grad for flag, param in zip(used, params, strict=True))
        if complete and reduction.passes:
            # This rank used every parameter, so the mask cannot change its update; wait for it at the end of the step.
            self._pending_mask = pending if self._control.blocks_host else None
        else:
            self._apply_used_mask(pending)
        reduction.reset_passes()
        if self._whole:
            self._set_whole_grads()
            self._use_present_grads()

    def _apply_used_mask(self, pending: PendingInts) -> None:
        with self._timer.waiting("control"):
            rows = pending.wait()
        while self.reduction.passes < max(row[0] for row in rows):
            self.reduction.launch_missing()
        used = union_of_masks([row[1:] for row in rows], len(self.buckets.params))
        self._used_elsewhere = {index for index, flag in enumerate(used) if flag} - set(self.reduction.used)
        self.reduction.mark_used(self._used_elsewhere)
        if not self._whole:
            self._stand_ins.place(self.reduction.used)

    def wait_used_mask(self) -> None:
        """Wait for the used mask of the other ranks, if it is still in flight."""
        pending, self._pending_mask = self._pending_mask, None
        if pending is not None:
            with self._timer.waiting("control"):
                pending.wait()

    # ------------------------------------------------------------------ whole gradients

    def _set_whole_grads(self) -> None:
        self.reduction.finish()
        set_whole_grads(self.buckets, self.reduction.take_sums(), self.reduction.used)

    def _use_present_grads(self) -> None:
        params = enumerate(self.buckets.params)
        self.reduction.replace_used(index for index, param in params if param.grad is not None)

    def whole_gradients(self) -> dict[int, Tensor]:
        """The sums of all used parameters, whole, on every rank: for verification, not for training."""
        if self._whole:
            return present_grads(self.buckets, self.reduction.used)
        self.reduction.finish()
        return gather_sums(self.buckets, self.reduction.sums, self.reduction.used)

    # ------------------------------------------------------------------ update and gather

    def update(self, inners: InnerOptimizers) -> None:
        """Step on the owned parts, bucket by bucket, and launch their gathers; other ranks learn of a failure later."""
        chosen = self.used_buckets()
        failure = self._updater.update(chosen, inners)
        if self._control.blocks_host:
            self._pending_status = self._control.start_all_gather_ints([failure is not None])
        self._updater.launch_deferred(chosen)
        if failure is not None:
            self.gathers.wait()
            raise failure

    def failed_ranks(self) -> list[int]:
        """The ranks whose last update failed, where ranks wait for each other on the host."""
        pending, self._pending_status = self._pending_status, None
        if pending is None:
            return []
        with self._timer.waiting("control"):
            return [rank for rank, row in enumerate(pending.wait()) if row[0]]

    def recover(self) -> None:
        """Drain pending messages after a failed step so that training can restart from a checkpoint."""
        self._failure = None
        with suppress(TransportError):
            self.gathers.wait()
            self.wait_used_mask()
            self.failed_ranks()

    def used_buckets(self) -> list[int]:
        """The buckets in which some rank has used some parameter; the same on all ranks."""
        return self.buckets.buckets_of(list(self.reduction.used))

    def drop_all(self) -> None:
        """Drop all gradients."""
        with self.lock:
            if self.reduction.open:
                self.reduction.launch_missing()
            self.reduction.drop_all()
            self.reduction.reset_passes()
            if self._reference is not None:
                self._reference.drop()
            self._stand_ins.forget_removed()
            self.grad_ops.drop_norms()
            self._passes_ended = False
