"""Exports and conversions of any checkpoint give the same bytes in every layout."""

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.synthetic_checkpoint import Made, bits, flat
from zerostep import consolidate
from zerostep.checkpoint import stored_tensor as stored
from zerostep.checkpoint.directory import read_manifest
from zerostep.checkpoint.reshard import reshard
from zerostep.plan.buckets import Cost, plan_buckets
from zerostep.plan.layout import Bucket, Layout, ParamSpec, Slot, Span
from zerostep.plan.partition import divide, plan

DTYPES = ["float32", "bfloat16", "complex64", "uint16"]

specs = st.builds(
    ParamSpec,
    name=st.just(""),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    splittable=st.booleans(),
    trainable=st.booleans(),
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Of either planner, or with whole and divided parameters in one bucket."""
    found = [
        ParamSpec(f"p{n}", s.shape, s.dtype, s.device, 0, s.splittable, s.trainable)
        for n, s in enumerate(draw(st.lists(specs, min_size=1, max_size=6)))
    ]
    world = draw(st.integers(1, 4))
    way = draw(st.sampled_from(["plan", "fill", "mixed"]))
    if way == "plan":
        return plan(found, world)
    if way == "fill":
        sizes = [getattr(torch, spec.dtype).itemsize for spec in found]
        return plan_buckets(found, world, 32, sizes, [Cost(spec.numel * 8) for spec in found])
    return _mixed(found, world)


def _mixed(found: list[ParamSpec], world: int) -> Layout:
    """One bucket, of one kind, all of which the last rank owns."""
    same = [ParamSpec(spec.name, spec.shape, "float32", splittable=spec.splittable) for spec in found]
    slots, end = [], 0
    for number, spec in enumerate(same):
        slots.append(Slot(number, Span(end, end + spec.numel), 0 if spec.numel else world - 1))
        end += spec.numel
    cuts = (*[0] * world, end)
    return Layout(world, tuple(same), (Bucket("float32", "cpu", True, tuple(slots), cuts),))


@given(layouts(), st.integers(1, 6))
def test_division(layout: Layout, world: int) -> None:
    """Nothing atomic is cut, divided buckets are even, and no rank has much more of the whole ones than another."""
    found = divide(layout, world)  # a Layout checks that all is there once, and that nothing atomic is cut
    assert (found.world_size, found.params) == (world, layout.params)
    whole = [0] * world
    for bucket in found.buckets:
        sizes = [stop - start for start, stop in pairwise(bucket.cuts)]
        if layout.params[bucket.slots[0].param].splittable:
            assert max(sizes) - min(sizes) <= 1
        else:
            whole = [load + size for load, size in zip(whole, sizes, strict=True)]
    largest = max((spec.numel for spec in layout.params if not spec.splittable), default=0)
    assert max(whole) - min(whole) <= largest


@st.composite
def checkpoints(draw: st.DrawFn) -> Made:
    """With state of several dtypes and of no tensors, tied weights, buffers, and another order of memory."""
    layout = draw(layouts())
    numbers = range(len(layout.params))
    with_state = [number for number in numbers if draw(st.booleans())]
    like = {
        n: {"avg": _state(layout, n, torch.float32, 1), "master": _state(layout, n, torch.float64, 2)}
        for n in with_state
    }
    rest: dict[int, dict[str, Any]] = {
        n: {"step": torch.tensor(float(n)), "factors": [flat(n, torch.float32, 3), (None, n)]} for n in with_state
    }
    weights = {n: _state(layout, n, getattr(torch, layout.params[n].dtype), 4) for n in numbers}
    owner = layout.world_size - 1
    model: list[tuple[Any, ...]] = [(f"w{n}", "param", n) for n in numbers]
    model += [("tied", "same", "w0"), ("table", "buffer", owner, 40), ("extra", "value", {"a": torch.ones(2)})]
    turned = [number for number in numbers if draw(st.booleans()) and _turned(layout.params[number])]
    orders = {number: _turned(layout.params[number]) for number in turned}
    buffers = {40: (owner, flat(6, torch.int16, 5).view(2, 3))}
    return Made(layout, like, rest, {"memory": flat(5, torch.float32, 6)}, weights, buffers, model, orders=orders)


def _state(layout: Layout, number: int, dtype: torch.dtype, seed: int) -> Tensor:
    return flat(layout.params[number].numel, dtype, seed + 10 * number)


def _turned(spec: ParamSpec) -> tuple[int, ...]:
    return tuple(dim for dim in reversed(range(len(spec.shape))) if spec.shape[dim] > 1) if spec.numel > 1 else ()


def _shaped(made: Made, number: int, elements: Tensor) -> Tensor:
    """What elements in the order of memory look like: written one by one, in the slowest way."""
    shape = made.layout.params[number].shape
    order = made.orders.get(number, tuple(dim for dim, size in enumerate(shape) if size > 1))
    if not elements.numel():
        return elements.reshape(shape)
    turned = elements.reshape([shape[dim] for dim in order])
    return turned.permute([order.index(dim) for dim in sorted(order)]).reshape(shape)


def _assert_same(found: Tensor, wanted: Tensor) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert bits(found) == bits(wanted)


@given(checkpoints(), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_export_and_conversion(made: Made, world: int) -> None:
    """The exports have what went in; those of the converted checkpoint are the same files, byte for byte."""
    with tempfile.TemporaryDirectory() as place, patch.object(stored, "_CHUNK", 24):
        root = Path(place)
        reshard(made.write(root / "old"), root / "new", world)
        for name in ("old", "new"):
            consolidate(root / name, root / f"{name}.pt", masters=True)
            consolidate(root / name, root / f"{name}-model.pt", part="model")
        assert (root / "old.pt").read_bytes() == (root / "new.pt").read_bytes()
        assert (root / "old-model.pt").read_bytes() == (root / "new-model.pt").read_bytes()
        _check_optimizer(made, torch.load(root / "new.pt", weights_only=True))
        _check_model(made, torch.load(root / "new-model.pt", weights_only=True))
        _check_manifest(root, world)


def _check_optimizer(made: Made, found: dict[str, Any]) -> None:
    state = found["state"]
    assert list(state) == [*sorted(made.like), "memory"]
    _assert_same(state["memory"], made.others["memory"])
    for number, like in made.like.items():
        assert list(state[number]) == ["step", "factors", "avg", "master"]
        for key, value in like.items():
            _assert_same(state[number][key], _shaped(made, number, value))
        assert state[number]["factors"][1] == (None, number)
        _assert_same(state[number]["factors"][0], made.rest[number]["factors"][0])
        _assert_same(state[number]["step"], made.rest[number]["step"])


def _check_model(made: Made, found: dict[str, Any]) -> None:
    assert list(found) == [entry[0] for entry in made.model or ()]
    for number, weight in made.weights.items():
        _assert_same(found[f"w{number}"], _shaped(made, number, weight))
    assert found["tied"].data_ptr() == found["w0"].data_ptr()
    _assert_same(found["table"], made.buffers[40][1])
    assert found["extra"]["a"].tolist() == [1.0, 1.0]


def _check_manifest(root: Path, world: int) -> None:
    old, new = read_manifest(root / "old"), read_manifest(root / "new")
    assert (new.step, new.groups, new.extra, new.named, new.params) == (
        old.step, old.groups, old.extra, old.named, old.params,
    )  # fmt: skip
    assert new.id != old.id
    assert new.created > old.created
    assert [record.layout for record in new.layouts] == [divide(old.layouts[0].layout, world)]
    regions = [[record.region(at) for at in range(len(old.params))] for record in (*old.layouts, *new.layouts)]
    assert regions[0] == regions[1]
    assert [entry[:2] for entry in new.model or ()] == [entry[:2] for entry in old.model or ()]
