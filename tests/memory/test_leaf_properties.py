"""Properties of leaves and shards for any layout."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.layouts import layouts
from zerostep.memory.leaf import Leaf, split
from zerostep.memory.shard import Shard
from zerostep.plan.layout import Layout, Span
from zerostep.tensors import flat_alias

patient = settings(deadline=None)


def _params(layout: Layout) -> list[Tensor]:
    """Every element has a number of its own."""
    found, count = list[Tensor](), 0
    for spec in layout.params:
        found.append(nn.Parameter(torch.arange(count, count + spec.numel, dtype=torch.float32).view(spec.shape)))
        count += spec.numel
    return found


def _shards(layout: Layout, rank: int, params: list[Tensor]) -> list[Shard]:
    return [Shard(layout, rank, bucket, params, None) for bucket in range(len(layout.buckets))]


def _tile(leaves: list[Leaf], length: int) -> None:
    filled = sorted((leaf.span for leaf in leaves if leaf.span.length), key=lambda span: span.start)
    assert [span.start for span in filled] == [0, *(span.stop for span in filled)][: len(filled)]
    assert (filled[-1].stop if filled else 0) == length


@patient
@given(layouts, st.data())
def test_leaves_tile_what_is_owned_and_share_its_memory(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    params = _params(layout)
    expected = [param.detach().clone() for param in params]
    for number, shard in enumerate(_shards(layout, rank, params)):
        _tile(shard.leaves, layout.buckets[number].owned(rank).length)
        for leaf in shard.leaves:
            assert torch.equal(leaf.tensor.detach(), leaf.view(shard.owned))
            leaf.tensor.data.add_(0.5)
    for index, param in enumerate(params):
        mine = torch.zeros(param.numel(), dtype=torch.bool)
        for fragment in layout.fragments_of(index):
            mine[fragment.part.start : fragment.part.stop] = fragment.rank == rank
        assert torch.equal(flat_alias(param), flat_alias(expected[index]) + 0.5 * mine)


@patient
@given(layouts)
def test_every_fragment_is_in_one_leaf_of_its_own_group(layout: Layout) -> None:
    for rank in range(layout.world_size):
        shards = _shards(layout, rank, _params(layout))
        leaves = [leaf for shard in shards for leaf in shard.leaves]
        found = [fragment for leaf in leaves for fragment in leaf.fragments]
        assert sorted(found, key=lambda f: f.param) == sorted(layout.fragments(rank), key=lambda f: f.param)
        for leaf in leaves:
            assert {layout.params[index].group for index in leaf.params} == {leaf.group}
            first = layout.params[leaf.params[0]]
            whole = not (first.splittable and first.numel)
            assert not whole or (len(leaf.fragments) == 1 and leaf.tensor.shape == first.shape)


@patient
@given(layouts)
def test_neighbours_of_one_group_are_one_leaf(layout: Layout) -> None:
    """Two leaves of a group at most, one for odd sizes, and one more for each parameter without elements."""
    for rank in range(layout.world_size):
        for shard in _shards(layout, rank, _params(layout)):
            loose = [leaf for leaf in shard.leaves if layout.params[leaf.params[0]].splittable]
            empty = sum(not leaf.span.length for leaf in loose)
            for group in {leaf.group for leaf in loose}:
                assert sum(leaf.group == group and leaf.span.length > 0 for leaf in loose) <= 2 + empty
            for one, other in pairwise(loose):
                assert one.group != other.group or not (one.span.length and other.span.length)


@patient
@given(layouts, st.data())
def test_the_parts_of_a_leaf_are_the_leaf(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    for number, shard in enumerate(_shards(layout, rank, _params(layout))):
        for leaf in list(shard.leaves):
            if len(leaf.fragments) > 1:
                parts = shard.split_leaf(leaf)
                assert parts == [each for each in shard.leaves if each in parts]
                assert [part.fragments for part in parts] == [(fragment,) for fragment in leaf.fragments]
                assert torch.equal(torch.cat([part.tensor for part in parts]), leaf.tensor)
                assert parts[0].tensor.data_ptr() == leaf.tensor.data_ptr()
        _tile(shard.leaves, layout.buckets[number].owned(rank).length)


@patient
@given(layouts)
def test_a_single_fragment_split_is_itself(layout: Layout) -> None:
    for shard in _shards(layout, 0, _params(layout)):
        for leaf in shard.leaves:
            if len(leaf.fragments) == 1 and leaf.tensor.dim() == 1:
                (part,) = split(leaf)
                assert part.span == leaf.span or leaf.span == Span(0, 0)
                assert part.tensor.data_ptr() == leaf.tensor.data_ptr()
