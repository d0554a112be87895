"""`GradSums`: which parameters have a gradient, what dropping leaves of their sums, and which memory is used again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from zerostep.comm.exchange import NullExchange
from zerostep.plan.buckets import Cost, plan_buckets
from zerostep.plan.layout import ParamSpec
from zerostep.step.grad_sums import GradSums
from zerostep.step.reduction_plan import ReductionPlan

_SIZES = st.lists(st.integers(0, 25), min_size=1, max_size=8)
_BUCKET_BYTES = st.sampled_from([80, 400, 2000])  # one parameter or several in most buckets


def _plan(
    sizes: Sequence[int], world_size: int = 1, rank: int = 0, whole: bool = False, bucket_bytes: int = 80
) -> ReductionPlan:
    """Buckets of about twenty elements; parameters may be divided among ranks."""
    specs = [ParamSpec(f"p{index}", (size,), "float32", splittable=True) for index, size in enumerate(sizes)]
    layout = plan_buckets(specs, world_size, bucket_bytes, [4] * len(sizes), [Cost(size) for size in sizes])
    params, count = [nn.Parameter(torch.zeros(size)) for size in sizes], len(layout.buckets)
    return ReductionPlan(layout, rank, params, [NullExchange()] * count, [torch.float32] * count, 1.0, whole)


def _part(plan: ReductionPlan, bucket: int, totals: Sequence[Tensor]) -> Tensor:
    """What a rank is given of a bucket."""
    where = plan.layout.buckets[bucket]
    memory = torch.cat([totals[slot.param] for slot in where.slots])
    owned = where.owned(plan.rank)
    return memory if plan.whole else memory[owned.start : owned.stop].clone()


def _take_all(sums: GradSums, plan: ReductionPlan, totals: Sequence[Tensor]) -> None:
    """Sums of all buckets; every parameter counts as used."""
    for bucket in range(len(plan.layout.buckets)):
        sums.take(bucket, _part(plan, bucket, totals))
    sums.use(range(len(totals)))


def _ones(sizes: Sequence[int], value: float = 1.0) -> list[Tensor]:
    return [torch.full((size,), value) for size in sizes]


# What is dropped.


@settings(deadline=None)
@given(_SIZES, st.integers(1, 4), st.booleans(), st.data())
def test_what_is_dropped_is_zero_and_the_rest_is_as_it_was(
    sizes: list[int], world_size: int, whole: bool, data: st.DataObject
) -> None:
    plan = _plan(sizes, world_size, data.draw(st.integers(0, world_size - 1)), whole, data.draw(_BUCKET_BYTES))
    sums, totals = GradSums(plan), [torch.full((size,), 1.0 + index) for index, size in enumerate(sizes)]
    _take_all(sums, plan, totals)
    kept = set(range(len(sizes)))
    for dropped in data.draw(st.lists(st.lists(st.integers(0, len(sizes) - 1)), max_size=3)):
        sums.drop(dropped)
        kept -= set(dropped)
        for index in dropped:
            totals[index].zero_()
    assert set(sums.used) == kept
    for bucket, where in enumerate(plan.layout.buckets):
        in_use = any(slot.param in kept for slot in where.slots)
        assert (bucket in sums.parts) == in_use
        assert not in_use or torch.equal(sums.parts[bucket], _part(plan, bucket, totals))


def test_what_was_dropped_starts_from_zero() -> None:
    plan = _plan([3, 4])
    sums = GradSums(plan)
    _take_all(sums, plan, _ones([3, 4], 5.0))
    sums.drop([0])
    _take_all(sums, plan, _ones([3, 4]))
    assert torch.equal(sums.parts[0], _part(plan, 0, [torch.ones(3), torch.full((4,), 6.0)]))


def test_parameters_without_a_gradient_are_not_dropped() -> None:
    """Their places in a sum are zeros of this rank and of all others."""
    plan = _plan([3, 4])
    sums, totals = GradSums(plan), [torch.zeros(3), torch.ones(4)]
    sums.take(0, _part(plan, 0, totals))
    sums.use([1])
    sums.drop([0])
    assert (set(sums.used), list(sums.parts)) == ({1}, [0])
    assert torch.equal(sums.parts[0], _part(plan, 0, totals))


def test_which_parameters_count_can_be_said_anew() -> None:
    sums = GradSums(_plan([3, 4, 5]))
    sums.use([0, 1])
    sums.use([1, 2])
    assert set(sums.used) == {0, 1, 2}
    sums.use_only([1])
    assert set(sums.used) == {1}


def test_all_sums_can_be_handed_over() -> None:
    plan = _plan([30, 30], whole=True)
    sums = GradSums(plan)
    _take_all(sums, plan, _ones([30, 30]))
    parts = sums.take_all()
    assert (sorted(parts), dict(sums.parts), set(sums.used)) == ([0, 1], {}, {0, 1})
    _take_all(sums, plan, _ones([30, 30], 2.0))
    assert torch.equal(parts[0], torch.ones(30)) and torch.equal(sums.parts[0], torch.full((30,), 2.0))


def test_dropping_everything_starts_anew() -> None:
    plan = _plan([3, 4])
    sums = GradSums(plan)
    _take_all(sums, plan, _ones([3, 4], 5.0))
    sums.drop_all()
    assert (dict(sums.parts), set(sums.used)) == ({}, set())


# Memory.


def _places(sums: GradSums) -> list[int]:
    return [sums.parts[bucket].data_ptr() for bucket in sorted(sums.parts)]


def _reused(sums: GradSums, count: int) -> list[int | None]:
    """The memory that is offered for each bucket."""
    offered = [sums.memory_for(bucket) for bucket in range(count)]
    return [None if memory is None else memory.data_ptr() for memory in offered]


@pytest.mark.parametrize("one_by_one", [True, False])
def test_memory_of_dropped_sums_is_used_again_once(one_by_one: bool) -> None:
    """But not that of buckets which are in flight when backward ends: they get memory of their own by then."""
    plan = _plan([30] * 5)
    sums = GradSums(plan)
    _take_all(sums, plan, _ones([30] * 5))
    places = _places(sums)
    if one_by_one:
        sums.drop(range(5))
    else:
        sums.drop_all()
    assert _reused(sums, 5) == [*places[:3], None, None]
    assert _reused(sums, 5) == [None] * 5


def test_memory_that_somebody_else_has_is_not_used_again() -> None:
    """An inner optimizer may have kept the gradient that it was given, which is a view."""
    plan = _plan([30] * 5)
    sums = GradSums(plan)
    _take_all(sums, plan, _ones([30] * 5))
    places, view = _places(sums), sums.parts[1][3:7]
    sums.drop_all()
    assert _reused(sums, 5) == [places[0], None, places[2], None, None]
    assert view.tolist() == [1.0] * 4


def test_whole_sums_are_never_used_again() -> None:
    """They stand in `.grad`."""
    plan = _plan([30] * 5, whole=True)
    sums = GradSums(plan)
    _take_all(sums, plan, _ones([30] * 5))
    sums.drop_all()
    assert (_reused(sums, 5), sums.nbytes) == ([None] * 5, 0)


@pytest.mark.parametrize("whole", [False, True])
def test_memory_is_let_go_with_the_gradients(whole: bool) -> None:
    plan = _plan([30] * 4, whole=whole)
    sums, memories = GradSums(plan), list[StorageWeakRef]()
    for _ in range(3):
        _take_all(sums, plan, _ones([30] * 4))
        memories += [StorageWeakRef(part.untyped_storage()) for part in sums.parts.values()]
        sums.drop_all()
    assert sum(not memory.expired() for memory in memories) == (0 if whole else 2)


def test_bytes_count_shared_memory_once() -> None:
    plan = _plan([30] * 5)
    sums, memory = GradSums(plan), torch.zeros(60)
    for bucket in range(5):
        sums.take(bucket, memory[:30] if bucket < 2 else torch.zeros(30))
    assert sums.nbytes == 4 * (60 + 3 * 30)
    del memory
    sums.use(range(5))
    sums.drop_all()
    assert sums.nbytes == 4 * 30  # what is kept for the next sums: memory that two buckets share is not
