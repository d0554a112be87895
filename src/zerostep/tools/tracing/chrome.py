"""Merge the traces of all ranks into one file for Perfetto and chrome://tracing: one process per rank, one clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from zerostep.tools.tracing.events import DEVICE_CATEGORIES, RankTrace
from zerostep.tools.tracing.step import StepView

_RANK_STRIDE = 1000  # rank r has process id 1000 * r, and the ids after it for its accelerators
_FLOW_STRIDE = 1 << 32
_NOT_HOST_PREFIXES = ("gpu", "kernel", "Trace", "overhead")


def merged(traces: Sequence[RankTrace], views: Sequence[StepView]) -> dict[str, Any]:
    """Return one trace of all ranks, with communication added as asynchronous ranges."""
    bases = [float(trace.raw.get("baseTimeNanoseconds", 0)) / 1e3 for trace in traces]
    begin = min(event.span.start for trace in traces for event in trace.events)
    events = list[dict[str, Any]]()
    for trace, base, view in zip(traces, bases, views, strict=True):
        events += _shifted(trace, base - begin)
        events += _comm_ranges(view, begin)
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}


def _shifted(trace: RankTrace, shift: float) -> Iterator[dict[str, Any]]:
    """Yield a rank's events with times on the common clock and process ids that no other rank has."""
    pids = _process_ids(trace)
    for pid in pids.values():
        name = f"rank {trace.rank}" if pid % _RANK_STRIDE == 0 else f"rank {trace.rank}, device"
        metadata = {"ph": "M", "pid": pid, "tid": 0, "ts": 0}
        yield {**metadata, "name": "process_name", "args": {"name": name}}
        yield {**metadata, "name": "process_sort_index", "args": {"sort_index": pid}}
    for entry in trace.raw["traceEvents"]:
        if entry.get("pid") not in pids or (entry["ph"] == "M" and entry["name"].startswith("process_")):
            continue
        shifted = {**entry, "pid": pids[entry["pid"]]}
        if "ts" in entry:
            shifted["ts"] = entry["ts"] + shift if entry["ph"] != "M" else 0
        if isinstance(entry.get("id"), int):
            # Ranks number their arrows alike; equal ids would draw arrows from one rank to another.
            shifted["id"] = entry["id"] + trace.rank * _FLOW_STRIDE
        yield shifted


def _process_ids(trace: RankTrace) -> dict[Any, int]:
    """Map the process ids that have events to new ones: the rank's own process first, then its devices."""
    ranges = [entry for entry in trace.raw["traceEvents"] if entry["ph"] == "X" and "dur" in entry]
    counts = Counter(entry["pid"] for entry in ranges if not str(entry.get("cat")).startswith(_NOT_HOST_PREFIXES))
    own = counts.most_common(1)[0][0]
    devices = dict.fromkeys(entry["pid"] for entry in ranges if entry.get("cat") in DEVICE_CATEGORIES)
    first = trace.rank * _RANK_STRIDE
    return {own: first, **{pid: first + 1 + index for index, pid in enumerate(devices) if pid != own}}


def _comm_ranges(view: StepView, begin: float) -> Iterator[dict[str, Any]]:
    """Yield an asynchronous range for each communication; Perfetto shows it beside the threads of the rank."""
    for index, comm in enumerate(view.comm_spans):
        common = {
            "cat": "on its way",
            "name": f"{comm.phase} {comm.row}",
            "id": f"{view.rank}.{index}",
            "pid": view.rank * _RANK_STRIDE,
            "tid": 0,
        }
        yield {**common, "ph": "b", "ts": comm.span.start - begin}
        yield {**common, "ph": "e", "ts": comm.span.stop - begin}
