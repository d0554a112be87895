"""Elements of any block are read from any other blocks, in any orders of memory."""

from itertools import pairwise, product
from math import prod
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zerostep.checkpoint import regions
from zerostep.checkpoint.layouts import LayoutRecord, WholeParam, check_layouts, stored_blocks
from zerostep.checkpoint.regions import Region, Source, read_elements
from zerostep.plan.blocks import Block, whole
from zerostep.plan.layout import Bucket, Layout, ParamSpec, Slot, Span

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Block]:
    """Blocks that make up a tensor: each dimension is cut at some places."""
    spans = []
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        spans.append([Span(start, stop) for start, stop in pairwise(cuts)])
    return [Block(shape, chosen) for chosen in product(*spans)]


@st.composite
def regions_of(draw: st.DrawFn, block: Block) -> Region:
    """A block in some order of memory."""
    dims = [dim for dim, size in enumerate(block.sizes) if size > 1]
    return Region(block, tuple(draw(st.permutations(dims))))


def _cut(tensor: Tensor, block: Block) -> Tensor:
    return tensor[tuple(slice(span.start, span.stop) for span in block.spans)]


def _memory(tensor: Tensor, region: Region) -> Tensor:
    """The elements of a region as they lie in memory, put there one by one."""
    block, sizes = _cut(tensor, region.block), region.block.sizes
    order = [dim for dim in range(len(sizes)) if dim not in region.order] + list(region.order)
    return block.permute(order).reshape(-1).clone()


@st.composite
def readings(draw: st.DrawFn) -> tuple[Tensor, list[Region], Region, Span]:
    """A tensor, the regions in which it is stored, one that is wanted, and some of its elements."""
    shape = draw(shapes)
    tensor = torch.arange(prod(shape), dtype=torch.int32).view(shape)
    stored = [draw(regions_of(block)) for block in draw(tilings(shape))]
    wanted = draw(regions_of(draw(st.sampled_from(draw(tilings(shape))))))
    ends = sorted(draw(st.tuples(*[st.integers(0, wanted.block.numel)] * 2)))
    return tensor, stored, wanted, Span(*ends)


@given(readings(), st.sampled_from([4, 16, 64, 1 << 20]))
def test_what_is_read_is_what_was_stored(case: tuple[Tensor, list[Region], Region, Span], chunk: int) -> None:
    tensor, stored, wanted, span = case
    reads: list[int] = []

    def source(region: Region) -> Source:
        memory = _memory(tensor, region)

        def read(part: Span) -> Tensor:
            assert part.stop <= memory.numel()
            reads.append(part.length)
            return memory[part.start : part.stop].clone()

        return Source(region, read)

    with mock.patch.object(regions, "_CHUNK", chunk):
        found = read_elements(wanted, span, [source(region) for region in stored], torch.int32)
    assert torch.equal(found, _memory(tensor, wanted)[span.start : span.stop])
    if wanted not in stored:
        assert all(length == 1 or length * 4 <= max(chunk, 4) for length in reads)


@given(readings())
def test_the_same_region_is_read_as_it_is(case: tuple[Tensor, list[Region], Region, Span]) -> None:
    tensor, _, wanted, span = case
    asked: list[Span] = []
    memory = _memory(tensor, wanted)
    others = [Source(Region.row_major(whole(wanted.block.shape)), mock.Mock(side_effect=AssertionError))]
    sources = [Source(wanted, lambda part: asked.append(part) or memory[part.start : part.stop]), *others]  # type: ignore[func-returns-value]
    assert torch.equal(read_elements(wanted, span, sources, torch.int32), memory[span.start : span.stop])
    assert asked == [span]


@given(readings())
def test_boxes_are_ranges_of_memory_in_order(case: tuple[Tensor, list[Region], Region, Span]) -> None:
    tensor, _, wanted, span = case
    boxes, memory, end = wanted.boxes(span), _memory(tensor, wanted), span.start
    for box in boxes:
        assert wanted.offset_of(box) == end
        inside = memory[end : end + box.numel]
        assert torch.equal(wanted.within(box).view(inside), _cut(tensor, box))
        end += box.numel
    assert end == span.stop
    assert len(boxes) <= max(1, 2 * len(wanted.order))


@given(st.data())
def test_only_the_rows_that_are_needed_are_read(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(2, 8)), data.draw(st.integers(2, 8))
    half = Block((rows, columns), (Span(0, rows), Span(0, data.draw(st.integers(1, columns - 1)))))
    start = data.draw(st.integers(0, half.numel - 1))
    span = Span(start, data.draw(st.integers(start + 1, half.numel)))
    memory, asked = torch.arange(rows * columns), list[Span]()
    stored = Region.row_major(whole((rows, columns)))
    source = Source(stored, lambda part: asked.append(part) or memory[part.start : part.stop])  # type: ignore[func-returns-value]
    read_elements(Region.row_major(half), span, [source], torch.int64)
    width = half.sizes[1]
    first, last = span.start // width, (span.stop - 1) // width
    assert asked == [Span(first * columns, (last + 1) * columns)]


# Which blocks a manifest accepts.


def _record(block: Block, index: int = 0, dtype: str = "float32", group: int = 0) -> LayoutRecord:
    spec = ParamSpec("w", block.sizes, dtype, group=group)
    slot = Slot(0, Span(0, block.numel))
    layout = Layout(1, (spec,), (Bucket(dtype, "cpu", True, (slot,), (0, block.numel)),))
    return LayoutRecord(layout, (index,), (block,), {})


@given(st.data())
def test_blocks_that_make_up_a_parameter_are_accepted_and_no_others(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    blocks = data.draw(tilings(shape))
    params = [WholeParam("w", shape, "float32", 0)]
    again = data.draw(st.lists(st.sampled_from(blocks), max_size=2))  # other ranks that hold the same
    records = [_record(block) for block in (*blocks, *again)]
    check_layouts(params, records)
    assert [place.layout for place in stored_blocks(params, records)[0]] == list(range(len(blocks)))
    lost = data.draw(st.sampled_from(blocks))
    with pytest.raises(ValueError, match="do not make up parameter 'w'"):
        check_layouts(params, [_record(block) for block in blocks if block != lost])


def test_blocks_that_overlap_are_no_parameter() -> None:
    shape, params = (4,), [WholeParam("w", (4,), "float32", 0)]
    for spans in ([(0, 3), (2, 4)], [(0, 4), (1, 2)], [(0, 2), (0, 3), (3, 4)]):
        with pytest.raises(ValueError, match="do not make up"):
            check_layouts(params, [_record(Block(shape, (Span(*span),))) for span in spans])


@pytest.mark.parametrize("changes", [{"dtype": "float64"}, {"group": 1}])
def test_layouts_that_disagree_are_refused(changes: dict[str, int | str]) -> None:
    params = [WholeParam("w", (4,), "float32", 0)]
    halves = [Block((4,), (Span(0, 2),)), Block((4,), (Span(2, 4),))]
    records = [_record(halves[0]), _record(halves[1], **changes)]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="and a layout has it as"):
        check_layouts(params, records)
