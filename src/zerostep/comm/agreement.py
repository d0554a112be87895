"""Ranks compare what they are about to do before they do it.

Every rank states what it holds as a list of records, each a title and a value. Equal digests cost one small
collective. Otherwise all ranks learn the first record that differs, or the error that kept a rank from making its
statement, and all raise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from zerostep.comm.stream import broadcast_bytes
from zerostep.comm.transport import Transport
from zerostep.errors import CheckpointError
from zerostep.plan.groups import Group, options
from zerostep.plan.layout import ParamSpec
from zerostep.tensors import is_dense
from zerostep.version import __version__

__all__ = ["Agreement", "Fact", "agreed", "facts_of", "first_failure"]

_MADE, _FAILED = 0, 1
_TEXT_WORDS = 64
_REMEDY = "build the optimizer from the same parameters, in the same order and with the same options, on every rank"
_SAME_CLASS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, KeyError, CheckpointError)
}


@dataclass(frozen=True)
class Fact:
    """One fact that must be the same on all ranks."""

    title: str
    value: str


@dataclass
class Agreement:
    """What a rank states; filled in while it is made."""

    facts: list[Fact] = field(default_factory=list)
    remedy: str = _REMEDY


@contextmanager
def agreed(transport: Transport) -> Iterator[Agreement]:
    """Leave the block only if every rank came to its end with equal records; otherwise all ranks raise.

    A rank that fails inside the block raises its own error, the others raise one that quotes it.
    """
    agreement = Agreement()
    try:
        yield agreement
    except Exception as error:
        _exchange(transport, [_FAILED, 0, 0, 0, 0])
        _exchange(transport, _words(_describe_error(error)))
        raise
    rows = _exchange(transport, [_MADE, *_digest(agreement.facts)])
    failed = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
    if failed:
        texts = _exchange(transport, _words(""))
        raise _peer_error(failed[0], _text(texts[failed[0]]))
    if any(row != rows[0] for row in rows):
        _raise_difference(transport, agreement.facts, agreement.remedy)


def first_failure(transport: Transport, error: Exception | None) -> Exception:
    """When some rank has failed, and all know it: this rank's own error, or one that quotes the first rank's."""
    texts = [_text(row) for row in _exchange(transport, _words("" if error is None else _describe_error(error)))]
    if error is not None:
        return error
    rank = next(rank for rank, text in enumerate(texts) if text)
    return _peer_error(rank, texts[rank])


def facts_of(
    groups: Sequence[Group], specs: Sequence[ParamSpec], optimizer_class: Any, with_strides: bool
) -> list[Fact]:
    """What all ranks must hold alike. Strides count where parameters are moved in memory order."""
    params = (param for group in groups for param in group["params"])
    found = [
        Fact(
            f"parameter {index} ({spec.name!r})",
            f"{spec.name!r}, shape {spec.shape}, {spec.dtype}, on {spec.device}, "
            f"{'trainable' if spec.trainable else 'frozen'}, in group {spec.group}"
            + (f", strides {param.stride()}" if with_strides and is_dense(param) else ""),
        )
        for index, (spec, param) in enumerate(zip(specs, params, strict=True))
    ]
    found.append(Fact(f"parameter {len(specs)}", "nothing"))  # stands against what a longer list has there
    found += [Fact(f"the options of group {i}", _describe(options(group))) for i, group in enumerate(groups)]
    found.append(Fact("the optimizer class", getattr(optimizer_class, "__qualname__", type(optimizer_class).__name__)))
    found.append(Fact("the version of zerostep", __version__))
    return found


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}={_describe(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_describe(item) for item in value) + ")"
    if isinstance(value, Tensor):
        return f"tensor {value.tolist()}" if value.numel() <= 8 else f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, (bool, int, float, complex, str, type(None), torch.dtype, torch.device)):
        return repr(value)
    # Any other object may print its address, which no two ranks share.
    return f"a {type(value).__qualname__}"


def _digest(facts: Sequence[Fact]) -> list[int]:
    found = hashlib.sha256(json.dumps([[record.title, record.value] for record in facts]).encode()).digest()
    return [int.from_bytes(found[i : i + 8], "little", signed=True) for i in range(0, 32, 8)]


def _exchange(transport: Transport, words: Sequence[int]) -> list[list[int]]:
    return transport.all_gather_ints(words)


def _raise_difference(transport: Transport, facts: Sequence[Fact], remedy: str) -> None:
    """All ranks compare with rank 0, tell where they first differ, and name the earliest place."""
    first = _first_difference(facts, _facts_of_rank_0(transport, facts))
    rows = _exchange(transport, [first])
    place = min(row[0] for row in rows if row[0] >= 0)
    mine = facts[place] if place < len(facts) else Fact("", "nothing")
    titles = _exchange(transport, _words(mine.title))
    values = [_text(words) for words in _exchange(transport, _words(mine.value))]
    title = next(text for text in map(_text, titles) if text)
    others = [rank for rank, row in enumerate(rows) if row[0] == place]
    raise ValueError(
        f"the ranks disagree on {title}: rank 0 has {values[0]}, but {_several(others)} {values[others[0]]}; {remedy}"
    )


def _several(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have other things, the first of them"


def _facts_of_rank_0(transport: Transport, facts: Sequence[Fact]) -> list[Fact]:
    text = json.dumps([[record.title, record.value] for record in facts]).encode()
    size = _exchange(transport, [len(text)])[0][0]
    found = broadcast_bytes(transport, text if transport.rank == 0 else bytes(size), source=0)
    return [Fact(title, value) for title, value in json.loads(found)]


def _first_difference(mine: Sequence[Fact], theirs: Sequence[Fact]) -> int:
    pairs = enumerate(zip_longest(mine, theirs))
    return next((index for index, (here, there) in pairs if here != there), -1)


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _peer_error(rank: int, text: str) -> Exception:
    kind, _, message = text.partition(": ")
    return _SAME_CLASS.get(kind, RuntimeError)(f"rank {rank} failed, so no rank goes on: {kind}: {message}")


def _words(text: str) -> list[int]:
    room = 8 * _TEXT_WORDS
    coded = text.encode()[:room].ljust(room, b"\0")
    return [int.from_bytes(coded[i : i + 8], "little", signed=True) for i in range(0, room, 8)]


def _text(words: Sequence[int]) -> str:
    coded = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
    return coded.rstrip(b"\0").decode(errors="ignore")
