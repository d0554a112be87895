"""Buckets in the order of backward: concrete cases, and shapes of real models."""

import time

import pytest

from zerostep.plan.buckets import Cost, extend, padded_size, plan_buckets
from zerostep.plan.layout import Bucket, Layout, ParamSpec, Slot, Span


def _loose(*sizes: int, group: int = 0, dtype: str = "float32", trainable: bool = True) -> list[ParamSpec]:
    return [
        ParamSpec(f"{group}.{place}", (size,), dtype, group=group, splittable=True, trainable=trainable)
        for place, size in enumerate(sizes)
    ]


def _atomic(*sizes: int) -> list[ParamSpec]:
    return [ParamSpec(f"atomic.{place}", (size,), "float32") for place, size in enumerate(sizes)]


def _fill(specs: list[ParamSpec], world_size: int, bucket_bytes: int = 1 << 30, per_element: int = 8) -> Layout:
    """Every element costs the same state."""
    costs = [Cost(per_element * spec.numel) for spec in specs]
    return plan_buckets(specs, world_size, bucket_bytes, [4] * len(specs), costs)


def _members(layout: Layout) -> list[list[int]]:
    return [[slot.param for slot in bucket.slots] for bucket in layout.buckets]


def _loads(layout: Layout) -> list[int]:
    return [layout.load(rank) for rank in range(layout.world_size)]


def test_the_last_parameters_come_first() -> None:
    assert _members(_fill(_loose(*[3] * 8), 2, bucket_bytes=24)) == [[6, 7], [4, 5], [2, 3], [1], [0]]
    assert _members(_fill(_loose(*[3] * 8), 2, bucket_bytes=96)) == [[*range(8)]]


def test_the_last_buckets_are_small() -> None:
    """A quarter for the parameters that come last, and half for those before."""
    assert _members(_fill(_loose(*[4] * 12), 2, bucket_bytes=128)) == [[6, 7, 8, 9, 10, 11], [2, 3, 4, 5], [0, 1]]
    assert _members(_fill(_loose(16, 4, 8, 16, 4), 2, bucket_bytes=128)) == [[3, 4], [1, 2], [0]]


def test_a_bucket_that_is_almost_full_is_closed() -> None:
    assert _members(_fill(_loose(*[4] * 14), 2, bucket_bytes=128))[0] == [8, 9, 10, 11, 12, 13]
    assert _members(_fill(_loose(*[4] * 13, 3), 2, bucket_bytes=128))[0] == [7, 8, 9, 10, 11, 12, 13]


def test_small_parameters_have_buckets_of_their_own() -> None:
    """Those that a bucket could hold more than 64 of."""
    specs = _loose(64, 4, 64, 4, 64)
    assert _members(_fill(specs, 2, bucket_bytes=1024)) == [[0, 1, 2, 3, 4]]
    assert _members(_fill(specs, 2, bucket_bytes=1025)) == [[1, 3], [0, 2, 4]]


def test_parameters_of_odd_sizes_lie_behind_the_others() -> None:
    specs = [*_loose(3, 4, group=1), *_loose(5, 8, 4), *_loose(4, group=1)]
    assert _members(_fill(specs, 2)) == [[3, 4, 1, 5, 2, 0]]


def test_whole_parameters_of_odd_sizes_have_buckets_of_their_own() -> None:
    assert _members(_fill(_atomic(3, 4, 5, 8), 1)) == [[1, 3], [0, 2]]


def test_what_is_odd_is_a_matter_of_bytes() -> None:
    specs = _loose(4, 8, dtype="bfloat16")
    assert _members(plan_buckets(specs, 1, 64, [2, 2], [Cost(8), Cost(16)])) == [[1, 0]]
    assert _members(plan_buckets(specs, 1, 64, [4, 4], [Cost(8), Cost(16)])) == [[0, 1]]


def test_a_parameter_that_does_not_fit_opens_a_bucket() -> None:
    assert _members(_fill(_loose(1, 9, 1, 1), 2, bucket_bytes=16)) == [[2, 3], [1], [0]]


def test_a_bucket_comes_as_early_as_its_earliest_parameter_allows() -> None:
    """The first kind is complete when parameter 0 is, the second already with parameter 1."""
    specs = [*_loose(2), *_loose(2, dtype="bfloat16"), *_loose(2)]
    assert _members(_fill(specs, 1)) == [[1], [0, 2]]


def test_frozen_parameters_come_last_in_buckets_of_their_own() -> None:
    specs = [*_loose(2), *_loose(2, 2, trainable=False), *_loose(2)]
    assert _members(_fill(specs, 2)) == [[0, 3], [1, 2]]


