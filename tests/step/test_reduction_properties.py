"""Reductions with gradients in any order, alone and on several ranks in threads, against sums of whole tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Condition

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.reference import assert_same_bits
from zerostep.comm.exchange import Exchange, NullExchange, PendingReduce
from zerostep.plan.buckets import Cost, extend, plan_buckets
from zerostep.plan.layout import Bucket, Layout, ParamSpec
from zerostep.step.grad_sums import GradSums
from zerostep.step.labels import PhaseTimer
from zerostep.step.reduction import Reduction, SumSink
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
    """One rank's reduction, and the sums that it keeps."""

    params: list[Tensor]
    reduction: Reduction
    sums: GradSums

    def play(self, arrivals: Sequence[tuple[int, float]]) -> None:
        """One backward pass."""
        self.reduction.begin()
        for index, value in arrivals:
            self.reduction.arrive(index, torch.full_like(self.params[index], value))
        self.reduction.end()

    def play_all(self, value: float) -> None:
        """A pass in which every parameter has the same gradient, the last one first."""
        self.play([(index, value) for index in reversed(range(len(self.params)))])
        self.sums.use(range(len(self.params)))


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
                sums = each.sums.parts.get(number, torch.zeros_like(expected))
                assert torch.equal(sums[: owned.length], expected), (number, rank, sums, expected)


@dataclass(frozen=True)
class Sizes:
    """Buckets of about twenty elements, and a limit: smaller gradients are held until their bucket is launched."""

    bucket_bytes: int = 80
    small: int = 1 << 14


_DEFAULT = Sizes()
# Buckets of one parameter or of several; all gradients are held, some, or none.
_ANY = st.builds(Sizes, st.sampled_from([80, 400, 2000]), st.sampled_from([1 << 14, 10, 0]))


def _world(specs: Sequence[ParamSpec], world_size: int, wanted: Sizes, scale: float = 1.0) -> World:
    costs = [Cost(spec.numel) for spec in specs]
    layout = plan_buckets(specs, world_size, wanted.bucket_bytes, [4] * len(specs), costs)
    net = Net(layout)
    plans = [
        _plan(
            layout,
            rank,
            [nn.Parameter(torch.zeros(spec.shape)) for spec in specs],
            Port(net, rank),
            wanted.small,
            scale,
        )
        for rank in range(world_size)
    ]
    return World(net, [_rank(plan) for plan in plans])


def _plan(
    layout: Layout, rank: int, params: Sequence[Tensor], port: Exchange, small: int = 1 << 14, scale: float = 1.0
) -> ReductionPlan:
    dtypes = [params[bucket.slots[0].param].dtype for bucket in layout.buckets]
    return ReductionPlan(layout, rank, params, [port] * len(dtypes), dtypes, scale, whole=False, small=small)


def _rank(plan: ReductionPlan) -> Rank:
    sums = GradSums(plan)
    return Rank(list(plan.params), Reduction(plan, lambda part: part, PhaseTimer(), sums), sums)


def _specs(sizes: Sequence[int], atomic: Sequence[bool] | None = None) -> list[ParamSpec]:
    whole = [False] * len(sizes) if atomic is None else atomic
    return [
        ParamSpec(f"p{i}", (size,), "float32", splittable=not each)
        for i, (size, each) in enumerate(zip(sizes, whole, strict=True))
    ]


def _alone(sizes: Sequence[int], wanted: Sizes = _DEFAULT) -> tuple[World, Rank]:
    world = _world(_specs(sizes), 1, wanted)
    return world, world.ranks[0]


# One pass, in any order.


@patient
@given(_SIZES, _ANY, st.data())
def test_a_bucket_is_launched_in_layout_order_as_soon_as_it_may_be(
    sizes: list[int], wanted: Sizes, data: st.DataObject
) -> None:
    world, rank = _alone(sizes, wanted)
    rank.reduction.begin()
    arrived = set[int]()
    for index in data.draw(st.permutations(range(len(sizes)))):
        assert not rank.reduction.is_taken(index)
        rank.reduction.arrive(index, torch.full((sizes[index],), 1.0 + index))
        arrived.add(index)
        full = [all(slot.param in arrived for slot in bucket.slots) for bucket in world.layout.buckets]
        assert world.net.launched(0) == list(range([*full, False].index(False)))
        assert world.net.in_flight[0] <= _MOST_IN_FLIGHT
        assert rank.reduction.missing() == sorted(set(range(len(sizes))) - arrived)
        assert {each for each in range(len(sizes)) if rank.reduction.is_taken(each)} == arrived
    assert rank.reduction.trainable_count == len(sizes)
    rank.reduction.end()
    rank.reduction.finish()
    assert (world.net.launched(0), world.net.in_flight) == (list(range(len(world.layout.buckets))), [0])
    world.assert_kept([torch.full((size,), 1.0 + index) for index, size in enumerate(sizes)])


