"""Leaves: which fragments share one, and what happens to state when one is split."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from zerostep.memory.leaf import Leaf, clone_scalars, cut_leaves, split, view_state
from zerostep.plan.buckets import Cost, plan_buckets
from zerostep.plan.layout import Layout, ParamSpec, Span
from zerostep.step.inner_optimizers import InnerOptimizers


def _layout(specs: list[ParamSpec], world_size: int) -> Layout:
    return plan_buckets(specs, world_size, 1 << 20, [4] * len(specs), [Cost(spec.numel) for spec in specs])


def _loose(*sizes: int, group: int = 0) -> list[ParamSpec]:
    return [ParamSpec(f"{group}.{i}", (size,), "float32", group=group, splittable=True) for i, size in enumerate(sizes)]


def _leaves(specs: list[ParamSpec], world_size: int = 1, rank: int = 0, bucket: int = 0) -> tuple[list[Leaf], Tensor]:
    layout = _layout(specs, world_size)
    shard = torch.arange(float(layout.buckets[bucket].owned(rank).length))
    return cut_leaves(layout, rank, bucket, shard, [torch.zeros(spec.shape) for spec in specs]), shard


def test_neighbours_of_one_group_are_one_leaf() -> None:
    (leaf,), shard = _leaves(_loose(4, 8, 3))
    assert (leaf.params, leaf.span, leaf.group) == ([0, 1, 2], Span(0, 15), 0)
    assert torch.equal(leaf.tensor.detach(), shard) and leaf.tensor.data_ptr() == shard.data_ptr()


def test_every_group_has_a_leaf_of_its_own() -> None:
    leaves, _ = _leaves([*_loose(4, 8), *_loose(12, group=1), *_loose(2, group=2)])
    assert [(leaf.params, leaf.group) for leaf in leaves] == [([0, 1], 0), ([2], 1), ([3], 2)]


def test_odd_sizes_of_a_group_are_a_leaf_behind_the_other_groups() -> None:
    leaves, _ = _leaves([*_loose(3, 4, 5), *_loose(6, 8, group=1)])
    assert [(leaf.params, leaf.group) for leaf in leaves] == [([1], 0), ([4], 1), ([0, 2], 0), ([3], 1)]


def test_a_cut_parameter_is_in_the_leaves_of_two_ranks() -> None:
    (first,), _ = _leaves(_loose(3, 5), world_size=2, rank=0)
    (second,), _ = _leaves(_loose(3, 5), world_size=2, rank=1)
    assert [f.part for f in first.fragments] == [Span(0, 3), Span(0, 1)]
    assert [f.part for f in second.fragments] == [Span(1, 5)]
    assert (first.span, second.span) == (Span(0, 4), Span(0, 4))


def test_a_whole_parameter_has_its_own_shape() -> None:
    specs = [ParamSpec(str(shape), shape, "float32") for shape in [(2, 4), (4,), (0, 3)]]
    leaves, shard = _leaves(specs)
    assert sorted(tuple(leaf.tensor.shape) for leaf in leaves) == [(0, 3), (2, 4), (4,)]
    matrix = next(leaf for leaf in leaves if leaf.tensor.dim() == 2 and leaf.tensor.numel())
    assert torch.equal(matrix.tensor.detach(), matrix.view(shard))
    for leaf in leaves:
        assert leaf.view(shard).shape == leaf.tensor.shape


def test_a_whole_parameter_may_have_no_dimension() -> None:
    (leaf,), shard = _leaves([ParamSpec("p", (), "float32")])
    assert leaf.tensor.shape == leaf.view(shard).shape == ()


def test_a_whole_parameter_has_its_own_order_of_memory() -> None:
    like = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    layout = _layout([ParamSpec("p", (2, 3, 2, 2), "float32")], 1)
    shard = torch.arange(24.0)
    (leaf,) = cut_leaves(layout, 0, 0, shard, [like])
    assert leaf.tensor.stride() == like.stride() == leaf.view(shard).stride()
    assert torch.equal(leaf.tensor.detach().permute(0, 2, 3, 1).reshape(-1), shard)


def test_a_splittable_parameter_without_elements_has_a_leaf_of_its_own() -> None:
    specs = [*_loose(4, 8), ParamSpec("empty", (0, 3), "float32", splittable=True)]
    leaves, shard = _leaves(specs, world_size=2, rank=0)
    assert [leaf.params for leaf in leaves] == [[0, 1], [2]]
    assert leaves[1].tensor.shape == leaves[1].view(shard).shape == (0, 3)
    assert [leaf.params for leaf in _leaves(specs, world_size=2, rank=1)[0]] == [[1]]


def test_a_rank_without_a_part_has_no_leaves() -> None:
    assert _leaves(_loose(1), world_size=2, rank=1)[0] == []


def test_a_view_is_the_leaf_s_part_of_any_memory() -> None:
    (first, second), _ = _leaves([*_loose(4), *_loose(3, group=1)])
    memory = torch.arange(10.0, 17.0)
    assert first.view(memory).tolist() == [10, 11, 12, 13] and second.view(memory).tolist() == [14, 15, 16]


def test_the_parts_of_a_leaf_share_its_memory() -> None:
    (leaf,), shard = _leaves(_loose(4, 3, 5))
    parts = split(leaf)
    assert [(part.params, part.span) for part in parts] == [([0], Span(0, 4)), ([1], Span(4, 7)), ([2], Span(7, 12))]
    for part in parts:
        part.tensor.data.fill_(part.params[0])
    assert shard.tolist() == [0] * 4 + [1] * 3 + [2] * 5


def test_the_parts_of_a_leaf_that_begins_inside_a_parameter() -> None:
    leaves, shard = _leaves([*_loose(4), *_loose(12, 8, group=1)], world_size=2, rank=1)
    (leaf,) = leaves
    assert leaf.params == [1, 2] and leaf.fragments[0].part.start > 0
    assert torch.cat([part.tensor.detach() for part in split(leaf)]).equal(shard)


def _step(tensor: nn.Parameter, value: float) -> None:
    tensor.grad = torch.full_like(tensor, value)


def test_a_split_keeps_the_state() -> None:
    """A leaf that goes on in parts does what the whole would have done."""
    found = []
    for apart in (False, True):
        (leaf,), shard = _leaves(_loose(3, 4, 5))
        inners = InnerOptimizers([{"params": []}], [[leaf.tensor]], optim.AdamW, {"lr": 0.1})
        _step(leaf.tensor, 1.0)
        inners.begin().step([(leaf.group, leaf.tensor)])
        leaves = [leaf]
        if apart:
            leaves = split(leaf)
            inners.replace(leaf, leaves)
            assert inners.state(leaf) is None
        for each in leaves:
            _step(each.tensor, -0.5)
        inners.begin().step((each.group, each.tensor) for each in leaves)
        found.append(shard)
    assert torch.equal(found[0], found[1])


def test_after_a_split_counters_go_separate_ways() -> None:
    (leaf,), _ = _leaves(_loose(3, 4))
    inners = InnerOptimizers([{"params": []}], [[leaf.tensor]], optim.Adam, {"lr": 0.1})
    _step(leaf.tensor, 1.0)
    inners.begin().step([(leaf.group, leaf.tensor)])
    parts = split(leaf)
    inners.replace(leaf, parts)
    _step(parts[0].tensor, 1.0)
    inners.begin().step([(parts[0].group, parts[0].tensor)])
    states = [inners.state(part) for part in parts]
    assert [state["step"].item() for state in states if state is not None] == [2.0, 1.0]


def test_the_state_of_a_fragment_is_a_view() -> None:
    (leaf,), _ = _leaves(_loose(4, 3))
    entry: dict[str, Any] = {"average": torch.arange(7.0), "step": torch.tensor(2.0), "note": "x"}
    part = view_state(entry, leaf, leaf.fragments[1])
    assert part["average"].tolist() == [4, 5, 6] and part["step"] is entry["step"] and part["note"] == "x"
    part["average"].zero_()
    assert entry["average"].tolist() == [0, 1, 2, 3, 0, 0, 0]


def test_only_scalars_are_copied() -> None:
    entry: dict[str, Any] = {"step": torch.tensor(1.0), "average": torch.ones(1), "note": 3}
    copy = clone_scalars(entry)
    assert copy["step"] is not entry["step"] and torch.equal(copy["step"], entry["step"])
    assert copy["average"] is entry["average"] and copy["note"] == 3


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_leaves_can_be_told_apart(rank: int) -> None:
    """Two leaves with equal fields are still two."""
    (one,), _ = _leaves(_loose(9), world_size=3, rank=rank)
    (other,), _ = _leaves(_loose(9), world_size=3, rank=rank)
    assert one != other and one in [other, one]
