"""What a sharded optimizer tells about itself: bytes moved, time spent waiting, how even the shares are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.profiler import record_function

__all__ = ["PhaseTimer", "Stats"]


@dataclass(frozen=True)
class Stats:
    """Totals since the optimizer was built.

    `wait_seconds` counts, by phase, the time for which this rank's host stood still for others: communication that
    was not hidden. On a backend that works in stream order the host never waits, and a profiler tells more.
    """

    steps: int
    rank: int
    world_size: int
    buckets: int
    elements: int
    owned_elements: int
    imbalance: float
    bytes_sent: int
    bytes_received: int
    wait_seconds: dict[str, float] = field(default_factory=dict)


class PhaseTimer:
    """Names the phases of a step for profilers, and counts the time spent waiting in each."""

    def __init__(self) -> None:
        self.waited: Counter[str] = Counter()

    @contextmanager
    def phase(self, name: str, bucket: int | None = None, last: int | None = None) -> Iterator[None]:
        """A range in a profile; `last` for the work of several buckets at once."""
        with _range(_title(name, bucket, last)):
            yield

    @contextmanager
    def waiting(self, name: str, bucket: int | None = None) -> Iterator[None]:
        """A range in a profile in which the host waits."""
        start = time.perf_counter()
        with _range(f"{_title(name, bucket)} wait"):
            yield
        self.waited[name] += time.perf_counter() - start  # type: ignore[assignment]


def _range(title: str) -> AbstractContextManager[object]:
    """A range costs more than many a bucket's work, so only for somebody who looks."""
    return record_function(title) if torch._C._autograd._profiler_enabled() else nullcontext()


def _title(name: str, bucket: int | None, last: int | None = None) -> str:
    if bucket is None:
        return f"zerostep/{name}"
    return f"zerostep/{name} bucket {bucket}" + (f" to {last}" if last not in (None, bucket) else "")