@patient
@given(_SIZES, _ANY, st.data())
def test_what_is_missing_counts_as_zero(sizes: list[int], wanted: Sizes, data: st.DataObject) -> None:
    world, rank = _alone(sizes, wanted)
    fates = [data.draw(st.sampled_from(["came", "missing", "none"])) for _ in sizes]
    rank.reduction.begin()
    for index in data.draw(st.permutations(range(len(sizes)))):
        if fates[index] != "missing":
            rank.reduction.arrive(index, torch.ones(sizes[index]) if fates[index] == "came" else None)
    assert rank.reduction.missing() == [index for index, fate in enumerate(fates) if fate == "missing"]
    rank.reduction.end()
    assert rank.reduction.missing() == [] and all(map(rank.reduction.is_taken, range(len(sizes))))
    rank.reduction.finish()
    world.assert_kept([torch.full((size,), float(fate == "came")) for size, fate in zip(sizes, fates, strict=True)])
    assert world.net.launched(0) == list(range(len(world.layout.buckets)))


class _Diary:
    """Notes what a reduction says about its buckets."""

    def __init__(self) -> None:
        self.calls = list[tuple[str, int]]()
        self.params = dict[int, Collection[int]]()

    def launched(self, bucket: int, params: Collection[int]) -> None:
        self.calls.append(("launched", bucket))
        self.params[bucket] = params

    def memory_for(self, bucket: int) -> Tensor | None:
        return None

    def take(self, bucket: int, part: Tensor) -> None:
        self.calls.append(("take", bucket))


@patient
@given(_SIZES, _ANY, st.data())
def test_the_sink_is_called_in_one_order_whatever_arrives(sizes: list[int], wanted: Sizes, data: st.DataObject) -> None:
    world, rank = _alone(sizes, wanted)
    diary = _Diary()
    sink: SumSink = diary
    plan = _plan(world.layout, 0, rank.params, Port(world.net, 0))
    reduction = Reduction(plan, lambda part: part, PhaseTimer(), sink)
    came = data.draw(st.lists(st.integers(0, len(sizes) - 1), unique=True))
    reduction.begin()
    for index in came:
        reduction.arrive(index, torch.ones(sizes[index]))
    reduction.end()
    reduction.finish()
    count = len(world.layout.buckets)
    assert [bucket for call, bucket in diary.calls if call == "take"] == list(range(count))
    for bucket in range(count):
        # What is in flight when the next bucket is launched is the same on all ranks.
        before = diary.calls[: diary.calls.index(("launched", bucket))]
        assert before.count(("take", bucket - _MOST_IN_FLIGHT)) == int(bucket >= _MOST_IN_FLIGHT)
        assert len(before) == bucket + max(0, bucket + 1 - _MOST_IN_FLIGHT)
        assert set(diary.params[bucket]) == {slot.param for slot in world.layout.buckets[bucket].slots} & set(came)


@patient
@given(_SIZES, _ANY, st.data())
def test_gradients_that_are_only_counted_give_the_sums_of_those_that_are_passed(
    sizes: list[int], wanted: Sizes, data: st.DataObject
) -> None:
    """They are collected when their bucket is launched; some may be gone by then."""
    world, rank = _alone(sizes, wanted)
    kept = {index: torch.full((size,), 1.0 + index) for index, size in enumerate(sizes)}
    plan = _plan(world.layout, 0, rank.params, Port(world.net, 0), wanted.small)
    reduction = Reduction(plan, lambda part: part, PhaseTimer(), rank.sums, lambda those: [kept.get(i) for i in those])
    reduction.begin()
    came = data.draw(st.lists(st.integers(0, len(sizes) - 1), unique=True))
    gone = data.draw(st.sets(st.sampled_from(came))) if came else set()
    for index in came:
        if reduction.count(index):
            assert reduction.is_counted(index) and reduction.is_taken(index) and not reduction.count(index)
            if index in gone:
                del kept[index]
            reduction.launch_full()
        else:
            gone.discard(index)
            reduction.arrive(index, kept[index])
    assert reduction.missing() == sorted(set(range(len(sizes))) - set(came))
    reduction.end()
    reduction.finish()
    assert reduction.written == set(came) - gone
    world.assert_kept([torch.full((size,), (1.0 + i) * (i in reduction.written)) for i, size in enumerate(sizes)])


