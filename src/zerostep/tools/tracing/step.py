"""One step of one rank: what its host did, what was on its way for each bucket, and what of that was not hidden.

The network itself is in no profile of a backend that works on the host. What is known is when a bucket set out and when
the host had it in its hands; the last part of that time, in which the host stood still, is what communication cost.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerostep.tools.tracing.events import BACKWARD, OPTIMIZER_STEP, RankTrace, TraceError, TraceEvent
from zerostep.tools.tracing.intervals import Interval, clip, intersect, join, subtract, total, union

__all__ = ["Communication", "StepView", "Update", "common_step", "view"]

_RANGE = re.compile(r"zerostep/(?P<phase>[a-z ]+?)(?: bucket (?P<bucket>\d+)(?: to (?P<last>\d+))?)?(?P<wait> wait)?")
_COLLECTIVE = re.compile(r"(?:gloo|mpi|ucc):_?(?P<name>[a-z_]+)")  # nccl's are ranges of launches
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_OWN_MESSAGES = ("send", "recv")  # the ranges tell more about them
_NO_COMMUNICATION = ("update", "meet", "end of step")
# The host is as good as busy between two ops that follow each other this closely.
_PAUSE = 100.0


@dataclass(frozen=True)
class Communication:
    """What was on its way: from its launch to the moment at which it was in place, as far as that is known.

    `waits` are the parts of it for which the host stood still because of it.
    """

    phase: str
    row: str
    span: Interval
    waits: Sequence[Interval] = ()


@dataclass(frozen=True)
class Update:
    """An inner optimizer's work on some rows."""

    rows: Sequence[str]
    span: Interval


@dataclass(frozen=True)
class StepView:
    """One step; all times lie inside `window`.

    `host` has what the host did, by kind; `device` has the accelerator's own work, without messages. `exposed` has, by
    phase, the time for which communication was waited for.
    """

    rank: int
    window: Interval
    host: dict[str, list[Interval]]
    device: list[Interval]
    communications: list[Communication]
    updates: list[Update]
    exposed: dict[str, list[Interval]]

    @property
    def exposed_ms(self) -> float:
        """Milliseconds of the step in which communication was waited for."""
        return total(interval for found in self.exposed.values() for interval in found) / 1e3

    @property
    def rows(self) -> list[str]:
        """The names of all rows, buckets first and in order."""
        names = {communication.row for communication in self.communications} | {
            row for update in self.updates for row in update.rows
        }
        return sorted(names, key=_row_order)


def common_step(traces: Sequence[RankTrace], wanted: int | None) -> int:
    """The step to look at: the wanted one, or the last that is complete on all ranks."""
    steps = sorted(set.intersection(*(set(trace.steps) for trace in traces)))
    if not steps:
        raise TraceError(
            "no step is complete on all ranks: profile at least two steps that call optimizer.step(), or call "
            "prof.step() after each"
        )
    if wanted is not None and wanted not in steps:
        raise TraceError(f"step {wanted} is not in the traces of all ranks: choose --step from {_listed(steps)}")
    return steps[-1] if wanted is None else wanted


def view(trace: RankTrace, step: int) -> StepView:
    """What happened on one rank in one step."""
    window = trace.steps[step]
    ours = [(match, event) for event in trace.events if (match := _RANGE.fullmatch(event.name)) and _is_host(event)]
    ops = [event for event in trace.events if _is_op(event) and event.thread in trace.host_threads]
    busy = union(event.span for event in ops)
    kernels = [event for event in trace.events if event.kind in _GPU_WORK]
    wire = [event for event in kernels if event.name.startswith("nccl")]
    device = union(event.span for event in kernels if not event.name.startswith("nccl"))
    communications = _device_communications(trace, wire, device) if wire else _host_communications(trace, ours, busy)
    exposed = defaultdict[str, list[Interval]](list)
    for communication in communications:
        exposed[communication.phase] += communication.waits
    if not wire:
        exposed["meet"] = _meetings(trace, ours, busy)
    updates = [_update(match, event) for match, event in ours if match["phase"] == "update"]
    return StepView(
        rank=trace.rank,
        window=window,
        host={kind: clip(spans, window) for kind, spans in _host(trace, ops, updates).items()},
        device=clip(device, window),
        communications=[
            Communication(f.phase, f.row, part, clip(f.waits, window))
            for f in communications
            for part in clip([f.span], window)
        ],
        updates=[Update(update.rows, part) for update in updates for part in clip([update.span], window)],
        exposed={phase: inside for phase, spans in exposed.items() if (inside := clip(spans, window))},
    )


