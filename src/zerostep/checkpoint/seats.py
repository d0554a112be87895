"""Who writes which file of a checkpoint: the layouts of all ranks, and this rank's place in them.

Ranks that hold the same have the same layout, and one rank writes each file of it. If an optimizer has no DTensors and
no groups with ranks of their own, all ranks have one layout and nothing is exchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from zerostep.checkpoint.layouts import Held, LayoutRecord, WholeParam, check_layouts, merge, stored_blocks
from zerostep.comm.agreement import agreed
from zerostep.comm.objects import broadcast_object
from zerostep.comm.transport import Transport
from zerostep.dtensors import is_dtensor, local_of
from zerostep.errors import CheckpointError
from zerostep.optim.view import OptimizerView, ViewPart
from zerostep.plan.blocks import Block
from zerostep.plan.layout import Layout, Span
from zerostep.state.param_state import order_of
from zerostep.tensors import is_dense

_WORDS = 4  # of a digest, as integers


class Seat(NamedTuple):
    """The place of one part of this rank's optimizer: a rank of a layout, whose file this rank may write."""

    layout: int
    rank: int
    writes: bool


@dataclass(frozen=True)
class Seats:
    """All layouts of a checkpoint that is about to be written, and the seat of each part of this rank.

    `ranks` is how many ranks write, `most` how many parts a rank has at most, and `leaders` are the ranks that describe
    the model, the first that writes of each layout.
    """

    params: tuple[WholeParam, ...]
    layouts: tuple[LayoutRecord, ...]
    repeats: Mapping[int, int]
    own: tuple[Seat, ...]
    ranks: int
    most: int
    leaders: tuple[int, ...]

    def file_number(self, seat: Seat) -> int:
        """The number of a file among all: those of earlier layouts come first."""
        return sum(record.layout.world_size for record in self.layouts[: seat.layout]) + seat.rank

    def stored_in(self, layout: int) -> set[int]:
        """The parameters of a layout that its files hold; others are in those of an earlier one."""
        places = (place for places in stored_blocks(self.params, self.layouts) for place in places)
        return {place.param for place in places if place.layout == layout}


def find_seats(view: OptimizerView, everyone: Transport) -> Seats:
    """Return the layouts of all ranks; a collective if the ranks may have several."""
    if not view.crosses:
        (part,) = view.parts
        return _seated([_held(part)], [Seat(0, part.rank, part.writes)], part.layout.world_size, 1, (0,))
    with agreed(everyone):
        texts = [_describe(part) for part in view.parts]
    claims = _claims(view, everyone, texts)
    digests = list(dict.fromkeys(claim.digest for claim in claims))
    writers = _writers(claims)
    leaders = [next(claim.source for claim in claims if claim.digest == digest and claim.writes) for digest in digests]
    bodies = [_told(everyone, texts, digest, leader) for digest, leader in zip(digests, leaders, strict=True)]
    held = [_from_body(body) for body in bodies]
    _check_writers(held, digests, writers)
    _check_own(bodies)
    own = [
        Seat(digests.index(_digest(text)), part.rank, writers.get((_digest(text), part.rank)) == everyone.rank)
        for text, part in zip(texts, view.parts, strict=True)
    ]
    most = max(claim.position for claim in claims) + 1
    return _seated(held, own, len(set(writers.values())), most, tuple(dict.fromkeys(leaders)))


def _seated(held: Sequence[Held], own: Sequence[Seat], ranks: int, most: int, leaders: tuple[int, ...]) -> Seats:
    params, layouts = merge(held)
    try:
        check_layouts(params, layouts)
    except ValueError as error:
        raise CheckpointError(
            f"the ranks do not hold the parts of one model: {error}; build the same model and optimizer on every rank"
        ) from error
    repeats = {
        record.whole[again]: record.whole[first]
        for record, each in zip(layouts, held, strict=True)
        for again, first in each.repeats.items()
    }
    return Seats(params, layouts, repeats, tuple(own), ranks, most, leaders)


# ---------------------------------------------------------------------- what a part is, as text


def _held(part: ViewPart) -> Held:
    first: dict[int, int] = {}
    for index, param in enumerate(part.params):
        first.setdefault(id(param), index)
    repeats = {index: first[id(param)] for index, param in enumerate(part.params) if first[id(param)] != index}
    local = [local_of(param) for param in part.params]
    orders = {
        index: order_of(tensor) for index, tensor in enumerate(local) if not tensor.is_contiguous() and is_dense(tensor)
    }
    return Held(part.layout, tuple(part.blocks), orders, repeats)