def test_splittable_and_atomic_parameters_do_not_share_a_bucket() -> None:
    specs = [*_loose(2), *_atomic(2), *_loose(2)]
    assert _members(_fill(specs, 2)) == [[1], [0, 2]]


def test_members_of_one_group_are_neighbours() -> None:
    specs = [*_loose(2, group=1), *_loose(2, group=0), *_loose(2, group=1), *_loose(2, group=0)]
    assert _members(_fill(specs, 2)) == [[1, 3, 0, 2]]


def test_atomic_parameters_lie_in_the_order_of_their_owners() -> None:
    (bucket,) = _fill(_atomic(3, 10, 3, 10, 1), 2).buckets
    assert [slot.param for slot in bucket.slots] == [0, 1, 4, 2, 3]
    assert bucket.cuts == (0, 14, 27)


@pytest.mark.parametrize(
    ("size", "world_size", "cuts"),
    [
        (7, 3, (0, 3, 6, 7)),
        (2, 4, (0, 1, 2, 2, 2)),
        (0, 2, (0, 0, 0)),
        (32_767, 2, (0, 16_384, 32_767)),
        (32_770, 2, (0, 16_448, 32_770)),
        (40_000, 4, (0, 10_000, 20_000, 30_000, 40_000)),
    ],
)
def test_even_parts_are_aligned_where_they_are_long(size: int, world_size: int, cuts: tuple[int, ...]) -> None:
    (bucket,) = _fill(_loose(size), world_size).buckets
    assert bucket.cuts == cuts


def test_splittable_parameters_level_the_state_of_atomic_ones() -> None:
    layout = _fill([*_atomic(100, 40), *_loose(160)], 3)
    assert _loads(layout) == [100, 100, 100]


def test_state_counts_and_not_elements() -> None:
    """Rank 0 has an atomic parameter with much state, so the splittable elements go to rank 1."""
    specs = [*_atomic(10), *_loose(10)]
    layout = plan_buckets(specs, 2, 1 << 20, [4, 4], [Cost(state=80), Cost(state=80)])
    assert layout.buckets[0].cuts == (0, 0, 10)
    layout = plan_buckets(specs, 2, 1 << 20, [4, 4], [Cost(state=0), Cost(state=80)])
    assert layout.buckets[0].cuts == (0, 5, 10)


def test_work_counts_beside_state() -> None:
    costs = [Cost(1, work=90), Cost(1, work=10), Cost(1, work=10), Cost(1, work=10)]
    layout = plan_buckets(_atomic(1, 1, 1, 1), 2, 1 << 20, [4] * 4, costs)
    assert [layout.owner_of(param) for param in range(4)] == [0, 1, 1, 1]


def test_frozen_parameters_do_not_disturb_the_balance_of_trained_ones() -> None:
    frozen = [ParamSpec(f"frozen.{i}", (100,), "float32", trainable=False) for i in range(3)]
    layout = _fill([*frozen, *_atomic(5, 5)], 2)
    assert [layout.owner_of(3), layout.owner_of(4)] == [0, 1]


@pytest.mark.parametrize(("world_size", "bucket_bytes"), [(0, 4), (-1, 4), (2, 0)])
def test_no_ranks_or_no_room_are_refused(world_size: int, bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"got {world_size} and {bucket_bytes}"):
        _fill(_loose(3), world_size, bucket_bytes)


def test_no_parameters_are_no_buckets() -> None:
    assert _fill([], 3) == Layout(3, (), ())


def _bucket(*cuts: int) -> Bucket:
    return Bucket("float32", "cpu", True, (Slot(0, Span(0, cuts[-1])),), cuts)


@pytest.mark.parametrize(
    ("cuts", "size"),
    [
        ((0, 3, 6, 7), 9),
        ((0, 3, 6, 9), 9),
        ((0, 1, 2, 2, 2), 4),
        ((0, 7), 7),
        ((0, 0, 0), 0),
        ((0, 2, 6, 7), 7),
        ((0, 0, 4), 4),
        ((0, 3, 4, 7), 7),
        ((0, 7, 7, 7), 7),  # one whole parameter of the first rank
    ],
)
def test_memory_is_padded_only_where_all_parts_can_be_equally_long(cuts: tuple[int, ...], size: int) -> None:
    assert padded_size(_bucket(*cuts)) == size


def test_further_parameters_leave_the_others_where_they_are() -> None:
    first, further = _fill(_loose(5, 6), 2), _fill(_atomic(3, 4), 2)
    both = extend(first, further)
    assert both.buckets[: len(first.buckets)] == first.buckets
    assert both.params == first.params + further.params
    assert [both.owner_of(param + 2) for param in range(2)] == [further.owner_of(param) for param in range(2)]


