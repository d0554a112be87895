"""Layouts of a checkpoint: which ranks divided which blocks of which whole parameters.

One layout belongs to each set of ranks that divides the same tensors: with tensor parallelism one to each coordinate,
with experts one to each of their groups. A block that several layouts hold is stored once, by the first of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from zerostep.checkpoint.regions import Region, rows_of
from zerostep.plan.blocks import Block, whole
from zerostep.plan.layout import Layout, ParamSpec, Span


@dataclass(frozen=True)
class WholeParam:
    """A parameter as it is without tensor parallelism."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class StoredBlock(NamedTuple):
    """A parameter of a layout, by the index it has there."""

    layout: int
    param: int


@dataclass(frozen=True)
class LayoutRecord:
    """A layout, and for each of its parameters the index of the whole one and the block that it is.

    `orders` has the order of dimensions in memory of parameters that are not row-major.
    """

    layout: Layout
    whole: tuple[int, ...]
    blocks: tuple[Block, ...]
    orders: Mapping[int, tuple[int, ...]]

    @staticmethod
    def of_whole(layout: Layout, orders: Mapping[int, tuple[int, ...]]) -> LayoutRecord:
        """A layout that divides whole parameters, in the order of the checkpoint's."""
        blocks = tuple(whole(spec.shape) for spec in layout.params)
        return LayoutRecord(layout, tuple(range(len(blocks))), blocks, dict(orders))

    def region(self, param: int) -> Region:
        """The block of a parameter, in its order of memory."""
        order = self.orders.get(param)
        return Region(self.blocks[param], rows_of(self.blocks[param].sizes) if order is None else order)


def whole_params(specs: Sequence[ParamSpec]) -> tuple[WholeParam, ...]:
    """The parameters of a layout that divides whole ones."""
    return tuple(WholeParam(spec.name, spec.shape, spec.dtype, spec.group) for spec in specs)


class Held(NamedTuple):
    """What one set of ranks holds: a layout, the block of each of its parameters, and their orders of memory.

    `repeats` has the first index of each parameter that is listed again.
    """

    layout: Layout
    blocks: tuple[Block, ...]
    orders: Mapping[int, tuple[int, ...]]
    repeats: Mapping[int, int]


def merge(held: Sequence[Held]) -> tuple[tuple[WholeParam, ...], tuple[LayoutRecord, ...]]:
    """Return the whole parameters of some layouts, group by group, and where each layout's parameters belong.

    Parameters are the same if they have the same name; of several with one name in a layout, the first is the same as
    the first elsewhere.
    """
    keys = [_keys(each.layout.params) for each in held]
    found: dict[tuple[str, int], WholeParam] = {}
    for each, names in zip(held, keys, strict=True):
        for spec, block, key in zip(each.layout.params, each.blocks, names, strict=True):
            found.setdefault(key, WholeParam(spec.name, block.shape, spec.dtype, spec.group))
    ordered = sorted(found, key=lambda key: found[key].group)  # as the groups of an optimizer list them
    index_of = {key: index for index, key in enumerate(ordered)}
    layouts = tuple(
        LayoutRecord(each.layout, tuple(index_of[key] for key in names), each.blocks, each.orders)
        for each, names in zip(held, keys, strict=True)
    )
    return tuple(found[key] for key in ordered), layouts


def _keys(specs: Sequence[ParamSpec]) -> list[tuple[str, int]]:
    seen = Counter[str]()
    keys = []
    for spec in specs:
        keys.append((spec.name, seen[spec.name]))
        seen[spec.name] += 1
    return keys


def stored_blocks(params: Sequence[WholeParam], layouts: Sequence[LayoutRecord]) -> tuple[tuple[StoredBlock, ...], ...]:
    """For each whole parameter, the parameters of layouts in which it is stored: each block once."""
    found: list[dict[tuple[Span, ...], StoredBlock]] = [{} for _ in params]
    for number, record in enumerate(layouts):
        for param, (index, block) in enumerate(zip(record.whole, record.blocks, strict=True)):
            if block.numel:
                found[index].setdefault(block.spans, StoredBlock(number, param))
            elif not params[index].numel and not found[index]:
                found[index][block.spans] = StoredBlock(number, param)
    return tuple(tuple(blocks.values()) for blocks in found)


def check_layouts(params: Sequence[WholeParam], layouts: Sequence[LayoutRecord]) -> None:
    """Raise `ValueError` unless the layouts agree about the parameters and their blocks make up all of each."""
    for record in layouts:
        if len(set(record.whole)) != len(record.whole):
            raise ValueError("a layout holds two blocks of one parameter")
        for spec, index, block in zip(record.layout.params, record.whole, record.blocks, strict=True):
            _check_alike(params[index], spec, block)
    for param, places in zip(params, stored_blocks(params, layouts), strict=True):
        _check_covers(param, [layouts[place.layout].blocks[place.param] for place in places])


def _check_alike(param: WholeParam, spec: ParamSpec, block: Block) -> None:
    if (block.shape, spec.dtype, spec.group) != (param.shape, param.dtype, param.group):
        raise ValueError(
            f"parameter {param.name[:80]!r} is {param.dtype} of shape {param.shape} in group {param.group}, and a "
            f"layout has it as {spec.dtype[:80]} of shape {block.shape} in group {spec.group}"
        )
    if block.sizes != spec.shape:
        raise ValueError(f"a block of {block.sizes} of parameter {param.name[:80]!r} is held as {spec.shape}")


def _check_covers(param: WholeParam, blocks: Sequence[Block]) -> None:
    """A mesh cuts along dimensions, so the blocks are all combinations of the spans of each dimension."""
    if param.numel:
        spans = [sorted({block.spans[dim] for block in blocks}, key=_start) for dim in range(len(param.shape))]
        tiled = all(_tiles(of_dim, size) for of_dim, size in zip(spans, param.shape, strict=True))
        if tiled and blocks and len(blocks) == prod(map(len, spans)):
            return
    elif blocks:
        return
    raise ValueError(f"{len(blocks)} blocks do not make up parameter {param.name[:80]!r} of shape {param.shape}")


def _start(span: Span) -> int:
    return span.start


def _tiles(spans: Iterable[Span], size: int) -> bool:
    ordered = list(spans)
    edges = bool(ordered) and ordered[0].start == 0 and ordered[-1].stop == size
    return edges and all(one.stop == other.start for one, other in pairwise(ordered))