# Several passes on several ranks.


@dataclass(frozen=True)
class Pass:
    """What happens on all ranks: what is dropped, what is frozen, and each rank's arrivals in an order of its own."""

    dropped: list[int]
    frozen: set[int]
    orders: list[list[tuple[int, float]]]

    @property
    def used(self) -> set[int]:
        """What some rank has used: ranks exchange it at the end of a pass."""
        return {index for order in self.orders for index, _ in order}


@st.composite
def passes(draw: st.DrawFn, count: int, world_size: int) -> Pass:
    dropped = draw(st.just(list(range(count))) | st.lists(st.integers(0, count - 1), max_size=3))
    frozen = set(draw(st.lists(st.integers(0, count - 1), max_size=2)))
    orders = []
    for _ in range(world_size):
        came = [index for index in range(count) if index not in frozen and draw(st.integers(0, 3))]
        orders.append([(index, float(draw(st.integers(-8, 8)))) for index in draw(st.permutations(came))])
    return Pass(dropped, frozen, orders)


def _run(threads: ThreadPoolExecutor, world: World, plan: Pass) -> None:
    if plan.dropped:
        _finish(threads, world)
    for each in world.ranks:
        if plan.dropped:
            each.sums.drop(plan.dropped)
        for index, param in enumerate(each.params):
            param.requires_grad_(index not in plan.frozen)
    pairs = zip(world.ranks, plan.orders, strict=True)
    for done in [threads.submit(each.play, order) for each, order in pairs]:
        done.result()
    for each in world.ranks:
        each.sums.use(plan.used)


def _finish(threads: ThreadPoolExecutor, world: World) -> None:
    for each in [threads.submit(each.reduction.finish) for each in world.ranks]:
        each.result()


def _follow(totals: list[Tensor], plan: Pass) -> None:
    """The model: whole tensors."""
    for index in plan.dropped:
        totals[index].zero_()
    for index, value in (arrival for order in plan.orders for arrival in order):
        totals[index] += value


@settings(patient, max_examples=150, phases=(Phase.explicit, Phase.generate))  # a rank that waits in vain waits long
@given(sizes=_SIZES, wanted=_ANY, world_size=st.integers(1, 4), data=st.data())
def test_passes_add_up_on_every_rank(sizes: list[int], wanted: Sizes, world_size: int, data: st.DataObject) -> None:
    """Whoever misses what, in whatever order; with parameters dropped and frozen in between."""
    world = _world(_specs(sizes, [data.draw(st.booleans()) for _ in sizes]), world_size, wanted)
    totals, used = [torch.zeros(size) for size in sizes], set[int]()
    with ThreadPoolExecutor(world_size) as threads:
        for _ in range(data.draw(st.integers(1, 4))):
            plan = data.draw(passes(len(sizes), world_size))
            _run(threads, world, plan)
            _follow(totals, plan)
            used = (used - set(plan.dropped)) | plan.used
        _finish(threads, world)
    assert all(set(each.sums.used) == used for each in world.ranks)
    world.assert_kept(totals)
    assert all(world.net.launched(rank) == world.net.launched(0) for rank in range(world_size))
    assert max(world.net.most) <= _MOST_IN_FLIGHT


# One thing at a time.


def test_every_pass_launches_every_bucket_once() -> None:
    world, rank = _alone([30, 30])
    for value in (1.0, 2.0, 3.0):
        rank.play_all(value)
    rank.reduction.finish()
    assert world.net.launched(0) == [0, 1] * 3
    world.assert_kept([torch.full((30,), 6.0)] * 2)


def test_a_pass_that_was_given_up_leaves_nothing_in_the_next() -> None:
    """In a bucket that was not launched, that is."""
    world, rank = _alone([3, 4, 5], Sizes(small=5))
    rank.reduction.begin()
    for index, size in ((1, 4), (2, 5)):  # one is held, one is in the bucket already
        rank.reduction.arrive(index, torch.full((size,), 7.0))
    assert world.net.launched(0) == []
    rank.play([(0, 1.0)])
    rank.reduction.finish()
    world.assert_kept([torch.ones(3), torch.zeros(4), torch.zeros(5)])


