"""Names of the ranges that a step leaves in a profile: the only module that writes and reads them."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from zerostep.comm.transport import Presence

_PATTERN = re.compile(r"zerostep/(?P<phase>[a-z ]+?)(?: bucket (?P<bucket>\d+)(?: to (?P<last>\d+))?)?(?P<wait> wait)?")
_END_OF_STEP = re.compile(r"zerostep/end of step (\d+)")
_NO_RANGE = nullcontext()
_thread = threading.local()


@dataclass(frozen=True)
class Label:
    """One range: a phase, the bucket or the first and last bucket it works on, and whether the host waits in it."""

    phase: str
    bucket: int | None = None
    last: int | None = None
    waits: bool = False

    def __str__(self) -> str:
        several = f" to {self.last}" if self.last not in (None, self.bucket) else ""
        buckets = "" if self.bucket is None else f" bucket {self.bucket}{several}"
        return f"zerostep/{self.phase}{buckets}{' wait' if self.waits else ''}"

    @staticmethod
    def parse(name: str) -> Label | None:
        """The label that a range's name was written from; `None` for any other name."""
        match = _PATTERN.fullmatch(name)
        if match is None:
            return None
        bucket, last = (None if match[key] is None else int(match[key]) for key in ("bucket", "last"))
        return Label(match["phase"], bucket, last, match["wait"] is not None)

    @property
    def buckets(self) -> range:
        """The buckets it works on."""
        if self.bucket is None:
            return range(0)
        return range(self.bucket, (self.bucket if self.last is None else self.last) + 1)


def label_range(
    phase: str, bucket: int | None = None, last: int | None = None, waits: bool = False
) -> AbstractContextManager[object]:
    """A range in a profile. It costs more than the work of a small bucket, so it is made only while a profiler runs."""
    if not torch._C._autograd._profiler_enabled():
        return _NO_RANGE
    return record_function(str(Label(phase, bucket, last, waits)))


def recorded_range(phase: str, bucket: int | None = None) -> AbstractContextManager[object]:
    """A range that is always made: observers, and profilers of other threads, may record it unseen."""
    return record_function(str(Label(phase, bucket)))


def end_of_step(number: int) -> str:
    """The name of the range that marks the end of a step."""
    return f"zerostep/end of step {number}"


def step_number(name: str) -> int | None:
    """The number of the step whose end a range marks; `None` for any other name."""
    match = _END_OF_STEP.fullmatch(name)
    return None if match is None else int(match[1])


@contextmanager
def stepping_in_backward() -> Iterator[None]:
    """Mark optimizer steps on this thread as part of a backward pass; see `in_backward`."""
    _thread.in_backward = True
    try:
        yield
    finally:
        _thread.in_backward = False


def in_backward() -> bool:
    """Whether the optimizer step that runs on this thread is part of a backward pass."""
    return getattr(_thread, "in_backward", False)


class PhaseTimer:
    """Labels the phases of a step for profilers and stall reports, and adds up the time that the host waits in each."""

    def __init__(self, presence: Presence | None = None) -> None:
        self._waited: Counter[str] = Counter()
        self._presence = presence or Presence()

    @property
    def wait_seconds(self) -> dict[str, float]:
        """Seconds of waiting so far, by phase."""
        return dict(self._waited)

    def phase(self, name: str, bucket: int | None = None, last: int | None = None) -> AbstractContextManager[object]:
        """A range of work on one bucket, or on those up to `last`."""
        self._presence.at(name, bucket)
        return label_range(name, bucket, last)

    @contextmanager
    def waiting(self, name: str, bucket: int | None = None) -> Iterator[None]:
        """A range in which the host waits."""
        self._presence.at(name, bucket)
        start = time.perf_counter()
        with label_range(name, bucket, waits=True):
            yield
        self._waited[name] += time.perf_counter() - start  # type: ignore[assignment]
