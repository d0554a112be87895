"""Interleaved rounds on all ranks, their quartiles, and Markdown tables of them."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

Probe = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Timing:
    """The rounds of one probe in seconds; each is the slowest rank's."""

    seconds: tuple[float, ...]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile."""
        if len(self.seconds) == 1:
            return (self.seconds[0],) * 3
        low, middle, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, middle, high

    @property
    def median(self) -> float:
        """The median round."""
        return self.quartiles[1]


def interleave(probes: Mapping[str, Probe], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Time every probe once per round, after a barrier; collective. Returns the slowest rank's seconds per round."""
    return rotate({name: partial(timed, probe) for name, probe in probes.items()}, rounds, warmup)


def rotate(clocks: Mapping[str, Clock], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Read every clock once per round; collective. Returns the slowest rank's seconds per round.

    Each round starts with another clock, so that none always follows the same neighbour.
    """
    names = list(clocks)
    local: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            local[name].append(clocks[name]())
    return {name: slowest(seconds[warmup:]) for name, seconds in local.items()}


def timed(probe: Probe) -> float:
    """Time one call on this rank, from a barrier, without the garbage collector."""
    gc.collect()
    gc.disable()
    dist.barrier()
    start = time.perf_counter()
    probe()
    elapsed = time.perf_counter() - start
    gc.enable()
    return elapsed


def steady(step: Probe, settle: Probe, steps: int) -> float:
    """Seconds per step of ``steps`` in a row on this rank, as in the middle of a long run.

    A step may leave work under way for the next to wait for. So one step goes before those that are timed, and nothing
    waits at the end of the time: what the first inherits stands for what the last leaves.
    """
    gc.collect()
    gc.disable()
    dist.barrier()
    step()
    start = time.perf_counter()  # no barrier here: work under way would go on behind it, for nothing
    for _ in range(steps):
        step()
    elapsed = time.perf_counter() - start
    settle()
    gc.enable()
    return elapsed / steps


def slowest(seconds: Sequence[float]) -> list[float]:
    """Return each round's maximum over the ranks; collective."""
    rounds = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(rounds, dist.ReduceOp.MAX)
    return [float(value) for value in rounds]


# Student's t, two-sided, 95%, by degrees of freedom; beyond, the last stands for all.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def another_run(ours: Timing, other: Timing) -> tuple[float, float] | None:
    """Where the ratio of another run of as many rounds lies, 9 times of 10 or more; nothing after a single round.

    Student's prediction interval around the ratio of the medians, from the spread of the rounds' own ratios: what slows
    both in one round hardly counts. Few rounds make it wide.
    """
    logs = [math.log(mine / theirs) for mine, theirs in zip(ours.seconds, other.seconds, strict=False)]
    if len(logs) < 2:
        return None
    # Twice, for either run's; and a median varies more than a mean by pi / 2.
    reach = _T[min(len(logs) - 1, len(_T)) - 1] * statistics.stdev(logs) * math.sqrt(2 * math.pi / 2 / len(logs))
    ratio = ours.median / other.median
    return ratio * math.exp(-reach), ratio * math.exp(reach)


def spread_cells(timing: Timing) -> list[str]:
    """Return the median and the quartiles in milliseconds as table cells."""
    low, middle, high = (1e3 * value for value in timing.quartiles)
    return [f"{middle:.2f}", f"{low:.2f} - {high:.2f}"]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = [f"{'-' * (width - 1)}{':' if column else '-'}" for column, width in enumerate(widths)]
    return "\n".join(_line(cells, widths) for cells in (lines[0], rule, *lines[1:]))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"
