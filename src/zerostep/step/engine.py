"""One rank's part in the steps of `ShardedOptimizer`, without torch's optimizer interface.

=========== =================================================================================================
arrived     autograd has finished a gradient: it is copied into its bucket, and a full bucket is launched
end_pass    a backward call is over: the rest is launched, and ranks exchange which parameters they used
settle      gradients are about to be used: what the user has dropped or set by hand since is noticed
update      bucket by bucket, as the sums arrive: the inner optimizers step on the owned parts
gather      the new parameters go to everyone; waited for at the end of the step or in the next forward pass
=========== =================================================================================================

`iteration` has the states of a step. With `update="backward"`, update and gather happen as sums arrive in a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from weakref import ref

import torch
from torch import Tensor

from zerostep.comm.exchange import Exchange
from zerostep.comm.exchange import connect as connect_exchange
from zerostep.comm.mesh import Ranks
from zerostep.comm.transport import Presence
from zerostep.dtensors import local_grad
from zerostep.plan.layout import Layout
from zerostep.plan.layout_planner import LayoutPlanner
from zerostep.step.backward_update import AppliedGradOps, BackwardUpdate, refuse_kept_gradients
from zerostep.step.bucket_shards import BucketShards
from zerostep.step.compiled_update import CompiledUpdates
from zerostep.step.ddp_hook import in_backward_pass
from zerostep.step.gathering import PendingGathers
from zerostep.step.grad_ops import GradChecks, ShardedGradOps
from zerostep.step.grad_sums import GradSums
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.step.labels import PhaseTimer
from zerostep.step.late_rows import LateRows
from zerostep.step.mesh_sums import MeshSums
from zerostep.step.pass_messages import PassMessages
from zerostep.step.passes import Passes
from zerostep.step.place import NONE, SOME, UNKNOWN, Progress
from zerostep.step.reduction import Reduction
from zerostep.step.reduction_plan import ReductionPlan, make_plan
from zerostep.step.reference import ReferenceOptimizer
from zerostep.step.scaled_sum import ScaledSum
from zerostep.step.stand_ins import StandIns
from zerostep.step.step_status import StepStatus
from zerostep.step.update import Updater
from zerostep.step.weak import weakly
from zerostep.step.whole_grads import gather_sums, owned_part, present_grads, whole_grad

_current_task = torch._C._current_graph_task_id
_NO_TASK = -2  # no backward call has this number


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
        planner: LayoutPlanner,
        reduces: bool,
        timer: PhaseTimer,
        progress: Progress,
        passes: Passes,
    ) -> None:
        self._progress, self._passes, self._positions = progress, passes, planner.positions
        self._ranks, self._settings, self._reduces, self._timer = ranks, planner.settings, reduces, timer
        settings = planner.settings
        self.lock, self.iteration, self.failures = passes.lock, passes.iteration, passes.failures
        self.buckets = BucketShards(ranks, layout, params, settings.master_dtype)
        first = self.buckets.params[layout.buckets[0].slots[0].param].device
        same = ranks.everyone is ranks.shards
        self._control: Exchange = self.buckets.exchanges[0] if same else connect_exchange(ranks.everyone, first)
        self._sum_replicas = ranks.replica_all_reduce(first)
        # Weakly, here and below: without a cycle, this engine goes with its optimizer, and its hooks are removed then.
        self._backward_end = passes.backward_end
        self.gathers = PendingGathers(timer)
        self._updater = Updater(self.buckets, self.gathers, settings, self.blocks_host, timer)
        plan = self._plan()
        self.sums = GradSums(plan)
        self._backward_update = BackwardUpdate(self.buckets, self._updater, self._control, timer)
        sink = self._backward_update if self._in_backward else self.sums
        self.reduction = Reduction(plan, self._sum_replicas, timer, sink, weakly(self._collect))
        self._mesh_sums = MeshSums(params, first, passes.counted)
        kept = ShardedGradOps(ref(self), self.buckets, self.sums, ranks.shards, self._mesh_sums, settings.reduction)
        self.grad_ops: ShardedGradOps | AppliedGradOps = AppliedGradOps() if self._in_backward else kept
        self._stand_ins = StandIns(self.buckets, ref(self.grad_ops))
        self._used_in_pass: set[int] = set()
        self._dropped: dict[int, Tensor | None] = {}
        self._taken_along: set[int] = set()
        self._placed: set[int] = set()  # parameters that got a stand-in in the open pass, inside a backward call
        self._plain_task = _NO_TASK  # the backward call of an open pass in which small gradients are only held
        self._absent: list[int] = []
        self._paused_grads: set[int] = set()
        late, before = LateRows(), weakly(self._steps_before_load)
        self._messages = PassMessages(self._control, timer, progress, late, before, ranks.everyone.presence)
        self.status = StepStatus(self._control, timer, late, before, progress.facts)
        self._on_pass: Callable[[], None] | None = None
        self._joining: Callable[[], bool] = lambda: False
        self._inners: InnerOptimizers | None = None
        self._before_updates: Callable[[], None] = lambda: None
        self._end_update: Callable[[], None] = lambda: None
        self._before_pass: Callable[[], None] = lambda: None
        self._holds_all: Callable[[], bool] = lambda: True
        self._hook_trainable: Callable[[], None] = lambda: None
        self._lifted = False
        self._reference: ReferenceOptimizer | None = None
        self._leads = passes.add(self)

    def _plan(self) -> ReductionPlan:
        scale = 1.0 / self._passes.world_size  # so that sums over the ranks are averages
        layout, params = self.buckets.layout, self.buckets.params
        exchanges = [self.buckets.exchange(bucket) for bucket in range(len(layout.buckets))]
        places = [self._positions.get(param, len(self._positions)) for param in params]
        return make_plan(layout, self.buckets.rank, params, exchanges, self._settings, scale, places)

    @property
    def _whole(self) -> bool:
        """Whether every rank gets all gradients. They are kept in `.grad` alone, as under DDP."""
        return self._settings.reduction == "all"

    @property
    def _in_backward(self) -> bool:
        """Whether parameters are updated inside backward."""
        return self._settings.update == "backward"

    def extend(self, layout: Layout, params: Sequence[Tensor]) -> None:
        """Go on with a layout that has further buckets; a collective."""
        with self.lock:
            self.end_pass()
            self.read_messages()  # they are about the parameters that there were
            self.buckets.extend(layout, params)
            self._mesh_sums.extend(params)
            plan = self._plan()
            self.reduction.extend(plan)
            self.sums.extend(plan)

    def leave_sums_to_ddp(self) -> None:
        """From now on DDP sums, and gradients are taken from `.grad`; only with `reduction="all"`."""
        with self.lock:
            self.end_pass()
            self._reduces = False

    @property
    def presence(self) -> Presence:
        """What the stall report knows of this rank."""
        return self._ranks.everyone.presence

    @property
    def blocks_host(self) -> bool:
        """Whether ranks wait for each other on the host."""
        return self._control.blocks_host

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        exchanges = {id(exchange): exchange for exchange in [*self.buckets.exchanges, self._control]}.values()
        between_replicas, (sent, received) = self._sum_replicas.bytes_moved, self._mesh_sums.traffic
        return (
            sent + between_replicas + sum(exchange.bytes_sent for exchange in exchanges),
            received + between_replicas + sum(exchange.bytes_received for exchange in exchanges),
        )

    @property
    def compiled(self) -> CompiledUpdates | None:
        """The compiled updates, if there are to be any."""
        return self._updater.compiled

    @property
    def gradient_bytes(self) -> int:
        """Bytes of sums, of buckets filled or in flight, and of receive buffers."""
        return self.reduction.nbytes + self.sums.nbytes

    # ------------------------------------------------------------------ what callers attach

    def attach_first(
        self, before_pass: Callable[[], None], holds_all: Callable[[], bool], before_updates: Callable[[], None]
    ) -> None:
        """Take what the first engine of an optimizer calls for all: a check that precedes each pass, and updates.

        `before_updates` precedes those inside backward; `holds_all` is whether no other optimizer has trainable
        parameters of the model.
        """
        self._before_pass, self._holds_all, self._before_updates = before_pass, holds_all, before_updates

    def attach(
        self, hook_trainable: Callable[[], None], inners: InnerOptimizers, end_update: Callable[[], None]
    ) -> None:
        """Take hooks for all trainable parameters, and what updates inside backward need."""
        self._hook_trainable, self._inners, self._end_update = hook_trainable, inners, end_update

    def set_reference(self, reference: ReferenceOptimizer | None) -> None:
        """Show all gradients to a reference optimizer, which compares their sums; `None` ends that."""
        self._reference = reference

    def enter_join(self, joining: Callable[[], bool], on_pass: Callable[[], None] | None) -> None:
        """A join context begins. `on_pass` is called before each pass, when dropped gradients were noticed."""
        self._joining, self._on_pass = joining, on_pass

    def stop_announcing(self) -> None:
        """Call `on_pass` no more: this rank has joined, or the context has ended."""
        self._on_pass = None

    def joining(self) -> bool:
        """Whether a join context is active."""
        return self._joining()

    @property
    def is_paused(self) -> bool:
        """Whether gradients only add up in `.grad`."""
        return self._passes.paused

    def paused(self) -> AbstractContextManager[None]:
        """Inside, gradients add up in `.grad` and are not reduced, those of other engines of the optimizer neither."""
        return self._passes.pause()

    @property
    def reduces(self) -> bool:
        """Whether gradients are summed here, and not by DDP."""
        return self._reduces

    # ------------------------------------------------------------------ gradients arrive

    def arrived(self, index: int) -> None:
        """Autograd has finished a gradient of a bare module; runs on autograd's thread, inside a hook."""
        # Nearly always no more than this. A bucket's parameters are on one device, and arrive on one thread.
        if _current_task() == self._plain_task and not self._passes.paused and self.reduction.count(index):
            if self.reduction.has_full:
                with self.lock, self.failures.noting():
                    self.reduction.launch_full()
            return
        if self._passes.paused:
            self._passes.note_gradient()
            self._paused_grads.add(index)
            self._stand_ins.keep_own_grad(index)
            return
        with self.lock, self.failures.noting():
            if not (self.iteration.in_pass and self._backward_end.is_expected):
                self._enter_pass_with(index)
            self._take_own_grad(index)

    def _enter_pass_with(self, index: int) -> None:
        try:
            self._passes.enter()
        except BaseException:
            if not self.iteration.in_pass:
                self._discard_own_grad(index)
            raise

    def before_ddp_accumulates(self, index: int) -> None:
        """A backward call inside DDP, or `torch.autograd.grad`, has reached a parameter. Runs on autograd's thread.

        DDP reads `.grad` of all parameters when the first gradient is there, so no stand-in may be left by then.
        """
        if self._backward_end.is_expected:
            return
        with self.lock:
            if not self._backward_end.active:
                self.buckets.check_params()  # here, where an error ends backward: in DDP's hook it comes wrapped
                self._notice_dropped()
                self._stand_ins.lift(self.sums.used, self._paused_grads)
                self._lifted = True
            self._backward_end.expect()

    def arrived_in_ddp(self, index: int, grad: Tensor | None) -> None:
        """DDP has a gradient ready, or `None` for a parameter that this rank has not used."""
        with self.lock, self.failures.noting():
            self._passes.note_gradient()  # in this pass, on some rank
            if not in_backward_pass() and not self.iteration.in_pass and not self.iteration.passes:
                # The shadow pass of a joined rank: the live ranks drop their gradients before a step's first pass.
                self.drop_all()
            if not (self.iteration.in_pass and self._backward_end.is_expected):
                self._passes.enter()
            if grad is None:
                self._absent.append(index)
                self.reduction.arrive(index, None)
            else:
                self._take(index, grad)

    def prepare_pass(self) -> None:
        """Before a pass begins: notice what the user has done, and raise if it must not begin."""
        self._before_pass()
        self.buckets.check_params()
        self.iteration.refuse_second_pass()
        if not self._lifted:
            self._notice_dropped()
        if self._in_backward:
            refuse_kept_gradients(self.buckets.layout.params[index].name for index in self.sums.used)
        if self._on_pass is not None:
            self._on_pass()
        if self._inners is not None and self._in_backward:
            self._before_updates()
            self._backward_update.begin(self._inners)

    def open_pass(self) -> None:
        """A pass has begun, and its first gradient is about to be taken."""
        self._taken_along, self._placed = set(), set()
        if self._reference is not None and self._whole:
            self._reference.drop()  # every pass sends whole gradients
        self.grad_ops.drop_norms()
        if self.reduction.begin():
            self._hook_trainable()
        # A stand-in adds what autograd passes to it, in memory that is autograd's: it cannot be left there.
        plain = self._reference is None and not self.sums.used and self._stand_ins.none_placed
        self._plain_task = _current_task() if plain and in_backward_pass() else _NO_TASK

    def _discard_own_grad(self, index: int) -> None:
        """A pass was refused: leave `.grad` as it was before."""
        _, adds = self._stand_ins.take_grad(index)
        if not adds and index not in self._paused_grads:
            self.buckets.params[index].grad = None

    def _take_own_grad(self, index: int) -> None:
        if self.reduction.is_counted(index):
            # As below, and autograd has added it to the first one, which is sent with this pass.
            self._refuse_second_grad(index)
            self._passes.end()
            self._passes.begin()
            return
        grad, adds = self._stand_ins.take_grad(index)
        if grad is None:
            return
        self._passes.note_gradient()
        if self.reduction.is_taken(index):
            # In a backward call inside another one that uses the parameter, too: a pass takes one gradient of each.
            self._refuse_second_grad(index)
            self._passes.end()
            self._passes.begin()
            whole = self.buckets.params[index].grad if self._whole else None
            grad = grad if whole is None else whole + grad
        elif adds and self._whole:
            raise RuntimeError(
                "compiled autograd has put back what stood in .grad when its call began, so that the sum of an earlier "
                'backward pass is lost: use reduction="scatter", or no_sync() for all passes of a step but the last'
            )
        elif not adds and index in self.sums.used and not self._whole:
            self._drop([index])  # dropped since the pass began
        self._take(index, grad)
        self._stand_ins.place_one(index)
        if in_backward_pass():  # compiled autograd puts back what stood there
            self._placed.add(index)

    def _collect(self, params: Sequence[int]) -> list[Tensor | None]:
        """The gradients that were only counted."""
        grads = self._stand_ins.take_all(params)
        self._placed.update([index for index, grad in zip(params, grads, strict=True) if grad is not None])
        return grads

    def _take(self, index: int, grad: Tensor) -> None:
        if self._reference is not None:
            self._reference.note(index, grad, index in self.sums.used and not self._whole)
        self.reduction.arrive(index, grad)

    def _refuse_second_grad(self, index: int) -> None:
        if self._in_backward:
            raise RuntimeError(
                f"parameter {self.buckets.layout.params[index].name!r} got two gradients in one backward pass, as in "
                'reentrant checkpointing, but update="backward" has used the first: use checkpoint(use_reentrant=False)'
            )

    # ------------------------------------------------------------------ a pass ends

    def put_back(self) -> None:
        """Put stand-ins back that were taken out for DDP."""
        if self._lifted:
            self._stand_ins.put_back()
            # DDP remembers which parameters were used inside no_sync(), and then insists on their gradients.
            self._paused_grads.update(self._own_grads())
            self._lifted = False

    def end_pass(self, read: bool = True) -> None:
        """End an open pass, of all engines of the optimizer: see `Passes.end`."""
        self._passes.end(read)

    def close_pass(self) -> BaseException | None:
        """All buckets of a pass are launched: note what was used. The error of an update inside backward."""
        self._dropped = self._dropped_since_placed()
        self._used_in_pass = self.reduction.written - self._taken_along
        if self._in_backward or self._whole:
            self.reduction.finish()
        self.reduction.release_scratch()
        self.sums.use(self._used_in_pass)
        return self._backward_update.end() if self._in_backward else None

    def tell_update(self, failure: BaseException | None) -> None:
        """Tell all ranks how the updates inside backward have ended, if there were any."""
        if self._in_backward:
            self.status.send(self._progress.place(self._gradients()), failure)

    def raise_failed_update(self, failure: BaseException) -> None:
        """Raise the error of an update inside backward, when all ranks have been told of it."""
        self.status.send_error(failure)
        failure.add_note(
            f"zerostep: the update of step {self.iteration.steps + 1} inside backward failed on rank "
            f"{self.buckets.rank}; restart from the last checkpoint on all ranks"
        )
        raise failure

    def after_pass(self) -> None:
        """A pass has ended for all engines: drop what the user has dropped before its end."""
        dropped, self._dropped = self._dropped, {}
        self._put_back_dropped(dropped)

    def _dropped_since_placed(self) -> dict[int, Tensor | None]:
        """What stands in `.grad` where the user has removed a stand-in of this pass, in a hook or after an error."""
        dropped = self._stand_ins.all_dropped(self._placed)
        return {index: self.buckets.params[index].grad for index in dropped}

    def _put_back_dropped(self, dropped: Mapping[int, Tensor | None]) -> None:
        """Drop gradients that the user has dropped before the pass has ended, and leave what stands there instead."""
        for index, grad in dropped.items():
            self.buckets.params[index].grad = grad
        if dropped and self._whole:
            self._use_present()
        elif dropped:
            self._drop(list(dropped))

    def take_leftovers(self) -> None:
        """Take gradients that no hook has seen: of passes inside `no_sync()`, set by hand, or just unfrozen."""
        self._plain_task = _NO_TASK
        for index in self.reduction.missing():
            if self._has_own_grad(index):
                self._take_own_grad(index)
            elif self._whole:
                self._take_along(index)
        self._paused_grads.clear()

    def _take_along(self, index: int) -> None:
        """Send a whole gradient of earlier passes along, as DDP does: another rank may have used the parameter."""
        grad = self.buckets.params[index].grad
        if grad is not None:
            self._take(index, local_grad(grad, self.buckets.params[index]))
            self._taken_along.add(index)

    def exchange_messages(self, read: bool) -> None:
        """Tell all ranks which parameters this one has used; with `read`, learn what the others have."""
        if self._in_backward:
            self._end_update()
        placed = () if self._dropped else self._placed
        used = map(self._used_in_pass.__contains__, range(len(self.buckets.params)))
        # A rank that used every parameter learns nothing from the others; it waits for them at the end of the step.
        complete = len(self._used_in_pass) == self.reduction.trainable_count
        self._messages.send(self.iteration.passes, list(used), complete)
        if read and not complete:
            self.read_messages()
        self._show_gradients(placed)

    def read_messages(self) -> None:
        """Wait for the messages of the passes that this rank has not read yet."""
        used = self._messages.read(len(self.buckets.params))
        self._used_in_pass |= used
        self.sums.use(used)

    def _steps_before_load(self) -> int:
        return self.iteration.steps - self._progress.steps

    def _show_gradients(self, placed: Collection[int]) -> None:
        """Give every parameter that some rank has used something in `.grad`, on all ranks; `placed` have it already."""
        # DDP has set .grad to this rank's zeros where only other ranks have a gradient: they are not a sum.
        absent, self._absent = self._absent, []
        for index in absent:
            self.buckets.params[index].grad = None
        if self._whole:
            sums = self.sums.take_all()
            for index in self._used_in_pass:
                self._stand_ins.place_whole(index, whole_grad(self.buckets, sums, index))
            self._use_present()
        else:
            self._stand_ins.place(set(self.sums.used).difference(placed))
        self._forget_lifted()
        if self._reference is not None:
            self._reference.check_sums(self.whole_gradients())

    def _forget_lifted(self) -> None:
        self._stand_ins.forget_lifted()
        self._lifted = False

    def shadow_backward(self, kept: Collection[int]) -> None:
        """Take part in a backward pass of the other ranks, with zeros; `kept` are the gradients that it adds to."""
        with self.lock, self.failures.noting():
            self.keep_only(kept)
            self._passes.begin()
            self._passes.end()

    # ------------------------------------------------------------------ between passes

    def settle(self) -> None:
        """Before gradients are used: see `Passes.settle`."""
        self._passes.settle()

    def unreduced(self) -> list[int]:
        """Gradients of this rank that no pass has reduced; notices those that were dropped."""
        self.put_back()
        if self._joining():
            self._read_in_join()
        if self._stand_ins.untouched:
            return []
        self._notice_dropped()
        return self._own_grads()

    def take_own(self, params: Iterable[int]) -> None:
        """Take gradients that no hook has seen into the open pass."""
        for index in params:
            self._take_own_grad(index)

    def use_present(self) -> None:
        """Where gradients are whole, count those that stand in `.grad`."""
        if self._whole:
            self._use_present()

    def _read_in_join(self) -> None:
        """Read what a shadow pass inside DDP has left unread."""
        if self._messages.unread and not self._whole:
            before = set(self.sums.used)
            self.read_messages()
            self._stand_ins.place(set(self.sums.used) - before)

    def _use_present(self) -> None:
        self.sums.use_only(index for index, param in enumerate(self.buckets.params) if param.grad is not None)

    def _own_grads(self) -> list[int]:
        """Gradients of this rank that no pass has reduced."""
        # All but stand-ins to which nothing was added; in a step these are all that there are.
        grads = enumerate([param.grad for param in self.buckets.params])
        others = [i for i, grad in grads if grad is not None and getattr(grad, "arrived", grad) is not None]
        return [i for i in others if self.buckets.params[i].requires_grad and self._has_own_grad(i)]

    def _has_own_grad(self, index: int) -> bool:
        if self._whole and index in self._paused_grads:
            return self.buckets.params[index].grad is not None  # autograd has added to the sum that stood there
        return self._stand_ins.has_own_grad(index)

    def _notice_dropped(self) -> None:
        """Drop the gradients of parameters whose `.grad` was removed or replaced by the user."""
        if self._whole:
            # `.grad` itself is the sum.
            if all(param.grad is None for param in self.buckets.params):
                self._all_dropped()
            return
        dropped = self._stand_ins.all_dropped(self.sums.used)
        if dropped:
            self._drop(dropped)

    def _drop(self, params: Sequence[int]) -> None:
        self.reduction.finish()
        self.sums.drop(params)
        self._stand_ins.forget_lifted(params)
        self.grad_ops.drop_norms()
        if self._reference is not None:
            self._reference.drop(params)
        if not self.sums.used:
            self._all_dropped()

    def _all_dropped(self) -> None:
        # The first engine's gradients are on all ranks the same; those of others may be dropped on some ranks only.
        if self._leads and not self.iteration.in_pass:
            self.iteration.drop()

    @property
    def leads(self) -> bool:
        """Whether this is the first engine of the optimizer, over all its ranks."""
        return self._leads

    @property
    def several(self) -> bool:
        """Whether the optimizer has further engines, over fewer ranks."""
        return self._passes.several

    def other_gradients(self) -> list[GradChecks]:
        """The gradients of all engines but the first."""
        return [member.grad_ops for member in self._passes.members[1:]]

    def first_has_gradients(self) -> bool:
        """Whether the first engine has gradients."""
        return self._passes.members[0].has_gradients

    @property
    def has_gradients(self) -> bool:
        """Whether some rank has a gradient of this step."""
        return bool(self.sums.used)

    def note_edit(self) -> None:
        """The sums were changed: they are no longer those of the gradients that autograd made."""
        if self._reference is not None:
            self._reference.note_edit()

    def keep_only(self, params: Collection[int]) -> None:
        """On a joined rank: drop the gradients that the other ranks have dropped."""
        with self.lock:
            dropped = set(self.sums.used).difference(params)
            if dropped:
                self._drop(sorted(dropped))
            for index, param in enumerate(self.buckets.params):
                if index not in self.sums.used:
                    param.grad = None  # of this rank's own last pass

    def drop_all(self) -> None:
        """Drop all gradients."""
        with self.lock:
            self.end_pass()
            self.reduction.finish()
            self.sums.drop_all()
            self._all_dropped()
            if self._reference is not None:
                self._reference.drop()
            self._forget_lifted()
            self._paused_grads.clear()
            self.grad_ops.drop_norms()

    def zero_all(self) -> None:
        """Set all gradients to zero; their parameters still count as used."""
        with self.lock:
            self._notice_dropped()
            self.finish()
            if self.sums.used:
                self.grad_ops.clear()
            self._stand_ins.zero_own_grads()

    def finish(self) -> None:
        """Wait for all sums."""
        with self.lock:
            self.end_pass()
            self.reduction.finish()

    # ------------------------------------------------------------------ whole gradients

    def whole_gradients(self) -> dict[int, Tensor]:
        """The sums of all used parameters, whole, on every rank: for verification, not for training."""
        if self._whole:
            return present_grads(self.buckets, self.sums.used)
        self.reduction.finish()
        return gather_sums(self.buckets, self.sums.parts, self.sums.used)

    # ------------------------------------------------------------------ update and gather

    def update(self, inners: InnerOptimizers) -> BaseException | None:
        """Step on the owned parts, bucket by bucket, and launch their gathers; the error of the update, if it failed.

        Other ranks learn of it by `tell`.
        """
        chosen = self.used_buckets()
        failure = self._updater.update(chosen, inners, self._owned_grad, self.sums.used)
        if not self.blocks_host:
            # Ahead of the status, which nobody waits for: in stream order the parameters would wait for it.
            self._updater.launch_deferred(chosen)
        return failure

    def tell(self, failure: BaseException | None, joined: bool) -> None:
        """Tell all ranks how the updates of this step have ended, of all engines."""
        self.status.send(self._progress.place(self._gradients(), joined), failure)
        if failure is not None:
            self.status.send_error(failure)

    def launch_behind_status(self) -> None:
        """Launch the gathers that come after the status."""
        if self.blocks_host:
            self._updater.launch_deferred(self.used_buckets())

    def _gradients(self) -> int:
        """Whether this rank has had gradients since the last step, as far as that tells anything of the others.

        Another optimizer may have all parameters that this rank's batch has used.
        """
        if self._passes.any_gradient if self._reduces else self.sums.used:
            return SOME
        return NONE if self._holds_all() else UNKNOWN

    def end_step(self) -> None:
        """A step is complete."""
        self.iteration.end_step()
        self._passes.forget_gradients()

    def send_all(self) -> None:
        """Send the owned part of every bucket to everyone and wait for all; a collective."""
        with self.lock:
            self._updater.send_all()

    def _owned_grad(self, bucket: int) -> ScaledSum:
        if self._whole:
            return ScaledSum(owned_part(self.buckets, bucket))
        self.reduction.finish_bucket(bucket)
        return self.sums.scaled(bucket)

    def recover(self) -> None:
        """Drain pending messages after a failed step so that training can restart from a checkpoint."""
        with self.lock:
            self.abandon()
            # Each by itself: what was launched half must be launched whole, and every message must be received.
            for drain in (self.end_pass, self.reduction.finish, self.read_messages, self.status.drain):
                with suppress(RuntimeError):
                    drain()
            self.gathers.recover()
            self.failures.forget()
            self._passes.forget_gradients()

    def abandon(self) -> None:
        """Update nothing more in an open pass, because all state is about to be replaced."""
        self._backward_update.abandon()

    def used_buckets(self) -> list[int]:
        """The buckets in which some rank has used some parameter; the same on all ranks."""
        return self.sums.used_buckets
