"""Properties of layouts for any parameters and world size."""

import dataclasses
import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zerostep.plan.layout import Layout, ParamSpec, Span
from zerostep.plan.partition import plan

patient = settings(deadline=None)

_DTYPES = st.sampled_from(["float32", "bfloat16"])
_DEVICES = st.sampled_from(["cpu:0", "cuda:0", "cuda:1"])
_SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
_WORLDS = st.integers(1, 9)


@st.composite
def spec_lists(draw: st.DrawFn) -> list[ParamSpec]:
    """Parameters of all kinds: atomic and splittable, several dtypes, devices and groups, frozen and empty ones."""
    groups = sorted(draw(st.lists(st.integers(0, 2), max_size=12)))
    return [
        ParamSpec(
            name=f"p{place}",
            shape=draw(_SHAPES),
            dtype=draw(_DTYPES),
            device=draw(_DEVICES),
            group=group,
            splittable=draw(st.booleans()),
            trainable=draw(st.booleans()),
        )
        for place, group in enumerate(groups)
    ]


layouts = st.builds(plan, spec_lists(), _WORLDS)


def _total(layout: Layout) -> int:
    return sum(spec.numel for spec in layout.params)


@patient
@given(layouts)
def test_slots_tile_every_parameter_once(layout: Layout) -> None:
    slots = [slot for bucket in layout.buckets for slot in bucket.slots]
    assert sorted(slot.param for slot in slots) == list(range(len(layout.params)))
    assert all(slot.span.length == layout.params[slot.param].numel for slot in slots)
    for bucket in layout.buckets:
        edges = [0, *(slot.span.stop for slot in bucket.slots)]
        assert [slot.span.start for slot in bucket.slots] == edges[:-1]
        assert edges[-1] == bucket.size


@patient
@given(layouts)
def test_cuts_never_decrease_and_cover_the_bucket(layout: Layout) -> None:
    for bucket in layout.buckets:
        assert len(bucket.cuts) == layout.world_size + 1
        assert (bucket.cuts[0], bucket.cuts[-1]) == (0, sum(slot.span.length for slot in bucket.slots))
        assert all(low <= high for low, high in pairwise(bucket.cuts))


@patient
@given(layouts)
def test_the_fragments_of_all_ranks_are_disjoint_and_complete(layout: Layout) -> None:
    owners: list[list[int]] = [[0] * spec.numel for spec in layout.params]
    for rank in range(layout.world_size):
        for fragment in layout.fragments(rank):
            assert fragment.rank == rank
            assert fragment.part.length == fragment.place.length
            for element in range(fragment.part.start, fragment.part.stop):
                owners[fragment.param][element] += 1
    assert all(count == 1 for counts in owners for count in counts)


@patient
@given(layouts)
def test_fragments_are_the_same_by_rank_and_by_parameter(layout: Layout) -> None:
    by_rank = {fragment for rank in range(layout.world_size) for fragment in layout.fragments(rank)}
    by_param = {fragment for param in range(len(layout.params)) for fragment in layout.fragments_of(param)}
    filled = {fragment for fragment in by_param if fragment.part.length}
    assert {fragment for fragment in by_rank if fragment.part.length} == filled
    empty = {param for param, spec in enumerate(layout.params) if not spec.numel}
    assert {fragment for fragment in by_rank if fragment.param in empty} == {
        fragment for fragment in by_param if fragment.param in empty
    }


@patient
@given(layouts)
def test_a_fragment_lies_where_its_parameter_does(layout: Layout) -> None:
    for rank in range(layout.world_size):
        for fragment in layout.fragments(rank):
            bucket, span = layout.place_of(fragment.param)
            assert fragment.bucket == bucket
            assert fragment.part.shift(span.start) == fragment.place
            assert fragment.place.intersect(layout.buckets[bucket].owned(rank)) == fragment.place


@patient
@given(layouts)
def test_a_rank_s_fragments_come_in_address_order(layout: Layout) -> None:
    for rank in range(layout.world_size):
        places = [(each.bucket, each.place.start, each.place.stop) for each in layout.fragments(rank)]
        assert places == sorted(places)


@patient
@given(layouts)
def test_no_cut_falls_inside_an_atomic_parameter(layout: Layout) -> None:
    for bucket in layout.buckets:
        for slot in bucket.slots:
            if not layout.params[slot.param].splittable:
                assert not any(slot.span.start < cut < slot.span.stop for cut in bucket.cuts)


