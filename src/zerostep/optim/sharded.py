"""`ShardedOptimizer`: the native face of the engine. Gradients and optimizer state are sharded, by element if possible.

Each rank sums the gradients of the elements it owns while backward still runs, updates those elements in `step()`, and
sends them to everyone, at the end of the step or behind the next forward pass.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zerostep.comm import stream
from zerostep.comm.agreement import Fact, agreed, facts_of
from zerostep.comm.background import BackgroundSaves
from zerostep.comm.mesh import Ranks, resolve
from zerostep.comm.objects import gather_object
from zerostep.optim.base import PartitionedOptimizer
from zerostep.optim.dcp_guard import refuse_dcp
from zerostep.optim.sharded_join import JoinProtocol, ShardedJoinHook
from zerostep.optim.view import OptimizerView
from zerostep.plan.buckets import extend
from zerostep.plan.groups import (
    Group,
    OptimizerClass,
    all_params,
    class_of,
    normalise,
    options,
    own_options,
    refuse_sparse,
)
from zerostep.plan.layout_planner import LayoutPlanner, Settings, in_order
from zerostep.state.consolidate import assemble, pack_groups, to_plain
from zerostep.state.expected import GroupOptimizer
from zerostep.state.leaf_state import LeafStates
from zerostep.state.load_state_dict import validate
from zerostep.state.param_state import DictState, SavedState, StateDict
from zerostep.step.engine import Engine
from zerostep.step.gathering import ForwardHooks
from zerostep.step.grad_sources import AutogradSource, DdpSource, GradSource, NoSource
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.step.reference import ReferenceOptimizer
from zerostep.step.stats import PhaseTimer, Stats
from zerostep.tensors import is_dense

__all__ = ["ShardedOptimizer"]

logger = logging.getLogger("zerostep")

_PROVED_STEPS = 10
_ADDING = "add the same group on every rank, after step() and before the next backward pass"


class ShardedOptimizer(PartitionedOptimizer):
    """An optimizer whose gradients and state are divided among the ranks of a process group.

    Arguments:
        model: the module to train. A bare module's parameters and buffers are broadcast from rank 0, its gradients are
            summed by this optimizer as backward makes them, and dropped. A module in `DistributedDataParallel` keeps
            its own memory for gradients; this optimizer becomes its communication hook.
        optimizer_class: the class of the inner optimizer, or any callable that takes `(param_groups, **defaults)`.
        params: tensors, (name, tensor) pairs or parameter groups; all named parameters of `model` if not given. A group
            may name an `"optimizer_class"` of its own; `defaults` are then not for it.
        process_group: the ranks to divide everything among: a process group, or a mesh of one dimension, or of two to
            replicate across the first and shard inside the second. The module's own group or the world if not given.
        partition: `"elements"` cuts parameters anywhere, `"parameters"` never; `"auto"` cuts where the optimizer class
            treats each element by itself, which is known of torch's own classes and found out about others.
        reduction: `"scatter"` sums each gradient for its owners alone; `"all"` gives all gradients to all ranks, in
            `.grad`, with DDP's own sums where the module is wrapped in DDP.
        gather: `"step"` waits for the new parameters at the end of `step()`; `"forward"` when the next forward pass
            needs them. Call `synchronize()` before you read parameters in any other way.
        master_dtype: keep masters of the owned elements of low-precision parameters in this dtype, and update those.
        reduce_dtype: sum gradients in this dtype.
        bucket_mb: about how many megabytes travel together. If not given: in host memory a quarter of the trained
            parameters, but at least 1 and at most 5; on an accelerator a 32nd, but at least 25 and at most 100.
        verify: compare the first ten steps, or as many as this says, with an unsharded optimizer that runs beside this
            one, and raise `VerificationError` at the first difference. Takes the memory of that optimizer meanwhile.
        **defaults: options for the inner optimizer.

    The constructor, `step`, `add_param_group`, `clip_grad_norm_`, `grad_norm`, `zero_grad(set_to_none=False)` and
    `consolidate_state_dict` are collective: all ranks call them.
    """

    _engine: Engine | None = None
    _inners: InnerOptimizers

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
        master_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        bucket_mb: float | None = None,
        verify: bool | int = False,
        **defaults: Any,
    ) -> None:
        self._model, self._ddp = _unwrapped(model)
        settings = Settings(partition, reduction, gather, master_dtype, reduce_dtype, bucket_mb)
        order = in_order(self._model.parameters())
        self._planner = LayoutPlanner(optimizer_class, defaults, settings, order)
        self._timer, self._steps = PhaseTimer(), 0
        self._broken: str | None = None
        self._all_state_dicts = []
        self._join: JoinProtocol | None = None
        self._contexts = 0
        self._has_state = False
        wanted = process_group if process_group is not None or self._ddp is None else self._ddp.process_group
        self._ranks: Ranks = resolve(wanted, _first_device(self._model))
        self._saves = BackgroundSaves(self._ranks.everyone)
        self.process_group = self._ranks.group if self._ranks.group is not None else dist.group.WORLD
        self.rank, self.world_size = self._ranks.shards.rank, self._ranks.shards.world_size
        with agreed(self._ranks.everyone) as agreement:
            self._build(params)
            agreement.facts = [*self._facts(), Fact("verify", repr(verify))]
        self._start()
        if verify:
            steps = _PROVED_STEPS if verify is True else verify
            specs = self._layout.params
            self._running.reference = ReferenceOptimizer(
                self._planner, self.param_groups, specs, self._ranks.everyone, steps
            )

    # ------------------------------------------------------------------ construction

    def _build(self, params: Any) -> None:
        """Everything that can go wrong on one rank alone; nothing of the user's is touched."""
        self._planner.settings.check()
        given = normalise(list(self._model.named_parameters()) if params is None else params)
        Joinable.__init__(self)
        self._not_joining = self._join_config
        Optimizer.__init__(self, [self._planner.complete(group) for group in given], {})
        self._check_params()
        self._layout = self._planner.plan(self.param_groups, self.world_size)

    def _check_params(self) -> None:
        refuse_sparse(self._all_params)
        if self._ddp is None or self._planner.settings.reduction == "all":
            return
        known = set(map(id, self._all_params))
        trained = [(name, param) for name, param in self._model.named_parameters() if param.requires_grad]
        foreign = [name for name, param in trained if id(param) not in known]
        if foreign:
            raise ValueError(
                f"the DDP module trains {foreign[0]!r}, which this optimizer does not hold, so nobody would reduce its "
                'gradient: pass all trainable parameters, freeze it, or use reduction="all"'
            )

    def _facts(self) -> list[Fact]:
        default = self._planner.default_class
        classes = [getattr(class_of(group, default), "__qualname__", "another") for group in self.param_groups]
        wrapped = "wrapped in DDP" if self._ddp is not None else "bare"
        return [
            *facts_of(self.param_groups, self._layout.params, default, with_strides=True),
            Fact("the optimizer classes of the groups", ", ".join(classes)),
            Fact("the settings", f"{self._planner.settings}, {wrapped}"),
            Fact("the layout", self._layout.digest()),
        ]

    def _start(self) -> None:
        """All ranks agree: take over the parameters."""
        settings, params = self._planner.settings, self._all_params
        reduces = self._ddp is None or settings.reduction == "scatter"
        if self._ddp is None:
            self._broadcast()
        self._engine = Engine(self._ranks, self._layout, params, settings, reduces, self._timer)
        members = self._bind_trainable()
        self._inners = InnerOptimizers(self.param_groups, members, self._planner.default_class, self._planner.defaults)
        self._states = LeafStates(self._engine, self._inners)
        self.defaults = self._inners.defaults
        self._grad_source: GradSource = self._make_grad_source(self._engine, reduces)
        self._grad_source.extend(params)
        self._forward_hooks = self._make_forward_hooks() if settings.gather == "forward" else None

    def _broadcast(self) -> None:
        """What rank 0 has, everyone has: parameters and buffers."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        known = set(map(id, tensors))
        tensors += [param for param in self._all_params if id(param) not in known]
        self._broadcast_all(tensors)

    def _broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        copies = [tensor.detach() if is_dense(tensor) else tensor.detach().contiguous() for tensor in tensors]
        with torch.no_grad():
            for transport in (self._ranks.replicas, self._ranks.shards):
                stream.broadcast(transport, copies, 0)
            for tensor, copy in zip(tensors, copies, strict=True):
                if not is_dense(tensor):
                    _once_each(tensor.detach()).copy_(_once_each(copy, tensor))

    def _bind_trainable(self) -> list[list[Tensor]]:
        """Move parameters that are trainable, and were not before, into flat memory; the new leaves of each group."""
        engine, found = self._running, [list[Tensor]() for _ in self.param_groups]
        for index, bucket in enumerate(engine.layout.buckets):
            if index not in engine.shards and any(engine.params[slot.param].requires_grad for slot in bucket.slots):
                for leaf in engine.bind(index).leaves:
                    found[leaf.group].append(leaf.tensor)
        return found

    def _make_grad_source(self, engine: Engine, reduces: bool) -> GradSource:
        if self._ddp is None:
            return AutogradSource(engine)
        return DdpSource(self._ddp, engine) if reduces else NoSource()

    def _make_forward_hooks(self) -> ForwardHooks:
        engine = self._running
        buckets = {param: engine.layout.place_of(index)[0] for index, param in enumerate(engine.params)}
        return ForwardHooks(self._model, buckets, engine.pending_gathers.wait)

    @property
    def _running(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def _all_params(self) -> list[Tensor]:
        return all_params(self.param_groups)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, on all ranks; what was there before stays where it is."""
        if self._engine is None:
            super().add_param_group(param_group)
            return
        before = len(self.param_groups), self._layout
        try:
            with agreed(self._ranks.everyone) as agreement:
                self._append(param_group)
                # What is under way is of buckets that all ranks have: with a further one, passes would not match.
                passes = self._running.reduction.passes + bool(self._running.reduction.open)
                record = Fact("the number of backward passes since the last step", str(passes))
                agreement.facts, agreement.remedy = [record, *self._facts()], _ADDING
        except Exception:
            del self.param_groups[before[0] :]
            self._layout = before[1]
            raise
        self._take_over_last()

    def _append(self, param_group: Group) -> None:
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got a {type(param_group).__name__}")
        number, count = len(self.param_groups), len(self._all_params)
        complete = self._planner.complete(normalise([param_group])[0])
        defaults, self.defaults = self.defaults, {}  # the group is complete; another class's options are not for it
        try:
            super().add_param_group(complete)
        finally:
            self.defaults = defaults
        self._check_params()
        further = self._planner.plan(self.param_groups[-1:], self.world_size, number, count)
        self._layout = extend(self._layout, further)

    def _take_over_last(self) -> None:
        engine, params = self._running, self._all_params
        self.synchronize()
        engine.extend(self._layout, params)
        if self._ddp is None:
            self._broadcast_all(self.param_groups[-1]["params"])
        *others, mine = self._bind_trainable()
        self._inners.add(self.param_groups[-1], mine)
        for group, leaves in enumerate(others):
            self._inners.extend(group, leaves)
        self._grad_source.extend(params)
        if engine.reference is not None:
            engine.reference.add(self.param_groups[-1], self._layout.params)
        if self._forward_hooks is not None:
            self._forward_hooks.remove()
            self._forward_hooks = self._make_forward_hooks()

    # ------------------------------------------------------------------ one step

    def step(self, closure: Any = None) -> Any:
        """Update the owned elements with the sums of all ranks' gradients, and send them to everyone.

        A closure is evaluated once, first; returns what it returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._join is not None and self._join_config.enable:
            self._check_order()
            self._join.step()
        self._step()
        return loss

    def _step(self) -> None:
        self._check_usable()
        self._saves.raise_if_failed()
        self._follow()
        with self._running.lock, self._failing_together():
            self._running.end_passes()
            self._step_reference()
            self._running.update(self._inners)
            self._running.wait_used_mask()
            # In a join context DDP reads all parameters at the end, whoever is still waiting for them.
            if self._planner.settings.gather == "step" or self._join_config.enable:
                self._raise_if_peer_failed()
                self.synchronize()
        self._inners.pull(self.param_groups)
        self._steps += 1
        self._has_state = True
        self._compare()

    def _step_reference(self) -> None:
        """In proof mode, let the unsharded optimizer step with the same sums."""
        engine = self._running
        if engine.reference is not None:
            engine.reference.step(self.param_groups, engine.params, engine.whole_gradients())

    def _compare(self) -> None:
        reference = self._running.reference
        if reference is not None:
            self.synchronize()
            reference.compare(self._running.params)
            if reference.done:
                self._running.reference = None

    def _follow(self) -> None:
        """Notice what the user did to the parameters since the last step."""
        engine = self._running
        self.synchronize()
        self._raise_if_peer_failed()
        engine.follow()
        for group, leaves in enumerate(self._bind_trainable()):
            self._inners.extend(group, leaves)
        self._grad_source.extend(engine.params)
        self._inners.push(self.param_groups)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """After an error in a step, parameters and state belong to no step."""
        try:
            yield
        except Exception as error:
            self._broken = f"step {self._steps + 1} failed on rank {self.rank}: {error}"
            raise

    def _raise_if_peer_failed(self) -> None:
        """An error in one rank's update ends the step of all, where hosts wait for each other anyway."""
        failed = self._running.failed()
        if failed:
            self.synchronize()
            self._broken = f"the update of step {self._steps} failed on rank {failed[0]}"
            raise RuntimeError(f"{self._broken}; restart from the last checkpoint on all ranks")

    def synchronize(self) -> None:
        """Return when all parameters are in place; needed only with `gather="forward"`, to read them by other means."""
        self._running.pending_gathers.wait()

    def _check_usable(self) -> None:
        if self._engine is not None and self._engine.failure is not None:
            self._broken = self._broken or f"a backward pass failed on rank {self.rank}: {self._engine.failure}"
        if self._broken is not None:
            raise RuntimeError(
                f"{self._broken}; parameters and optimizer state are from different steps: load the last checkpoint, "
                "the model's and this optimizer's, on all ranks before going on"
            )

    # ------------------------------------------------------------------ gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those that were reduced too."""
        engine = self._running
        if set_to_none or self._planner.settings.reduction == "all":
            engine.drop_all()
            super().zero_grad(set_to_none)
        else:
            if engine.joining():
                raise RuntimeError("inside Join, ranks without inputs cannot follow: use zero_grad(set_to_none=True)")
            engine.grad_ops.clear()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward passes only add up local gradients; the first one outside sends the sum."""
        return self._ddp.no_sync() if self._ddp is not None else self._paused()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        engine = self._running
        before, engine.paused = engine.paused, True
        try:
            yield
        finally:
            engine.paused = before

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients together, as torch would find it on whole gradients; the same on all ranks."""
        return self._as_norm(self._announced_clip(math.inf, norm_type))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; returns the norm they had."""
        if error_if_nonfinite:
            total = self._announced_clip(math.inf, norm_type)
            if not math.isfinite(total):
                raise RuntimeError(
                    f"the norm of order {norm_type} of all gradients is {total}, which cannot be clipped: look for the "
                    "rank whose loss is not finite, or pass error_if_nonfinite=False"
                )
        return self._as_norm(self._announced_clip(float(max_norm), norm_type))

    def _announced_clip(self, max_norm: float, norm_type: float) -> float:
        if self._join is not None and self._join_config.enable:
            self._join.clip(max_norm, float(norm_type))
        return self._clip(max_norm, float(norm_type))

    def _clip(self, max_norm: float, norm_type: float) -> float:
        """The norm of all gradients, which are scaled to `max_norm` unless that is infinite."""
        total = self._running.grad_ops.total_norm(norm_type)
        if max_norm != math.inf and not (factor := max_norm / (total + 1e-6)) >= 1.0:
            self._running.grad_ops.scale(factor)
        return total

    def _as_norm(self, value: float) -> Tensor:
        return torch.tensor(value, device=self._running.params[0].device)

    # ------------------------------------------------------------------ state

    @property
    def state(self) -> Any:
        """The live state of this rank's fragments, keyed by the user's parameters.

        What is shaped like the parameter is a flat view of the owned elements where a parameter may be cut.
        """
        refuse_dcp("ShardedOptimizer")
        return {} if self._engine is None else self._states.by_parameter()

    @state.setter
    def state(self, value: Any) -> None:
        pass  # torch sets an empty one before anything exists

    def _collected(self, to: int) -> list[Any]:
        found: list[Any] = gather_object(self._ranks.shards, lambda: to_plain(self._states.param_states()), to)
        return found

    def _whole(self) -> StateDict:
        groups = [
            {k: v for k, v in group.items() if k != "optimizer_class"} for group in pack_groups(self.param_groups)
        ]
        return {"state": assemble(self._all_state_dicts, self._running.params), "param_groups": groups}

    def _take(self, state_dict: StateDict) -> None:
        kinds = [self._inners.of(group) for group in range(len(self.param_groups))]
        numbers = validate(state_dict, self.param_groups, kinds, {})
        saved = {numbers[key]: dict(entry) for key, entry in state_dict["state"].items() if key in numbers}
        chosen = [options(dict(group)) for group in state_dict["param_groups"]]
        self._running.recover()
        params = self._running.params
        self._states.load({number: DictState(entry, params[number]) for number, entry in saved.items()}, chosen)
        self._loaded(saved, chosen)

    def _loaded(self, saved: Mapping[int, Mapping[str, Any]], chosen: Sequence[Group]) -> None:
        """All state and options are new."""
        if self._running.reference is not None:
            self._running.reference.load(saved, chosen)
        self._inners.pull(self.param_groups)
        self._has_state, self._all_state_dicts, self._broken = bool(saved), [], None

    def optimizer_view(self) -> OptimizerView:
        """Return what a checkpoint reads and replaces; raises inside a join context."""
        self._refuse_joining()
        return OptimizerView(
            everyone=self._ranks.everyone,
            rank=self.rank,
            writes=self._ranks.replicas.rank == 0,
            layout=self._layout,
            params=self._running.params,
            groups=self.param_groups,
            optimizer_names=[type(self._inners.of(group)).__name__ for group in range(len(self.param_groups))],
            step=self._steps,
            saves=self._saves,
            ensure_complete=self._settle,
            param_states=self._states.param_states,
            global_state=dict,
            group_optimizer=self.group_optimizer,
            loads_whole_state=self._running.reference is not None,
            restore=self._restore,
            mark_broken=self._spoil,
        )

    def group_optimizer(self, group: int) -> GroupOptimizer:
        """How the state of a group's parameters comes about."""
        planner, found = self._planner, self.param_groups[group]
        kind = class_of(found, planner.default_class)
        defaults = planner.defaults if kind is planner.default_class else {}
        return GroupOptimizer(kind, defaults, own_options(found), planner.settings.master_dtype)

    def _settle(self) -> None:
        self._check_usable()
        self.synchronize()
        self._raise_if_peer_failed()

    def _restore(
        self, saved: Mapping[int, SavedState], others: Mapping[str, Any], options: Sequence[Group], step: int
    ) -> Callable[[], None]:
        replace_state = self._states.prepare(saved, options, fresh=True)

        def commit() -> None:
            self._running.recover()
            replace_state()
            proved = saved if self._running.reference is not None else {}
            whole = {number: {key: found.whole(key) for key in found.names()} for number, found in proved.items()}
            self._loaded(whole, options)
            self._has_state, self._steps = bool(saved), step

        return commit

    # ------------------------------------------------------------------ uneven inputs

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._running.params[0].device

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The shadow of this optimizer on a rank that has run out of inputs; every keyword is ignored.

        A module in DDP is listed before the optimizer: `Join([ddp, optimizer])`. A bare module is not listed.
        """
        if self._join is None:
            self._join = JoinProtocol(self, self._ranks.everyone)
        if self._ddp is None:
            self._running.on_backward = self._join.backward
        of = ref(self)
        self._running.joining = lambda: (found := of()) is not None and found._join_config.enable
        self._contexts += 1
        return ShardedJoinHook(self, self._join, self._contexts)

    def _check_order(self) -> None:
        if self._ddp is not None and self._join_config.is_first_joinable:
            raise RuntimeError(
                "a DDP module and this optimizer join together, the module first: use Join([ddp, optimizer])"
            )

    def _stop_announcing(self) -> None:
        self._running.on_backward = None

    def _leave_join_context(self, number: int) -> None:
        """Go on alone, unless a later context has begun."""
        if number == self._contexts and self._join is not None:
            self._stop_announcing()
            self._join.end()
            self._join_config = self._not_joining

    def _shadow_backward(self, fresh: bool) -> None:
        self._running.shadow_backward(fresh)

    def _shadow_step(self) -> None:
        with self._running.lock:
            self._step()
            # The live ranks drop their gradients before the next pass; of a bare module's, there is a word about it.
            if self._ddp is not None or self._planner.settings.reduction == "all":
                self._running.drop_all()
        if self._ddp is None and self._planner.settings.reduction == "all":
            super().zero_grad()

    def _whole_gradients_of(self, rank: int) -> list[Tensor]:
        """The parameters whose whole gradients `rank` steps with, where a joined rank cannot have them by itself."""
        if self._ddp is None or self._planner.settings.reduction == "scatter":
            return []
        shard_rank = rank % self.world_size
        return [self._running.params[fragment.param] for fragment in self._layout.fragments(shard_rank)]

    # ------------------------------------------------------------------ about itself

    def stats(self) -> Stats:
        """Bytes moved, time waited and how even the shares are, since the optimizer was built; local."""
        engine, layout = self._running, self._layout
        loads = [layout.load(rank) for rank in range(self.world_size)]
        sent, received = engine.traffic()
        return Stats(
            steps=self._steps,
            rank=self.rank,
            world_size=self.world_size,
            buckets=len(layout.buckets),
            elements=sum(loads),
            owned_elements=loads[self.rank],
            imbalance=max(loads) * self.world_size / max(1, sum(loads)),
            bytes_sent=sent,
            bytes_received=received,
            wait_seconds=dict(self._timer.waited),
        )


def _unwrapped(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """The module that holds the parameters, and DDP's wrapper around it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    found = getattr(model, "_orig_mod", model)  # what torch.compile returns
    if isinstance(found, DistributedDataParallel):
        return found.module, found
    return found, None


def _once_each(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Each element of memory once: an expanded tensor shows some of them many times."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _first_device(model: nn.Module) -> torch.device | None:
    return next((param.device for param in model.parameters()), None)
