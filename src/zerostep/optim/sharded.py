"""`ShardedOptimizer`: gradients and optimizer state are sharded, by element where the optimizer allows it.

Each rank sums the gradients of the elements it owns while backward runs, updates those elements in `step()`, and sends
them to everyone, at the end of the step or behind the next forward pass. This module is torch's interface to that; the
step itself is `zerostep.step.training_step`, over `zerostep.step.engine`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import astuple
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zerostep.comm.agreement import Fact, agreed, agreed_by_each
from zerostep.comm.background import BackgroundSaves
from zerostep.comm.mesh import mesh_controls, resolve
from zerostep.comm.model_ranks import ModelRanks
from zerostep.comm.stall_watch import check_stall_seconds, stall_limit, watch
from zerostep.comm.transport import Transport, calling
from zerostep.dtensors import is_dtensor
from zerostep.optim.all_divisions import collect_state, consolidated, group_optimizers, load_whole, stats_of
from zerostep.optim.base import PartitionedOptimizer, refuse_dcp
from zerostep.optim.closures import evaluated
from zerostep.optim.division import Division, OwnRanks, connect_own, global_ranks, own_ranks
from zerostep.optim.inner_methods import InnerMethods
from zerostep.optim.sharded_join import ShardedJoin, ShardedJoinHook
from zerostep.optim.view import OptimizerView, ViewPart
from zerostep.plan.groups import (
    GROUP_KEY,
    Group,
    OptimizerClass,
    all_params,
    check_dtensors,
    check_mesh_overlap,
    class_of,
    normalise,
    refuse_dtensors,
    refuse_shared_memory,
    refuse_sparse,
)
from zerostep.plan.layout import Layout
from zerostep.plan.layout_planner import LayoutPlanner, Settings, model_positions
from zerostep.state.audit import AuditReport, Audits, AuditSubject, audit
from zerostep.state.param_state import SavedState, StateDict
from zerostep.step.ddp_watch import DdpWatch
from zerostep.step.engine import Engine
from zerostep.step.grad_sources import AutogradSource, DdpSource, GradSource, NoSource
from zerostep.step.health import Health
from zerostep.step.initial_values import Titled, broadcast_facts
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.step.labels import PhaseTimer
from zerostep.step.late_params import clear_grads
from zerostep.step.passes import Passes
from zerostep.step.place import Progress
from zerostep.step.stats import Stats
from zerostep.step.training_step import TrainingStep
from zerostep.step.weak import weakly

logger = logging.getLogger("zerostep")

_VERIFIED_STEPS = 10
_BARE_ONLY = (
    'update="backward" sums the gradients of a bare module itself, and DDP would keep them: pass the '
    'module without DistributedDataParallel, or use update="step"'
)
_OWN_RANKS_BARE = (
    "a parameter group has a process_group of its own, and DistributedDataParallel would sum its gradients over all "
    "ranks: pass the module without DistributedDataParallel"
)
_EVENLY = (
    "build the same optimizer on all ranks of the mesh, and let it divide such parameters evenly; or use "
    "ZeroRedundancyOptimizer, which chooses owners by whole sizes"
)
_REPLICATED = (
    "tensor parallelism takes what it does not shard for equal on its ranks: make the model from the same seed on all "
    "ranks, or broadcast such parameters over the tp dimension, before the optimizer is built"
)
_ADDING = "add the same group on every rank, after step() and before the next backward pass"


class ShardedOptimizer(PartitionedOptimizer):
    """An optimizer whose gradients and state are divided among the ranks of a process group.

    Arguments:
        model: the module to train. A bare module's parameters and buffers are broadcast from rank 0, its gradients are
            summed by this optimizer as backward makes them, and dropped. A module in `DistributedDataParallel` keeps
            its own memory for gradients; this optimizer becomes its communication hook. So it does when a bare module
            is called through `DistributedDataParallel` later.
        optimizer_class: the class of the inner optimizer, or any callable that takes `(param_groups, **defaults)`.
        params: tensors, (name, tensor) pairs or parameter groups; all named parameters of `model` if not given. A group
            may name an `"optimizer_class"` of its own; `defaults` are then not for it. It may also name a
            `"process_group"` of its own, some of the optimizer's ranks or a mesh of one dimension: only those hold
            these parameters, as experts that have fewer replicas; not with DDP, Join or `reduction="all"`.
        process_group: the ranks to divide everything among: a process group, or a mesh of one dimension, or of two to
            replicate across the first and shard inside the second. The module's own group or the world if not given.
        partition: `"elements"` cuts parameters anywhere, `"parameters"` never; `"auto"` cuts where the optimizer class
            treats each element by itself, which is known of torch's own classes and found out about others.
        reduction: `"scatter"` sums each gradient for its owners alone; `"all"` gives all gradients to all ranks, in
            `.grad`, with DDP's own sums where the module is wrapped in DDP.
        gather: `"step"` waits for the new parameters at the end of `step()`; `"forward"` when the next forward pass
            needs them, or whoever else reads them.
        update: `"step"` updates the parameters in `step()`; `"backward"` updates each bucket inside backward, as soon
            as its gradients are summed, and keeps no gradient: no clipping, no GradScaler, `no_sync()` to accumulate,
            and `step()` after every pass. For a bare module.
        master_dtype: keep masters of the owned elements of low-precision parameters in this dtype, and update those.
        reduce_dtype: sum gradients in this dtype.
        bucket_mb: about how many megabytes travel together. If not given: in host memory a quarter of the trained
            parameters, but at least 1 and at most 5, or 1/16 for each rank if that is more; on an accelerator an 8th,
            but at least 25 and at most 100.
        compile: compile all that happens to an owned element in a step, from the summed gradient to the new parameter,
            into one kernel, for every class whose `step()` can be traced; others are updated as they are without, and
            a warning says why.
        verify: compare the first ten steps, or as many as this says, with an unsharded optimizer that runs beside this
            one, and raise `VerificationError` at the first difference. Takes the memory of that optimizer meanwhile.
        audit_every: call `audit()` after every so many steps; on an accelerator without a wait, and an error comes
            four steps later.
        stall_seconds: log a warning that says which ranks have not come when this one has waited for so long; five
            times as long in the first step. `ZEROSTEP_STALL_SECONDS` or 60 if not given; 0, `None` or `"off"` for none.
        **defaults: options for the inner optimizer.

    The constructor, `step`, `audit`, `add_param_group`, `clip_grad_norm_`, `grad_norm` and `consolidate_state_dict` are
    collective: all ranks call them.
    """

    @calling("ShardedOptimizer()")
    def __init__(  # noqa: PLR0913
        self,
        model: nn.Module,
        optimizer_class: OptimizerClass,
        params: Any = None,
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        partition: Literal["auto", "elements", "parameters"] = "auto",
        reduction: Literal["scatter", "all"] = "scatter",
        gather: Literal["step", "forward"] = "step",
        update: Literal["step", "backward"] = "step",
        master_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        bucket_mb: float | None = None,
        compile: bool = False,
        verify: bool | int = False,
        audit_every: int | None = None,
        stall_seconds: float | str | None = "default",
        **defaults: Any,
    ) -> None:
        self._training_step: TrainingStep | None = None  # as long as torch's constructor runs, too
        self._model, self._ddp = _unwrapped(model)
        self._settings = Settings(partition, reduction, gather, update, master_dtype, reduce_dtype, bucket_mb, compile)
        self._planner = LayoutPlanner(
            optimizer_class, defaults, self._settings, model_positions(self._model.parameters())
        )
        self._divisions: list[Division] = []
        self._own_ranks: list[OwnRanks] = []
        self._stall_seconds = stall_seconds
        self._all_state_dicts = []
        self._join: ShardedJoin | None = None
        self._join_contexts = 0
        wanted = process_group if process_group is not None or self._ddp is None else self._ddp.process_group
        self._ranks = resolve(wanted, _first_device(self._model))
        presence = self._ranks.everyone.presence
        self._timer, self._health = PhaseTimer(presence), Health(presence.fail, presence.recover)
        watch(presence, "ShardedOptimizer", stall_limit(stall_seconds), weakly(self._give_up))
        self._saves = BackgroundSaves(self._ranks.control)
        self._model_ranks = ModelRanks(self._ranks.control)
        self.process_group = self._ranks.group if self._ranks.group is not None else dist.group.WORLD
        self.rank, self.world_size = self._ranks.shards.rank, self._ranks.shards.world_size
        across = mesh_controls(self._model.parameters())
        with agreed_by_each(across), agreed(self._ranks.control) as agreement:
            self._audits = Audits(audit_every, self._health)
            self._build(params, verify)
            self._refuse_with_own_ranks(audit_every)
            broadcast = broadcast_facts(self._shared_tensors()) if self._ddp is None else []
            extra = Fact("verify", repr(verify)), Fact("audit_every", repr(audit_every))
            agreement.compare([*self._facts(broadcast), *extra])
            samples = self._main.sample_unnamed()
        samples.compare(self._ranks.control, must_be_equal=False)
        with agreed_by_each(across) as mesh_agreements:
            self._add_divisions()
            for each in mesh_agreements:
                each.compare(self._mesh_facts(), _EVENLY)
        with agreed_by_each(across):
            self._start()
        self._compare_replicas(across)
        for division in self._divisions if verify else ():
            division.verify_with_reference(_VERIFIED_STEPS if verify is True else verify)

    # ------------------------------------------------------------------ construction

    def _compare_replicas(self, across: Sequence[Transport]) -> None:
        for control in across:
            self._main.sample_replicated().compare(control, must_be_equal=True, remedy=_REPLICATED)

    def _build(self, params: Any, verify: bool | int) -> None:
        """Everything that can go wrong on one rank alone; nothing of the user's is touched."""
        self._settings.check()
        check_stall_seconds(self._stall_seconds)
        if self._settings.update == "backward":
            self._refuse_for_backward(verify)
        given = normalise(list(self._model.named_parameters()) if params is None else params)
        Joinable.__init__(self)
        self._not_joining = self._join_config
        Optimizer.__init__(self, [self._planner.complete(group) for group in given], {})
        self._check_params()
        if verify:
            refuse_dtensors(self.param_groups, "verify", "verify without tensor parallelism")
        self._own_ranks = own_ranks(self.param_groups, self._ranks)
        for own in self._own_ranks:
            groups_there = [self.param_groups[number] for number in sorted(own.groups)]
            check_dtensors(groups_there, partial(dist.get_process_group_ranks, own.process_group))
            check_mesh_overlap(groups_there, dist.get_process_group_ranks(self.process_group))
        elsewhere = frozenset[int]().union(*(own.groups for own in self._own_ranks))
        groups = weakly(self._current_groups)  # what the optimizer holds must not hold the optimizer
        owns = lambda number: number not in elsewhere  # noqa: E731
        members = range(self.world_size)
        self._divisions = [Division(self._ranks, self._planner, self._model, groups, owns, members)]
        self._main.plan()

    def _refuse_with_own_ranks(self, audit_every: int | None) -> None:
        if not self._own_ranks:
            return
        if self._ddp is not None:
            raise ValueError(_OWN_RANKS_BARE)
        if self._settings.reduction == "all":
            raise ValueError(
                'reduction="all" leaves gradients to other code, GradScaler for one, which would find others on ranks '
                'that have other experts: use reduction="scatter" with a process_group in a parameter group'
            )
        if audit_every is not None:
            raise ValueError(
                "audit_every cannot be used with a process_group in a parameter group: call audit() on all ranks, "
                "where they may wait for each other"
            )

    def _add_divisions(self) -> None:
        """Connect the ranks that parameter groups name, which agree on those groups; a collective of all ranks."""
        groups = weakly(self._current_groups)
        device = _first_device(self._model)
        for own in self._own_ranks:
            ranks = connect_own(own, self._ranks, device)
            owns, members = own.groups.__contains__, own.members
            division = Division(ranks, self._planner, self._model, groups, owns, members)
            # Some ranks may not agree among themselves: then no rank goes on.
            with agreed(self._ranks.control):
                division.agree(self._main)
            self._divisions.append(division)

    @property
    def _main(self) -> Division:
        """The groups that all ranks divide."""
        return self._divisions[0]

    @property
    def _layout(self) -> Layout:
        return self._main.layout

    @property
    def _inners(self) -> InnerOptimizers:
        return self._main.part.inners

    def _refuse_for_backward(self, verify: bool | int) -> None:
        if self._ddp is not None:
            raise ValueError(_BARE_ONLY)
        if verify:
            raise ValueError(
                'verify needs the gradients of a whole step, which update="backward" does not keep: verify with '
                'update="step", which gives the same numbers'
            )

    def _check_params(self) -> None:
        refuse_sparse(self._all_params)
        refuse_shared_memory(self.param_groups)
        shared = [group for group in self.param_groups if group.get(GROUP_KEY) is None]
        check_dtensors(shared, partial(dist.get_process_group_ranks, self.process_group))
        self._refuse_dtensors_elsewhere()
        if self._ddp is not None:
            self._check_ddp(self._ddp)

    def _refuse_dtensors_elsewhere(self) -> None:
        """Ranks of a mesh agree over the meshes of the model's parameters."""
        known = set(map(id, self._model.parameters()))
        if any(is_dtensor(param) and id(param) not in known for param in self._all_params):
            raise ValueError(
                "the optimizer gets a DTensor parameter that its model does not hold, whose mesh it cannot know on all "
                "ranks: pass the module that holds it"
            )

    def _check_ddp(self, ddp: DistributedDataParallel) -> None:
        self._check_ranks(ddp)
        refuse_dtensors(self.param_groups, "DistributedDataParallel", "pass the module without it")
        if self._settings.reduction == "scatter":
            self._refuse_foreign(ddp.module)

    def _refuse_foreign(self, model: nn.Module) -> None:
        known = set(map(id, self._all_params))
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        foreign = [name for name, param in trained if id(param) not in known]
        if foreign:
            raise ValueError(
                f"the DDP module trains {foreign[0]!r}, which this optimizer does not hold, so nobody would reduce its "
                'gradient: pass all trainable parameters, freeze it, or use reduction="all"'
            )

    def _check_ranks(self, ddp: DistributedDataParallel) -> None:
        """Raise if DDP has equal gradients, or equal parameters, on other ranks than this optimizer."""
        ours, theirs = (dist.get_process_group_ranks(group) for group in (self.process_group, ddp.process_group))
        inside = self._settings.reduction == "all" and set(ours) <= set(theirs)  # DDP sums, each subgroup shards
        if set(ours) != set(theirs) and not inside:
            raise ValueError(
                f"the optimizer spans ranks {sorted(ours)}, the DDP module ranks {sorted(theirs)}, so replicas would "
                "part: give both the same process group, or the optimizer a mesh of the module's ranks"
            )

    def _facts(self, broadcast: Sequence[Fact] = ()) -> list[Fact]:
        default = self._planner.default_class
        classes = [getattr(class_of(group, default), "__qualname__", "another") for group in self.param_groups]
        wrapped = "wrapped in DDP" if self._ddp is not None else "bare"
        return [
            *self._main.param_facts(),
            Fact("the optimizer classes of the groups", ", ".join(classes)),
            Fact("the groups with a process_group of their own", str([sorted(own.groups) for own in self._own_ranks])),
            Fact("the settings", f"{self._settings}, {wrapped}"),
            *broadcast,
            *self._main.layout_facts(),
        ]

    def _mesh_facts(self) -> list[Fact]:
        """What must be equal on ranks that hold other blocks of the same parameters."""
        facts = [Fact("the settings", str(self._settings))]
        for division in self._divisions:
            whole = division.updated_over_a_mesh()
            if whole:  # these updates communicate over the mesh, bucket by bucket
                title = f"the layout, with {whole[0]!r}, which is updated as a whole,"
                facts.append(Fact(title, division.layout.digest()))
        return facts

    def _shared_tensors(self) -> list[Titled]:
        """All that rank 0 sends to all others before the first step of a bare module, with titles."""
        main = set(map(id, self._main.params))
        return self._main.shared_tensors({id(param) for param in self._all_params if id(param) not in main})

    def _start(self) -> None:
        """All ranks agree: move the parameters into flat memory and register hooks."""
        reduces = self._ddp is None or self._settings.reduction == "scatter"
        tensors = self._shared_tensors() if self._ddp is None else []
        progress, control = Progress(self._health), self._ranks.control
        counted = global_ranks(self._ranks) if self._own_ranks else ()
        passes = Passes(self._settings.update == "backward", self.rank, control.world_size, counted)
        common = self._timer, progress, passes, control
        self._main.start(tensors, *common, partial(self._make_grad_source, reduces=reduces), reduces)
        for division in self._divisions[1:]:
            division.start(division.own_tensors(), *common)
        self.defaults = self._inners.defaults
        self._training_step = TrainingStep(
            [division.part for division in self._divisions],
            weakly(self._current_groups),
            self._saves,
            self._settings,
            progress,
            weakly(self._holds_all),
        )
        if self._settings.gather == "forward":
            self._hook_modules()
        groups = weakly(self._current_groups)
        watched = lambda: all_params(groups())  # noqa: E731
        self._ddp_watch = DdpWatch(watched, self._follow_ddp) if self._ddp is None else None

    def _hook_modules(self) -> None:
        self._main.hook_modules(weakly(self._training.read_status))
        for division in self._divisions[1:]:
            division.hook_modules(lambda: None)

    def _holds_all(self) -> bool:
        """Whether the model trains no parameter that this optimizer does not hold."""
        known = set(map(id, self._all_params))
        return all(id(param) in known for param in self._model.parameters() if param.requires_grad)

    def _make_grad_source(self, engine: Engine, reduces: bool) -> GradSource:
        if self._ddp is None:
            return AutogradSource(engine)
        return DdpSource(self._ddp, engine) if reduces else NoSource()

    def _follow_ddp(self, ddp: DistributedDataParallel) -> None:
        """The module was passed bare, and is about to be called through DDP: go on as if it had been passed in DDP.

        Everything here is the same on all ranks, which are about to enter the same forward pass.
        """
        if self._ddp is not None:
            return
        self._refuse_ddp(ddp)
        engine, scatters = self._training.engine, self._settings.reduction == "scatter"
        engine.finish()  # of a backward pass that has failed, or of compiled autograd
        if not scatters:
            engine.leave_sums_to_ddp()
        self._ddp = ddp
        self._training.take_gradients_from(DdpSource(ddp, engine) if scatters else NoSource())
        if self._ddp_watch is not None:
            self._ddp_watch.stop()
        logger.info("the model is called through DistributedDataParallel: this optimizer takes its gradients")

    def _refuse_ddp(self, ddp: DistributedDataParallel) -> None:
        if self._own_ranks:
            raise ValueError(_OWN_RANKS_BARE)
        if self._settings.update == "backward":
            raise ValueError(_BARE_ONLY)
        self._check_ddp(ddp)
        if self._settings.reduction == "scatter" and ddp._comm_hooks:
            raise ValueError(
                "the DDP module around this optimizer's parameters has a communication hook, which reduces the "
                'gradients: use reduction="all", or no hook'
            )

    def _follow_only_ddp(self) -> None:
        """Before anything that must know whether there is a DDP module: take the only one."""
        found = [] if self._ddp_watch is None else self._ddp_watch.modules
        if len(found) == 1:
            self._follow_ddp(found[0])

    @property
    def _training(self) -> TrainingStep:
        assert self._training_step is not None
        return self._training_step

    @property
    def bare_model(self) -> nn.Module | None:
        """The module whose gradients this optimizer sums itself, so that nobody else may; `None` under DDP."""
        return self._model if self._ddp is None else None

    @property
    def _has_state(self) -> bool:
        return self._training.has_state

    def _current_groups(self) -> list[Group]:
        return self.param_groups

    @calling("add_param_group")
    def add_param_group(self, param_group: Group) -> None:
        """Add a group, on all ranks; what was there before stays where it is."""
        if self._training_step is None:
            super().add_param_group(param_group)
            return
        if isinstance(param_group, dict) and param_group.get(GROUP_KEY) is not None:
            raise ValueError(
                "a group with a process_group of its own cannot be added later: give all such groups to the "
                "constructor of the optimizer"
            )
        before = len(self.param_groups), self._layout
        try:
            across = mesh_controls(self._model.parameters())
            with agreed_by_each(across) as mesh_agreements, agreed(self._ranks.control) as agreement:
                self._append(param_group)
                # Buckets in flight are those that all ranks have: with a further one, passes would not match.
                passes = self._training.engine.iteration.passes
                fact = Fact("the number of backward passes since the last step", str(passes))
                agreement.compare([fact, *self._facts()], _ADDING)
                for each in mesh_agreements:
                    each.compare(self._mesh_facts(), _EVENLY)
                samples = self._main.sample_unnamed()
            samples.compare(self._ranks.control, must_be_equal=False)
        except Exception:
            del self.param_groups[before[0] :]
            self._main.restore_plan(before[1])
            raise
        self.synchronize()
        for division in self._divisions:
            division.start_last_group(broadcast=self._ddp is None)
        self._compare_replicas(across)

    def _append(self, param_group: Group) -> None:
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got a {type(param_group).__name__}")
        complete = self._planner.complete(normalise([param_group])[0])
        defaults, self.defaults = self.defaults, {}  # the group is complete; another class's options are not for it
        try:
            super().add_param_group(complete)
        finally:
            self.defaults = defaults
        self._check_params()
        self._main.plan_last_group()

    # ------------------------------------------------------------------ one step

    def step(self, closure: Any = None) -> Any:
        """Update the owned elements with the sums of all ranks' gradients, and send them to everyone.

        A closure is evaluated once, first; returns what it returns.
        """
        with self._training.calling_closure():
            closure = evaluated(closure)
        self._refuse_step_without_sync()
        if self._join is not None and self._join_config.enable:
            self._check_order()
            self._training.engine.settle()  # a pass of gradients that were set by hand is an event of its own
            self._join.step()
        self._training.run(joining=self._join_config.enable)
        self._audit_after_step(self._training.count)
        return None if closure is None else closure()

    def _refuse_step_without_sync(self) -> None:
        in_ddp = self._ddp is not None and not self._ddp.require_backward_grad_sync
        if in_ddp or self._training.engine.is_paused:
            raise RuntimeError(
                "step() was called inside no_sync(), where gradients of this rank alone add up: leave the block before "
                "the last backward pass, and call step() outside"
            )

    def synchronize(self) -> None:
        """Return when all parameters are in place.

        Needed only with `gather="forward"`, for code that reads memory without torch's functions, such as an extension.
        """
        self._training.synchronize()

    def _check_usable(self) -> None:
        self._training.check_usable()

    def _ensure_complete(self) -> None:
        self._training.ensure_complete()
        self._audits.finish()

    def _give_up(self, description: str) -> None:
        """Another rank has failed, and the device waits for it; runs on the watching thread."""
        # First: whoever waits for the device goes on once the wait has ended, and must find this optimizer broken.
        self._health.mark_broken(description)
        for ranks in [self._ranks, *(division.ranks for division in self._divisions[1:])]:
            for transport in (ranks.everyone, ranks.shards, ranks.replicas):
                transport.abort()

    @property
    def _inner_methods(self) -> InnerMethods | None:
        if self._training_step is None:
            return None
        return InnerMethods(
            optimizers=[each for division in self._divisions for each in division.part.inners.all],
            control=self._ranks.control,
            health=self._health,
            groups=self.param_groups,
            begin=self._begin_method,
            run=self._training.run_method,
            facts=self._method_facts,
            send=self._training.send_all,
        )

    def _begin_method(self) -> None:
        self._refuse_joining("call it outside")
        self._training.begin_method()

    def _method_facts(self) -> list[Fact]:
        buckets = sorted(self._training.engine.buckets.shards)
        return [Fact("the buckets that were trained", str(buckets))]

    # ------------------------------------------------------------------ gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those that were reduced too."""
        engines = [division.engine for division in self._divisions]
        if set_to_none or self._settings.reduction == "all":
            for engine in engines:
                engine.drop_all()
            if set_to_none:
                clear_grads(self._all_params)
            else:
                super().zero_grad(set_to_none)
        else:
            if engines[0].joining():
                raise RuntimeError("inside Join, ranks without inputs cannot follow: use zero_grad(set_to_none=True)")
            for engine in engines:
                engine.zero_all()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes only add up local gradients; the first one outside sends the sum."""
        return self._ddp.no_sync() if self._ddp is not None else self._paused()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with ExitStack() as contexts:
            contexts.enter_context(self._training.engine.paused())
            # Those that may be called inside: only then is it known whether the module is trained through one.
            for ddp in [] if self._ddp_watch is None else self._ddp_watch.modules:
                contexts.enter_context(ddp.no_sync())
            yield

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients together, as torch would find it on whole gradients; the same on all ranks."""
        return self._as_norm(self._clip(math.inf, norm_type))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; returns the norm they had.

        On an accelerator with NCCL no host waits for it, unless it is to raise an `error_if_nonfinite`.
        """
        if error_if_nonfinite:
            total = float(self._clip(math.inf, norm_type))
            if not math.isfinite(total):
                raise RuntimeError(
                    f"the norm of order {norm_type} of all gradients is {total}, which cannot be clipped: look for the "
                    "rank whose loss is not finite, or pass error_if_nonfinite=False"
                )
        return self._as_norm(self._clip(float(max_norm), norm_type))

    def _clip(self, max_norm: float, norm_type: float) -> Tensor:
        if self._join is not None and self._join_config.enable:
            self._training.engine.settle()
            self._join.clip(max_norm, float(norm_type))
        return self._training.clip(max_norm, float(norm_type))

    def _as_norm(self, value: Tensor) -> Tensor:
        return value.to(self.join_device, torch.get_default_dtype())

    # ------------------------------------------------------------------ state

    @property
    def state(self) -> Any:
        """The live state of this rank's fragments, keyed by the user's parameters.

        What is shaped like the parameter is a flat view of the owned elements where a parameter may be cut.
        """
        refuse_dcp("ShardedOptimizer")
        if self._training_step is None:
            return {}
        found = [division.state.leaves.by_parameter() for division in self._divisions]
        return {param: entry for each in found for param, entry in each.items()}

    @state.setter
    def state(self, value: Any) -> None:
        pass  # torch sets an empty one before anything exists

    def _collect_state(self, to: int) -> list[Any]:
        if len(self._divisions) == 1:
            return collect_state(self._divisions, to)
        with agreed(self._ranks.control):  # those that hold the experts of rank `to` may fail where others have no part
            return collect_state(self._divisions, to)

    def _consolidated(self) -> StateDict:
        return consolidated(self._divisions, self.param_groups, self._all_state_dicts)

    def _load_whole(self, state_dict: StateDict, allow_missing: bool) -> None:
        load_whole(self._divisions, self.param_groups, self._training, state_dict, allow_missing)

    def audit(self) -> AuditReport:
        """Compare over all ranks, bit for bit, what must be the same on them; see the base class.

        Parameters of groups with a process group of their own are compared on its ranks.
        """
        if len(self._divisions) == 1:
            return super().audit()
        with agreed(self._ranks.control):  # what some ranks find, all raise
            reports = [super().audit()]
            reports += [audit(division.audit_subject(self._training.count)) for division in self._divisions[1:]]
        return AuditReport(*(sum(values) for values in zip(*map(astuple, reports), strict=True)))

    def _audit_subject(self) -> AuditSubject:
        self._training.ensure_complete()
        return self._main.audit_subject(self._training.count)

    def optimizer_view(self) -> OptimizerView:
        """What a checkpoint reads and replaces, for zerostep's own use; raises inside a join context."""
        self._refuse_joining()
        optimizers = group_optimizers(self._divisions, self.param_groups)
        return OptimizerView(
            control=self._ranks.control,
            model_ranks=self._model_ranks,
            parts=[self._view_part(division) for division in self._divisions],
            groups=self.param_groups,
            optimizer_names=[type(optimizer).__name__ for optimizer in optimizers],
            step=self._training.count,
            saves=self._saves,
            ensure_complete=self._ensure_complete,
            global_state=lambda: self._inners.named,
            group_optimizer=self._main.state.group_optimizer,
            loads_whole_state=self._training.verifies,
            restore=self._restore,
            begin_load=self._health.begin_shared_load,
            mark_broken=self._health.mark_broken,
        )

    def _view_part(self, division: Division) -> ViewPart:
        group = division.ranks.group
        is_own = division is not self._main and group is not None
        return ViewPart(
            rank=division.ranks.shards.rank,
            writes=division.ranks.replicas.rank == 0,
            layout=division.layout,
            params=division.engine.buckets.params,
            param_states=division.state.leaves.param_states,
            own_ranks=tuple(dist.get_process_group_ranks(group)) if is_own else None,
        )

    def _restore(
        self,
        saved: Sequence[Mapping[int, SavedState]],
        global_state: Mapping[str, Any],
        options: Sequence[Group],
        step: int,
    ) -> Callable[[], None]:
        acts = [
            division.state.prepare_restore(states, global_state if division is self._main else {}, options)
            for division, states in zip(self._divisions, saved, strict=True)
        ]

        def apply() -> None:
            self._training.recover()
            for act in acts:
                act()
            self._training.loaded(any(saved), step)
            self._all_state_dicts = []

        return apply

    # ------------------------------------------------------------------ uneven inputs

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._training.engine.buckets.params[0].device

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The shadow of this optimizer on a rank that has run out of inputs; every keyword is ignored.

        A module in DDP is listed before the optimizer: `Join([ddp, optimizer])`. A bare module is not listed.
        """
        if self._own_ranks:
            raise RuntimeError(
                "Join cannot be used with a process_group in a parameter group: a rank without inputs has experts that "
                "others still train. Give all ranks equally many inputs"
            )
        self._follow_only_ddp()
        in_ddp = self._ddp is not None
        if self._settings.update == "backward":
            raise RuntimeError(
                'update="backward" cannot be used inside Join: a rank without inputs would miss the options that the '
                'others update with. Use update="step"'
            )
        if self._join is None:
            groups = weakly(self._current_groups)
            self._join = ShardedJoin(self, self._training, groups, in_ddp, self._ranks)
        # Weakly: the protocol holds the engine.
        on_pass = None if in_ddp else weakly(self._join.backward)
        self._training.engine.enter_join(weakly(self._join.active), on_pass)
        self._join_contexts += 1
        leave = partial(weakly(self._leave_join_context), self._join_contexts)
        return ShardedJoinHook(self._join, self._training, in_ddp, leave)

    def _check_order(self) -> None:
        if self._ddp is not None and self._join_config.is_first_joinable:
            raise RuntimeError(
                "a DDP module and this optimizer join together, the module first: use Join([ddp, optimizer])"
            )

    def _leave_join_context(self, number: int) -> None:
        """Go on alone, unless a later context has begun."""
        if number == self._join_contexts and self._join is not None:
            self._training.engine.stop_announcing()
            self._join.end()
            self._join_config = self._not_joining

    # ------------------------------------------------------------------ about itself

    def stats(self) -> Stats:
        """Bytes moved and held, time waited and how even the shares are, since the optimizer was built; local."""
        return stats_of(self._divisions, self._training.count, self._timer)


def _unwrapped(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The module that holds the parameters, and DDP's wrapper around it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    module = getattr(model, "_orig_mod", model)  # what torch.compile returns
    if isinstance(module, DistributedDataParallel):
        return module.module, module
    return module, None


def _first_device(model: nn.Module) -> torch.device | None:
    return next((param.device for param in model.parameters()), None)
