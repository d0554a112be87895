"""Compare what must be equal on several ranks: parameters, masters, options, and state that replicas hold.

Every rank makes a row of numbers, one digest for each thing that is compared. Rows are exchanged, and all ranks look at
all of them, so all raise, or none. State that exists on one rank alone cannot be compared with anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerostep.comm.transport import GroupTransport, Transport
from zerostep.errors import AuditError
from zerostep.plan.groups import Group
from zerostep.plan.layout import ParamSpec
from zerostep.state.digest import combined, digest
from zerostep.state.param_state import ParamState
from zerostep.step.group_options import options_digest


@dataclass(frozen=True)
class AuditReport:
    """What an audit has compared: parameters, the bytes that were read on this rank, and the time that it took."""

    parameters: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class AuditSubject:
    """What an audit reads of an optimizer.

    `positions`: for each rank of `everyone`, which part of the state it holds. `masters`: the index of a parameter, the
    elements of it that this rank owns, and their masters.
    """

    everyone: Transport
    positions: Sequence[int]
    specs: Sequence[ParamSpec]
    params: Sequence[Tensor]
    groups: Sequence[Group]
    masters: Iterable[tuple[int, Tensor, Tensor]]
    param_states: Callable[[], Iterable[ParamState]]
    step: int


class _Row(NamedTuple):
    """The numbers of one rank, on the device of the parameters, and the bytes they were made from."""

    numbers: Tensor
    nbytes: int


class PendingAudit:
    """Rows that may still be under way on an accelerator. `finish` compares them; until then `arrived` tells."""

    def __init__(self, subject: AuditSubject, rows: Tensor, nbytes: int) -> None:
        self._names = [spec.name for spec in subject.specs]
        self._positions, self._step = list(subject.positions), subject.step
        self._groups, self.nbytes = len(subject.groups), nbytes
        self._rows, self._event = rows, None
        if rows.device.type != "cpu":
            # Copied behind all kernels of this step, and read when the event has passed: no host waits here.
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            self._rows.copy_(rows, non_blocking=True)
            self._event = torch.Event(rows.device)
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether `finish` would not wait."""
        return self._event is None or bool(self._event.query())

    def finish(self) -> None:
        """Compare all rows; `AuditError` on every rank if they differ."""
        if self._event is not None:
            self._event.synchronize()
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
    rows = torch.tensor(subject.everyone.all_gather_ints(row.numbers.tolist()))
    PendingAudit(subject, rows, row.nbytes).finish()
    return AuditReport(len(subject.specs), row.nbytes, time.perf_counter() - start)


def start_audit(subject: AuditSubject) -> PendingAudit:
    """Begin to compare everything; a collective. In stream order no host waits for it, elsewhere it is complete."""
    row, transport = _row(subject), subject.everyone
    device = row.numbers.device
    if not (isinstance(transport, GroupTransport) and transport.stream_ordered(device)):
        return PendingAudit(subject, torch.tensor(transport.all_gather_ints(row.numbers.tolist())), row.nbytes)
    rows = row.numbers.new_empty((transport.world_size, row.numbers.numel()))
    rows[transport.rank] = row.numbers
    gathered = transport.start_all_gather(rows.view(-1), None).wait()
    return PendingAudit(subject, gathered.view(rows.shape), row.nbytes)


def _row(subject: AuditSubject) -> _Row:
    """Digests of all parameters, counts of wrong elements, digests of replicated state, digests of the options."""
    device = subject.params[0].device if subject.params else torch.device("cpu")
    zero = torch.zeros((), dtype=torch.int64, device=device)
    parameters = [_moved(digest(param), device) for param in subject.params]
    wrong, state = [zero] * len(parameters), [zero] * len(parameters)
    nbytes = sum(param.nbytes for param in subject.params)
    for index, owned, master in subject.masters:
        wrong[index] = wrong[index] + _moved(_different_bits(master.to(owned.dtype), owned), device)
        nbytes += master.nbytes
    if len(set(subject.positions)) < len(subject.positions):
        for each in subject.param_states():
            tensors = [value for value in (*each.per_element.values(), *each.shared.values()) if _is_tensor(value)]
            if tensors:
                state[each.param] = combined([_moved(digest(tensor), device) for tensor in tensors])
            nbytes += sum(tensor.nbytes for tensor in tensors)
    options = torch.tensor([options_digest([group]) for group in subject.groups], dtype=torch.int64)
    return _Row(torch.cat([torch.stack([*parameters, *wrong, *state]), _moved(options, device)]), nbytes)


def _moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers on another device. Through pinned memory: a copy from ordinary memory makes the host wait."""
    if numbers.device == device:
        return numbers
    return (numbers.pin_memory() if numbers.device.type == "cpu" else numbers).to(device, non_blocking=True)


def _different_bits(one: Tensor, other: Tensor) -> Tensor:
    """How many elements have other bits: NaN is equal to itself here, and zero is not equal to minus zero."""
    rows = [each.contiguous().view(-1).view(torch.uint8).view(-1, one.element_size()) for each in (one, other)]
    return (rows[0] != rows[1]).any(dim=1).sum()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


class Audits:
    """An audit every so many steps of one optimizer; what one finds on an accelerator is raised in a later step."""

    def __init__(self, every: int | None) -> None:
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"audit_every must be a number of steps, at least 1, or None for no audits; got {every!r}")
        self._every = every
        self._pending: PendingAudit | None = None

    def after_step(self, step: int, subject: Callable[[], AuditSubject]) -> None:
        """Audit if it is time, and raise what an earlier one has found; a collective on all ranks alike."""
        if self._every is None:
            return
        due = step % self._every == 0
        # A rank that is ahead may see the rows one step later; before the next audit all of them look.
        if self._pending is not None and (due or self._pending.arrived):
            pending, self._pending = self._pending, None
            pending.finish()
        if due:
            self._pending = start_audit(subject())
            if self._pending.arrived:
                pending, self._pending = self._pending, None
                pending.finish()
