"""Properties of `fill` and `extend` for any parameters, world size and bucket size."""

import dataclasses
from collections import defaultdict
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.layouts import (
    BUCKET_BYTES,
    ITEMSIZES,
    LONG,
    STATE_BYTES,
    WORLD_SIZES,
    fill_layout,
    layouts,
    spec_lists,
)
from zerostep.plan.buckets import Cost, extend, padded_size, plan_buckets
from zerostep.plan.layout import Layout, ParamSpec

patient = settings(deadline=None)


def _bytes(spec: ParamSpec) -> int:
    return spec.numel * ITEMSIZES[spec.dtype]


def _odd(spec: ParamSpec) -> bool:
    return _bytes(spec) % 16 != 0


def _kinds(layout: Layout, bucket_bytes: int) -> list[list[list[int]]]:
    """The members of the buckets of each kind, as backward fills them."""
    costly = {spec.group for spec in layout.params if spec.numel}
    found: defaultdict[tuple[object, ...], list[list[int]]] = defaultdict(list)
    for bucket in layout.buckets:
        members = sorted((slot.param for slot in bucket.slots), reverse=True)
        kinds = {
            (
                *(spec.dtype, spec.device, spec.trainable, spec.splittable),
                *(64 * _bytes(spec) < bucket_bytes, spec.splittable and spec.group in costly),
                not spec.splittable and _odd(spec),
            )
            for spec in (layout.params[index] for index in members)
        }
        assert len(kinds) == 1, "a bucket of several kinds"
        found[kinds.pop()].append(members)
    return list(found.values())


@patient
@given(layouts)
def test_slots_tile_every_parameter_once(layout: Layout) -> None:
    slots = [slot for bucket in layout.buckets for slot in bucket.slots]
    assert sorted(slot.param for slot in slots) == list(range(len(layout.params)))
    for bucket in layout.buckets:
        ends = [0, *(slot.span.stop for slot in bucket.slots)]
        assert [slot.span.start for slot in bucket.slots] == ends[:-1]
        assert [slot.span.length for slot in bucket.slots] == [layout.params[s.param].numel for s in bucket.slots]


@patient
@given(layouts)
def test_cuts_never_decrease_and_never_fall_into_an_atomic_parameter(layout: Layout) -> None:
    for bucket in layout.buckets:
        assert len(bucket.cuts) == layout.world_size + 1
        assert (bucket.cuts[0], bucket.cuts[-1]) == (0, bucket.slots[-1].span.stop)
        assert all(low <= high for low, high in pairwise(bucket.cuts))
        for slot in bucket.slots:
            if not layout.params[slot.param].splittable:
                assert not any(slot.span.start < cut < slot.span.stop for cut in bucket.cuts)


@patient
@given(layouts)
def test_a_bucket_holds_one_kind(layout: Layout) -> None:
    for bucket in layout.buckets:
        specs = [layout.params[slot.param] for slot in bucket.slots]
        assert {(s.dtype, s.device, s.trainable) for s in specs} == {(bucket.dtype, bucket.device, bucket.trainable)}
        assert len({spec.splittable for spec in specs}) == 1


@patient
@given(layouts)
def test_buckets_come_as_their_gradients_do_and_frozen_ones_last(layout: Layout) -> None:
    keys = [(not bucket.trainable, -min(slot.param for slot in bucket.slots)) for bucket in layout.buckets]
    assert keys == sorted(keys)