# ---------------------------------------------------------------------- the host


def _host(trace: RankTrace, ops: Sequence[TraceEvent], updates: Sequence[Update]) -> dict[str, list[Interval]]:
    """What the host did: every moment has at most one kind, the later kinds first.

    But an update inside backward is made by another thread, and beside what the host did in that moment.
    """
    steps = union(event.span for event in trace.titled(OPTIMIZER_STEP) if event.thread in trace.host_threads)
    backward = subtract(_backward(ops), steps)
    known = union([*steps, *backward])
    rest = join(subtract((op.span for op in ops), known), _PAUSE)
    update = union(update.span for update in updates) or steps
    return {
        "forward": subtract(rest, known),
        "backward": backward,
        "step": subtract(steps, update),
        "update": update,
    }


def _backward(ops: Sequence[TraceEvent]) -> list[Interval]:
    """Each backward pass from its first op to its last; a pass ends where another op runs outside of it."""
    passes = union(event.span for event in ops if event.name.startswith(BACKWARD))
    others = subtract((event.span for event in ops), passes)
    found = list[Interval]()
    for part in passes:
        gap = [Interval(found[-1].stop, part.start)] if found else []
        if gap and not intersect(gap, others):
            found[-1] = Interval(found[-1].start, part.stop)
        else:
            found.append(part)
    return found


def _is_host(event: TraceEvent) -> bool:
    return not event.kind.startswith("gpu")


def _is_op(event: TraceEvent) -> bool:
    """Work of the host; not the call of a collective, in which it may wait."""
    return event.kind == "cpu_op" and not event.name.startswith(("c10d::", "record_param_comms"))


# ---------------------------------------------------------------------- what is on its way

_Named = tuple[re.Match[str], TraceEvent]


def _host_communications(trace: RankTrace, ours: Sequence[_Named], busy: Sequence[Interval]) -> list[Communication]:
    """Launches with the waits that end them, in order; and the collectives of others."""
    found = list[Communication]()
    by_name = defaultdict[tuple[str, str], list[_Named]](list)
    for match, event in ours:
        if match["phase"] not in _NO_COMMUNICATION:
            by_name[match["phase"], _row(match)].append((match, event))
    waited = {match["phase"] for match, _ in ours if match["wait"]}
    at_work = _at_work(trace, ours, busy)
    for (phase, row), named in by_name.items():
        pairs = _paired(named, trace) if phase in waited else [(event.span, event) for _, event in named]
        found += [Communication(phase, row, span, _stood_still(trace, event, busy, at_work)) for span, event in pairs]
    return found + _collectives(trace, ours, at_work)


def _at_work(trace: RankTrace, ours: Sequence[_Named], busy: Sequence[Interval]) -> list[Interval]:
    """When a host was not idle: in ops, and in ranges of ours, which tell by themselves what they wait for."""
    told = (event.span for match, event in ours if match["phase"] == "update" or event.thread in trace.host_threads)
    return union([*join(busy, _PAUSE), *told])


def _stood_still(
    trace: RankTrace, wait: TraceEvent | None, busy: Sequence[Interval], at_work: Sequence[Interval]
) -> list[Interval]:
    """A wait without the ops inside: sums and copies are work.

    What another thread waits for, as for a step inside backward, holds the host up only where it has nothing to do.
    """
    if wait is None:
        return []
    return subtract([wait.span], busy if wait.thread in trace.host_threads else at_work)


