"""Reductions with gradients in any order, alone and on several ranks in threads, against sums of whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers.reference import assert_same_bits
from zerostep.comm.exchange import NullExchange, PendingReduce
from zerostep.plan.buckets import Cost, plan_buckets
from zerostep.plan.layout import Bucket, Layout, ParamSpec
from zerostep.step.labels import PhaseTimer
from zerostep.step.reduction import Reduction
from zerostep.step.reduction_plan import ReductionPlan
from zerostep.tensors import Scratch

patient = settings(deadline=None)

# The oldest lands before a third bucket is launched.
_MOST_IN_FLIGHT = 2
_PATIENCE = 2.0

_SIZES = st.lists(st.integers(0, 25), min_size=1, max_size=8)


@pytest.fixture(autouse=True, scope="module")
def _poison() -> Iterator[None]:
    """Memory that nobody has written is not a number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Net:
    """Ranks in one process: a sum is there when all have launched it, and waits until then.

    What is under way must stay as it was launched; what has landed may be used again.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout, self.changed = layout, Condition()
        self.sent: list[list[tuple[int, Tensor]]] = [[] for _ in range(layout.world_size)]
        self.places: list[int] = []
        self.in_flight = [0] * layout.world_size
        self.most = [0] * layout.world_size

    def launch(self, rank: int, bucket: Bucket, memory: Tensor) -> int:
        with self.changed:
            self.sent[rank].append((self.layout.buckets.index(bucket), memory.clone()))
            self.places.append(memory.data_ptr())
            self.in_flight[rank] += 1
            self.most[rank] = max(self.most[rank], self.in_flight[rank])
            self.changed.notify_all()
            return len(self.sent[rank]) - 1

    def land(self, rank: int, number: int, memory: Tensor) -> Tensor:
        with self.changed:
            assert self.changed.wait_for(lambda: all(len(sent) > number for sent in self.sent), _PATIENCE)
            self.in_flight[rank] -= 1
            launched = [sent[number] for sent in self.sent]
        assert len({bucket for bucket, _ in launched}) == 1, "ranks launch in different orders"
        assert_same_bits({"memory": memory}, {"memory": launched[rank][1]})
        owned = self.layout.buckets[launched[0][0]].owned(rank)
        return torch.stack([memory[owned.start : owned.stop] for _, memory in launched]).sum(0)

    def launched(self, rank: int) -> list[int]:
        return [bucket for bucket, _ in self.sent[rank]]


@dataclass(frozen=True)
class _Sum:
    net: Net
    rank: int
    number: int
    memory: Tensor
    nbytes: int = 0

    def finish(self, out: Tensor | None = None) -> Tensor:
        total = self.net.land(self.rank, self.number, self.memory)
        return total if out is None else out.copy_(total)


class Port(NullExchange):
    """One rank's end of the net."""

    blocks_host = True

    def __init__(self, net: Net, rank: int) -> None:
        self._net, self._rank, self._scratch = net, rank, Scratch()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._scratch.allocate(numel, dtype)

    def free(self, memory: Tensor) -> None:
        self._scratch.free(memory)

    def release_scratch(self) -> None:
        self._scratch.trim()

    def reduce(self, memory: Tensor, bucket: Bucket) -> PendingReduce:
        return _Sum(self._net, self._rank, self._net.launch(self._rank, bucket, memory), memory)


@dataclass(frozen=True)
class Rank:
    params: list[Tensor]
    reduction: Reduction


@dataclass(frozen=True)
class World:
    net: Net
    ranks: list[Rank]

    @property
    def layout(self) -> Layout:
        return self.net.layout

    def assert_kept(self, totals: Sequence[Tensor]) -> None:
        """Every rank has its part of every bucket, or the bucket has nothing but zeros."""
        for number, bucket in enumerate(self.layout.buckets):
            whole = torch.cat([totals[slot.param] for slot in bucket.slots])
            for rank, each in enumerate(self.ranks):
                owned = bucket.owned(rank)
                expected = whole[owned.start : owned.stop]
                sums = each.reduction.sums.get(number, torch.zeros_like(expected))
                assert torch.equal(sums[: owned.length], expected), (number, rank, sums, expected)


