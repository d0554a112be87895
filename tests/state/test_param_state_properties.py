"""State in leaves of simulated ranks equals that of a plain optimizer, and moves between world sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.helpers.reference import ELEMENTWISE, MATRIXWISE, OPTIMIZERS, assert_same_state_dict
from zerostep.memory.leaf import Leaf
from zerostep.memory.shard import Shard
from zerostep.plan.buckets import Cost, plan_buckets
from zerostep.plan.layout import Layout, ParamSpec
from zerostep.state.consolidate import assemble, to_plain
from zerostep.state.param_state import DictState, entry_for, fits_one_leaf, param_states_of
from zerostep.tensors import flat_alias

patient = settings(deadline=None, max_examples=25)

SavedState = dict[int, dict[str, Any]]

# Of no dimension, of no or one element, matrices, and images whose memory is in another order.
_SHAPES = st.lists(
    st.sampled_from([(), (1,), (7,), (0, 3), (3, 4), (3, 5), (1, 1), (2, 3, 2, 2), (4, 1, 3, 3)]),
    min_size=1,
    max_size=6,
)
_MATRICES = st.lists(st.sampled_from([(3, 5), (4, 4), (1, 6)]), min_size=1, max_size=5)
_WORLDS = st.integers(1, 5)
_BYTES = st.sampled_from([1, 60, 1 << 20])


def _params(shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    return [
        nn.Parameter(each.to(memory_format=torch.channels_last) if each.dim() == 4 else each.clone()) for each in found
    ]


def _gradients(params: Sequence[Tensor], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator)) for param in params]


def _layout(params: Sequence[Tensor], world_size: int, bucket_bytes: int, splittable: bool = True) -> Layout:
    specs = [ParamSpec(f"p{i}", tuple(p.shape), "float32", splittable=splittable) for i, p in enumerate(params)]
    return plan_buckets(specs, world_size, bucket_bytes, [4] * len(specs), [Cost(spec.numel) for spec in specs])


class Rank:
    """One simulated rank: its own copy of the parameters, and an optimizer over its leaves."""

    def __init__(self, layout: Layout, rank: int, params: Sequence[Tensor]) -> None:
        self.layout, self.rank = layout, rank
        self.params = [nn.Parameter(param.detach().clone()) for param in params]
        self.shards = [Shard(layout, rank, bucket, self.params, None) for bucket in range(len(layout.buckets))]

    @property
    def leaves(self) -> Iterator[Leaf]:
        for shard in self.shards:
            yield from shard.leaves

    def optimizer(self, name: str) -> Optimizer | None:
        tensors = [leaf.tensor for leaf in self.leaves]
        return OPTIMIZERS[name].optimizer(tensors) if tensors else None

    def give(self, gradients: Sequence[Tensor]) -> None:
        for number, shard in enumerate(self.shards):
            bucket = self.layout.buckets[number]
            whole = torch.cat([flat_alias(gradients[slot.param]) for slot in bucket.slots])
            owned = bucket.owned(self.rank)
            for leaf in shard.leaves:
                leaf.tensor.grad = leaf.view(whole[owned.start : owned.stop].clone())

    def load(self, saved: SavedState) -> list[tuple[Leaf, dict[str, Any]]]:
        """As an optimizer loads: leaves whose fragments do not go together are split first."""
        found, states = [], _states(saved, self.params)
        for shard in self.shards:
            for leaf in list(shard.leaves):
                for part in [leaf] if fits_one_leaf(leaf, states) else shard.split_leaf(leaf):
                    first = part.params[0]
                    if first in saved:
                        cut = self.layout.params[first].splittable and self.layout.params[first].numel
                        found.append((part, entry_for(part, states) if cut else saved[first]))
        return found


def _states(saved: SavedState, params: Sequence[Tensor]) -> dict[int, DictState]:
    return {number: DictState(entry, params[number]) for number, entry in saved.items()}


@dataclass(frozen=True)
class World:
    layout: Layout
    ranks: list[Rank]


def _world(params: Sequence[Tensor], world_size: int, bucket_bytes: int, splittable: bool = True) -> World:
    layout = _layout(params, world_size, bucket_bytes, splittable)
    return World(layout, [Rank(layout, rank, params) for rank in range(world_size)])


def _plain(name: str, params: Sequence[nn.Parameter], steps: int) -> SavedState:
    optimizer = OPTIMIZERS[name].optimizer(params)
    for step in range(steps):
        for param, gradient in zip(params, _gradients(params, step), strict=True):
            param.grad = gradient
        optimizer.step()
    found: SavedState = optimizer.state_dict()["state"]
    return found


def _sharded(name: str, world: World, steps: int) -> SavedState:
    shares = []
    for rank in world.ranks:
        optimizer = rank.optimizer(name)
        for step in range(steps):
            rank.give(_gradients(rank.params, step))
            if optimizer is not None:
                optimizer.step()
        pairs = [(leaf, optimizer.state[leaf.tensor]) for leaf in rank.leaves if optimizer is not None]
        found = param_states_of([pair for pair in pairs if pair[1]], world.layout, rank.params)
        shares.append(to_plain(found))
    return assemble(shares, world.ranks[0].params)


def _assert_same(found: SavedState, expected: SavedState) -> None:
    assert list(found) == sorted(expected)
    assert_same_state_dict({"state": found}, {"state": expected})
    for index, entry in expected.items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                assert torch.equal(flat_alias(found[index][key]), flat_alias(value)), (index, key)


@pytest.mark.parametrize("name", ELEMENTWISE)
@patient
@given(shapes=_SHAPES, world_size=_WORLDS, bucket_bytes=_BYTES)
def test_what_the_ranks_have_is_the_state_of_a_plain_optimizer(
    name: str, shapes: list[tuple[int, ...]], world_size: int, bucket_bytes: int
) -> None:
    found = _sharded(name, _world(_params(shapes), world_size, bucket_bytes), 2)
    _assert_same(found, {k: v for k, v in _plain(name, _params(shapes), 2).items() if v})


@pytest.mark.parametrize("name", MATRIXWISE)
@patient
@given(shapes=_MATRICES, world_size=_WORLDS, bucket_bytes=_BYTES)
def test_whole_parameters_keep_their_state_whole(
    name: str, shapes: list[tuple[int, ...]], world_size: int, bucket_bytes: int
) -> None:
    found = _sharded(name, _world(_params(shapes), world_size, bucket_bytes, splittable=False), 2)
    _assert_same(found, _plain(name, _params(shapes), 2))


def _through(saved: SavedState, world: World) -> SavedState:
    """Into a world, and out of it again."""
    shares = [to_plain(param_states_of(rank.load(deepcopy(saved)), world.layout, rank.params)) for rank in world.ranks]
    return assemble(shares, world.ranks[0].params)


@pytest.mark.parametrize("name", ["adamw", "nadam", "asgd", "rprop", "sgd_momentum", "rmsprop_centered"])
@patient
@given(shapes=_SHAPES, worlds=st.lists(st.tuples(_WORLDS, _BYTES), min_size=1, max_size=3), data=st.data())
def test_state_goes_from_world_to_world(
    name: str, shapes: list[tuple[int, ...]], worlds: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Some parameters have no state yet, and some have made more steps than others."""
    saved = {index: entry for index, entry in _plain(name, _params(shapes), 2).items() if data.draw(st.integers(0, 4))}
    for entry in saved.values():
        if "step" in entry:
            entry["step"] = entry["step"] + float(data.draw(st.integers(0, 1)))
    found = saved
    for world_size, bucket_bytes in worlds:
        found = _through(found, _world(_params(shapes), world_size, bucket_bytes))
    _assert_same(found, saved)


