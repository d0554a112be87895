"""Which parameters some rank has used in a step, as a bit mask in a few integers."""

from __future__ import annotations

from collections.abc import Sequence

_BITS = 62  # of a signed 64-bit integer


def pack_mask(used: Sequence[bool]) -> list[int]:
    """One bit per parameter, as integers to send."""
    chunks = (used[start : start + _BITS] for start in range(0, len(used), _BITS))
    return [sum(1 << bit for bit, flag in enumerate(chunk) if flag) for chunk in chunks]


def union_of_masks(masks: Sequence[Sequence[int]], count: int) -> list[bool]:
    """For each of `count` parameters, whether its bit is set in the mask of any rank."""
    return [any(mask[index // _BITS] >> (index % _BITS) & 1 for mask in masks) for index in range(count)]