@patient
@given(layouts)
def test_every_whole_parameter_has_one_owner(layout: Layout) -> None:
    for param, spec in enumerate(layout.params):
        if not spec.splittable or not spec.numel:
            (fragment,) = layout.fragments_of(param)
            assert layout.owner_of(param) == fragment.rank
            assert fragment.part == Span(0, spec.numel)


@patient
@given(layouts)
def test_the_load_is_at_most_the_average_and_the_largest_atomic_parameter(layout: Layout) -> None:
    loads = [layout.load(rank) for rank in range(layout.world_size)]
    largest = max((spec.numel for spec in layout.params if not spec.splittable), default=0)
    assert sum(loads) == _total(layout)
    assert max(loads) <= math.ceil(_total(layout) / layout.world_size) + largest


@patient
@given(spec_lists(), _WORLDS)
def test_the_load_is_level_where_everything_may_be_split(specs: list[ParamSpec], world_size: int) -> None:
    layout = plan([dataclasses.replace(spec, splittable=True) for spec in specs], world_size)
    loads = [layout.load(rank) for rank in range(world_size)]
    assert max(loads) - min(loads) <= 1


@patient
@given(layouts)
def test_a_bucket_holds_one_kind_of_parameter(layout: Layout) -> None:
    for bucket in layout.buckets:
        kinds = {(spec.dtype, spec.device, spec.trainable) for spec in (layout.params[s.param] for s in bucket.slots)}
        assert kinds == {(bucket.dtype, bucket.device, bucket.trainable)}


@patient
@given(layouts)
def test_json_there_and_back_is_the_identity(layout: Layout) -> None:
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.digest() == layout.digest()


@patient
@given(layouts, layouts)
def test_digests_are_equal_exactly_where_layouts_are(one: Layout, other: Layout) -> None:
    assert (one.digest() == other.digest()) == (one == other)


@patient
@given(layouts, st.data())
def test_a_cut_moved_into_an_atomic_parameter_is_refused(layout: Layout, data: st.DataObject) -> None:
    targets = [
        (number, cut, slot.span)
        for number, bucket in enumerate(layout.buckets)
        for cut in range(1, layout.world_size)
        for slot in bucket.slots
        if not layout.params[slot.param].splittable and slot.span.length > 1
    ]
    assume(targets)
    number, cut, span = data.draw(st.sampled_from(targets))
    inside = data.draw(st.integers(span.start + 1, span.stop - 1))
    bucket = layout.buckets[number]
    cuts = [*(min(c, inside) for c in bucket.cuts[:cut]), inside, *(max(c, inside) for c in bucket.cuts[cut + 1 :])]
    moved = dataclasses.replace(bucket, cuts=tuple(cuts))
    with pytest.raises(ValueError, match="a cut falls inside the atomic parameter"):
        dataclasses.replace(layout, buckets=(*layout.buckets[:number], moved, *layout.buckets[number + 1 :]))


@patient
@given(layouts, st.data())
def test_a_bucket_left_out_or_given_twice_is_refused(layout: Layout, data: st.DataObject) -> None:
    assume(layout.buckets)
    number = data.draw(st.integers(0, len(layout.buckets) - 1))
    for buckets in (
        layout.buckets[:number] + layout.buckets[number + 1 :],
        (*layout.buckets, layout.buckets[number]),
    ):
        with pytest.raises(ValueError, match="exactly one slot"):
            dataclasses.replace(layout, buckets=buckets)


@patient
@given(layouts, _WORLDS)
def test_a_layout_for_another_number_of_ranks_is_refused(layout: Layout, world_size: int) -> None:
    assume(layout.buckets and world_size != layout.world_size)
    with pytest.raises(ValueError, match=f"{world_size} ranks need {world_size + 1} cuts"):
        dataclasses.replace(layout, world_size=world_size)


_WRONG: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 99),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-2, 9), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every entry of a JSON value, as its container and its key there."""
    if not isinstance(value, (dict, list)):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


@settings(patient, max_examples=300)
@given(layouts, st.data())
def test_text_with_a_wrong_entry_is_refused_or_read_as_it_stands(layout: Layout, data: st.DataObject) -> None:
    found = json.loads(layout.to_json())
    container, key = data.draw(st.sampled_from(_places(found)))
    container[key] = data.draw(_WRONG)
    text = json.dumps(found, separators=(",", ":"))
    try:
        again = Layout.from_json(text)
    except ValueError:
        return
    assert again.to_json() == text


@patient
@given(st.text())
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Layout.from_json(text)
