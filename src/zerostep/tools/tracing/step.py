"""Evaluate one step of one rank: what the host did, the communication of each bucket, and how much was exposed.

A host backend such as Gloo leaves no record of the network in a profile. Known are the launch of a bucket's message and
the wait for it; the part of the wait in which the host ran no op is the exposed communication. With NCCL, messages are
kernels of the profile, and exposed is the time in which no other kernel runs.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from zerostep.step.labels import Label
from zerostep.tools.errors import TraceError
from zerostep.tools.tracing.events import BACKWARD, DEVICE_CATEGORIES, OPTIMIZER_STEP, RankTrace, TraceEvent
from zerostep.tools.tracing.intervals import Interval, clip, intersect, join, subtract, total, union

_COLLECTIVE = re.compile(r"(?:gloo|mpi|ucc):_?(?P<name>[a-z_]+)")  # the ranges of nccl are only the launches of kernels
_OWN_MESSAGES = ("send", "recv")  # covered by the ranges of this library, which name the bucket
_NO_COMMUNICATION = ("update", "control")
_MAX_PAUSE = 100.0  # microseconds; a shorter pause between two ops counts as work
_Labelled = tuple[Label, TraceEvent]


@dataclass(frozen=True)
class CommSpan:
    """One communication, from its launch to the end of the wait for it; `row` is its bucket or collective.

    `waits` are the parts in which the host was idle because of it.
    """

    phase: str
    row: str
    span: Interval
    waits: Sequence[Interval] = ()


@dataclass(frozen=True)
class Update:
    """One call of an inner optimizer and the rows of the buckets it updated."""

    rows: Sequence[str]
    span: Interval


@dataclass(frozen=True)
class StepView:
    """One step of one rank; all times lie inside `window`.

    `host` has the host's time by activity: forward, backward, step, update. `device` has the accelerator's kernels
    without communication. `exposed` has, by phase, the time spent waiting for communication.
    """

    rank: int
    window: Interval
    host: dict[str, list[Interval]]
    device: list[Interval]
    comm_spans: list[CommSpan]
    updates: list[Update]
    exposed: dict[str, list[Interval]]

    @property
    def exposed_ms(self) -> float:
        """Milliseconds of the step spent waiting for communication."""
        return total(interval for waits in self.exposed.values() for interval in waits) / 1e3

    @property
    def rows(self) -> list[str]:
        """The names of all rows, buckets first and in order."""
        names = {comm.row for comm in self.comm_spans} | {row for update in self.updates for row in update.rows}
        return sorted(names, key=_row_order)


def common_step(traces: Sequence[RankTrace], wanted: int | None) -> int:
    """Return the number of the step to draw: the wanted one, or the last that is complete on all ranks."""
    steps = sorted(set.intersection(*(set(trace.steps) for trace in traces)))
    if not steps:
        raise TraceError(
            "no step is complete on all ranks: profile at least two steps that call optimizer.step(), or call "
            "prof.step() after each"
        )
    if wanted is not None and wanted not in steps:
        known = ", ".join(map(str, steps))
        raise TraceError(f"step {wanted} is not in the traces of all ranks: choose --step from {known}")
    return steps[-1] if wanted is None else wanted


def view_step(trace: RankTrace, step: int) -> StepView:
    """Evaluate one step of one rank.

    Communication is evaluated over the whole trace and clipped afterwards, because it may cross the edges of a step.
    """
    window = trace.steps[step]
    ours = [(label, event) for event in trace.host_events() if (label := Label.parse(event.name))]
    ops = [event for event in trace.events if _is_op(event) and event.thread in trace.host_threads]
    op_spans = union(event.span for event in ops)
    kernels = [event for event in trace.events if event.category in DEVICE_CATEGORIES]
    messages = [event for event in kernels if event.name.startswith("nccl")]
    device = union(event.span for event in kernels if not event.name.startswith("nccl"))
    comms = _device_comms(trace, messages, device) if messages else _host_comms(trace, ours, op_spans)
    exposed = defaultdict[str, list[Interval]](list)
    for comm in comms:
        exposed[comm.phase] += comm.waits
    if not messages:
        exposed["control"] = _control_waits(trace, ours, op_spans)
    updates = [
        Update([f"bucket {bucket}" for bucket in label.buckets], event.span)
        for label, event in ours
        if label.phase == "update"
    ]
    return StepView(
        rank=trace.rank,
        window=window,
        host={activity: clip(spans, window) for activity, spans in _host_activities(trace, ours, ops).items()},
        device=clip(device, window),
        comm_spans=[
            CommSpan(comm.phase, comm.row, part, clip(comm.waits, window))
            for comm in comms
            for part in clip([comm.span], window)
        ],
        updates=[Update(update.rows, part) for update in updates for part in clip([update.span], window)],
        exposed={phase: inside for phase, spans in exposed.items() if (inside := clip(spans, window))},
    )


# ---------------------------------------------------------------------- the host


def _host_activities(
    trace: RankTrace, ours: Sequence[_Labelled], ops: Sequence[TraceEvent]
) -> dict[str, list[Interval]]:
    """Divide the host's time among activities, which do not overlap; where several apply, the later key wins.

    Only an update of DDP's hooks inside backward overlaps: another thread runs it beside the host.
    """
    steps = union(event.span for event in trace.host_events(OPTIMIZER_STEP) if event.thread in trace.host_threads)
    inside = _inside_backward(trace, ours, steps)
    own_updates = [event.span for label, event in inside if label.phase == "update"]
    backward = subtract(_backward(ops, [event.span for _, event in inside]), [*steps, *own_updates])
    known = union([*steps, *backward, *own_updates])
    rest = join(subtract((op.span for op in ops), known), _MAX_PAUSE)
    update = union(event.span for label, event in ours if label.phase == "update") or steps
    return {
        "forward": subtract(rest, known),
        "backward": backward,
        "step": subtract(steps, update),
        "update": update,
    }


def _inside_backward(trace: RankTrace, ours: Sequence[_Labelled], steps: Sequence[Interval]) -> list[_Labelled]:
    """Return what the host did of the step inside backward: nothing, unless it updates there.

    The last buckets are reduced and updated when autograd has run all its nodes, but `backward()` has not returned.
    """
    mine = [(label, event) for label, event in ours if event.thread in trace.host_threads]
    outside = [(label, event) for label, event in mine if not any(step.covers(event.span) for step in steps)]
    if not any(label.phase == "update" for label, _ in outside):
        return []
    return [(label, event) for label, event in outside if label.phase != "gather" or not label.waits]


def _backward(ops: Sequence[TraceEvent], inside: Sequence[Interval]) -> list[Interval]:
    """Return each backward pass, from its first op to its last; an op outside of autograd separates two passes.

    `inside` are ranges of this library that count as autograd's.
    """
    nodes = union([*(event.span for event in ops if event.name.startswith(BACKWARD)), *inside])
    others = subtract((event.span for event in ops), nodes)
    passes = list[Interval]()
    for node in nodes:
        gap = [Interval(passes[-1].stop, node.start)] if passes else []
        if gap and not intersect(gap, others):
            passes[-1] = Interval(passes[-1].start, node.stop)
        else:
            passes.append(node)
    return passes


def _is_op(event: TraceEvent) -> bool:
    """Return whether an event is an op, other than the call of a collective, in which the host may wait."""
    return event.category == "cpu_op" and not event.name.startswith(("c10d::", "record_param_comms"))


# ---------------------------------------------------------------------- communication


def _host_comms(trace: RankTrace, ours: Sequence[_Labelled], op_spans: Sequence[Interval]) -> list[CommSpan]:
    """Return the communication of a host backend: this library's by its ranges, and the collectives of others."""
    comms = list[CommSpan]()
    by_name = defaultdict[tuple[str, str], list[_Labelled]](list)
    for label, event in ours:
        if label.phase not in _NO_COMMUNICATION:
            by_name[label.phase, _row(label)].append((label, event))
    waited = {label.phase for label, _ in ours if label.waits}
    work = _work_spans(trace, ours, op_spans)
    for (phase, row), named in by_name.items():
        pairs = _launches_with_waits(named, trace) if phase in waited else [(event.span, event) for _, event in named]
        comms += [CommSpan(phase, row, span, _idle_spans(trace, wait, op_spans, work)) for span, wait in pairs]
    return comms + _collectives(trace, ours, work)


