"""What a demonstration has found."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["EXACT_WORLD", "RankReport", "RunReport", "Sizes", "largest_difference", "verdict"]

EXACT_WORLD = 2  # up to here a sum of gradients has only one order, so anything but equality is an error
_CLOSE = 1e-3  # beyond, what differs is not the order of a sum


@dataclass(frozen=True)
class Sizes:
    """Bytes on one rank; gradients as they are at the end of backward, with what is under way."""

    parameters: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.state


@dataclass(frozen=True)
class RunReport:
    """What one way of training cost on one rank, and where its loss went.

    `wire_bytes` are those this rank sends in a step, `counted` or else computed. `exposed_ms` is the time of a step in
    which it waited for others; `None` where the host does not wait. `difference` is the largest between its final
    parameters and those of plain DDP, 0.0 if bit-equal.
    """

    name: str
    predicted: Sizes
    measured: Sizes
    step_ms: float
    wire_bytes: int
    counted: bool
    exposed_ms: float | None
    first_loss: float
    last_loss: float
    difference: float


@dataclass(frozen=True)
class RankReport:
    """All runs of one rank; the first is plain DDP."""

    runs: Sequence[RunReport]


def verdict(reports: Sequence[RankReport]) -> tuple[bool, list[str]]:
    """Return whether the runs agree as far as this number of ranks promises it, and a line for each that says so."""
    passed, lines = True, list[str]()
    for place, run in enumerate(reports[0].runs[1:], start=1):
        difference = max(report.runs[place].difference for report in reports)
        subject = f"{run.name}: parameters after the last step"
        if difference == 0:
            lines.append(f"{subject} bit-equal to plain DDP's on every rank")
        else:
            lines.append(f"{subject} NOT bit-equal to plain DDP's, largest difference {difference:.3g}")
            passed = passed and len(reports) > EXACT_WORLD and difference < _CLOSE
    return passed, lines


def largest_difference(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """Return the largest absolute difference of two lists of tensors: 0.0 if equal, infinite if one is not finite."""
    gaps = [(a - b).abs().max().item() for a, b in zip(left, right, strict=True) if not torch.equal(a, b)]
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)
