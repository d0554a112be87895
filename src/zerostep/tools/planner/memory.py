"""The bytes of every rank under each strategy, from the layout or ownership that training would have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from zerostep.plan.buckets import padded_size
from zerostep.plan.groups import Group, all_params, class_of
from zerostep.plan.layout import Fragment, Layout, Slot
from zerostep.plan.layout_planner import LayoutPlanner
from zerostep.plan.ownership import Ownership
from zerostep.tools.planner.gradient_bytes import gradient_bytes
from zerostep.tools.planner.state import StateModel

_Member = TypeVar("_Member", Slot, Fragment)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    `gradients` are those that `step()` uses. `scratch` is the peak memory of communication during backward, beside
    them; `scratch_at_end` is what remains of it when backward has ended. `buffers` are the model's own.
    """

    parameters: int
    gradients: int
    state: int
    masters: int
    buffers: int
    scratch: int
    scratch_at_end: int

    @property
    def total(self) -> int:
        """The sum of all, at the peak of backward."""
        return self.parameters + self.gradients + self.state + self.masters + self.buffers + self.scratch


@dataclass(frozen=True)
class TrainingJob:
    """What is trained: parameter groups with all their options, and the planner that divides them.

    `names` has the parameters in the model's order. `on_host` says that they are in host memory, and
    `gradients_are_views` that DDP has `gradient_as_bucket_view=True`. `whole_shapes` are those of parameters of which
    tensor parallelism leaves a rank a part.
    """

    planner: LayoutPlanner
    groups: Sequence[Group]
    names: Sequence[str]
    buffer_bytes: int
    on_host: bool
    gradients_are_views: bool = False
    whole_shapes: Mapping[Tensor, tuple[int, ...]] = field(default_factory=dict)

    def whole(self, param: Tensor) -> Tensor:
        """Return a parameter without memory, of the shape that a parameter has in the whole model."""
        shape = self.whole_shapes.get(param, tuple(param.shape))
        return torch.empty(shape, dtype=param.dtype, device="meta", requires_grad=param.requires_grad)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters."""
        return sum(param.nbytes for param in all_params(self.groups))

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients."""
        return sum(param.nbytes for param in all_params(self.groups) if param.requires_grad)

    @property
    def ddp_bytes(self) -> int:
        """The bytes of DDP's buckets beside the gradients."""
        return 0 if self.gradients_are_views else self.gradient_bytes

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the dtype of the masters of parameters of a dtype; `None` if they have no masters."""
        wanted = self.planner.settings.master_dtype
        return wanted if wanted is not None and dtype.is_floating_point and dtype != wanted else None


@dataclass(frozen=True)
class RankBytes:
    """The bytes of state, masters and gradients of every rank, one element per rank; the rest is common to all.

    `base` has what is common. With the `layout` of `ShardedOptimizer` and `job`, `memory` simulates backward to get the
    memory of gradients, which is too slow for all of thousands of ranks.
    """

    base: Memory
    state: Tensor
    masters: Tensor
    gradients: Tensor
    layout: Layout | None = None
    job: TrainingJob | None = None

    @property
    def imbalance(self) -> float:
        """The largest rank's state and masters, divided by the mean."""
        owned = (self.state + self.masters).double()
        return float(owned.max() / owned.mean()) if owned.sum() else 1.0

    @property
    def extremes(self) -> tuple[int, int]:
        """The ranks with the most and the least state and masters.

        Gradients are left out: the peak of backward, which `Memory.total` has, contains what a rank keeps of them.
        """
        total = self.state + self.masters
        return int(total.argmax()), int(total.argmin())

    def memory(self, rank: int) -> Memory:
        """The bytes of one rank."""
        state, masters = int(self.state[rank]), int(self.masters[rank])
        memory = replace(self.base, state=state, masters=masters, gradients=int(self.gradients[rank]))
        if self.layout is None or self.job is None:
            return memory
        in_ddp, settings = self.base.scratch > 0, self.job.planner.settings
        arrivals = map(self.layout.index_of, reversed(self.job.names))
        backward = gradient_bytes(self.layout, rank, arrivals, settings, self.job.on_host, in_ddp)
        return replace(
            memory,
            gradients=backward.kept,
            scratch=memory.scratch + max(0, backward.peak - backward.kept),
            scratch_at_end=memory.scratch_at_end + backward.end - backward.kept,
        )


# ---------------------------------------------------------------------- plain DDP and whole parameters


def replicated(job: TrainingJob) -> RankBytes:
    """Return the bytes under plain DDP: every rank has everything, and DDP's buckets beside the gradients."""
    return _whole(job, [0] * len(all_params(job.groups)), 1)


def whole_parameters(job: TrainingJob, world_size: int) -> RankBytes:
    """Return the bytes under `ZeroRedundancyOptimizer` in DDP: parameters have owners; one optimizer for each class."""
    owners = dict[Tensor, int]()
    # By id, because an optimizer class may be any callable, hashable or not.
    for class_id in {id(class_of(group, job.planner.default_class)) for group in job.groups}:
        members = [group for group in job.groups if id(class_of(group, job.planner.default_class)) == class_id]
        wholes = {param: job.whole(param) for param in all_params(members)}
        # Owners are chosen by whole sizes, so that all ranks of tensor parallelism choose the same.
        groups = [{**group, "params": [wholes[param] for param in group["params"]]} for group in members]
        ranks = Ownership(groups, world_size).rank_of
        owners |= {param: ranks[whole] for param, whole in wholes.items()}
    return _whole(job, [owners[param] for param in all_params(job.groups)], world_size)


