"""The types of a layout: spans, slots, buckets, fragments, and JSON both ways."""

import dataclasses
import json
from typing import Any

import pytest

from zerostep.plan.layout import Bucket, Fragment, Layout, ParamSpec, Slot, Span


def _spec(name: str, *shape: int, splittable: bool = False, **more: Any) -> ParamSpec:
    return ParamSpec(name, shape, "float32", splittable=splittable, **more)


def _bucket(sizes: list[int], cuts: tuple[int, ...], **more: Any) -> Bucket:
    ends = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    slots = tuple(Slot(param, Span(ends[param], ends[param + 1])) for param in range(len(sizes)))
    return Bucket(**{"dtype": "float32", "device": "cpu", "trainable": True, "slots": slots, "cuts": cuts, **more})


def _drawn() -> Layout:
    """The drawing at the top of the module."""
    params = (_spec("w1", 2, 4), _spec("w2", 12, splittable=True), _spec("b1", 6), _spec("w3", 8))
    return Layout(3, params, (_bucket([8, 12, 6, 8], (0, 13, 26, 34)),))


def test_a_span_counts_shifts_and_intersects() -> None:
    span = Span(3, 8)
    assert span.length == 5
    assert span.shift(-3) == Span(0, 5)
    assert span.intersect(Span(0, 4)) == Span(3, 4)
    assert span.intersect(Span(4, 6)) == Span(4, 6)


@pytest.mark.parametrize("other", [Span(0, 3), Span(8, 9), Span(20, 30), Span(5, 5)])
def test_spans_that_do_not_meet_have_an_empty_intersection(other: Span) -> None:
    assert Span(3, 8).intersect(other).length == 0
    assert other.intersect(Span(3, 8)).length == 0


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (-2, -1)])
def test_a_span_that_is_no_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"0 <= start <= stop, got {start} and {stop}"):
        Span(start, stop)


def test_a_shift_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="0 <= start"):
        Span(2, 4).shift(-3)


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((0, 5), 0), ((2, 3, 4), 24)])
def test_a_spec_counts_its_elements(shape: tuple[int, ...], numel: int) -> None:
    assert _spec("w", *shape).numel == numel


def test_what_a_layout_consists_of_is_frozen() -> None:
    layout = _drawn()
    for part in (layout, layout.buckets[0], layout.buckets[0].slots[0], layout.params[0], Span(0, 1)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, None)


def test_the_drawing() -> None:
    layout = _drawn()
    assert layout.fragments_of(1) == (
        Fragment(1, rank=0, bucket=0, part=Span(0, 5), place=Span(8, 13)),
        Fragment(1, rank=1, bucket=0, part=Span(5, 12), place=Span(13, 20)),
    )
    assert [layout.load(rank) for rank in range(3)] == [13, 13, 8]
    assert [[each.param for each in layout.fragments(rank)] for rank in range(3)] == [[0, 1], [1, 2], [3]]
    assert layout.place_of(2) == (0, Span(20, 26))
    assert layout.index_of("w3") == 3


def test_the_owner_of_a_whole_parameter() -> None:
    layout = _drawn()
    assert [layout.owner_of(param) for param in (0, 2, 3)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"'w2' is divided among ranks \[0, 1\]"):
        layout.owner_of(1)


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="w9"):
        _drawn().index_of("w9")


@pytest.mark.parametrize(
    ("span", "ranks"),
    [
        (Span(0, 1), [0]),
        (Span(3, 4), [0]),
        (Span(3, 5), [0, 2]),
        (Span(4, 5), [2]),
        (Span(0, 9), [0, 2, 4]),
        (Span(8, 9), [4]),
    ],
)
def test_the_ranks_of_a_span_leave_out_those_with_nothing(span: Span, ranks: list[int]) -> None:
    bucket = _bucket([9], (0, 4, 4, 8, 8, 9, 9))
    assert [rank for rank in bucket.ranks_of(Slot(0, span)) if bucket.owned(rank).intersect(span).length] == ranks


@pytest.mark.parametrize("keeper", range(6))
def test_an_empty_slot_belongs_to_its_keeper(keeper: int) -> None:
    bucket = _bucket([9], (0, 4, 4, 8, 8, 9, 9))
    assert list(bucket.ranks_of(Slot(0, Span(4, 4), keeper))) == [keeper]