def _world(specs: Sequence[ParamSpec], world_size: int, scale: float = 1.0) -> World:
    """Buckets of about twenty elements."""
    layout = plan_buckets(specs, world_size, 80, [4] * len(specs), [Cost(spec.numel) for spec in specs])
    net = Net(layout)
    ranks = [
        _rank(net, rank, [nn.Parameter(torch.zeros(spec.shape)) for spec in specs], scale) for rank in range(world_size)
    ]
    return World(net, ranks)


def _rank(net: Net, rank: int, params: list[Tensor], scale: float = 1.0) -> Rank:
    count, port = len(net.layout.buckets), Port(net, rank)
    dtypes = [params[bucket.slots[0].param].dtype for bucket in net.layout.buckets]
    plan = ReductionPlan(net.layout, rank, params, [port] * count, dtypes, scale, whole=False)
    return Rank(params, Reduction(plan, lambda part: part, PhaseTimer(), lambda: None))


def _specs(sizes: Sequence[int], atomic: Sequence[bool] | None = None) -> list[ParamSpec]:
    whole = [False] * len(sizes) if atomic is None else atomic
    return [
        ParamSpec(f"p{i}", (size,), "float32", splittable=not each)
        for i, (size, each) in enumerate(zip(sizes, whole, strict=True))
    ]


def _alone(sizes: Sequence[int]) -> tuple[World, Reduction]:
    world = _world(_specs(sizes), 1)
    return world, world.ranks[0].reduction


# One round, in any order.


@patient
@given(_SIZES, st.data())
def test_a_bucket_is_launched_in_layout_order_as_soon_as_it_may_be(sizes: list[int], data: st.DataObject) -> None:
    world, reduction = _alone(sizes)
    arrived, ended = set[int](), list[bool]()
    for index in data.draw(st.permutations(range(len(sizes)))):
        ended.append(reduction.arrive(index, torch.full((sizes[index],), 1.0 + index), False))
        arrived.add(index)
        full = [all(slot.param in arrived for slot in bucket.slots) for bucket in world.layout.buckets]
        assert world.net.launched(0) == list(range([*full, False].index(False)))
        assert world.net.in_flight[0] <= _MOST_IN_FLIGHT
    assert ended == [False] * (len(sizes) - 1) + [True]
    assert (reduction.passes, reduction.open, reduction.used) == (1, False, arrived)
    reduction.finish()
    assert world.net.in_flight == [0]
    world.assert_kept([torch.full((size,), 1.0 + index) for index, size in enumerate(sizes)])


@patient
@given(_SIZES, st.data())
def test_what_is_missing_counts_as_zero(sizes: list[int], data: st.DataObject) -> None:
    world, reduction = _alone(sizes)
    fates = [data.draw(st.sampled_from(["came", "missing", "none"])) for _ in sizes]
    for index in data.draw(st.permutations(range(len(sizes)))):
        if fates[index] != "missing":
            reduction.arrive(index, torch.ones(sizes[index]) if fates[index] == "came" else None, False)
    if not reduction.passes:
        reduction.launch_missing()
    reduction.finish()
    assert reduction.used == {index for index, fate in enumerate(fates) if fate == "came"}
    assert (reduction.passes, reduction.open) == (1, False)
    world.assert_kept([torch.full((size,), float(fate == "came")) for size, fate in zip(sizes, fates, strict=True)])


@patient
@given(_SIZES, st.data())
def test_a_gradient_that_comes_again_begins_a_round(sizes: list[int], data: st.DataObject) -> None:
    """Any sequence of arrivals, each on top of what is there; whatever is not there when a round ends is zero."""
    world, reduction = _alone(sizes)
    totals = [torch.zeros(size) for size in sizes]
    for index in data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=25)):
        value = float(data.draw(st.integers(-9, 9)))
        reduction.arrive(index, torch.full((sizes[index],), value), True)
        totals[index] += value
    reduction.launch_missing()
    reduction.finish()
    world.assert_kept(totals)
    assert world.net.launched(0) == list(range(len(world.layout.buckets))) * reduction.passes
    assert world.net.most[0] <= _MOST_IN_FLIGHT


# Several rounds on several ranks.


@dataclass(frozen=True)
class Round:
    """What happens on all ranks: what is dropped, what is frozen, and each rank's arrivals in an order of its own."""

    dropped: list[int] | None
    frozen: set[int]
    accumulate: dict[int, bool]
    orders: list[list[tuple[int, float]]]