def _whole(job: TrainingJob, owners: Sequence[int], world_size: int) -> RankBytes:
    state, masters = [0] * world_size, [0] * world_size
    next_owner = iter(owners)
    for group in job.groups:
        model = StateModel(job.planner, group)
        for param in group["params"]:
            rank, master_dtype = next(next_owner), job.master_dtype(param.dtype)
            if param.requires_grad:
                state[rank] += model.whole(tuple(param.shape), master_dtype or param.dtype)
                masters[rank] += param.numel() * master_dtype.itemsize if master_dtype else 0
    base = Memory(job.parameter_bytes, 0, 0, 0, job.buffer_bytes, job.ddp_bytes, job.ddp_bytes)
    gradients = torch.full((world_size,), job.gradient_bytes)
    return RankBytes(base, torch.tensor(state), torch.tensor(masters), gradients)


# ---------------------------------------------------------------------- ShardedOptimizer


def sharded(job: TrainingJob, layout: Layout, in_ddp: bool = False) -> RankBytes:
    """Return the bytes under `ShardedOptimizer` over a bare module; or in DDP, with whole gradients and buckets."""
    models = [StateModel(job.planner, group) for group in job.groups]
    state, masters, gradients = (torch.zeros(layout.world_size, dtype=torch.int64) for _ in range(3))
    reduce_dtype = job.planner.settings.reduce_dtype
    for index, bucket in enumerate(layout.buckets):
        if bucket.trainable:
            dtype = getattr(torch, bucket.dtype)
            master_dtype, cuts = job.master_dtype(dtype), torch.tensor(bucket.cuts)
            masters += cuts.diff() * (master_dtype.itemsize if master_dtype else 0)
            gradients += cuts.diff() * (reduce_dtype or dtype).itemsize
            _add_state(state, layout, index, cuts, models, master_dtype or dtype)
    # In DDP, whole gradients and buckets during backward; after it the buckets, be the gradients views of them or not.
    scratch, at_end = (job.gradient_bytes + job.ddp_bytes, job.gradient_bytes) if in_ddp else (0, 0)
    base = Memory(_flat_bytes(layout), 0, 0, 0, job.buffer_bytes, scratch, at_end)
    return RankBytes(base, state, masters, gradients, layout, job)


def _flat_bytes(layout: Layout) -> int:
    """Return the bytes of the flat parameters; buckets that are trained are padded."""
    sizes = [(padded_size(bucket) if bucket.trainable else bucket.size, bucket.dtype) for bucket in layout.buckets]
    return sum(size * getattr(torch, dtype).itemsize for size, dtype in sizes)


def _add_state(
    state: Tensor, layout: Layout, index: int, cuts: Tensor, models: Sequence[StateModel], dtype: torch.dtype
) -> None:
    """Add the state of each rank's leaves in one bucket, for all ranks at once."""
    bucket = layout.buckets[index]
    if not all(slot.span.length for slot in bucket.slots):
        _add_state_by_rank(state, layout, index, models, dtype)
        return
    for run in _runs(layout, bucket.slots):
        spec = layout.params[run[0].param]
        if not spec.splittable:
            state[bucket.ranks_of(run[0])[0]] += models[spec.group].whole(spec.shape, dtype)
        else:
            start, stop = run[0].span.start, run[-1].span.stop
            lengths = (cuts[1:].clamp(max=stop) - cuts[:-1].clamp(min=start)).clamp(min=0)
            state += models[spec.group].flat(lengths, dtype)
            state += _empty_leaves(run, cuts) * models[spec.group].whole((0,), dtype)


def _add_state_by_rank(
    state: Tensor, layout: Layout, index: int, models: Sequence[StateModel], dtype: torch.dtype
) -> None:
    """Add the same rank by rank, which is slow: for buckets with parameters without elements."""
    for rank in range(layout.world_size):
        for run in _runs(layout, layout.fragments_in(index, rank)):
            spec, length = layout.params[run[0].param], run[-1].place.stop - run[0].place.start
            flat = spec.splittable and spec.numel
            state[rank] += models[spec.group].whole((length,) if flat else spec.shape, dtype)


def _empty_leaves(run: Sequence[Slot], cuts: Tensor) -> Tensor:
    """Return a mask of the ranks that own an empty part inside a parameter, for which there is a leaf as well."""
    starts = cuts[:-1]
    inside = (cuts.diff() == 0) & (starts > run[0].span.start) & (starts < run[-1].span.stop)
    if inside.any():
        inside &= ~torch.isin(starts, torch.tensor([slot.span.start for slot in run]))
    return inside


def _runs(layout: Layout, members: Iterable[_Member]) -> Iterator[list[_Member]]:
    """Group neighbours that share a leaf on every rank that owns parts of both."""

    def leaf_key(member: _Member) -> tuple[int, int]:
        spec = layout.params[member.param]
        return spec.group, -1 if spec.splittable and spec.numel else member.param

    for _, run in groupby(members, key=leaf_key):
        yield list(run)


# ---------------------------------------------------------------------- full sharding


def fully_sharded(plain: Memory, world_size: int, largest_unit: int) -> RankBytes:
    """Return the bytes under FSDP-style sharding, by arithmetic alone.

    Everything is divided; the largest unit and its gradients are whole while the unit runs.
    """
    state, masters, gradients = (
        torch.tensor([-(-each // world_size)]) for each in (plain.state, plain.masters, plain.gradients)
    )
    parameters = -(-plain.parameters // world_size)
    base = Memory(parameters, 0, 0, 0, plain.buffers, 2 * largest_unit, 0)
    return RankBytes(base, state, masters, gradients)
