"""The greedy partition and the even one, on concrete cases."""

import time

import pytest

from zerostep.plan.assign import pour
from zerostep.plan.layout import Layout, ParamSpec, Span
from zerostep.plan.partition import plan


def _atomic(*sizes: int, group: int = 0) -> list[ParamSpec]:
    return [ParamSpec(f"{group}.{place}", (size,), "float32", group=group) for place, size in enumerate(sizes)]


def _loose(*sizes: int) -> list[ParamSpec]:
    return [ParamSpec(f"loose.{place}", (size,), "float32", splittable=True) for place, size in enumerate(sizes)]


def _owners(layout: Layout) -> list[int]:
    return [layout.owner_of(param) for param in range(len(layout.params))]


@pytest.mark.parametrize(
    ("sizes", "world_size", "owners"),
    [
        ([3, 10, 3, 10, 1], 2, [0, 0, 1, 1, 0]),
        ([3, 10, 3, 10, 1], 3, [2, 0, 2, 1, 2]),
        ([4, 4, 4, 4, 4], 2, [0, 1, 0, 1, 0]),
        ([5], 4, [0]),
        ([1, 2, 3], 1, [0, 0, 0]),
    ],
)
def test_statement_16_whole_parameters_go_to_the_least_loaded_rank(
    sizes: list[int], world_size: int, owners: list[int]
) -> None:
    assert _owners(plan(_atomic(*sizes), world_size)) == owners


def test_statement_16_the_largest_parameters_go_first_within_a_group_only() -> None:
    assert _owners(plan([*_atomic(1), *_atomic(9, 2, group=1)], 2)) == [0, 1, 0]


def test_statement_16_loads_are_equal_where_sizes_divide_evenly() -> None:
    layout = plan(_atomic(*[6] * 12), 4)
    assert [layout.load(rank) for rank in range(4)] == [18] * 4


def test_parameters_of_one_owner_stand_in_the_order_of_assignment() -> None:
    (bucket,) = plan(_atomic(3, 10, 3, 10, 1), 2).buckets
    assert [slot.param for slot in bucket.slots] == [1, 0, 4, 3, 2]
    assert bucket.cuts == (0, 14, 27)


def test_elements_are_cut_evenly() -> None:
    (bucket,) = plan(_loose(7, 0, 4), 4).buckets
    assert [slot.param for slot in bucket.slots] == [0, 1, 2]
    assert bucket.cuts == (0, 3, 6, 9, 11)


def test_elements_level_what_whole_parameters_left_uneven() -> None:
    layout = plan([*_atomic(10, 4), *_loose(9)], 3)
    assert [layout.load(rank) for rank in range(3)] == [10, 7, 6]


def test_more_ranks_than_elements() -> None:
    layout = plan([*_atomic(1), *_loose(2)], 5)
    assert [layout.load(rank) for rank in range(5)] == [1, 1, 1, 0, 0]


def test_every_kind_has_a_bucket_of_its_own() -> None:
    kinds = [("float32", "cpu", True), ("float16", "cpu", True), ("float32", "cuda:0", True), ("float32", "cpu", False)]
    specs = [
        ParamSpec(f"{kind}.{splittable}", (4,), kind[0], kind[1], splittable=splittable, trainable=kind[2])
        for splittable in (False, True)
        for kind in kinds
    ]
    found = [(bucket.dtype, bucket.device, bucket.trainable) for bucket in plan(specs, 2).buckets]
    assert found == kinds + kinds


def test_no_parameters_are_no_buckets() -> None:
    assert plan([], 3) == Layout(3, (), ())


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_ranks_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"at least one rank, got {world_size}"):
        plan(_atomic(1), world_size)


@pytest.mark.parametrize(
    ("amount", "loads", "shares"),
    [
        (0, [3, 1], [0, 0]),
        (2, [3, 1], [0, 2]),
        (3, [3, 1], [1, 2]),
        (7, [0, 0, 0], [3, 2, 2]),
        (1, [5, 5], [1, 0]),
        (4, [9, 0, 1], [0, 3, 1]),
    ],
)
def test_pour(amount: int, loads: list[int], shares: list[int]) -> None:
    assert pour(amount, loads) == shares


def test_a_plan_for_thousands_of_ranks_takes_seconds() -> None:
    specs = [ParamSpec(f"p{i}", (1 + i % 97, 8), "float32", splittable=i % 3 == 0) for i in range(100_000)]
    start = time.process_time()
    layout = plan(specs, 4096)
    seconds = time.process_time() - start
    print(f"100,000 parameters planned for 4,096 ranks in {seconds:.2f} s")
    assert sum(layout.load(rank) for rank in range(4096)) == sum(spec.numel for spec in specs)
    assert seconds < 6


def test_a_layout_for_thousands_of_ranks_is_looked_up() -> None:
    layout = plan(_loose(10**9), 4096)
    bucket, span = layout.place_of(0)
    assert (bucket, span) == (0, Span(0, 10**9))
    assert [each.rank for each in layout.fragments_of(0)] == list(range(4096))
