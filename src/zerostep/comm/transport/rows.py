"""Rows of integers that ranks all-gather: all equally long, and each names the call that it belongs to.

A collective is matched with the next one of the other ranks, whatever that is. If ranks are in different calls, their
rows still have one length, and all of them learn it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerostep.comm.transport.calls import current_call, next_collective
from zerostep.errors import StepMismatchError

_NAME_INTS = 5
_HEADER = _NAME_INTS + 2  # the name of the call, the number of the collective in it, the number of values
_VALUES = 64  # in the first row; more travel in a second one, once all ranks agree on their number


def all_gather_rows(
    gather: Callable[[Sequence[int]], list[list[int]]], values: Sequence[int], transport: object
) -> list[list[int]]:
    """The values of every rank of a transport, by rank, over an all-gather of rows of equal length; a collective.

    Raises `StepMismatchError`, on all ranks, if they are not in the same call.
    """
    header = [*_to_ints(current_call()), next_collective(transport), len(values)]
    padding = [0] * (_VALUES - len(values))
    rows = gather([*header, *values[:_VALUES], *padding])
    _compare([row[:_HEADER] for row in rows])
    rest = gather(values[_VALUES:]) if len(values) > _VALUES else [[] for _ in rows]
    length = min(len(values), _VALUES)
    return [[*row[_HEADER : _HEADER + length], *more] for row, more in zip(rows, rest, strict=True)]


def _compare(headers: Sequence[Sequence[int]]) -> None:
    if all(header == headers[0] for header in headers):
        return
    other = next(rank for rank, header in enumerate(headers) if header != headers[0])
    raise StepMismatchError(
        f"the ranks are in different calls: rank 0 is in {_describe(headers[0])}, rank {other} in "
        f"{_describe(headers[other])}. Make the same calls in the same order on all ranks"
    )


def _describe(header: Sequence[int]) -> str:
    *name, number, count = header
    text = _to_text(name) or "no call"
    return f"{text} (message {number}, of {count} numbers)"


def _to_ints(text: str) -> list[int]:
    data = text.encode()[: 8 * _NAME_INTS].ljust(8 * _NAME_INTS, b"\0")
    return [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]


def _to_text(values: Sequence[int]) -> str:
    data = b"".join(value.to_bytes(8, "little", signed=True) for value in values)
    return data.rstrip(b"\0").decode(errors="ignore")
