"""Ranks compare facts before they act, so that all go on or all raise.

Every rank lists its facts, each a title and a value. If the digests of all lists are equal, that costs one small
collective. Otherwise the ranks exchange the first fact that differs, or the error of a rank that failed, and all raise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor

from zerostep.comm.stream import broadcast_bytes
from zerostep.comm.transport import Transport
from zerostep.dtensors import describe_placements, is_dtensor, local_of
from zerostep.errors import CheckpointError
from zerostep.plan.groups import GROUP_KEY, Group, all_params, options
from zerostep.plan.layout import Bucket, Layout, ParamSpec
from zerostep.tensors import is_dense
from zerostep.version import __version__

_READY, _FAILED = 0, 1
_MOST_VALUES = 3  # that an error shows beside that of rank 0
_TEXT_INTS = 64  # longer texts are cut: all ranks must gather equally many integers
_REMEDY = "build the optimizer from the same parameters, in the same order and with the same options, on every rank"
# A peer's error is raised as the same class if it is one of these, else as RuntimeError.
_SAME_CLASS: dict[str, type[Exception]] = {
    error_class.__name__: error_class for error_class in (ValueError, TypeError, KeyError, MemoryError, CheckpointError)
}


AllGather = Callable[[Sequence[int]], list[list[int]]]  # every rank's integers, by rank


@dataclass(frozen=True)
class Fact:
    """One fact that must be the same on all ranks."""

    title: str
    value: str


class Agreement:
    """The facts of this rank, given inside the block of `agreed`."""

    def __init__(self) -> None:
        self.facts: Sequence[Fact] = ()
        self.remedy = _REMEDY

    def compare(self, facts: Sequence[Fact], remedy: str = _REMEDY) -> None:
        """Compare these facts at the end of the block; `remedy` ends the error if they differ."""
        self.facts, self.remedy = facts, remedy


@contextmanager
def agreed(transport: Transport) -> Iterator[Agreement]:
    """Leave the block only if all ranks finish it with equal facts; otherwise all ranks raise. A collective.

    A rank that fails inside the block raises its own error, the others raise one that quotes it. If the block
    communicates, a rank that fails in it before it sends leaves the others waiting there.
    """
    agreement = Agreement()
    try:
        yield agreement
    except Exception as error:
        # The same two collectives as on the ranks that did not fail; the row is as long as theirs.
        transport.all_gather_ints([_FAILED, 0, 0, 0, 0])
        transport.all_gather_ints(text_to_ints(describe_error(error)))
        raise
    digest = hashlib.sha256(_to_json(agreement.facts)).digest()
    rows = transport.all_gather_ints([_READY, *_bytes_to_ints(digest)])
    failed = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
    if failed:
        texts = transport.all_gather_ints(text_to_ints(""))
        raise _peer_error(failed[0], ints_to_text(texts[failed[0]]))
    if any(row != rows[0] for row in rows):
        _raise_difference(transport, agreement.facts, agreement.remedy)


@contextmanager
def agreed_by_each(transports: Iterable[Transport]) -> Iterator[list[Agreement]]:
    """The same over several sets of ranks, one inside the other: a failure reaches all ranks of all of them."""
    with ExitStack() as blocks:
        yield [blocks.enter_context(agreed(transport)) for transport in transports]


def first_failure(transport: Transport, error: Exception | None) -> Exception:
    """The error to raise after some rank has failed: this rank's own, or one that quotes the first rank's.

    A collective: all ranks must know that one has failed.
    """
    own = text_to_ints("" if error is None else describe_error(error))
    texts = [ints_to_text(row) for row in transport.all_gather_ints(own)]
    if error is not None:
        return error
    rank = next(rank for rank, text in enumerate(texts) if text)
    return _peer_error(rank, texts[rank])


def failure_texts(all_gather: AllGather, error: BaseException | None) -> list[str]:
    """The error of every rank in words, by rank; empty for those that have none. A collective, like `all_gather`."""
    own = text_to_ints("" if error is None else describe_error(error))
    return [ints_to_text(row) for row in all_gather(own)]


def first_difference(all_gather: AllGather, facts: Sequence[Fact]) -> tuple[str, list[str]] | None:
    """The title of the first fact that differs between ranks, and every rank's value; `None` if none does.

    A collective, like `all_gather`, for callers that know that something differs.
    """
    count = max(row[0] for row in all_gather([len(facts)]))
    padded = [*facts, *[Fact("", "nothing")] * (count - len(facts))]
    rows = all_gather([_bytes_to_ints(hashlib.sha256(_to_json([fact])).digest())[0] for fact in padded])
    index = next((index for index, digests in enumerate(zip(*rows, strict=True)) if len(set(digests)) > 1), None)
    if index is None:
        return None
    titles = [ints_to_text(row) for row in all_gather(text_to_ints(padded[index].title))]
    values = [ints_to_text(row) for row in all_gather(text_to_ints(padded[index].value))]
    return next((title for title in titles if title), ""), values


def facts_of(
    groups: Sequence[Group], specs: Sequence[ParamSpec], optimizer_class: Any, with_strides: bool
) -> list[Fact]:
    """The facts that must be equal on all ranks; with strides if parameters are sent in memory order."""
    facts = [
        Fact(
            f"parameter {index} ({spec.name!r})",
            f"{spec.name!r}, shape {spec.shape}, {spec.dtype}, on {spec.device}, "
            f"{'trainable' if spec.trainable else 'frozen'}, in group {spec.group}"
            + (f", strides {local_of(param).stride()}" if with_strides and is_dense(local_of(param)) else "")
            + (f", {describe_placements(param)}" if is_dtensor(param) else ""),
        )
        for index, (spec, param) in enumerate(zip(specs, all_params(groups), strict=True))
    ]
    # If another rank has more parameters, its next one differs from this fact and not from an option.
    facts.append(Fact(f"parameter {len(specs)}", "nothing"))
    facts += [Fact(f"the options of group {i}", _describe(_compared(group))) for i, group in enumerate(groups)]
    facts.append(Fact("the optimizer class", getattr(optimizer_class, "__qualname__", type(optimizer_class).__name__)))
    facts.append(Fact("the version of zerostep", __version__))
    return facts


def _compared(group: Group) -> Group:
    """The options of a group that must be equal; a process group of its own is another one on other ranks."""
    return {key: value for key, value in options(group).items() if key != GROUP_KEY}


def layout_facts(layout: Layout, names: Sequence[str]) -> list[Fact]:
    """Where each parameter lies and who owns it, in words; `names` are those that the ranks know them by.

    It follows from facts that come before, but for the order of the model's parameters, what a trial step of the class
    has shown, and this package itself.
    """
    facts = []
    for index, (name, spec) in enumerate(zip(names, layout.params, strict=True)):
        facts.append(Fact(f"whether parameter {name!r} may be cut", "yes" if spec.splittable else "no"))
        bucket, span = layout.place_of(index)
        owners = short_list([fragment.rank for fragment in layout.fragments_of(index)])
        facts.append(
            Fact(
                f"the place of parameter {name!r}, which follows from the order of parameters in the model",
                f"elements {span.start} to {span.stop} of bucket {bucket}, with owners {owners}",
            )
        )
    facts += [Fact(f"the parts of bucket {index}", _describe_parts(each)) for index, each in enumerate(layout.buckets)]
    return facts


def _describe_parts(bucket: Bucket) -> str:
    lengths = [stop - start for start, stop in pairwise(bucket.cuts)]
    if len(set(lengths)) == 1:
        return f"{len(lengths)} parts of {lengths[0]} elements"
    return f"parts of {', '.join(map(str, lengths))} elements"


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}={_describe(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_describe(item) for item in value) + ")"
    if isinstance(value, Tensor):
        return f"tensor {value.tolist()}" if value.numel() <= 8 else f"tensor of shape {tuple(value.shape)}"
    if isinstance(value, (bool, int, float, complex, str, type(None), torch.dtype, torch.device)):
        return repr(value)
    # The repr of any other object may contain its address, which differs between ranks.
    return f"a {type(value).__qualname__}"


def _to_json(facts: Sequence[Fact]) -> bytes:
    return json.dumps([[fact.title, fact.value] for fact in facts]).encode()


def _raise_difference(transport: Transport, facts: Sequence[Fact], remedy: str) -> None:
    """Raise an error that names the first fact in which any rank differs from rank 0; a collective."""
    pairs = enumerate(zip_longest(facts, _facts_of_rank_0(transport, facts)))
    first = next((index for index, (here, there) in pairs if here != there), -1)
    rows = transport.all_gather_ints([first])
    index = min(row[0] for row in rows if row[0] >= 0)
    mine = facts[index] if index < len(facts) else Fact("", "nothing")
    titles = transport.all_gather_ints(text_to_ints(mine.title))
    values = [ints_to_text(row) for row in transport.all_gather_ints(text_to_ints(mine.value))]
    title = next(text for text in map(ints_to_text, titles) if text)
    others = [rank for rank, row in enumerate(rows) if row[0] == index]
    raise ValueError(f"the ranks disagree on {title}: {_by_value(values, others)}; {remedy}")


def _by_value(values: Sequence[str], others: Sequence[int]) -> str:
    """What rank 0 has, and what those ranks have that differ from it."""
    ranks: dict[str, list[int]] = {}
    for rank in others:
        ranks.setdefault(values[rank], []).append(rank)
    told = [f"{_have(those)} {value}" for value, those in list(ranks.items())[:_MOST_VALUES]]
    more = f", and {len(ranks) - _MOST_VALUES} more values" if len(ranks) > _MOST_VALUES else ""
    return f"rank 0 has {values[0]}, but {', '.join(told)}{more}"


def _have(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {short_list(ranks)} have"


def short_list(ranks: Sequence[int]) -> str:
    """The first eight ranks, as text."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _facts_of_rank_0(transport: Transport, facts: Sequence[Fact]) -> list[Fact]:
    text = _to_json(facts)
    size = transport.all_gather_ints([len(text)])[0][0]
    received = broadcast_bytes(transport, text if transport.rank == 0 else bytes(size), source=0)
    return [Fact(title, value) for title, value in json.loads(received)]


def describe_error(error: BaseException) -> str:
    """An error in words: its class and its text."""
    return f"{type(error).__name__}: {error}"


def _peer_error(rank: int, text: str) -> Exception:
    class_name = text.partition(": ")[0]
    return _SAME_CLASS.get(class_name, RuntimeError)(f"rank {rank} failed, so no rank goes on: {text}")


def text_to_ints(text: str) -> list[int]:
    """A text as integers to send, always equally many; a longer one is cut."""
    size = 8 * _TEXT_INTS
    return _bytes_to_ints(text.encode()[:size].ljust(size, b"\0"))


def ints_to_text(values: Sequence[int]) -> str:
    """The text that was sent."""
    data = b"".join(value.to_bytes(8, "little", signed=True) for value in values)
    return data.rstrip(b"\0").decode(errors="ignore")  # a cut text may end inside a character


def _bytes_to_ints(data: bytes) -> list[int]:
    return [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]
