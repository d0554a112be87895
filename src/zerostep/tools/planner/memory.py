"""The bytes of every rank under each strategy, as the strategy's own planning gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from zerostep.plan.buckets import padded_size
from zerostep.plan.groups import Group, all_params, class_of
from zerostep.plan.layout import Fragment, Layout, Slot
from zerostep.plan.layout_planner import LayoutPlanner
from zerostep.plan.ownership import Ownership
from zerostep.tools.planner.gradient_bytes import BackwardTerms, gradient_bytes
from zerostep.tools.planner.state import StateModel

__all__ = ["Memory", "RankBytes", "TrainingJob", "fully_sharded", "replicated", "sharded", "whole_parameters"]

_Member = TypeVar("_Member", Slot, Fragment)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    `gradients` are those that the step uses. `scratch` is what communication takes beside them at the worst moment of
    backward, and `scratch_at_end` when backward has ended. `buffers` are the model's own.
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
        """All of it, at the worst moment of backward."""
        return self.parameters + self.gradients + self.state + self.masters + self.buffers + self.scratch


@dataclass(frozen=True)
class TrainingJob:
    """What is trained, by complete groups, and where; `names` has the parameters in the model's order."""

    planner: LayoutPlanner
    groups: Sequence[Group]
    names: Sequence[str]
    buffer_bytes: int
    on_host: bool
    gradients_are_views: bool = False

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
        """What DDP's own buckets take beside the gradients."""
        return 0 if self.gradients_are_views else self.gradient_bytes

    def master_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype of the masters of parameters of a dtype, if they have any."""
        wanted = self.planner.settings.master_dtype
        return wanted if wanted is not None and dtype.is_floating_point and dtype != wanted else None


@dataclass(frozen=True)
class RankBytes:
    """The bytes of state and masters of every rank, one number for each, and the memory of single ranks on demand."""

    base: Memory
    state: Tensor
    masters: Tensor
    gradients: Tensor
    course: Layout | None = None
    job: TrainingJob | None = None

    @property
    def imbalance(self) -> float:
        """The largest rank's state and masters against the mean."""
        owned = (self.state + self.masters).double()
        return float(owned.max() / owned.mean()) if owned.sum() else 1.0

    @property
    def extremes(self) -> tuple[int, int]:
        """The ranks with the most and the least.

        What a rank keeps of the gradients, it has while backward is at its worst; so they make no difference.
        """
        total = self.state + self.masters
        return int(total.argmax()), int(total.argmin())

    def memory(self, rank: int) -> Memory:
        """The bytes of one rank."""
        state, masters = int(self.state[rank]), int(self.masters[rank])
        found = replace(self.base, state=state, masters=masters, gradients=int(self.gradients[rank]))
        if self.course is None or self.job is None:
            return found
        in_ddp = self.base.scratch > 0
        terms = BackwardTerms(self.job.planner.settings.reduce_dtype, self.job.on_host, in_ddp)
        course = gradient_bytes(self.course, rank, map(self.course.index_of, reversed(self.job.names)), terms)
        return replace(
            found,
            gradients=course.kept,
            scratch=found.scratch + max(0, course.peak - course.kept),
            scratch_at_end=found.scratch_at_end + course.end - course.kept,
        )


# ---------------------------------------------------------------------- plain DDP and whole parameters


def replicated(job: TrainingJob) -> RankBytes:
    """Plain DDP: every rank has everything, and DDP's buckets beside the gradients."""
    return _whole(job, [0] * len(all_params(job.groups)), 1)


def whole_parameters(job: TrainingJob, world_size: int) -> RankBytes:
    """`ZeroRedundancyOptimizer` in DDP: whole parameters have owners; one optimizer for each class."""
    owners = dict[int, int]()
    for kind in {id(class_of(group, job.planner.default_class)) for group in job.groups}:
        members = [group for group in job.groups if id(class_of(group, job.planner.default_class)) == kind]
        owners |= {id(param): rank for param, rank in Ownership(members, world_size).rank_of.items()}
    return _whole(job, [owners[id(param)] for param in all_params(job.groups)], world_size)