def test_empty_parameters_have_one_owner_each() -> None:
    specs = (_spec("a", 0), _spec("b", 3), _spec("c", 0), _spec("d", 2), _spec("e", 0))
    plain = _bucket([0, 3, 0, 2, 0], (0, 3, 3, 5))
    slots = [dataclasses.replace(slot, keeper={0: 2, 2: 1, 4: 0}.get(slot.param, 0)) for slot in plain.slots]
    layout = Layout(3, specs, (dataclasses.replace(plain, slots=tuple(slots)),))
    assert [layout.owner_of(param) for param in range(5)] == [2, 0, 1, 2, 0]
    assert [[each.param for each in layout.fragments(rank)] for rank in range(3)] == [[1, 4], [2], [0, 3]]
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": (Slot(0, Span(1, 3)),)}, "slots must tile a bucket: one ends at 0, the next starts at 1"),
        ({"slots": (Slot(0, Span(0, 2)), Slot(1, Span(1, 3)))}, "one ends at 2, the next starts at 1"),
        ({"cuts": (0,)}, "cuts must run from 0 to the bucket's 3 elements"),
        ({"cuts": ()}, "cuts must run from 0"),
        ({"cuts": (1, 3)}, "cuts must run from 0"),
        ({"cuts": (0, 2)}, "cuts must run from 0"),
        ({"cuts": (0, 4)}, "cuts must run from 0"),
        ({"cuts": (0, 2, 1, 3)}, "cuts must not decrease"),
    ],
)
def test_a_bucket_that_does_not_add_up_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _bucket([3], **{"cuts": (0, 3), **changes})


def _layout(*specs: ParamSpec, sizes: list[int], cuts: tuple[int, ...], world_size: int = 2, **more: Any) -> Layout:
    return Layout(world_size, specs, (_bucket(sizes, cuts, **more),))


def test_a_parameter_without_a_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="every one of the 2 parameters needs exactly one slot"):
        _layout(_spec("a", 3), _spec("b", 2), sizes=[3], cuts=(0, 3, 3))


def test_a_slot_without_a_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="every one of the 1 parameters needs exactly one slot"):
        _layout(_spec("a", 3), sizes=[3, 2], cuts=(0, 3, 5))


def test_a_parameter_with_two_slots_is_refused() -> None:
    bucket = _bucket([3], (0, 3, 3))
    with pytest.raises(ValueError, match="exactly one slot"):
        Layout(2, (_spec("a", 3),), (bucket, bucket))


def test_the_wrong_number_of_cuts_is_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks need 4 cuts, got 3"):
        _layout(_spec("a", 3), sizes=[3], cuts=(0, 3, 3), world_size=3)


def test_a_slot_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' has 4 elements, its slot 3"):
        _layout(_spec("a", 4), sizes=[3], cuts=(0, 3, 3))


@pytest.mark.parametrize("changes", [{"dtype": "float16"}, {"device": "cuda:0"}, {"trainable": False}])
def test_a_parameter_in_a_bucket_of_another_kind_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'a' is not of its bucket's dtype, device and trainability"):
        _layout(_spec("a", 3), sizes=[3], cuts=(0, 3, 3), **changes)


def test_a_cut_may_fall_inside_a_splittable_parameter_only() -> None:
    assert _layout(_spec("a", 3, splittable=True), sizes=[3], cuts=(0, 1, 3)).load(1) == 2
    with pytest.raises(ValueError, match="a cut falls inside the atomic parameter 'a'"):
        _layout(_spec("a", 3), sizes=[3], cuts=(0, 1, 3))


def test_json_keeps_everything() -> None:
    layout = _drawn()
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.to_json() == layout.to_json()
    assert again.digest() == layout.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"name": "x"},
        {"shape": (4, 2)},
        {"group": 1},
        {"splittable": True},
    ],
)
def test_the_digest_sees_every_difference(change: dict[str, Any]) -> None:
    layout = _drawn()
    params = (dataclasses.replace(layout.params[0], **change), *layout.params[1:])
    assert dataclasses.replace(layout, params=params).digest() != layout.digest()


def test_the_digest_sees_the_cuts() -> None:
    layout = _drawn()
    bucket = dataclasses.replace(layout.buckets[0], cuts=(0, 14, 26, 34))
    assert dataclasses.replace(layout, buckets=(bucket,)).digest() != layout.digest()


@pytest.mark.parametrize("text", ["", "{", "null", "7", "[]", "{}", '{"world_size": 1}', "[" * 100_000, "\x00"])
def test_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Layout.from_json(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("world_size",), float("inf")),
        (("world_size",), 3.5),
        (("world_size",), "3"),
        (("world_size",), 4),
        (("params", 0, 0), 7),
        (("params", 0, 1), [-2, -4]),
        (("params", 0, 1), [2.0, 4]),
        (("params", 0, 1), "ab"),
        (("params", 0, 2), None),
        (("params", 0, 4), "first"),
        (("params", 0, 5), "no"),
        (("params", 0), ["w1"]),
        (("params", 0), ["w1", [8], "float32"]),
        (("buckets", 0, "params"), [0, 1, 2, -1]),
        (("buckets", 0, "params"), [False, 1, 2, 3]),
        (("buckets", 0, "params"), [0, 1, 2, 9]),
        (("buckets", 0, "cuts"), [0, 13, 26, 34.0]),
        (("buckets", 0, "cuts"), 34),
        (("buckets", 0), None),
        (("buckets",), {"0": 1}),
    ],
)
def test_a_layout_with_a_wrong_entry_is_refused(path: tuple[Any, ...], value: Any) -> None:
    found = json.loads(_drawn().to_json())
    *parents, last = path
    place = found
    for key in parents:
        place = place[key]
    place[last] = value
    with pytest.raises(ValueError):
        Layout.from_json(json.dumps(found))