def _describe(part: ViewPart) -> str:
    held = _held(part)
    body = {
        "layout": held.layout.to_json(),
        "blocks": [[block.shape, [[span.start, span.stop] for span in block.spans]] for block in held.blocks],
        "orders": list(held.orders.items()),
        "repeats": list(held.repeats.items()),
        # Ranks that hold the same are replicas of each other, unless the group has ranks of its own.
        "own": part.own_ranks,
        "plain": [not is_dtensor(param) for param in part.params],
    }
    return json.dumps(body)


def _from_body(body: Mapping[str, Any]) -> Held:
    blocks = tuple(Block(tuple(shape), tuple(Span(*span) for span in spans)) for shape, spans in body["blocks"])
    orders = {index: tuple(order) for index, order in body["orders"]}
    return Held(Layout.from_json(body["layout"]), blocks, orders, dict(body["repeats"]))


def _digest(text: str) -> tuple[int, ...]:
    found = hashlib.sha256(text.encode()).digest()
    return tuple(int.from_bytes(found[8 * at : 8 * at + 8], "big", signed=True) for at in range(_WORDS))


# ---------------------------------------------------------------------- what all ranks have


class _Claim(NamedTuple):
    """A part of some rank: its position there, what it is, and which rank of its layout."""

    source: int
    position: int
    digest: tuple[int, ...]
    rank: int
    writes: bool


def _claims(view: OptimizerView, everyone: Transport, texts: Sequence[str]) -> list[_Claim]:
    """The parts of all ranks, by rank."""
    most = max(row[0] for row in everyone.all_gather_ints([len(texts)]))
    own = [[*_digest(text), part.rank, part.writes] for text, part in zip(texts, view.parts, strict=True)]
    padding = [[0] * _WORDS + [-1, 0]] * (most - len(own))
    rows = everyone.all_gather_ints([value for each in (*own, *padding) for value in each])
    return [claim for source, row in enumerate(rows) for claim in _claims_in(source, row)]


def _claims_in(source: int, row: Sequence[int]) -> Iterator[_Claim]:
    width = _WORDS + 2
    for position in range(len(row) // width):
        *digest, rank, writes = row[position * width : (position + 1) * width]
        if rank >= 0:
            yield _Claim(source, position, tuple(digest), rank, bool(writes))


def _writers(claims: Sequence[_Claim]) -> dict[tuple[tuple[int, ...], int], int]:
    """Who writes the file of each rank of each layout: of several that hold the same, the first."""
    writers: dict[tuple[tuple[int, ...], int], int] = {}
    for claim in claims:
        if claim.writes:
            writers.setdefault((claim.digest, claim.rank), claim.source)
    return writers


def _told(everyone: Transport, texts: Sequence[str], digest: tuple[int, ...], leader: int) -> dict[str, Any]:
    """The description of a layout, from the rank that leads it."""
    own = next((text for text in texts if _digest(text) == digest), None)
    text = broadcast_object(everyone, own if everyone.rank == leader else None, leader, torch.device("cpu"))
    body: dict[str, Any] = json.loads(text)
    return body


def _check_writers(
    held: Sequence[Held], digests: Sequence[tuple[int, ...]], writers: Mapping[tuple[tuple[int, ...], int], int]
) -> None:
    for each, digest in zip(held, digests, strict=True):
        absent = [rank for rank in range(each.layout.world_size) if (digest, rank) not in writers]
        if absent:
            raise CheckpointError(
                f"of {each.layout.world_size} ranks that divide parameter {each.layout.params[0].name!r}, number "
                f"{absent[0]} holds something else: build the same model and optimizer on every rank"
            )


def _check_own(bodies: Sequence[Mapping[str, Any]]) -> None:
    """Raise if ranks of different groups use one name for different parameters."""
    seen: dict[str, list[int]] = {}
    for body in bodies:
        if body["own"] is None:
            continue
        for spec, plain in zip(Layout.from_json(body["layout"]).params, body["plain"], strict=True):
            if plain and seen.setdefault(spec.name, body["own"]) != body["own"]:
                raise CheckpointError(
                    f"ranks {seen[spec.name]} and {body['own']} each have a parameter {spec.name!r} in a group with a "
                    "process_group of its own, and a checkpoint cannot tell them apart: give every expert a name that "
                    "no other rank's has"
                )