def _whole(job: TrainingJob, owners: Sequence[int], world_size: int) -> RankBytes:
    state, masters = [0] * world_size, [0] * world_size
    places = iter(owners)
    for group in job.groups:
        model = StateModel(job.planner, group)
        for param in group["params"]:
            rank, wide = next(places), job.master_dtype(param.dtype)
            if param.requires_grad:
                state[rank] += model.whole(tuple(param.shape), wide or param.dtype)
                masters[rank] += param.numel() * wide.itemsize if wide else 0
    base = Memory(job.parameter_bytes, 0, 0, 0, job.buffer_bytes, job.ddp_bytes, job.ddp_bytes)
    gradients = torch.full((world_size,), job.gradient_bytes)
    return RankBytes(base, torch.tensor(state), torch.tensor(masters), gradients)


# ---------------------------------------------------------------------- ShardedOptimizer


def sharded(job: TrainingJob, layout: Layout, in_ddp: bool = False) -> RankBytes:
    """`ShardedOptimizer`, over a bare module; or in DDP, whose buckets stay, and whose gradients do until the end."""
    models = [StateModel(job.planner, group) for group in job.groups]
    state, masters, gradients = (torch.zeros(layout.world_size, dtype=torch.int64) for _ in range(3))
    reduce_dtype = job.planner.settings.reduce_dtype
    for index, bucket in enumerate(layout.buckets):
        if bucket.trainable:
            dtype = getattr(torch, bucket.dtype)
            wide, cuts = job.master_dtype(dtype), torch.tensor(bucket.cuts)
            masters += cuts.diff() * (wide.itemsize if wide else 0)
            gradients += cuts.diff() * (reduce_dtype or dtype).itemsize
            _add_state(state, layout, index, cuts, models, wide or dtype)
    whole = job.gradient_bytes if in_ddp else 0
    end = whole  # DDP's buckets, whether the gradients are views of them or not
    base = Memory(_flat_bytes(layout), 0, 0, 0, job.buffer_bytes, whole + (job.ddp_bytes if in_ddp else 0), end)
    return RankBytes(base, state, masters, gradients, layout, job)


def _flat_bytes(layout: Layout) -> int:
    """Parameters as they lie in memory; flat, trained ones are padded."""
    sizes = [(padded_size(bucket) if bucket.trainable else bucket.size, bucket.dtype) for bucket in layout.buckets]
    return sum(size * getattr(torch, dtype).itemsize for size, dtype in sizes)


def _add_state(
    state: Tensor, layout: Layout, index: int, cuts: Tensor, models: Sequence[StateModel], dtype: torch.dtype
) -> None:
    """What each rank's leaves in a bucket cost."""
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
            state += _without_length(run, cuts) * models[spec.group].whole((0,), dtype)


def _add_state_by_rank(
    state: Tensor, layout: Layout, index: int, models: Sequence[StateModel], dtype: torch.dtype
) -> None:
    """The slow way, where parameters without elements stand between the others, for one rank alone."""
    for rank in range(layout.world_size):
        for run in _runs(layout, layout.fragments_in(index, rank)):
            spec, length = layout.params[run[0].param], run[-1].place.stop - run[0].place.start
            flat = spec.splittable and spec.numel
            state[rank] += models[spec.group].whole((length,) if flat else spec.shape, dtype)


def _without_length(run: Sequence[Slot], cuts: Tensor) -> Tensor:
    """The ranks that have a leaf without elements: two cuts meet inside a parameter, and what is between is theirs."""
    here = cuts[:-1]
    inside = (cuts.diff() == 0) & (here > run[0].span.start) & (here < run[-1].span.stop)
    if inside.any():
        inside &= ~torch.isin(here, torch.tensor([slot.span.start for slot in run]))
    return inside


def _runs(layout: Layout, members: Iterable[_Member]) -> Iterator[list[_Member]]:
    """Neighbours that share a leaf, wherever they share an owner."""

    def kind(member: _Member) -> tuple[int, int]:
        spec = layout.params[member.param]
        return spec.group, -1 if spec.splittable and spec.numel else member.param

    for _, run in groupby(members, key=kind):
        yield list(run)


# ---------------------------------------------------------------------- full sharding


def fully_sharded(plain: Memory, world_size: int, largest_unit: int) -> RankBytes:
    """FSDP in numbers: everything divided, and the largest unit whole, with its gradients, while it runs."""
    state, masters, gradients = (
        torch.tensor([-(-each // world_size)]) for each in (plain.state, plain.masters, plain.gradients)
    )
    parameters = -(-plain.parameters // world_size)
    base = Memory(parameters, 0, 0, 0, plain.buffers, 2 * largest_unit, 0)
    return RankBytes(base, state, masters, gradients)
