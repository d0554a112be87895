"""The traces of all ranks as one, for Perfetto and chrome://tracing: one process per rank, one clock."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerostep.tools.tracing.events import RankTrace
from zerostep.tools.tracing.step import StepView

__all__ = ["merged", "write"]

_RANK_STRIDE = 1000  # process numbers of a rank's accelerators follow its own
_FLOW_STRIDE = 1 << 32
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NOT_THE_HOST = ("gpu", "kernel", "Trace", "overhead")


def merged(traces: Sequence[RankTrace], views: Sequence[StepView]) -> dict[str, Any]:
    """One trace; what was on its way between ranks is added as asynchronous ranges."""
    bases = [float(trace.raw.get("baseTimeNanoseconds", 0)) / 1e3 for trace in traces]
    begin = min(event.span.start for trace in traces for event in trace.events)
    events = list[dict[str, Any]]()
    for trace, base, view in zip(traces, bases, views, strict=True):
        events += _moved(trace, base - begin)
        events += _communications(view, begin)
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": events}


def write(path: Path, traces: Sequence[RankTrace], views: Sequence[StepView]) -> None:
    """Write one file for all ranks."""
    path.write_text(json.dumps(merged(traces, views)))


def _moved(trace: RankTrace, shift: float) -> Iterator[dict[str, Any]]:
    entries, numbers = trace.raw["traceEvents"], _processes(trace)
    for number in numbers.values():
        name = f"rank {trace.rank}" if number % _RANK_STRIDE == 0 else f"rank {trace.rank}, device"
        named = {"ph": "M", "pid": number, "tid": 0, "ts": 0}
        yield {**named, "name": "process_name", "args": {"name": name}}
        yield {**named, "name": "process_sort_index", "args": {"sort_index": number}}
    for entry in entries:
        if entry.get("pid") not in numbers or (entry["ph"] == "M" and entry["name"].startswith("process_")):
            continue
        moved = {**entry, "pid": numbers[entry["pid"]]}
        if "ts" in entry:
            moved["ts"] = entry["ts"] + shift if entry["ph"] != "M" else 0
        if isinstance(entry.get("id"), int):
            moved["id"] = entry["id"] + trace.rank * _FLOW_STRIDE  # arrows stay inside a rank
        yield moved


def _processes(trace: RankTrace) -> dict[Any, int]:
    """Numbers of the processes in which something happens: first the rank's own, then its devices."""
    happened = [entry for entry in trace.raw["traceEvents"] if entry["ph"] == "X" and "dur" in entry]
    counts = Counter(entry["pid"] for entry in happened if not str(entry.get("cat")).startswith(_NOT_THE_HOST))
    main = counts.most_common(1)[0][0]
    devices = dict.fromkeys(entry["pid"] for entry in happened if entry.get("cat") in _DEVICE)
    first = trace.rank * _RANK_STRIDE
    return {main: first, **{pid: first + 1 + place for place, pid in enumerate(devices) if pid != main}}


def _communications(view: StepView, begin: float) -> Iterator[dict[str, Any]]:
    """A range for each bucket on its way, beside the threads that launched it."""
    for number, communication in enumerate(view.communications):
        common = {
            "cat": "on its way",
            "name": f"{communication.phase} {communication.row}",
            "id": f"{view.rank}.{number}",
            "pid": view.rank * _RANK_STRIDE,
            "tid": 0,
        }
        yield {**common, "ph": "b", "ts": communication.span.start - begin}
        yield {**common, "ph": "e", "ts": communication.span.stop - begin}
