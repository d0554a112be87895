"""Norms of gradients whose elements lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from struct import pack, unpack

import torch
from torch import Tensor

from zerostep.comm.exchange import Exchange


def power_sum(parts: Iterable[Tensor], norm_type: float) -> float:
    """What one rank's parts contribute to a norm: the extreme element, the number of elements, or the sum of powers.

    Each part's norm is computed in its own precision, as torch does for a whole gradient; the rest is in double.
    """
    norms = [torch.linalg.vector_norm(part, norm_type) for part in parts if part.numel()]
    if not norms:
        return math.inf if norm_type == -math.inf else 0.0
    # On one device, wait for it once and not for each norm.
    one_device = len({norm.device for norm in norms}) == 1
    values = torch.stack([norm.double() for norm in norms]).tolist() if one_device else list(map(float, norms))
    if math.isinf(norm_type):
        return _extreme(values, norm_type)
    if norm_type == 0:
        return sum(values)
    return float(torch.tensor(values, dtype=torch.float64).pow(norm_type).sum())


def combine(exchange: Exchange, sums: Sequence[float], norm_type: float) -> list[float]:
    """The contributions of all ranks together, the same numbers on every rank; one small collective."""
    bits = unpack(f"<{len(sums)}q", pack(f"<{len(sums)}d", *sums))
    rows = [unpack(f"<{len(row)}d", pack(f"<{len(row)}q", *row)) for row in exchange.start_all_gather_ints(bits).wait()]
    columns = zip(*rows, strict=True)
    return [_extreme(column, norm_type) if math.isinf(norm_type) else sum(column) for column in columns]


def root(total: float, norm_type: float) -> float:
    """The norm that belongs to a sum of powers."""
    if math.isinf(norm_type) or norm_type == 0 or math.isnan(total):
        return total
    if norm_type < 0 and total == 0:
        return math.inf  # of no elements
    return total ** (1.0 / norm_type)


def _extreme(values: Sequence[float], norm_type: float) -> float:
    """The largest value, or the smallest for a negative norm type; NaN if any is NaN."""
    if any(map(math.isnan, values)):
        return math.nan
    return max(values) if norm_type > 0 else min(values)
