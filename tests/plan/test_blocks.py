"""Blocks: which part of a parameter a rank holds, and how parts of parts relate."""

from random import Random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.helpers.pool import Pool
from zerostep.plan.blocks import Block, block_of, whole
from zerostep.plan.layout import Span

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def blocks_of_one_tensor(draw: st.DrawFn, count: int = 2) -> list[Block]:
    shape = draw(shapes)

    def span(size: int) -> Span:
        start = draw(st.integers(0, size))
        return Span(start, draw(st.integers(start, size)))

    return [Block(shape, tuple(span(size) for size in shape)) for _ in range(count)]


def _elements(block: Block) -> set[int]:
    numbers = torch.arange(whole(block.shape).numel).view(block.shape)
    return set(numbers[block.inside(whole(block.shape))].flatten().tolist())


@given(blocks_of_one_tensor())
def test_an_intersection_has_what_both_have(pair: list[Block]) -> None:
    one, other = pair
    assert _elements(one.intersect(other)) == _elements(one) & _elements(other)
    assert len(_elements(one)) == one.numel
    assert one.is_whole == (one.sizes == one.shape)


@given(blocks_of_one_tensor())
def test_a_block_is_found_inside_another_one(pair: list[Block]) -> None:
    outer, other = pair
    inner = outer.intersect(other)
    if inner.numel:
        numbers = torch.arange(whole(outer.shape).numel).view(outer.shape)
        memory = numbers[outer.inside(whole(outer.shape))]
        assert set(memory[inner.inside(outer)].flatten().tolist()) == _elements(inner)


def test_a_block_lies_inside_its_tensor() -> None:
    with pytest.raises(ValueError, match="must lie inside"):
        Block((3,), (Span(1, 4),))
    with pytest.raises(ValueError, match="must lie inside"):
        Block((3, 2), (Span(0, 1),))
    with pytest.raises(ValueError, match="blocks of different tensors"):
        whole((3,)).intersect(whole((4,)))


def _as_torch_divides(group: ProcessGroup) -> None:
    random, meshes = Random(0), [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    for _ in range(40):
        shape = [random.randint(1, 9) for _ in range(random.randint(1, 3))]
        value = torch.arange(torch.Size(shape).numel()).view(shape).float()
        mesh = random.choice(meshes)
        kinds = [random.choice([Replicate(), *(Shard(dim) for dim in range(len(shape)))]) for _ in range(mesh.ndim)]
        tensor = distribute_tensor(value, mesh, kinds)
        block = block_of(tensor)
        local = tensor.to_local()
        assert block.sizes == tuple(local.shape), (shape, kinds)
        assert torch.equal(value[block.inside(whole(tuple(shape)))], local), (shape, kinds)


def test_blocks_are_those_that_torch_makes(pool: Pool) -> None:
    pool.run(_as_torch_divides, 4)