@pytest.mark.parametrize("small", [0, 5, 1 << 14])
def test_gradients_that_are_held_are_copied_when_their_memory_is_about_to_be_reused(small: int) -> None:
    world, rank = _alone([4, 3, 5], Sizes(small=small))
    rank.reduction.begin()
    for index, size in ((2, 5), (0, 4)):
        gradient = torch.arange(float(size))
        rank.reduction.arrive(index, gradient)
        rank.reduction.copy_held_back()
        gradient.fill_(torch.nan)
    rank.reduction.end()
    rank.reduction.finish()
    world.assert_kept([torch.arange(4.0), torch.zeros(3), torch.arange(5.0)])


def test_a_bucket_s_memory_is_used_again_when_its_sum_is_complete() -> None:
    """As much as is in flight, and one that is being filled."""
    world, rank = _alone([30] * 8)
    rank.play_all(1.0)
    assert len(world.net.places) == 8 and len(set(world.net.places)) <= _MOST_IN_FLIGHT + 1


def test_bytes_are_those_of_buckets_filled_and_in_flight() -> None:
    _, rank = _alone([40, 40, 4], Sizes(small=5))
    assert rank.reduction.nbytes == 0
    rank.reduction.begin()
    rank.reduction.arrive(2, torch.ones(4))
    assert rank.reduction.nbytes == 16  # a gradient that is held
    rank.reduction.arrive(1, torch.ones(40))
    assert rank.reduction.nbytes >= 160
    rank.reduction.end()
    assert rank.reduction.nbytes >= 320
    rank.reduction.finish()
    assert rank.reduction.nbytes == 0


def test_a_bucket_without_trained_parameters_is_not_sent() -> None:
    world, rank = _alone([30, 30, 30])
    rank.params[1].requires_grad_(False)
    rank.play([(2, 1.0), (0, 1.0)])
    assert rank.reduction.trainable_count == 2 and rank.reduction.is_taken(1)
    rank.params[1].requires_grad_(True)
    assert rank.reduction.trainable_count == 2  # a pass goes by what was trainable when it began
    rank.reduction.begin()
    assert rank.reduction.missing() == [0, 1, 2]
    rank.reduction.end()
    assert world.net.launched(0) == [0, 2, 0, 1, 2]


def test_one_bucket_can_be_waited_for() -> None:
    world, rank = _alone([30, 30])
    rank.play_all(1.0)
    for bucket, in_flight in ((0, 1), (0, 1), (1, 0)):
        rank.reduction.finish_bucket(bucket)
        assert (list(rank.sums.parts), world.net.in_flight) == (list(range(bucket + 1)), [in_flight])


def test_a_larger_plan_takes_over_what_is_kept() -> None:
    world, rank = _alone([3, 4])
    rank.play_all(5.0)
    new = ParamSpec("new", (9,), "float32", splittable=True)
    layout = extend(world.layout, plan_buckets([new], 1, 80, [4], [Cost(9)]))
    rank.params.append(nn.Parameter(torch.zeros(9)))
    larger = World(Net(layout), [rank])
    plan = _plan(layout, 0, rank.params, Port(larger.net, 0))
    rank.reduction.extend(plan)
    rank.sums.extend(plan)
    assert (world.net.in_flight, set(rank.sums.used)) == ([0], {0, 1})
    rank.play_all(1.0)
    rank.reduction.finish()
    larger.assert_kept([torch.full((3,), 6.0), torch.full((4,), 6.0), torch.ones(9)])


def test_each_rank_counts_for_its_share() -> None:
    world = _world(_specs([6]), 1, _DEFAULT, scale=0.25)
    world.ranks[0].play_all(8.0)
    world.ranks[0].reduction.finish()
    world.assert_kept([torch.full((6,), 2.0)])


@pytest.mark.parametrize("small", [0, 1 << 14])
def test_the_gradient_itself_is_left_alone(small: int) -> None:
    _, rank = _alone([3], Sizes(small=small))
    gradient = torch.full((3,), 5.0)
    rank.reduction.begin()
    rank.reduction.arrive(0, gradient)
    rank.reduction.finish()
    rank.sums.parts[0].zero_()
    assert torch.equal(gradient, torch.full((3,), 5.0))