def _work_spans(trace: RankTrace, ours: Sequence[_Labelled], op_spans: Sequence[Interval]) -> list[Interval]:
    """Return when the host was not idle: in ops, and in ranges of this library, whose waits are counted separately."""
    ranges = (event.span for label, event in ours if label.phase == "update" or event.thread in trace.host_threads)
    return union([*join(op_spans, _MAX_PAUSE), *ranges])


def _idle_spans(
    trace: RankTrace, wait: TraceEvent | None, op_spans: Sequence[Interval], work: Sequence[Interval]
) -> list[Interval]:
    """Return a wait without the ops inside of it, which are sums and copies.

    A wait of another thread, as in a step inside backward, delays the host only where the host has no work.
    """
    if wait is None:
        return []
    return subtract([wait.span], op_spans if wait.thread in trace.host_threads else work)


def _launches_with_waits(named: Sequence[_Labelled], trace: RankTrace) -> list[tuple[Interval, TraceEvent | None]]:
    """Return the time from each launch to the end of its wait, and the wait; without a wait, to the end of the trace.

    Launches and waits of one bucket are matched first in, first out. A wait without a launch belongs to a launch before
    the trace, so it lasts from its beginning; unless its phase has no launches at all.
    """
    pairs, launched = list[tuple[Interval, TraceEvent | None]](), list[float]()
    begin, end = trace.events[0].span.start, max(event.span.stop for event in trace.events)
    only_waits = all(label.waits for label, _ in named)
    for label, event in named:
        if label.waits:
            before = event.span.start if only_waits else begin
            pairs.append((Interval(launched.pop(0) if launched else before, event.span.stop), event))
        else:
            launched.append(event.span.start)
    return pairs + [(Interval(start, end), None) for start in launched]