@patient
@given(shapes=_SHAPES, world_size=_WORLDS, bucket_bytes=_BYTES)
def test_state_in_another_order_of_memory_is_put_in_order(
    shapes: list[tuple[int, ...]], world_size: int, bucket_bytes: int
) -> None:
    saved = _plain("adamw", _params(shapes), 2)
    other = {i: {k: v.contiguous() if v.dim() else v for k, v in entry.items()} for i, entry in saved.items()}
    _assert_same(_through(other, _world(_params(shapes), world_size, bucket_bytes)), saved)


# One thing at a time.


def _leaf(params: Sequence[Tensor]) -> Leaf:
    (leaf,) = Rank(_layout(params, 1, 1 << 20), 0, params).leaves
    return leaf


def _entry(param: Tensor, **others: Any) -> dict[str, Any]:
    return {"average": torch.ones_like(param), **others}


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        ({"step": torch.tensor(1.0)}, {"step": torch.tensor(1.0)}, True),
        ({"step": torch.tensor(1.0)}, {"step": torch.tensor(2.0)}, False),
        ({"step": 1}, {"step": 1}, True),
        ({"step": 1}, {"step": 2}, False),
        ({"step": 1}, {}, False),
        ({"count": torch.tensor(1.0)}, {"count": torch.tensor(2.0)}, False),
        ({"count": 1}, {"count": 2}, False),
        ({"count": 1}, {"count": 1}, True),
    ],
)
def test_fragments_share_a_state_if_all_scalars_agree(
    first: Mapping[str, Any], second: Mapping[str, Any], fits: bool
) -> None:
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))]
    saved = {0: _entry(params[0], **first), 1: _entry(params[1], **second)}
    assert fits_one_leaf(_leaf(params), _states(saved, params)) is fits


