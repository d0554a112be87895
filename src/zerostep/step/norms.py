"""Norms of gradients whose elements lie on several ranks, on their device: no host waits for them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from zerostep.comm.exchange import Exchange


def power_sum(parts: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """What one rank's parts contribute to a norm: the extreme element, the number of elements, or the sum of powers.

    Each part's norm is computed in its own precision, as torch does for a whole gradient; the rest is in double.
    """
    norms = [torch.linalg.vector_norm(part, norm_type) for part in parts if part.numel()]
    if not norms:
        value = math.inf if norm_type == -math.inf else 0.0
        return torch.full((), value, dtype=torch.float64, device=device)
    return _add_up(torch.stack([norm.to(device, torch.float64) for norm in norms]), norm_type, powers=False)


def combine(exchange: Exchange, sums: Tensor, norm_type: float) -> Tensor:
    """The contributions of all ranks together, the same numbers on every rank; one small collective."""
    return add_up(exchange.all_gather_values(sums), norm_type)


def add_up(sums: Tensor, norm_type: float) -> Tensor:
    """Several contributions together, over the first dimension."""
    return _add_up(sums, norm_type, powers=True)


def root(total: Tensor, norm_type: float) -> Tensor:
    """The norm that belongs to a sum of powers; infinite for a negative order and no elements."""
    return total if math.isinf(norm_type) or norm_type == 0 else total.pow(1.0 / norm_type)


def _add_up(values: Tensor, norm_type: float, powers: bool) -> Tensor:
    """The extreme of the values, or their sum, over the first dimension; NaN if any is NaN."""
    if math.isinf(norm_type):
        return values.amax(0) if norm_type > 0 else values.amin(0)
    return values.sum(0) if powers or norm_type == 0 else values.pow(norm_type).sum(0)
