"""Which parameters some rank has used in a step, as a bit mask in a few integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_

_BITS = 62  # of a signed 64-bit integer
_DIGITS = bytes.maketrans(b"\0\1", b"01")


def pack_mask(used: Iterable[bool | int]) -> list[int]:
    """One bit per parameter, as integers to send."""
    flags = bytes(used).translate(_DIGITS)
    chunks = (flags[start : start + _BITS] for start in range(0, len(flags), _BITS))
    return [int(chunk[::-1], 2) for chunk in chunks]


def union_of_masks(masks: Sequence[Sequence[int]], count: int) -> list[bool]:
    """For each of `count` parameters, whether its bit is set in the mask of any rank."""
    words = (reduce(or_, column) for column in zip(*masks, strict=True))
    flags = "".join(f"{word:0{_BITS}b}"[::-1] for word in words)
    return [flag == "1" for flag in flags[:count]]