def test_a_parameter_without_state_does_not_share_one() -> None:
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))]
    assert not fits_one_leaf(_leaf(params), _states({0: _entry(params[0])}, params))
    assert fits_one_leaf(_leaf(params), {})


@pytest.mark.parametrize("name", ["step", "count"])
def test_a_scalar_may_have_any_name(name: str) -> None:
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))]
    saved = {index: _entry(param, **{name: torch.tensor(2.0)}) for index, param in enumerate(params)}
    entry = entry_for(_leaf(params), _states(saved, params))
    assert entry[name].shape == () and entry["average"].shape == (7,)


@pytest.mark.parametrize("name", ["average", "mu", "eta"])
def test_what_is_shaped_like_the_parameter_may_have_any_name(name: str) -> None:
    params = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(3))]
    saved = {index: {name: torch.full_like(param, float(index))} for index, param in enumerate(params)}
    leaf = _leaf(params)
    states = _states(saved, params)
    assert fits_one_leaf(leaf, states)
    assert entry_for(leaf, states)[name].tolist() == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_state_keeps_its_precision(order: torch.memory_format) -> None:
    low = nn.Parameter(torch.zeros(2, 3, 2, 2, dtype=torch.bfloat16).to(memory_format=torch.channels_last))
    layout = plan_buckets([ParamSpec("p", (2, 3, 2, 2), "bfloat16", splittable=True)], 1, 80, [2], [Cost(1)])
    (leaf,) = Shard(layout, 0, 0, [low], torch.float32).leaves
    value = (torch.arange(24.0) / 7).view(2, 3, 2, 2).to(memory_format=order)
    found = entry_for(leaf, _states({0: {"average": value}}, [low]))["average"]
    assert found.dtype == torch.float32
    assert torch.equal(found, value.permute(0, 2, 3, 1).reshape(-1))


def test_scalars_come_from_the_first_rank_that_has_them() -> None:
    param = torch.zeros(4)
    shares = [
        [
            {
                "param": 0,
                "part": [2 * r, 2 * r + 2],
                "per_element": {"a": torch.full((2,), float(r))},
                "shared": {"step": r},
            }
        ]
        for r in range(2)
    ]
    assert assemble(shares, [param])[0]["step"] == 0
    assert assemble(shares, [param])[0]["a"].tolist() == [0, 0, 1, 1]
