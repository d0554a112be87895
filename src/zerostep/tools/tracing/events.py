"""Read the profile that torch.profiler wrote on one rank, and find where its steps begin and end."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerostep.step.labels import step_number
from zerostep.tools.errors import TraceError
from zerostep.tools.tracing.intervals import Interval

OPTIMIZER_STEP = "Optimizer.step#"
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
BACKWARD = "autograd::engine::evaluate_function"
_PROFILER_STEP = "ProfilerStep#"


@dataclass(frozen=True)
class TraceEvent:
    """One range of a profile; `category` is the profiler's, such as cpu_op or kernel."""

    name: str
    category: str
    span: Interval
    thread: object


@dataclass(frozen=True)
class RankTrace:
    """All ranges of one rank, sorted by start, and the parsed JSON they come from."""

    rank: int
    events: Sequence[TraceEvent]
    raw: Mapping[str, Any]

    def host_events(self, prefix: str = "") -> list[TraceEvent]:
        """Return the host's ranges whose names start with `prefix`."""
        named = (event for event in self.events if event.name.startswith(prefix))
        return [event for event in named if not event.category.startswith("gpu")]

    @cached_property
    def host_threads(self) -> set[object]:
        """The thread that runs the training loop, and those that run autograd."""
        steps = self._end_marks or self.host_events(_PROFILER_STEP) or self.host_events(OPTIMIZER_STEP)
        counts = Counter(event.thread for event in steps or self.events)
        if not counts:
            return set()
        return {counts.most_common(1)[0][0], *(event.thread for event in self.host_events(BACKWARD))}

    @cached_property
    def steps(self) -> dict[int, Interval]:
        """The complete steps by number, each from the end of the step before to its own end."""
        ends = {step_number(event.name): event.span.start for event in self._end_marks}
        if ends:
            return _between({number: end for number, end in ends.items() if number is not None})
        profiled = [event for event in self.host_events(_PROFILER_STEP) if event.category == "user_annotation"]
        if profiled:
            return {int(event.name.removeprefix(_PROFILER_STEP)): event.span for event in profiled}
        return _between(dict(enumerate(self._step_ends(), start=1)))

    @property
    def _end_marks(self) -> list[TraceEvent]:
        return [event for event in self.host_events() if step_number(event.name) is not None]

    def _step_ends(self) -> list[float]:
        """Return the ends of the first optimizer's steps; steps of others, beside or inside of them, do not count."""
        outermost = list[TraceEvent]()
        for event in self.host_events(OPTIMIZER_STEP):
            if not outermost or event.span.start >= outermost[-1].span.stop:
                outermost.append(event)
        return [event.span.stop for event in outermost if event.name == outermost[0].name]


def _between(ends: Mapping[int, float]) -> dict[int, Interval]:
    return {number: Interval(ends[number - 1], stop) for number, stop in ends.items() if number - 1 in ends}


def parse(raw: Mapping[str, Any], rank: int) -> RankTrace:
    """Convert the profiler's JSON; times become microseconds since the epoch, so that ranks can be compared.

    `rank` is used where the profile does not contain one.
    """
    base = float(raw.get("baseTimeNanoseconds", 0)) / 1e3
    events = [_event(entry, base) for entry in raw["traceEvents"] if entry.get("ph") == "X" and "dur" in entry]
    own_rank = raw.get("distributedInfo", {}).get("rank", rank)
    return RankTrace(int(own_rank), sorted(events, key=lambda event: event.span), raw)


def _event(entry: Mapping[str, Any], base: float) -> TraceEvent:
    start = base + float(entry["ts"])
    span = Interval(start, start + float(entry["dur"]))
    return TraceEvent(str(entry["name"]), str(entry.get("cat", "")), span, entry.get("tid"))


def read(path: Path, rank: int) -> RankTrace:
    """Read one rank's profile, as JSON or gzipped JSON."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        return parse(json.loads(text), rank)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}; name a trace of torch.profiler") from error
    except (ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise TraceError(
            f"{path} is not a trace of torch.profiler: write one with prof.export_chrome_trace()"
        ) from error


def sort_by_rank(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the traces sorted by rank; raise `TraceError` if two are of one rank."""
    counts = Counter(trace.rank for trace in traces)
    repeated = [rank for rank, count in counts.items() if count > 1]
    if repeated:
        raise TraceError(f"{counts[repeated[0]]} traces are of rank {repeated[0]}: give the trace of each rank once")
    return sorted(traces, key=lambda trace: trace.rank)