def _paired(named: Sequence[_Named], trace: RankTrace) -> list[tuple[Interval, TraceEvent | None]]:
    """Each launch to the end of its wait, with the wait; what has no wait goes on to the end of the trace.

    A wait without a launch belongs to one before the trace, or is of a phase that is only waited for.
    """
    found, launched = list[tuple[Interval, TraceEvent | None]](), list[float]()
    begin, end = trace.events[0].span.start, max(event.span.stop for event in trace.events)
    only_waits = all(match["wait"] for match, _ in named)
    for match, event in named:
        if match["wait"]:
            before = event.span.start if only_waits else begin
            found.append((Interval(launched.pop(0) if launched else before, event.span.stop), event))
        else:
            launched.append(event.span.start)
    return found + [(Interval(start, end), None) for start in launched]


def _collectives(trace: RankTrace, ours: Sequence[_Named], at_work: Sequence[Interval]) -> list[Communication]:
    """What other libraries have sent, such as DDP: each message is a row, in the order of a step.

    Nobody tells who waits for them; where one is under way and no op runs, the host is taken to.
    """
    found = list[Communication]()
    counts = Counter[str]()
    edges = sorted({edge for step in trace.steps.values() for edge in (step.start, step.stop)})
    for event in trace.events:
        match = _COLLECTIVE.fullmatch(event.name)
        if not match or match["name"] in _OWN_MESSAGES or _is_part(match["name"], event, ours):
            continue
        if edges and event.span.start >= edges[0]:
            edges, counts = [edge for edge in edges if edge > event.span.start], Counter()
        name = match["name"].replace("_", "-")
        phase = next((known for known in ("gather", "reduce") if known in name), "other")
        found.append(Communication(phase, f"{name} {counts[name]}", event.span, subtract([event.span], at_work)))
        counts[name] += 1
    return found


def _is_part(name: str, collective: TraceEvent, ours: Sequence[_Named]) -> bool:
    """Whether a collective belongs to a range of ours: gradients that others reduce meanwhile do not."""
    around = (match["phase"] for match, event in ours if event.span.covers(collective.span))
    return any(phase not in ("update", "gather") or "reduce" not in name for phase in around)


def _device_communications(
    trace: RankTrace, wire: Sequence[TraceEvent], device: Sequence[Interval]
) -> list[Communication]:
    """Messages that are kernels: the ranges in which they were launched tell the bucket.

    Exposed is the time of a message in which no other kernel runs.
    """
    annotations = [event for event in trace.events if event.kind == "gpu_user_annotation"]
    named = [(match, event.span) for event in annotations if (match := _RANGE.fullmatch(event.name))]
    communications = list[Communication]()
    for kernel in wire:
        found = next((match for match, span in named if span.covers(kernel.span)), None)
        guess = "gather" if "AllGather" in kernel.name else "reduce"
        phase, row = (found["phase"], _row(found)) if found else (guess, "messages")
        communications.append(Communication(phase, row, kernel.span, subtract([kernel.span], device)))
    return communications


def _meetings(trace: RankTrace, ours: Sequence[_Named], busy: Sequence[Interval]) -> list[Interval]:
    """When the host waited for a word from the others."""
    waits = [event for match, event in ours if match["phase"] == "meet" and match["wait"]]
    return [interval for wait in waits for interval in _stood_still(trace, wait, busy, [wait.span])]


def _update(match: re.Match[str], event: TraceEvent) -> Update:
    if match["bucket"] is None:
        return Update([], event.span)
    last = match["last"] or match["bucket"]
    return Update([f"bucket {bucket}" for bucket in range(int(match["bucket"]), int(last) + 1)], event.span)


def _row(match: re.Match[str]) -> str:
    return match["phase"] if match["bucket"] is None else f"bucket {match['bucket']}"


def _row_order(row: str) -> tuple[bool, str, int]:
    name, _, number = row.rpartition(" ")
    return (name != "bucket", name, int(number)) if number.isdigit() else (True, row, 0)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
