"""Properties of the greedy partition and the even one."""

import dataclasses
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from zerostep.plan.assign import pour
from zerostep.plan.layout import Layout, ParamSpec
from zerostep.plan.partition import plan

patient = settings(deadline=None)

_WORLDS = st.integers(1, 9)
_GROUPS = st.lists(st.lists(st.integers(1, 40), max_size=8), min_size=1, max_size=4)


def _specs(groups: Sequence[Sequence[int]]) -> list[ParamSpec]:
    return [
        ParamSpec(f"{number}.{place}", (size,), "float32", group=number)
        for number, sizes in enumerate(groups)
        for place, size in enumerate(sizes)
    ]


def _owners(layout: Layout) -> list[int]:
    return [layout.owner_of(param) for param in range(len(layout.params))]


def _greedy(groups: Sequence[Sequence[int]], world_size: int) -> tuple[list[int], list[int]]:
    """Group by group, the largest first, each to the rank with the least so far: owners and loads, the slow way."""
    loads, owners = [0] * world_size, []
    for sizes in groups:
        found = [0] * len(sizes)
        for place in sorted(range(len(sizes)), key=lambda place: sizes[place], reverse=True):
            found[place] = loads.index(min(loads))
            loads[found[place]] += sizes[place]
        owners += found
    return owners, loads


def _drip(amount: int, loads: Sequence[int]) -> list[int]:
    """One element at a time to a rank that has least."""
    totals = list(loads)
    for _ in range(amount):
        totals[totals.index(min(totals))] += 1
    return totals


@patient
@given(_GROUPS, _WORLDS)
def test_statement_16_whole_parameters_are_assigned_greedily(groups: list[list[int]], world_size: int) -> None:
    layout = plan(_specs(groups), world_size)
    owners, loads = _greedy(groups, world_size)
    assert _owners(layout) == owners
    assert [layout.load(rank) for rank in range(world_size)] == loads


@patient
@given(_GROUPS, st.lists(st.integers(1, 40), min_size=1, max_size=8), _WORLDS)
def test_statement_27_a_further_group_leaves_earlier_owners(
    groups: list[list[int]], further: list[int], world_size: int
) -> None:
    before = _owners(plan(_specs(groups), world_size))
    after = _owners(plan(_specs([*groups, further]), world_size))
    assert after[: len(before)] == before


@patient
@given(_GROUPS, st.lists(st.integers(1, 40), min_size=1, max_size=8), _WORLDS)
def test_in_order_a_further_group_leaves_earlier_owners_too(
    groups: list[list[int]], further: list[int], world_size: int
) -> None:
    before = _owners(plan(_specs(groups), world_size, in_order=True))
    after = _owners(plan(_specs([*groups, further]), world_size, in_order=True))
    assert after[: len(before)] == before


@patient
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), _WORLDS, st.data())
def test_in_order_every_stretch_is_shared_evenly(sizes: list[int], world_size: int, data: st.DataObject) -> None:
    layout = plan(_specs([sizes]), world_size, in_order=True)
    owners = _owners(layout)
    loads = [layout.load(rank) for rank in range(world_size)]
    assert max(loads) - min(loads) <= max(sizes)
    if 2 * world_size * max(sizes) <= sum(sizes):  # nobody is too large to be taken in order
        start = data.draw(st.integers(0, len(sizes)))
        stop = data.draw(st.integers(start, len(sizes)))
        stretch = [sum(sizes[i] for i in range(start, stop) if owners[i] == rank) for rank in range(world_size)]
        assert max(stretch) - min(stretch) <= 2 * max(sizes)


@patient
@given(_GROUPS, _WORLDS, st.data())
def test_statement_16_owners_do_not_depend_on_what_is_trainable(
    groups: list[list[int]], world_size: int, data: st.DataObject
) -> None:
    specs = _specs(groups)
    mixed = [dataclasses.replace(spec, trainable=data.draw(st.booleans())) for spec in specs]
    assert _owners(plan(mixed, world_size)) == _owners(plan(specs, world_size))


@patient
@given(_GROUPS, _WORLDS, st.data())
def test_owners_do_not_depend_on_dtype_and_device(
    groups: list[list[int]], world_size: int, data: st.DataObject
) -> None:
    specs = _specs(groups)
    kinds = st.sampled_from([("float32", "cpu"), ("float16", "cpu"), ("float32", "cuda:0")])
    mixed = [ParamSpec(spec.name, spec.shape, *data.draw(kinds), group=spec.group) for spec in specs]
    assert _owners(plan(mixed, world_size)) == _owners(plan(specs, world_size))


@patient
@given(_GROUPS, _WORLDS)
def test_owners_do_not_depend_on_splittable_parameters(groups: list[list[int]], world_size: int) -> None:
    specs = _specs(groups)
    loose = [ParamSpec(f"loose.{i}", (7 * i,), "float32", splittable=True) for i in range(3)]
    layout = plan([*specs, *loose], world_size)
    assert [layout.owner_of(param) for param in range(len(specs))] == _greedy(groups, world_size)[0]


@patient
@given(_GROUPS, st.integers(0, 300), _WORLDS)
def test_splittable_elements_level_the_loads(groups: list[list[int]], amount: int, world_size: int) -> None:
    loose = ParamSpec("loose", (amount,), "float32", splittable=True)
    layout = plan([*_specs(groups), loose], world_size)
    expected = _drip(amount, _greedy(groups, world_size)[1])
    assert sorted(layout.load(rank) for rank in range(world_size)) == sorted(expected)


@patient
@given(st.integers(0, 200), st.lists(st.integers(0, 60), min_size=1, max_size=9))
def test_pour_levels_as_dripping_would(amount: int, loads: list[int]) -> None:
    shares = pour(amount, loads)
    assert sum(shares) == amount
    assert min(shares) >= 0
    totals = [load + share for load, share in zip(loads, shares, strict=True)]
    assert sorted(totals) == sorted(_drip(amount, loads))


@patient
@given(_GROUPS, _WORLDS)
def test_a_plan_keeps_the_order_of_the_parameters(groups: list[list[int]], world_size: int) -> None:
    specs = _specs(groups)
    layout = plan(specs, world_size)
    assert list(layout.params) == specs
    assert layout == plan(tuple(specs), world_size)