@st.composite
def passes(draw: st.DrawFn, count: int, world_size: int) -> Round:
    """A gradient that replaces what is there comes on all ranks; one that is added may miss on some."""
    members = st.lists(st.integers(0, count - 1), max_size=2)
    frozen = set(draw(members))
    trained = [index for index in range(count) if index not in frozen]
    accumulate = {index: draw(st.booleans()) for index in trained}
    orders = []
    for _ in range(world_size):
        came = [index for index in trained if not accumulate[index] or draw(st.integers(0, 3))]
        orders.append([(index, float(draw(st.integers(-8, 8)))) for index in draw(st.permutations(came))])
    return Round(draw(st.none() | members), frozen, accumulate, orders)


def _play(each: Rank, arrivals: Sequence[tuple[int, float]], accumulate: dict[int, bool]) -> None:
    """One rank's backward pass."""
    before = each.reduction.passes
    for index, value in arrivals:
        each.reduction.arrive(index, torch.full_like(each.params[index], value), accumulate[index])
    if each.reduction.passes == before:
        each.reduction.launch_missing()


def _allowed(plan: Round, used: Sequence[set[int]]) -> Round:
    """Only what all ranks have used, or none, is dropped or replaced: by then they have told each other."""
    known = {index for index in plan.accumulate if len({index in each for each in used}) == 1}
    dropped = None if plan.dropped is None else [index for index in plan.dropped if index in known]
    accumulate = {index: flag or index not in known for index, flag in plan.accumulate.items()}
    return Round(dropped, plan.frozen, accumulate, plan.orders)


def _follow(totals: list[Tensor], used: list[set[int]], plan: Round) -> None:
    """The model: whole tensors."""
    for index in [*(plan.dropped or ()), *(index for index, flag in plan.accumulate.items() if not flag)]:
        totals[index].zero_()
    for rank, order in enumerate(plan.orders):
        used[rank].difference_update(plan.dropped or ())
        for index, value in order:
            totals[index] += value
            used[rank].add(index)


def _finish(threads: ThreadPoolExecutor, world: World) -> None:
    for each in [threads.submit(each.reduction.finish) for each in world.ranks]:
        each.result()


def _run(threads: ThreadPoolExecutor, world: World, plan: Round) -> None:
    for each in world.ranks:
        if plan.dropped is not None:
            each.reduction.drop(plan.dropped)
        for index, param in enumerate(each.params):
            param.requires_grad_(index not in plan.frozen)
    pairs = zip(world.ranks, plan.orders, strict=True)
    for done in [threads.submit(_play, each, order, plan.accumulate) for each, order in pairs]:
        done.result()


@pytest.mark.parametrize("landed", [True, False])
@settings(patient, max_examples=100, phases=(Phase.explicit, Phase.generate))  # a rank that waits in vain waits long
@given(sizes=_SIZES, world_size=st.integers(1, 4), data=st.data())
def test_rounds_add_up_on_every_rank(sizes: list[int], world_size: int, landed: bool, data: st.DataObject) -> None:
    """Whoever misses what, in whatever order; dropped, frozen and replaced in between."""
    world = _world(_specs(sizes, [data.draw(st.booleans()) for _ in sizes]), world_size)
    totals = [torch.zeros(size) for size in sizes]
    used: list[set[int]] = [set() for _ in range(world_size)]
    with ThreadPoolExecutor(world_size) as threads:
        for _ in range(data.draw(st.integers(1, 4))):
            plan = _allowed(data.draw(passes(len(sizes), world_size)), used)
            if landed:
                _finish(threads, world)
            _run(threads, world, plan)
            _follow(totals, used, plan)
        _finish(threads, world)
    for each, known in zip(world.ranks, used, strict=True):
        each.reduction.zero_stale()
        assert each.reduction.used == known
    world.assert_kept(totals)
    assert all(world.net.launched(rank) == world.net.launched(0) for rank in range(world_size))
    assert max(world.net.most) <= _MOST_IN_FLIGHT


# One thing at a time.


def _send(reduction: Reduction, sizes: Sequence[int], value: float, accumulate: bool = False) -> None:
    for index in reversed(range(len(sizes))):
        reduction.arrive(index, torch.full((sizes[index],), value), accumulate)


def test_a_pass_is_one_round_whatever_was_before() -> None:
    world, reduction = _alone([30, 30])
    for number in range(1, 4):
        _send(reduction, [30, 30], 1.0)
        assert reduction.passes == number
    assert world.net.launched(0) == [0, 1] * 3