def _collectives(trace: RankTrace, ours: Sequence[_Labelled], work: Sequence[Interval]) -> list[CommSpan]:
    """Return the collectives of other libraries, such as DDP's; each is a row, numbered by its order in a step.

    A profile does not record the waits for them: the host counts as waiting where one is under way and it has no work.
    """
    comms = list[CommSpan]()
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
        comms.append(CommSpan(phase, f"{name} {counts[name]}", event.span, subtract([event.span], work)))
        counts[name] += 1
    return comms


def _is_part(name: str, collective: TraceEvent, ours: Sequence[_Labelled]) -> bool:
    """Return whether this library launched a collective; DDP's reductions during an update or a gather are not its."""
    around = (label.phase for label, event in ours if event.span.covers(collective.span))
    return any(phase not in ("update", "gather") or "reduce" not in name for phase in around)


def _device_comms(trace: RankTrace, messages: Sequence[TraceEvent], device: Sequence[Interval]) -> list[CommSpan]:
    """Return the communication of NCCL: its kernels, with phase and bucket from the range that launched them.

    A message's waits are the time in which no other kernel runs.
    """
    annotations = [event for event in trace.events if event.category == "gpu_user_annotation"]
    labelled = [(label, event.span) for event in annotations if (label := Label.parse(event.name))]
    comms = list[CommSpan]()
    for kernel in messages:
        label = next((label for label, span in labelled if span.covers(kernel.span)), None)
        guess = "gather" if "AllGather" in kernel.name else "reduce"
        phase, row = (label.phase, _row(label)) if label else (guess, "messages")
        comms.append(CommSpan(phase, row, kernel.span, subtract([kernel.span], device)))
    return comms


def _control_waits(trace: RankTrace, ours: Sequence[_Labelled], op_spans: Sequence[Interval]) -> list[Interval]:
    """Return when the host waited for other ranks' used masks or status; these messages belong to no bucket."""
    waits = [event for label, event in ours if label.phase == "control" and label.waits]
    return [interval for wait in waits for interval in _idle_spans(trace, wait, op_spans, [wait.span])]


def _row(label: Label) -> str:
    return label.phase if label.bucket is None else f"bucket {label.bucket}"


def _row_order(row: str) -> tuple[bool, str, int]:
    name, _, number = row.rpartition(" ")
    return (name != "bucket", name, int(number)) if number.isdigit() else (True, row, 0)
