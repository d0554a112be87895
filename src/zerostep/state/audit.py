"""Compare what must be equal on several ranks: parameters, masters, options, and state that replicas hold.

Every rank makes a row of numbers, one digest for each thing that is compared. Rows are exchanged, and all ranks look at
all of them, in the same step, so all raise, or none. State that exists on one rank alone cannot be compared with
anything.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zerostep.comm.transport import GroupTransport, NullTransport, Transport
from zerostep.dtensors import locals_of
from zerostep.errors import AuditError
from zerostep.plan.groups import Group
from zerostep.plan.layout import ParamSpec
from zerostep.state.digest import Summand, counts, different_bits, digests, moved, odd
from zerostep.state.param_state import ParamState
from zerostep.step.bucket_shards import OwnedMasters
from zerostep.step.group_options import options_digest
from zerostep.step.health import Health
from zerostep.tensors import recorded_event

# Steps after which all ranks look at the rows of an audit on an accelerator. A fixed number: if each rank looked when
# it finds them arrived, one would raise and leave while the others wait for it in a later step. A device takes some
# thousand launches ahead, which is less than the kernels of so many steps, so no host waits for rows that are so old.
LOOKED_AT_AFTER = 4


@dataclass(frozen=True)
class AuditReport:
    """What an audit has compared: parameters, the bytes that were read on this rank, and the time that it took."""

    parameters: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class AuditSubject:
    """What an audit reads of an optimizer.

    `positions`: for each rank of `everyone`, which part of the state it holds. `control` is for audits that the user
    asks for: it never takes a place among the messages of steps.
    """

    everyone: Transport
    control: Transport
    positions: Sequence[int]
    specs: Sequence[ParamSpec]
    params: Sequence[Tensor]
    groups: Sequence[Group]
    masters: Iterable[OwnedMasters]
    param_states: Callable[[], Iterable[ParamState]]
    step: int


class _Row(NamedTuple):
    """The numbers of one rank, on the device of the parameters, and the bytes they were made from."""

    numbers: Tensor
    nbytes: int


class PendingAudit:
    """Rows that may still be under way on an accelerator; `compare` looks at them after `wait`."""

    def __init__(self, subject: AuditSubject, rows: Tensor) -> None:
        self._names = [spec.name for spec in subject.specs]
        self._positions, self._step = list(subject.positions), subject.step
        self._groups = len(subject.groups)
        self._rows, self._event = rows, None
        if rows.device.type != "cpu":
            # Copied behind all kernels of this step, and read when the event has passed: no host waits here. The
            # allocator of pinned memory keeps it for the copy, even if this object is dropped before.
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            self._rows.copy_(rows, non_blocking=True)
            self._event = recorded_event(rows.device)

    @property
    def on_host(self) -> bool:
        """Whether all rows were there at once; the same on all ranks."""
        return self._event is None

    def wait(self) -> None:
        """Wait until all rows are there."""
        if self._event is not None:
            self._event.synchronize()

    def compare(self) -> None:
        """Compare all rows; `AuditError` on every rank if they differ."""
        rows, count = self._rows.tolist(), len(self._names)
        everyone = range(len(rows))
        for index in range(self._groups):
            self._compare(f"the options of group {index}", [row[3 * count + index] for row in rows], everyone)
        self._compare_masters([row[count : 2 * count] for row in rows])
        for index, name in enumerate(self._names):
            self._compare(f"parameter {name!r}", [row[index] for row in rows], everyone)
        for position in sorted(set(self._positions)):
            holders = [rank for rank, held in enumerate(self._positions) if held == position]
            for index, name in enumerate(self._names):
                self._compare(f"the state of parameter {name!r}", [row[2 * count + index] for row in rows], holders)

    def _compare_masters(self, counts: Sequence[Sequence[int]]) -> None:
        for rank, row in enumerate(counts):
            for name, different in zip(self._names, row, strict=True):
                if different:
                    raise AuditError(
                        f"the audit after step {self._step} found that on rank {rank}, which owns them, {different} "
                        f"elements of parameter {name!r} are not what their masters round to: {_REMEDY}"
                    )

    def _compare(self, what: str, values: Sequence[int], ranks: Iterable[int]) -> None:
        camps: dict[int, list[int]] = {}
        for rank in ranks:
            camps.setdefault(values[rank], []).append(rank)
        if len(camps) > 1:
            raise AuditError(
                f"the audit after step {self._step} found that {_describe(list(camps.values()))} in {what}: {_REMEDY}"
            )


_REMEDY = "look for faulty memory or code that changes one rank alone, and load the last checkpoint on all ranks"


def _describe(camps: Sequence[Sequence[int]]) -> str:
    """Who differs from whom; a majority, if there is one, is taken to be right."""
    ordered = sorted(camps, key=len, reverse=True)
    most, others = ordered[0], sorted(rank for camp in ordered[1:] for rank in camp)
    if len(most) > len(others):
        verb = "differs" if len(others) == 1 else "differ"
        return f"{_ranks(others)} {verb} from {_ranks(most)}, which agree,"
    return " and ".join(_ranks(camp) for camp in ordered) + " differ"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def audit(subject: AuditSubject) -> AuditReport:
    """Compare everything now; a collective, on which the hosts wait for each other."""
    start = time.perf_counter()
    row = _row(subject)
    PendingAudit(subject, torch.tensor(subject.control.all_gather_ints(row.numbers.tolist()))).compare()
    return AuditReport(len(subject.specs), row.nbytes, time.perf_counter() - start)


def start_audit(subject: AuditSubject) -> PendingAudit:
    """Begin to compare everything; a collective. In stream order no host waits for it, elsewhere it is complete."""
    numbers, transport = _row(subject).numbers, subject.everyone
    if isinstance(transport, NullTransport):
        return PendingAudit(subject, numbers.view(1, -1))
    if not (isinstance(transport, GroupTransport) and transport.stream_ordered(numbers.device)):
        return PendingAudit(subject, torch.tensor(transport.all_gather_ints(numbers.tolist())))
    rows = numbers.new_empty((transport.world_size, numbers.numel()))
    rows[transport.rank] = numbers
    # Launched where the step has launched all of its own: at the same place among the collectives of all ranks.
    gathered = transport.start_all_gather(rows.view(-1), None).wait()
    return PendingAudit(subject, gathered.view(rows.shape))


def _row(subject: AuditSubject) -> _Row:
    """Digests of all parameters, counts of wrong elements, digests of replicated state, digests of the options."""
    # An accelerator, if there is one: what is on the host is copied there without a wait, and nothing the other way.
    devices = [param.device for param in subject.params] or [torch.device("cpu")]
    device = next((device for device in devices if device.type != "cpu"), devices[0])
    count, read = len(subject.params), [memory.nbytes for memory in locals_of(subject.params)]
    parameters = digests(
        (Summand(index, memory) for index, memory in enumerate(locals_of(subject.params))), count, device
    )
    wrong = counts(_wrong_masters(subject.masters, read), count, device)
    replicated = len(set(subject.positions)) < len(subject.positions)
    state = digests(_tensors_of_state(subject.param_states(), read) if replicated else (), count, device)
    options = torch.tensor([options_digest([group]) for group in subject.groups], dtype=torch.int64)
    return _Row(torch.cat([parameters, wrong, state, moved(options, device)]), sum(read))


def _wrong_masters(masters: Iterable[OwnedMasters], read: list[int]) -> Iterator[Summand]:
    """Which elements of parameters are not what their masters round to; bucket by bucket, to save memory."""
    for each in masters:
        wrong = different_bits(each.master.to(each.owned.dtype), each.owned)
        read.append(each.master.nbytes)
        for index, span in each.places:
            yield Summand(index, wrong[span.start : span.stop])


def _tensors_of_state(states: Iterable[ParamState], read: list[int]) -> Iterator[Summand]:
    for each in states:
        values = (*each.per_element.values(), *each.shared.values())
        for position, tensor in enumerate(value for value in values if isinstance(value, Tensor)):
            read.append(tensor.nbytes)
            yield Summand(each.param, tensor, odd(position))


class Audits:
    """An audit every so many steps of one optimizer; what one finds on an accelerator is raised in a later step."""

    def __init__(self, every: int | None, health: Health) -> None:
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"audit_every must be a number of steps, at least 1, or None for no audits; got {every!r}")
        self._every, self._health = every, health
        self._steps = self._recoveries = 0
        self._pending: deque[tuple[int, PendingAudit]] = deque()

    def after_step(self, step: int, subject: Callable[[], AuditSubject]) -> None:
        """Audit if it is time, and raise what an earlier one has found; a collective on all ranks alike."""
        if self._every is None:
            return
        self._steps += 1
        self._look(self._steps - LOOKED_AT_AFTER)
        if step % self._every == 0:
            self._pending.append((self._steps, start_audit(subject())))
            if self._pending[-1][1].on_host:
                self._look(self._steps)

    def finish(self) -> None:
        """Wait for all that is under way, and raise what was found; on all ranks alike."""
        self._look(self._steps)

    def _look(self, until: int) -> None:
        """Look at the audits up to a step, the oldest first."""
        if self._recoveries != self._health.recoveries:
            self._recoveries = self._health.recoveries
            self._pending.clear()  # what was loaded has replaced what they were about
        while self._pending and self._pending[0][0] <= until:
            pending = self._pending.popleft()[1]
            pending.wait()
            self._health.check()  # a wait that ended because the communicator was aborted has brought nothing
            try:
                pending.compare()
            except AuditError:
                self._pending.clear()  # the next ones have found the same
                raise