@pytest.mark.parametrize("landed", [True, False])
def test_what_was_dropped_is_gone(landed: bool) -> None:
    world, reduction = _alone([3, 4])
    _send(reduction, [3, 4], 5.0)
    if landed:
        reduction.finish()
    reduction.drop([0])
    reduction.finish()
    reduction.zero_stale()
    world.assert_kept([torch.zeros(3), torch.full((4,), 5.0)])


@pytest.mark.parametrize("landed", [True, False])
def test_what_comes_instead_replaces_what_was_there(landed: bool) -> None:
    world, reduction = _alone([30, 4, 30, 5])
    for value in (5.0, 7.0):
        _send(reduction, [30, 4, 30, 5], value)
        if landed:
            reduction.finish()
    reduction.finish()
    world.assert_kept([torch.full((size,), 7.0) for size in (30, 4, 30, 5)])


def test_forgetting_everything_starts_anew() -> None:
    world, reduction = _alone([3, 4])
    _send(reduction, [3, 4], 5.0)
    reduction.drop_all()
    assert (reduction.sums, reduction.used) == ({}, set())
    _send(reduction, [3, 4], 2.0, accumulate=True)
    reduction.finish()
    world.assert_kept([torch.full((3,), 2.0), torch.full((4,), 2.0)])


def _pointers(world: World) -> dict[int, int]:
    return {bucket: part.data_ptr() for bucket, part in world.ranks[0].reduction.sums.items()}


def test_parts_that_were_forgotten_are_used_again() -> None:
    """But not those that are still under way when backward ends."""
    world, reduction = _alone([30] * 5)
    found = []
    for value in (1.0, 2.0):
        _send(reduction, [30] * 5, value)
        reduction.finish()
        world.assert_kept([torch.full((30,), value)] * 5)
        found.append((_pointers(world), dict(reduction.sums)))
        reduction.drop_all()
    (first, _), (second, _) = found
    assert [first[bucket] == second[bucket] for bucket in range(5)] == [True, True, True, False, False]


def test_a_forgotten_part_is_used_once() -> None:
    """A second round adds to it, and needs other memory."""
    world, reduction = _alone([30] * 3)
    _send(reduction, [30] * 3, 5.0)
    reduction.drop_all()
    for value in (1.0, 2.0):
        _send(reduction, [30] * 3, value, accumulate=True)
    reduction.finish()
    world.assert_kept([torch.full((30,), 3.0)] * 3)


def test_a_bucket_s_memory_is_used_again_when_it_has_landed() -> None:
    """As much as is under way, and one that is being filled."""
    world, reduction = _alone([30] * 8)
    _send(reduction, [30] * 8, 1.0)
    assert len(world.net.places) == 8 and len(set(world.net.places)) <= _MOST_IN_FLIGHT + 1


@pytest.mark.parametrize("whole", [False, True])
def test_memory_is_let_go_with_the_gradients(whole: bool) -> None:
    layout = plan_buckets(_specs([30]), 1, 80, [4], [Cost(30)])
    plan = ReductionPlan(layout, 0, [nn.Parameter(torch.zeros(30))], [NullExchange()], [torch.float32], 1.0, whole)
    reduction = Reduction(plan, lambda part: part, PhaseTimer(), lambda: None)
    memories = list[StorageWeakRef]()
    for _ in range(4):
        reduction.arrive(0, torch.ones(30), False)
        reduction.finish()
        memories.append(StorageWeakRef(reduction.sums[0].untyped_storage()))
        reduction.drop_all()
    assert sum(not memory.expired() for memory in memories) <= 1


def test_a_bucket_without_trained_parameters_is_not_sent() -> None:
    world, reduction = _alone([30, 30, 30])
    world.ranks[0].params[1].requires_grad_(False)
    assert [reduction.arrive(index, torch.ones(30), False) for index in (2, 0)] == [False, True]
    world.ranks[0].params[1].requires_grad_(True)
    assert [reduction.arrive(index, torch.ones(30), True) for index in (2, 1, 0)] == [False, False, True]
    assert world.net.launched(0) == [0, 2, 0, 1, 2]


