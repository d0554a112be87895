"""The results of a demo: cost of each run on each rank, and whether the runs ended with equal parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_EXACT_WORLD = 2  # up to so many ranks, a sum of gradients has one order only, so parameters must be bit-equal
_TOLERANCE = 1e-3  # on more ranks; the order of sums makes no larger difference


@dataclass(frozen=True)
class Sizes:
    """Bytes on one rank; gradients at the end of backward, with the buffers of buckets under way."""

    parameters: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.parameters + self.gradients + self.state


@dataclass(frozen=True)
class RunReport:
    """Cost and losses of one run on one rank.

    `wire_bytes` are those that the rank sends in a step. `exposed_ms` is the time per step in which the host waited for
    other ranks; `None` on GPUs, where it does not wait. `difference` is the largest between the run's final parameters
    and those of plain DDP, 0.0 if bit-equal.
    """

    name: str
    predicted: Sizes
    measured: Sizes
    step_ms: float
    wire_bytes: int
    exposed_ms: float | None
    first_loss: float
    last_loss: float
    difference: float


def compare_runs(ranks: Sequence[Sequence[RunReport]]) -> tuple[bool, list[str]]:
    """Return whether all runs of all ranks ended with the parameters of plain DDP, and a line to print for each.

    The first run is plain DDP. On more than two ranks, small differences pass.
    """
    passed, lines = True, list[str]()
    for index, run in enumerate(ranks[0][1:], start=1):
        difference = max(runs[index].difference for runs in ranks)
        subject = f"{run.name}: parameters after the last step"
        if difference == 0:
            lines.append(f"{subject} bit-equal to plain DDP's on every rank")
        else:
            lines.append(f"{subject} NOT bit-equal to plain DDP's, largest difference {difference:.3g}")
            passed = passed and len(ranks) > _EXACT_WORLD and difference < _TOLERANCE
    return passed, lines


def largest_difference(left: Iterable[Tensor], right: Iterable[Tensor]) -> float:
    """Return the largest absolute difference of two lists of tensors: 0.0 if equal, infinite if one is not finite."""
    gaps = [(a - b).abs().max().item() for a, b in zip(left, right, strict=True) if not torch.equal(a, b)]
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)