# A transformer, one parameter that holds 80 % of all elements, and a thousand small ones.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "transformer": [(50_257, 768), (1024, 768), *[(768, 2304), (2304,), (768, 768), (768,), (768, 3072)] * 12],
    "lopsided": [*[(256, 256)] * 30, (1024, 7680), *[(256,)] * 30],
    "small": [(60,)] * 30_000,
}


@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_state_is_level_within_two_percent(name: str, world_size: int) -> None:
    specs = [ParamSpec(f"p{i}", shape, "float32", splittable=True) for i, shape in enumerate(SHAPES[name])]
    loads = _loads(_fill(specs, world_size, bucket_bytes=5 << 20))
    assert max(loads) <= 1.02 * sum(loads) / world_size


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_state_is_level_within_two_percent_beside_matrices_that_stay_whole(world_size: int) -> None:
    """As with Muon for the matrices: half the state of the others, and work that counts."""
    specs = [
        ParamSpec(f"p{i}", shape, "float32", splittable=len(shape) == 1 or shape[0] > 768, group=int(len(shape) == 1))
        for i, shape in enumerate(SHAPES["transformer"])
    ]
    costs = [
        Cost(8 * spec.numel) if spec.splittable else Cost(4 * spec.numel, spec.numel * min(spec.shape))
        for spec in specs
    ]
    layout = plan_buckets(specs, world_size, 5 << 20, [4] * len(specs), costs)
    assert max(_states(layout, costs)) <= 1.02 * sum(cost.state for cost in costs) / world_size


def test_state_is_level_where_groups_cost_differently() -> None:
    """SGD without momentum beside AdamW: neighbours in a bucket, but not alike in bytes."""
    specs = [*_loose(*[1000] * 8, group=0), *_loose(*[1000] * 8, group=1)]
    costs = [Cost(8 * spec.numel * spec.group) for spec in specs]
    layout = plan_buckets(specs, 2, 1 << 20, [4] * 16, costs)
    assert max(_states(layout, costs)) <= 1.02 * sum(cost.state for cost in costs) / 2


def _states(layout: Layout, costs: list[Cost]) -> list[float]:
    return [
        sum(costs[f.param].state * f.part.length / layout.params[f.param].numel for f in layout.fragments(rank))
        for rank in range(layout.world_size)
    ]


def test_a_hundred_thousand_parameters_on_thousands_of_ranks() -> None:
    specs = [
        ParamSpec(f"p{i}", (64, 1 + i % 97), "float32", splittable=i % 10 != 0, group=i % 3) for i in range(100_000)
    ]
    start = time.perf_counter()
    layout = _fill(specs, 4096, bucket_bytes=25 << 20)
    print(f"100,000 parameters on 4,096 ranks: {time.perf_counter() - start:.2f} s, {len(layout.buckets)} buckets")
    loads = _loads(layout)
    assert sum(loads) == sum(spec.numel for spec in specs)
    assert max(loads) <= 1.02 * sum(loads) / 4096 + 64 * 97


@pytest.mark.parametrize(
    ("sizes", "least", "members"),
    [
        ([1, 30, 30, 30, 40], 0, [[4], [3], [2], [1], [0]]),
        ([1, 30, 30, 30, 40], 8, [[4], [3], [2], [0, 1]]),  # the last one goes with that before it
        ([1, 30, 1, 30, 40], 8, [[4], [3], [0, 1, 2]]),  # biases go with the last weights
        ([1, 1, 1], 100, [[0, 1, 2]]),
        ([40, 40, 40], 1000, [[0, 1, 2]]),  # all are too small
    ],
)
def test_buckets_that_are_too_small_join_others(sizes: list[int], least: int, members: list[list[int]]) -> None:
    specs = [ParamSpec(f"p{index}", (size,), "float32", splittable=True) for index, size in enumerate(sizes)]
    layout = plan_buckets(specs, 2, 4 * 40, [4] * len(sizes), [Cost(1)] * len(sizes), least_bytes=4 * least)
    assert [sorted(slot.param for slot in bucket.slots) for bucket in layout.buckets] == members


def test_small_buckets_of_other_kinds_stay_alone() -> None:
    specs = [ParamSpec("a", (4,), "float32", splittable=True), ParamSpec("b", (4,), "bfloat16", splittable=True)]
    assert len(plan_buckets(specs, 2, 400, [4, 2], [Cost(1)] * 2, least_bytes=100).buckets) == 2