@patient
@given(spec_lists(), WORLD_SIZES, BUCKET_BYTES)
def test_buckets_are_full_but_not_too_full(specs: list[ParamSpec], world_size: int, bucket_bytes: int) -> None:
    sizes = [_bytes(spec) for spec in specs]
    for buckets in _kinds(fill_layout(specs, world_size, bucket_bytes), bucket_bytes):
        filled = [sum(sizes[index] for index in members) for members in buckets]
        if sum(filled) <= bucket_bytes:
            assert len(buckets) == 1
            continue
        # Small ones at the end, with as much as there is room for.
        rooms = [bucket_bytes] * (len(buckets) - 2) + [bucket_bytes // 2, bucket_bytes // 4][-len(buckets) :]
        for members, size, room in zip(buckets, filled, rooms, strict=True):
            assert size <= room or len(members) == 1
        for place, (before, after) in enumerate(pairwise(buckets)):
            if place >= len(buckets) - 3:
                assert filled[place + 1] + sizes[before[-1]] > rooms[place + 1]
            else:
                assert filled[place] >= 0.75 * bucket_bytes or filled[place] + sizes[after[0]] > bucket_bytes
        for members, size in zip(buckets[:-2], filled, strict=False):
            assert size - sizes[members[-1]] < 0.75 * bucket_bytes


@patient
@given(spec_lists(), WORLD_SIZES, BUCKET_BYTES, st.integers(1, 400))
def test_only_a_kind_with_too_few_bytes_has_too_small_a_bucket(
    specs: list[ParamSpec], world_size: int, bucket_bytes: int, least_bytes: int
) -> None:
    layout = fill_layout(specs, world_size, bucket_bytes, least_bytes)
    rated = {spec.group for spec in specs if spec.numel}
    buckets: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for bucket in layout.buckets:
        first = layout.params[bucket.slots[0].param]
        odd = not first.splittable and _odd(first)
        kind = first.dtype, first.device, first.trainable, first.splittable, first.group in rated, odd
        buckets[kind].append(sum(_bytes(layout.params[slot.param]) for slot in bucket.slots))
    assert all(len(sizes) == 1 or min(sizes) >= least_bytes for sizes in buckets.values())


@patient
@given(layouts)
def test_every_group_is_one_stretch_of_a_bucket_s_part(layout: Layout) -> None:
    """So that a rank has one leaf for each group and bucket; those of odd sizes come again behind all groups."""
    for number, bucket in enumerate(layout.buckets):
        if not layout.params[bucket.slots[0].param].splittable:
            continue
        for rank in range(layout.world_size):
            owned = [layout.params[f.param] for f in layout.fragments_in(number, rank) if f.part.length]
            groups = [(_odd(spec), spec.group) for spec in owned]
            assert groups == sorted(groups)


@patient
@given(layouts)
def test_only_odd_sizes_lie_where_fast_kernels_do_not_like_them(layout: Layout) -> None:
    for bucket in layout.buckets:
        for slot in bucket.slots:
            spec = layout.params[slot.param]
            assert _odd(spec) or slot.span.start * ITEMSIZES[spec.dtype] % 16 == 0


@patient
@given(st.lists(st.integers(0, 200_000), max_size=8), WORLD_SIZES, BUCKET_BYTES, st.data())
def test_any_subset_of_splittable_buckets_is_shared_evenly(
    sizes: list[int], world_size: int, bucket_bytes: int, data: st.DataObject
) -> None:
    """Whatever part of the model is trained: one element more than the average for each bucket, or 64 if it is long."""
    specs = [ParamSpec(f"p{i}", (size,), "float32", splittable=True) for i, size in enumerate(sizes)]
    layout = fill_layout(specs, world_size, bucket_bytes)
    chosen = [bucket for bucket in layout.buckets if data.draw(st.booleans())]
    slack = sum(64 if bucket.size >= (LONG - 1) * world_size else 1 for bucket in chosen)
    total = sum(bucket.size for bucket in chosen)
    for rank in range(world_size):
        load = sum(bucket.owned(rank).length for bucket in chosen)
        assert load <= total / world_size + slack
        assert load >= total / world_size - slack * world_size


@patient
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=8), WORLD_SIZES)
def test_long_parts_start_where_vectors_do(sizes: list[int], world_size: int) -> None:
    specs = [ParamSpec(f"p{i}", (size,), "float32", splittable=True) for i, size in enumerate(sizes)]
    for bucket in fill_layout(specs, world_size).buckets:
        if bucket.size >= LONG * world_size:
            assert all(cut % 64 == 0 or cut == bucket.size for cut in bucket.cuts)


