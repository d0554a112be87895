"""`ZeroRedundancyOptimizer`: a drop-in for torch's class of that name.

Every rank updates the parameters it owns with an ordinary torch optimizer and sends them to the others. Gradients are
reduced before `step()`, by DDP or by the user.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import LBFGS, Optimizer

from zerostep.comm.agreement import AllGather, Fact, agreed, describe_error, facts_of
from zerostep.comm.background import BackgroundSaves
from zerostep.comm.mesh import as_group
from zerostep.comm.model_ranks import ModelRanks
from zerostep.comm.objects import broadcast_object
from zerostep.comm.stall_watch import check_stall_seconds, stall_limit, watch
from zerostep.comm.transport import BucketMemory, Transport, calling, connect, control_of
from zerostep.comm.value_samples import ValueSamples
from zerostep.errors import StepMismatchError
from zerostep.memory.bucket_memory import make_bucket_memories, memories_of_all
from zerostep.optim.base import PartitionedOptimizer, refuse_dcp
from zerostep.optim.closures import evaluated, raised_in
from zerostep.optim.inner_methods import InnerMethods
from zerostep.optim.join import JoinProtocol
from zerostep.optim.view import OptimizerView, ViewPart
from zerostep.optim.zero_join import ZeroJoinHook, ZeroShadow
from zerostep.optim.zero_state import ZeroState
from zerostep.plan.groups import (
    Group,
    all_params,
    check_dtensors,
    copy_options,
    normalise,
    options,
    refuse_dtensors,
    refuse_own_ranks,
    refuse_shared_memory,
    refuse_sparse,
)
from zerostep.plan.ownership import Ownership
from zerostep.plan.probe import refuse_coupled
from zerostep.state.audit import Audits, AuditSubject
from zerostep.state.consolidate import collect, merge
from zerostep.state.expected import GroupOptimizer
from zerostep.state.missing import refuse_missing
from zerostep.state.param_state import SavedState, StateDict
from zerostep.step.health import Health
from zerostep.step.inner_optimizers import build_inner
from zerostep.step.labels import recorded_range
from zerostep.step.late_rows import LateRows
from zerostep.step.overlap_pipeline import GradientCallback
from zerostep.step.overlap_state import OverlapHost, OverlapState
from zerostep.step.place import NONE, OWN, SOME, UNKNOWN, Place, Progress
from zerostep.step.step_status import FAILED, UPDATED, PeerFailedError, compare_status
from zerostep.step.weak import weakly
from zerostep.tensors import recorded_event

logger = logging.getLogger("zerostep")


class ZeroRedundancyOptimizer(PartitionedOptimizer):
    """An optimizer whose state is divided among the ranks of a process group, a whole parameter to each owner.

    Arguments:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer. All ranks must pass the
            same, in the same order; all raise if they differ.
        optimizer_class: the class of the inner optimizer, or any callable that takes `(param_groups, **defaults)`.
        process_group: the ranks to divide the state among, a group or a mesh of one dimension; the whole world if not
            given.
        parameters_as_bucket_view: move the parameters of each owner into one flat tensor and make each parameter a
            view of it. Saves the copies into and out of the transfer, at the price of changed storage.
        overlap_with_ddp: step inside backward, through one of the hooks in `zerostep.overlap`, and not in `step()`.
        audit_every: call `audit()` after every so many steps; on an accelerator without a wait, and an error comes
            four steps later. With `overlap_with_ddp=True` the audit is made as the next backward pass begins.
        stall_seconds: log a warning that says which ranks have not come when this one has waited for so long; five
            times as long in the first step. `ZEROSTEP_STALL_SECONDS` or 60 if not given; 0, `None` or `"off"` for none.
        **defaults: options for the inner optimizer.

    The constructor, `step`, `add_param_group` and `consolidate_state_dict` are collective: all ranks of the group
    call them. `state_dict` and `load_state_dict` are not.
    """

    optim: Optimizer

    @calling("ZeroRedundancyOptimizer()")
    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        audit_every: int | None = None,
        *,
        stall_seconds: float | str | None = "default",
        **defaults: Any,
    ) -> None:
        groups, error = _normalised(params)
        process_group = as_group(process_group)
        self._transport: Transport = connect(process_group, _first_device(groups))
        watch(self._transport.presence, "ZeroRedundancyOptimizer", stall_limit(stall_seconds), weakly(self._give_up))
        self._control = control_of(self._transport)
        self._saves = BackgroundSaves(self._control)
        self._model_ranks = ModelRanks(self._control)
        self.initialized = False
        self.process_group = process_group if process_group is not None else dist.group.WORLD
        self.world_size, self.rank = self._transport.world_size, self._transport.rank
        self.global_rank = dist.get_rank()
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._overlap_with_ddp = overlap_with_ddp
        self._stall_seconds = stall_seconds
        self._optimizer_class, self._class_options = optimizer_class, defaults
        self._all_state_dicts = []
        self._ownership: Ownership | None = None
        self._prepared: Ownership | None = None
        self._bucket_memories: list[BucketMemory] = []
        self._join: JoinProtocol | None = None
        self._join_hook: ZeroJoinHook | None = None
        self._steps, self._state_exists = 0, False
        self._health = Health(self._transport.presence.fail, self._transport.presence.recover)
        self._progress, self._late = Progress(self._health), LateRows()
        self._overlap_state = OverlapState(self._overlap_host()) if overlap_with_ddp else None
        with agreed(self._control) as agreement:
            if error is not None:
                raise error
            self._audits = Audits(audit_every, self._health)
            self._build(groups, optimizer_class, defaults)
            agreement.compare([*self._facts(), Fact("audit_every", repr(audit_every))])
            samples = self._sample_values(first=0)
        samples.compare(self._control, must_be_equal=True)
        # Steps inside backward run beside DDP's messages, and audits of them too. In stream order they have one place.
        overlapped = overlap_with_ddp and audit_every is not None and self.world_size > 1
        overlapped = overlapped and not self._transport.stream_ordered(self.join_device)
        self._audit_transport = self._transport.companion() if overlapped else self._transport
        self._prepare_memory()
        self.initialized = True

    def _build(self, groups: list[Group], optimizer_class: Callable[..., Optimizer], defaults: dict[str, Any]) -> None:
        check_stall_seconds(self._stall_seconds)
        _check_class(optimizer_class, self._overlap_with_ddp)
        Joinable.__init__(self)
        self._not_joining = self._join_config
        Optimizer.__init__(self, groups, defaults)
        refuse_sparse(self._all_params)
        refuse_shared_memory(self.param_groups)
        self._check_dtensors(self.param_groups)
        self.optim = self._build_inner(optimizer_class, defaults)
        self.defaults = {**self.optim.defaults, **defaults}
        copy_options(self.optim.param_groups, self.param_groups)
        self._refuse_coupled(self.param_groups)
        if self._overlap_with_ddp:
            self._step_supports_amp_scaling = True  # so that GradScaler calls step(), which refuses it
            if self.parameters_as_bucket_view:
                logger.warning("parameters_as_bucket_view=True has no effect with overlap_with_ddp=True")

    def _check_dtensors(self, groups: Sequence[Group]) -> None:
        check_dtensors(groups, partial(dist.get_process_group_ranks, self.process_group))
        if self._overlap_with_ddp:
            refuse_dtensors(groups, "overlap_with_ddp=True", "use overlap_with_ddp=False")

    def _build_inner(self, optimizer_class: Callable[..., Optimizer], defaults: dict[str, Any]) -> Optimizer:
        try:
            return build_inner(optimizer_class, self._inner_groups(), defaults)
        except ValueError:
            self._refuse_coupled(self.param_groups)  # where it applies, that is the better reason
            raise

    def _refuse_coupled(self, groups: Sequence[Group]) -> None:
        """Raise for a class that gives other numbers where parameters are divided; LBFGS is taken as it is."""
        divides = self.world_size > 1 or self._overlap_with_ddp
        if divides and not isinstance(self.__dict__.get("optim"), LBFGS):
            for group in groups:
                refuse_coupled(self._optimizer_class, self._class_options, options(group))

    # ------------------------------------------------------------------ state and owners

    @property
    def state(self) -> Any:
        """The live state of this rank's shard, keyed by the user's parameters.

        It is the inner optimizer's own mapping. In overlap mode, where that one is keyed by leaves, it is another
        mapping with the same entries.
        """
        refuse_dcp("ZeroRedundancyOptimizer")
        inner = self.__dict__.get("optim")
        if inner is None:
            return {}
        return inner.state if self._overlap_state is None else self._overlap_state.state(inner)

    @state.setter
    def state(self, value: Any) -> None:
        if "optim" in self.__dict__:
            self.optim.state = value

    @property
    def _owners(self) -> Ownership:
        if self._ownership is None:
            # In overlap mode in the order of parameters, so that a bucket of DDP has few owners and messages.
            self._ownership = Ownership(self.param_groups, self.world_size, in_order=self._overlap_with_ddp)
        return self._ownership

    @property
    def _index_to_param(self) -> list[Tensor]:
        return self._owners.params

    @property
    def _param_to_index(self) -> dict[Tensor, int]:
        return self._owners.index_of

    @property
    def _param_to_rank(self) -> dict[Tensor, int]:
        return self._owners.rank_of

    def _clear_cache(self) -> None:
        """Plan the owners anew; also for callers that edit `param_groups` in place."""
        self._ownership = None

    def _partition_parameters(self) -> list[list[Group]]:
        """For every rank, copies of all groups with the parameters that it owns."""
        return [self._owners.groups_of(rank) for rank in range(self.world_size)]

    def _inner_groups(self) -> list[Group]:
        """All groups with the parameters that this rank owns, or in overlap mode with their leaves."""
        groups = self._owners.groups_of(self.rank)
        return groups if self._overlap_state is None else self._overlap_state.leaves(groups)

    @property
    def _inner_index(self) -> dict[Tensor, int]:
        """The index of each tensor that the inner optimizer holds."""
        if self._overlap_state is None:
            return self._param_to_index
        return {self._overlap_state.leaf_of(param): index for param, index in self._param_to_index.items()}

    # ------------------------------------------------------------------ one step

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Update this rank's shard with the inner optimizer, then send all parameters to all ranks.

        `closure`, if not `None`, and all other keywords are passed to the inner optimizer's `step`. Returns what that
        returns. With `overlap_with_ddp=True` it only runs the closure, whose backward pass is the step.
        """
        self._check_usable()
        if self._overlap_state is not None:
            with self._progress.calling_closure():
                loss = evaluated(closure)  # its backward pass updates the parameters
            self._overlap_state.refuse_step(scaled=getattr(self, "found_inf", None) is not None, alone=loss is None)
            return None if loss is None else loss()
        if self._join is not None and self._join_config.enable:
            # The closure comes first: a DDP module that runs in it may announce this iteration in our place.
            with self._progress.calling_closure():
                closure = evaluated(closure)
            self._join.step()
        with self._present():
            loss = self._step_and_sync(closure, kwargs)
        self._audit_after_step(self._steps)
        self._snapshot_in_join()
        return loss

    @contextmanager
    def _present(self) -> Iterator[None]:
        """Tell the stall report when a step begins and ends."""
        presence, before = self._transport.presence, self._steps
        presence.begin_step()
        try:
            yield
        finally:
            presence.end_step(self._steps, complete=self._steps > before)
        if self._steps > before:
            self._mark_device()

    def _mark_device(self) -> None:
        """Let the stall report see when the device has finished a step, where the host does not wait for it."""
        if self._transport.stream_ordered(self.join_device):
            self._transport.presence.device_mark(recorded_event(self.join_device).query)

    def _give_up(self, description: str) -> None:
        """Another rank has failed, and the device waits for it; runs on the watching thread."""
        # First: whoever waits for the device goes on once the wait has ended, and must find this optimizer broken.
        self._health.mark_broken(description)
        self._transport.abort()

    def _step_and_sync(self, closure: Any, kwargs: dict[str, Any], joined: bool = False) -> Any:
        self._saves.raise_if_failed()
        self._late.check()
        self._follow_parameters()
        self._progress.begin_step(self.param_groups)
        gradients = self._gradients()
        with self._failing_together(closure), self._progress.calling_closure():
            loss = self._local_step(closure, **kwargs)
        self._sync_params(joined, max(gradients, self._gradients()))
        return loss

    def _local_step(self, closure: Any = None, **kwargs: Any) -> Any:
        """The first half of a step: the inner optimizer, with the options of the outer groups."""
        copy_options(self.param_groups, self.optim.param_groups)
        if closure is not None:
            kwargs["closure"] = closure
        with recorded_range("update"):
            loss = self.optim.step(**kwargs)
        copy_options(self.optim.param_groups, self.param_groups)
        return loss

    def _gradients(self) -> int:
        """Whether this rank has gradients: for a parameter of another rank, only for its own, or none."""
        own = False
        for param, rank in self._param_to_rank.items():
            if param.grad is not None:
                if rank != self.rank:
                    return SOME
                own = True
        # A rank that owns nothing needs no gradient. Nor has every rank some where gradients are reduced to owners.
        return OWN if own or not any(param.requires_grad for param in self._owners.owned(self.rank)) else NONE

    def _sync_params(self, joined: bool = False, gradients: int = UNKNOWN) -> None:
        """The second half of a step: send every owner's parameters to all ranks."""
        with self._marking_broken():
            rows = self._gather(UPDATED, self._progress.place(gradients, joined))
            self._check_rows(rows, self._active_transport.all_gather_ints, None)
        self._end_step()

    def _end_step(self) -> None:
        self._steps, self._state_exists = self._steps + 1, True
        self._progress.end_step(self.param_groups)

    def _gather(self, status: int, place: Place) -> list[list[int]]:
        """Send all parameters to all ranks; the statuses and places of those that are known by now."""
        transport, row = self._active_transport, [status, *place.to_ints()]
        try:
            self._transport.presence.at("gather")
            with recorded_range("gather"):
                rows = transport.gather(self._bucket_memories, row, self._owners.fingerprint)
                if transport.exchanges_status(self._bucket_memories):
                    return rows
                if self._bucket_memories:
                    self._late.add(transport.start_all_gather_ints(row), weakly(self._check_late))
                return []
        except Exception as error:
            raise self._fail(f"the exchange of parameters failed: {error}") from error

    def _check_rows(self, rows: Sequence[Sequence[int]], ask: AllGather | None, error: BaseException | None) -> None:
        """Raise if some rank has failed, or is not in the same place; `error` is that of this rank's own update.

        `ask` gathers integers of all ranks, if all are at this point.
        """
        try:
            compare_status(rows, self._steps - self._progress.steps, self._progress.facts, ask, error)
        except (PeerFailedError, StepMismatchError) as found:
            raise self._fail(
                str(found), StepMismatchError if isinstance(found, StepMismatchError) else RuntimeError
            ) from found

    def _check_late(self, rows: Sequence[Sequence[int]]) -> None:
        self._check_rows(rows, None, None)

    @contextmanager
    def _marking_broken(self) -> Iterator[None]:
        """An error of whatever kind leaves parameters and state of no step."""
        try:
            yield
        except BaseException as error:
            if not self._health.broken:
                self._fail(describe_error(error))
            raise

    @contextmanager
    def _failing_together(self, closure: Any) -> Iterator[None]:
        """An error in one rank's local update ends the step of all, where hosts wait for each other in a gather."""
        versions = [param._version for param in all_params(self.optim.param_groups)] if closure is not None else []
        try:
            yield
        except BaseException as error:
            # A closure may fail on one rank alone, while the others wait in theirs: a gather would wait for ever.
            in_closure = raised_in(closure, error)
            if not in_closure:
                self._tell(error)
            if not in_closure or versions != [param._version for param in all_params(self.optim.param_groups)]:
                told = self._health.mark_broken(
                    f"the local update of step {self._steps + 1} failed on rank {self.rank}: {describe_error(error)}"
                )
                error.add_note(f"zerostep: {told}")
            raise

    def _tell(self, error: BaseException) -> None:
        """Let the others end their step, and tell them why."""
        logger.error("the local update of step %d failed on rank %d: %s", self._steps + 1, self.rank, error)
        with suppress(RuntimeError):  # what has failed first is told
            rows = self._gather(FAILED, self._progress.place(UNKNOWN))
            self._check_rows(rows, self._active_transport.all_gather_ints, error)

    def _fail(self, description: str, error_class: type[RuntimeError] = RuntimeError) -> RuntimeError:
        """Refuse further steps, because parameters and state are from different ones; the error to raise."""
        told = f"step {self._steps + 1} failed on rank {self.rank}: {description}"
        return self._health.mark_broken(told, error_class)

    # ------------------------------------------------------------------ other methods of the inner optimizer

    @property
    def _inner_methods(self) -> InnerMethods | None:
        if not self.__dict__.get("initialized", False):
            return None
        return InnerMethods(
            optimizers=[self.optim],
            control=self._control,
            health=self._health,
            groups=self.param_groups,
            begin=self._begin_method,
            run=self._run_method,
            facts=list,
            send=self._send_all,
        )

    def _begin_method(self) -> None:
        self._check_usable()
        self._refuse_joining("call it outside")
        self._saves.raise_if_failed()
        self._late.check()
        if self._overlap_state is None:
            self._follow_parameters()

    def _run_method(self, call: Callable[[Optimizer], Any]) -> Any:
        copy_options(self.param_groups, self.optim.param_groups)
        result = call(self.optim)
        copy_options(self.optim.param_groups, self.param_groups)
        return result

    def _send_all(self) -> None:
        """Send every owner's parameters to all ranks, also those that no step changes any more."""
        memories = memories_of_all(self._owners.layout, self._owners.params)
        try:
            self._transport.gather(memories, [UPDATED], self._owners.fingerprint)
        except Exception as error:
            raise self._health.mark_broken(f"the exchange of parameters failed: {error}") from error

    # ------------------------------------------------------------------ changed parameters, new groups

    def _prepare_memory(self) -> None:
        owners = self._prepared = self._owners
        if self._overlap_state is not None:
            self._overlap_state.prepare(self.optim, self.param_groups, owners)
        else:
            as_views = self.parameters_as_bucket_view
            self._bucket_memories = make_bucket_memories(owners.layout, owners.params, as_views, self._bucket_memories)

    def _follow_parameters(self) -> None:
        """Check shapes, and plan anew if the user froze, unfroze, moved or cast parameters since the last step."""
        owners = self._owners
        owners.check_shapes()
        sends_others = owners.sends_others()
        if sends_others:
            logger.warning("requires_grad of some parameters changed: what each rank sends is planned anew")
        if sends_others or owners.moved():
            self._clear_cache()
        if self._owners is not self._prepared:
            self._prepare_memory()

    @calling("add_param_group")
    def add_param_group(self, param_group: Group) -> None:
        """Add a group, on all ranks; earlier parameters keep their owners."""
        if not getattr(self, "initialized", False):
            super().add_param_group(param_group)
            return
        before = len(self.param_groups)
        try:
            with agreed(self._control) as agreement:
                self._append_group(param_group)
                agreement.compare(self._facts())
                samples = self._sample_values(first=len(self._all_params) - len(self.param_groups[-1]["params"]))
            samples.compare(self._control, must_be_equal=True)
        except Exception:
            del self.param_groups[before:], self.optim.param_groups[before:]
            self._clear_cache()
            raise
        self._prepare_memory()

    def _append_group(self, param_group: Group) -> None:
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got a {type(param_group).__name__}")
        refuse_own_ranks([param_group])
        super().add_param_group(normalise([param_group])[0])
        refuse_sparse(self.param_groups[-1]["params"])
        refuse_shared_memory(self.param_groups)
        self._check_dtensors(self.param_groups[-1:])
        self._clear_cache()
        self.optim.add_param_group(self._inner_groups()[-1])
        # Of the new group alone: options of the others may have been changed since the last step.
        copy_options(self.optim.param_groups[-1:], self.param_groups[-1:])
        self._refuse_coupled(self.param_groups[-1:])

    def _facts(self) -> list[Any]:
        specs = self._owners.layout.params
        return facts_of(self.param_groups, specs, self._optimizer_class, self.parameters_as_bucket_view)

    def _sample_values(self, first: int) -> ValueSamples:
        """Samples of the parameters from number `first` on: those before may differ, if replicas were never equal."""
        titles = [f"parameter {index} ({spec.name!r})" for index, spec in enumerate(self._owners.layout.params)]
        return ValueSamples(titles[first:], self._all_params[first:])

    @staticmethod
    def _sync_param_groups(src_param_groups: Sequence[Group], dst_param_groups: Sequence[Group]) -> None:
        copy_options(src_param_groups, dst_param_groups)

    # ------------------------------------------------------------------ steps inside backward

    def set_gradient_callback(self, callback: GradientCallback | None) -> None:
        """In overlap mode, call `callback(params, gradients)` before each update, to edit the gradients in place.

        It is called once for each bucket of DDP, with the parameters that this rank owns in it, e.g. to clip values.
        The gradients are copies: `.grad` stays what DDP reduced.
        """
        if self._overlap_state is None:
            raise ValueError("a gradient callback needs overlap_with_ddp=True; without it, edit .grad before step()")
        self._overlap_state.set_callback(callback)

    @property
    def overlap_state(self) -> OverlapState | None:
        """What the hooks of overlap mode work on; `None` without `overlap_with_ddp=True`."""
        return self._overlap_state

    def _overlap_host(self) -> OverlapHost:
        # Weakly: this optimizer holds the overlap state, and a cycle would keep both alive until a collection.
        return OverlapHost(
            self._transport,
            owners=weakly(self._current_owners),
            check_usable=weakly(self._check_usable),
            check_healthy=self._health.check,
            raise_if_save_failed=weakly(self._begin_step_in_backward),
            fail=weakly(self._fail),
            step_done=weakly(self._end_step_in_backward),
            progress=self._progress,
            late=self._late,
            check_late=weakly(self._check_late),
            steps=weakly(self._count),
        )

    def _count(self) -> int:
        return self._steps

    def _current_owners(self) -> Ownership:
        return self._owners

    def _begin_step_in_backward(self) -> None:
        """Raise what a save or an audit has found; parameters are still those of the step before."""
        self._saves.raise_if_failed()
        if self._steps:
            self._audit_after_step(self._steps)

    def _end_step_in_backward(self) -> None:
        self._end_step()
        self._transport.presence.end_step(self._steps)
        self._mark_device()  # on the stream that updates run on
        self._opt_called = True  # what LR schedulers look for, to warn of a missing step()

    def _check_overlap_initialized(self) -> None:
        """Does nothing: overlap mode is ready from the start. Kept for callers of torch's method."""

    # ------------------------------------------------------------------ checkpoints

    @property
    def _zero_state(self) -> ZeroState:
        return ZeroState(self.optim, self.param_groups, self._inner_index)

    @property
    def _has_state(self) -> bool:
        return self._state_exists

    def _collect_state(self, to: int) -> list[Any]:
        copy_options(self.param_groups, self.optim.param_groups)
        return collect(self._control, self.optim, self._inner_index, to)

    def _consolidated(self) -> StateDict:
        return merge(self._all_state_dicts, self.param_groups)

    def _check_usable(self) -> None:
        if self._overlap_state is not None:
            self._overlap_state.mark_if_half_done()
        super()._check_usable()

    def _ensure_complete(self) -> None:
        self._check_usable()
        self._audits.finish()

    def _forget_failed_step(self) -> None:
        """A state is loaded: nothing of earlier steps counts any more."""
        self._late.drop()
        if self._overlap_state is not None:
            self._overlap_state.forget_iteration()

    def _load_whole(self, state_dict: StateDict, allow_missing: bool) -> None:
        state, owners = self._zero_state, self._owners
        numbers = state.check(state_dict, self.state)
        if not allow_missing:
            refuse_missing(state_dict, numbers, owners.layout.params, owners.params, self._group_optimizer)
        state.load_whole(state_dict, numbers, self._has_state)
        self._state_exists = bool(state_dict["state"])
        self._forget_failed_step()

    def _audit_subject(self) -> AuditSubject:
        return AuditSubject(
            everyone=self._audit_transport,
            control=self._control,
            positions=range(self.world_size),
            specs=self._owners.layout.params,
            params=self._owners.params,
            groups=self.param_groups,
            masters=(),
            param_states=tuple,
            step=self._steps,
        )

    def optimizer_view(self) -> OptimizerView:
        """What a checkpoint reads and replaces, for zerostep's own use; raises inside a join context."""
        self._refuse_joining()
        state = self._zero_state
        return OptimizerView(
            control=self._control,
            model_ranks=self._model_ranks,
            parts=[self._part()],
            groups=self.param_groups,
            optimizer_names=[type(self.optim).__name__] * len(self.param_groups),
            step=self._steps,
            saves=self._saves,
            ensure_complete=self._ensure_complete,
            global_state=state.global_state,
            group_optimizer=self._group_optimizer,
            loads_whole_state=False,
            restore=self._restore,
            begin_load=self._health.begin_shared_load,
            mark_broken=self._health.mark_broken,
        )

    def _part(self) -> ViewPart:
        return ViewPart(
            rank=self.rank,
            writes=True,
            layout=self._owners.layout,
            params=self._owners.params,
            param_states=lambda: self._zero_state.param_states(self.state, self._param_to_index),
        )

    def _group_optimizer(self, group: int) -> GroupOptimizer:
        return GroupOptimizer(self._optimizer_class, self._class_options, options(self.param_groups[group]), None)

    def _restore(
        self,
        saved: Sequence[Mapping[int, SavedState]],
        global_state: Mapping[str, Any],
        options: Sequence[Group],
        step: int,
    ) -> Callable[[], None]:
        (states,) = saved
        replace = self._zero_state.prepare_restore(states, global_state, options)

        def apply() -> None:
            replace()
            self._state_exists, self._steps = bool(states), step
            self._all_state_dicts = []
            self._forget_failed_step()
            self._health.mark_recovered()
            self._transport.presence.restart(step)

        return apply

    # ------------------------------------------------------------------ uneven inputs

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._owners.device

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The shadow of this optimizer on a rank that has run out of inputs; every keyword is ignored."""
        if self._overlap_state is not None:
            return JoinHook()  # DDP's own shadow runs the hook that steps
        if self._join is None:
            self._join = JoinProtocol(
                self, self._control, lambda: self.param_groups, lambda rank: self._owners.owned(rank)
            )
        self._join.end()
        shadow = ZeroShadow(
            step=self._shadow_step,
            shard=lambda: self._owners.owned(self.rank),
            holds=self._trained_by,
            hand_over=self._hand_over_announcing,
            leave=self._leave_join_context,
            device=lambda: self.join_device,
        )
        # Kept alive: a rank that saw no forward pass in a context that an error ended must still hand over.
        self._join_hook = ZeroJoinHook(shadow, self._join)
        return self._join_hook

    @property
    def _active_transport(self) -> Transport:
        return self._join.companion if self._join is not None and self._join.someone_joined else self._transport

    def _shadow_step(self) -> None:
        self._check_usable()
        with self._present():
            self._step_and_sync(None, {}, joined=True)

    def _trained_by(self, module: nn.Module) -> bool:
        return not {id(param) for param in module.parameters()}.isdisjoint(map(id, self._all_params))

    def _hand_over_announcing(self) -> bool:
        """Let a DDP module announce iterations; whether that was this optimizer's duty."""
        first: bool = self._join_config.is_first_joinable
        if first:
            self._join_config = self._join_config._replace(is_first_joinable=False)
        return first

    def _leave_join_context(self) -> None:
        self._join_config = self._not_joining
        if self._join is not None:
            self._join.end()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, not only of those that this rank owns."""
        if self._overlap_state is not None:
            self._overlap_state.refuse_edited_gradients()
        super().zero_grad(set_to_none)
        self._snapshot_in_join()

    def _snapshot_in_join(self) -> None:
        if self._join_hook is not None and self._join_config.enable:
            self._join_hook.snapshot_gradients()


def _broadcast_object(
    obj: Any, src_rank: int, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Any:
    """Send a nested value of tensors and plain data from world rank `src_rank` to all ranks of `group`.

    The source gets `obj` back; the others get a copy with its tensors on `device`.
    """
    ranks = group if group is not None else dist.group.WORLD
    assert ranks is not None
    return broadcast_object(connect(ranks), obj, dist.get_group_rank(ranks, src_rank), torch.device(device))


def _normalised(params: Any) -> tuple[list[Group], Exception | None]:
    """Groups, or the error in `params`: it is raised once ranks are connected, so that all of them raise."""
    try:
        groups = normalise(params)
        refuse_own_ranks(groups)
        return groups, None
    except Exception as error:
        return [], error


def _first_device(groups: Sequence[Group]) -> torch.device | None:
    lists = [group["params"] for group in groups]
    first = next((entry for params in lists for entry in ([params] if isinstance(params, Tensor) else params)), None)
    tensor = first[1] if isinstance(first, tuple) else first
    return tensor.device if isinstance(tensor, Tensor) else None


def _check_class(optimizer_class: Any, overlap_with_ddp: bool) -> None:
    if not callable(optimizer_class):
        raise TypeError(f"optimizer_class must be an optimizer class, got {optimizer_class!r}")
    if getattr(optimizer_class, "__module__", "").startswith("torch.distributed.optim.functional_"):
        raise ValueError(
            f"{optimizer_class.__name__} is a functional optimizer, given with overlap_with_ddp={overlap_with_ddp}; "
            "it is neither needed nor supported: pass the ordinary class from torch.optim"
        )