def test_one_bucket_can_be_waited_for() -> None:
    world, reduction = _alone([30, 30])
    _send(reduction, [30, 30], 1.0)
    reduction.finish(0)
    assert (list(reduction.sums), world.net.in_flight) == ([0], [1])
    reduction.finish(0)
    assert world.net.in_flight == [1]
    reduction.finish(1)
    assert (list(reduction.sums), world.net.in_flight) == ([0, 1], [0])


def test_a_larger_plan_takes_over_what_is_kept() -> None:
    world, reduction = _alone([3, 4])
    _send(reduction, [3, 4], 5.0)
    params, port = world.ranks[0].params, Port(world.net, 0)
    reduction.extend(ReductionPlan(world.layout, 0, params, [port], [torch.float32], 1.0, whole=False))
    assert reduction.used == {0, 1}
    _send(reduction, [3, 4], 1.0, accumulate=True)
    reduction.finish()
    assert torch.equal(reduction.sums[0], torch.full((7,), 6.0))
    assert world.net.in_flight == [0]


def test_each_rank_counts_for_its_share() -> None:
    world = _world(_specs([6]), 1, scale=0.25)
    world.ranks[0].reduction.arrive(0, torch.full((6,), 8.0), False)
    world.ranks[0].reduction.finish()
    world.assert_kept([torch.full((6,), 2.0)])


def test_the_gradient_itself_is_left_alone() -> None:
    _, reduction = _alone([3])
    gradient = torch.full((3,), 5.0)
    reduction.arrive(0, gradient, False)
    reduction.finish()
    reduction.sums[0].zero_()
    assert torch.equal(gradient, torch.full((3,), 5.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_elements_lie_in_the_order_of_the_parameter_s_memory(dtype: torch.dtype) -> None:
    """In channels-last memory, whatever the memory of the gradient; and another dtype where that was asked for."""
    param = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    layout = plan_buckets([ParamSpec("p", (2, 3, 2, 2), "float32", splittable=True)], 1, 80, [4], [Cost(1)])
    plan = ReductionPlan(layout, 0, [param], [NullExchange()], [dtype], 0.5, whole=False)
    reduction = Reduction(plan, lambda part: part, PhaseTimer(), lambda: None)
    gradient = torch.arange(24.0).view(2, 3, 2, 2)
    reduction.arrive(0, gradient, False)
    reduction.finish()
    assert reduction.sums[0].dtype == dtype
    assert torch.equal(reduction.sums[0], gradient.permute(0, 2, 3, 1).reshape(-1).to(dtype) / 2)


def test_a_sparse_gradient_is_made_dense() -> None:
    world, reduction = _alone([5])
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[1, 3, 1]]), torch.tensor([1.0, 2.0, 4.0]), (5,), check_invariants=True
    )
    reduction.arrive(0, gradient, False)
    reduction.finish()
    world.assert_kept([torch.tensor([0.0, 5.0, 0.0, 2.0, 0.0])])


def test_a_replica_s_sum_is_kept() -> None:
    layout = plan_buckets(_specs([4]), 1, 80, [4], [Cost(4)])
    plan = ReductionPlan(layout, 0, [nn.Parameter(torch.zeros(4))], [NullExchange()], [torch.float32], 1.0, whole=False)
    reduction = Reduction(plan, lambda part: part * 3, PhaseTimer(), lambda: None)
    reduction.arrive(0, torch.ones(4), False)
    reduction.finish()
    assert torch.equal(reduction.sums[0], torch.full((4,), 3.0))


class _FailsOnce(Port):
    """The first launch fails."""

    failed = False

    def reduce(self, memory: Tensor, bucket: Bucket) -> PendingReduce:
        if not self.failed:
            self.failed = True
            raise RuntimeError("once")
        return super().reduce(memory, bucket)


def test_a_bucket_whose_launch_failed_is_launched_again_with_what_was_written() -> None:
    world, _ = _alone([30])
    params, port = world.ranks[0].params, _FailsOnce(world.net, 0)
    plan = ReductionPlan(world.layout, 0, params, [port], [torch.float32], 1.0, whole=False)
    reduction = Reduction(plan, lambda part: part, PhaseTimer(), lambda: None)
    with pytest.raises(RuntimeError, match="once"):
        reduction.arrive(0, torch.full((30,), 3.0), False)
    reduction.launch_missing()
    reduction.finish()
    assert torch.equal(reduction.sums[0], torch.full((30,), 3.0))
