"""What a torch profiler has written for one rank, and where its steps begin and end."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerostep.tools.tracing.intervals import Interval

__all__ = ["BACKWARD", "MARK", "OPTIMIZER_STEP", "RankTrace", "TraceError", "TraceEvent", "in_order", "parse", "read"]

MARK = "zerostep/end of step "
OPTIMIZER_STEP = "Optimizer.step#"
BACKWARD = "autograd::engine::evaluate_function"
_PROFILER_STEP = "ProfilerStep#"


class TraceError(RuntimeError):
    """A trace cannot be made or read; the message is one line for the user."""

    def format_message(self) -> str:
        """The one line, for a command line."""
        return " ".join(str(self).split())


@dataclass(frozen=True)
class TraceEvent:
    """A range of a trace."""

    name: str
    kind: str
    span: Interval
    thread: object


@dataclass(frozen=True)
class RankTrace:
    """All ranges of one rank, in the order of their beginnings, and the file's own content."""

    rank: int
    events: Sequence[TraceEvent]
    raw: Mapping[str, Any]

    def titled(self, prefix: str) -> list[TraceEvent]:
        """The ranges of the host whose names begin like this."""
        return [event for event in self.events if event.name.startswith(prefix) and not event.kind.startswith("gpu")]

    @cached_property
    def host_threads(self) -> set[object]:
        """The thread that trains, and those on which autograd works."""
        marks = self.titled(MARK) or self.titled(_PROFILER_STEP) or self.titled(OPTIMIZER_STEP)
        counts = Counter(event.thread for event in marks or self.events)
        return {counts.most_common(1)[0][0], *(event.thread for event in self.titled(BACKWARD))} if counts else set()

    @cached_property
    def steps(self) -> dict[int, Interval]:
        """Complete steps by number: each from the end of the one before to its own end."""
        marks = {int(event.name.removeprefix(MARK)): event.span.start for event in self.titled(MARK)}
        if marks:
            return _between(marks)
        profiled = [event for event in self.titled(_PROFILER_STEP) if event.kind == "user_annotation"]
        if profiled:
            return {int(event.name.removeprefix(_PROFILER_STEP)): event.span for event in profiled}
        return _between(dict(enumerate(self._ends_of_steps(), start=1)))

    def _ends_of_steps(self) -> list[float]:
        """The ends of the outermost ranges of the first optimizer; others may step beside it, or inside."""
        outer = list[TraceEvent]()
        for event in self.titled(OPTIMIZER_STEP):
            if not outer or event.span.start >= outer[-1].span.stop:
                outer.append(event)
        return [event.span.stop for event in outer if event.name == outer[0].name]


def _between(ends: Mapping[int, float]) -> dict[int, Interval]:
    return {number: Interval(ends[number - 1], stop) for number, stop in ends.items() if number - 1 in ends}


def parse(raw: Mapping[str, Any], rank: int) -> RankTrace:
    """A trace as the profiler writes it; `rank` if it does not tell its own. Times become those of the epoch."""
    base = float(raw.get("baseTimeNanoseconds", 0)) / 1e3
    found = [_event(entry, base) for entry in raw["traceEvents"] if entry.get("ph") == "X" and "dur" in entry]
    known = raw.get("distributedInfo", {}).get("rank", rank)
    return RankTrace(int(known), sorted(found, key=lambda event: event.span), raw)


def _event(entry: Mapping[str, Any], base: float) -> TraceEvent:
    start = base + float(entry["ts"])
    span = Interval(start, start + float(entry["dur"]))
    return TraceEvent(str(entry["name"]), str(entry.get("cat", "")), span, entry.get("tid"))


def read(path: Path, rank: int) -> RankTrace:
    """Read the file of one rank, as JSON or compressed JSON."""
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


def in_order(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces by rank, of which each must be there once."""
    counts = Counter(trace.rank for trace in traces)
    twice = [rank for rank, count in counts.items() if count > 1]
    if twice:
        raise TraceError(f"{counts[twice[0]]} traces are of rank {twice[0]}: give the trace of each rank once")
    return sorted(traces, key=lambda trace: trace.rank)