_IMAGE = torch.arange(24.0).view(2, 3, 2, 2)


@pytest.mark.parametrize("gradient", [_IMAGE, _IMAGE.to(memory_format=torch.channels_last)], ids=["rows", "channels"])
@pytest.mark.parametrize("channels_last", [True, False], ids=["to channels", "to rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_elements_lie_in_the_order_of_the_parameter_s_memory(
    dtype: torch.dtype, channels_last: bool, gradient: Tensor
) -> None:
    """Whatever the memory of the gradient; and in another dtype where that was asked for."""
    zeros = torch.zeros(2, 3, 2, 2)
    param = nn.Parameter(zeros.to(memory_format=torch.channels_last) if channels_last else zeros)
    layout = plan_buckets([ParamSpec("p", (2, 3, 2, 2), "float32", splittable=True)], 1, 80, [4], [Cost(1)])
    rank = _rank(ReductionPlan(layout, 0, [param], [NullExchange()], [dtype], 0.5, whole=False))
    rank.reduction.begin()
    rank.reduction.arrive(0, gradient)
    rank.reduction.finish()
    assert rank.sums.parts[0].dtype == dtype
    in_memory = gradient.permute(0, 2, 3, 1) if channels_last else gradient
    assert torch.equal(rank.sums.parts[0], in_memory.reshape(-1).to(dtype) / 2)


def test_a_sparse_gradient_is_made_dense() -> None:
    world, rank = _alone([5])
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[1, 3, 1]]), torch.tensor([1.0, 2.0, 4.0]), (5,), check_invariants=True
    )
    rank.reduction.begin()
    rank.reduction.arrive(0, gradient)
    rank.reduction.finish()
    world.assert_kept([torch.tensor([0.0, 5.0, 0.0, 2.0, 0.0])])


def test_what_is_kept_is_summed_over_the_replicas() -> None:
    world, rank = _alone([30, 4])
    plan, seen = _plan(world.layout, 0, rank.params, Port(world.net, 0)), list[int]()

    def sum_replicas(part: Tensor) -> Tensor:
        seen.append(part.numel())
        return part * 3

    each = Rank(rank.params, Reduction(plan, sum_replicas, PhaseTimer(), rank.sums), rank.sums)
    each.play_all(1.0)
    each.reduction.finish()
    world.assert_kept([torch.full((30,), 3.0), torch.full((4,), 3.0)])
    assert len(seen) == len(world.layout.buckets)


def test_whole_sums_are_the_gathered_bucket() -> None:
    """The parts of other owners come with a gather; here one owner has all."""
    layout = plan_buckets(_specs([30, 30]), 1, 80, [4] * 2, [Cost(30)] * 2)
    params = [nn.Parameter(torch.zeros(30)) for _ in range(2)]
    rank = _rank(ReductionPlan(layout, 0, params, [NullExchange()] * 2, [torch.float32] * 2, 1.0, whole=True))
    for value in (1.0, 2.0):
        rank.play_all(value)
    rank.reduction.finish()
    assert [part.tolist() for part in rank.sums.parts.values()] == [[3.0] * 30] * 2


class _FailsOnce(Port):
    """The first launch fails."""

    failed = False

    def reduce(self, memory: Tensor, bucket: Bucket) -> PendingReduce:
        if not self.failed:
            self.failed = True
            raise RuntimeError("once")
        return super().reduce(memory, bucket)


@pytest.mark.parametrize("small", [0, 1 << 14])
def test_a_bucket_whose_launch_failed_is_launched_again_with_what_was_written(small: int) -> None:
    world, rank = _alone([30, 30])
    again = _rank(_plan(world.layout, 0, rank.params, _FailsOnce(world.net, 0), small))
    again.reduction.begin()
    first = world.layout.buckets[0].slots[0].param
    with pytest.raises(RuntimeError, match="once"):
        again.reduction.arrive(first, torch.full((30,), 3.0))
    assert again.reduction.missing() == [1 - first] and again.reduction.is_taken(first)
    again.reduction.arrive(1 - first, torch.full((30,), 4.0))
    again.reduction.end()
    again.reduction.finish()
    assert world.net.launched(0) == [0, 1]
    assert torch.equal(again.sums.parts[0], torch.full((30,), 3.0))
    assert torch.equal(again.sums.parts[1], torch.full((30,), 4.0))
