"""Norms of gradients whose elements lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from struct import pack, unpack

import torch
from torch import Tensor

from zerostep.comm.exchange import Exchange

__all__ = ["combine", "power_sum", "root"]


def power_sum(parts: Iterable[Tensor], norm_type: float) -> float:
    """What one rank's parts contribute to a norm: the largest element, or the sum of powers.

    Each part's norm is taken in its own precision, as torch takes that of a whole gradient; the rest is done in double.
    """
    norms = [torch.linalg.vector_norm(part, norm_type) for part in parts if part.numel()]
    if not norms:
        return 0.0 if norm_type > 0 else math.inf
    found = torch.stack([norm.double() for norm in norms]).tolist() if len({n.device for n in norms}) == 1 else [
        float(norm) for norm in norms
    ]  # fmt: skip
    if math.isinf(norm_type):
        return _extreme(found, norm_type)
    return float(torch.tensor(found, dtype=torch.float64).pow(norm_type).sum())


def combine(exchange: Exchange, sums: Sequence[float], norm_type: float) -> list[float]:
    """What all ranks contribute, the same numbers on every rank: one small collective."""
    words = [unpack("<q", pack("<d", value))[0] for value in sums]
    rows = [[unpack("<d", pack("<q", word))[0] for word in row] for row in exchange.start_all_gather_ints(words).wait()]
    if math.isinf(norm_type):
        return [_extreme(column, norm_type) for column in zip(*rows, strict=True)]
    return [sum(column) for column in zip(*rows, strict=True)]


def root(total: float, norm_type: float) -> float:
    """From a sum of powers to the norm."""
    return total if math.isinf(norm_type) or not math.isfinite(total) else total ** (1.0 / norm_type)


def _extreme(values: Sequence[float], norm_type: float) -> float:
    """The largest or the smallest; not a number if any is none."""
    if any(map(math.isnan, values)):
        return math.nan
    return max(values) if norm_type > 0 else min(values)