@patient
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.booleans()), min_size=1, max_size=20), WORLD_SIZES)
def test_whole_parameters_are_balanced_by_state_and_work(costs: list[tuple[int, int, bool]], world_size: int) -> None:
    """The bound of every list schedule: the average and the largest, for trained parameters by themselves too."""
    specs = [ParamSpec(f"p{i}", (1,), "float32", trainable=trained) for i, (_, _, trained) in enumerate(costs)]
    layout = plan_buckets(specs, world_size, 1 << 20, [4] * len(specs), [Cost(state, work) for state, work, _ in costs])
    state, work = (sum(cost[i] for cost in costs) or 1 for i in range(2))
    weights = [cost[0] / state + cost[1] / work for cost in costs]
    for chosen in ([trained for _, _, trained in costs], [True] * len(costs)):
        loads = [0.0] * world_size
        for param, weight in enumerate(weights):
            loads[layout.owner_of(param)] += weight * chosen[param]
        most = max((weight for weight, use in zip(weights, chosen, strict=True) if use), default=0.0)
        assert max(loads) <= sum(loads) / world_size + most * (1 - 1 / world_size) + 1e-9


@patient
@given(spec_lists(2000), WORLD_SIZES)
def test_splittable_parameters_level_the_bytes_of_whole_ones(specs: list[ParamSpec], world_size: int) -> None:
    trained = [dataclasses.replace(spec, trainable=True) for spec in specs]
    layout = fill_layout(trained, world_size)
    loads, fixed = [0] * world_size, [0] * world_size
    for rank in range(world_size):
        for fragment in layout.fragments(rank):
            loads[rank] += STATE_BYTES * fragment.part.length
            if not layout.params[fragment.param].splittable:
                fixed[rank] += STATE_BYTES * fragment.part.length
    # One element for each bucket is lost to rounding.
    slack = STATE_BYTES * (len(layout.buckets) + 1)
    assert max(loads) <= max(max(fixed), sum(loads) / world_size) + slack


@patient
@given(layouts)
def test_padded_parts_are_the_parts(layout: Layout) -> None:
    for bucket in layout.buckets:
        size = padded_size(bucket)
        assert size >= bucket.size
        if size != bucket.size:
            assert size % layout.world_size == 0
            part = size // layout.world_size
            for rank in range(layout.world_size):
                start = rank * part
                assert bucket.owned(rank).length == max(0, min(part, bucket.size - start))
                assert not bucket.owned(rank).length or bucket.owned(rank).start == start


@patient
@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=5), WORLD_SIZES)
def test_buckets_of_splittable_parameters_alone_can_always_be_padded(sizes: list[int], world_size: int) -> None:
    specs = [ParamSpec(f"p{i}", (size,), "float32", splittable=True) for i, size in enumerate(sizes)]
    for bucket in fill_layout(specs, world_size).buckets:
        assert padded_size(bucket) % world_size == 0


@patient
@given(spec_lists(), spec_lists(), WORLD_SIZES, BUCKET_BYTES)
def test_further_parameters_leave_the_others_where_they_are(
    first: list[ParamSpec], further: list[ParamSpec], world_size: int, bucket_bytes: int
) -> None:
    before, behind = fill_layout(first, world_size, bucket_bytes), fill_layout(further, world_size, bucket_bytes)
    both = extend(before, behind)
    assert both.params == (*first, *further)
    assert both.buckets[: len(before.buckets)] == before.buckets
    shift = len(first)
    for param in range(len(first)):
        assert both.fragments_of(param) == before.fragments_of(param)
    for param in range(len(further)):
        here, there = both.fragments_of(shift + param), behind.fragments_of(param)
        assert [(f.rank, f.part, f.place) for f in here] == [(f.rank, f.part, f.place) for f in there]


@patient
@given(layouts)
def test_json_there_and_back_is_the_identity(layout: Layout) -> None:
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.digest() == layout.digest()


@patient
@given(spec_lists(), WORLD_SIZES, BUCKET_BYTES)
def test_equal_specs_give_equal_layouts(specs: list[ParamSpec], world_size: int, bucket_bytes: int) -> None:
    assert fill_layout(specs, world_size, bucket_bytes) == fill_layout(list(specs), world_size, bucket_bytes)
