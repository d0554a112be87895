"""Where a rank is when it updates: what goes along with the status of every step, and must be equal on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

from zerostep.comm.agreement import AllGather, Fact, first_difference
from zerostep.errors import StepMismatchError
from zerostep.plan.groups import Group
from zerostep.step.group_options import GroupOptions
from zerostep.step.health import Health

UNKNOWN = -1  # of a rank that has joined: whatever the others have is right
# Whether a rank has gradients in a step. `OWN` alone: for nothing but what it owns.
NONE, OWN, SOME = range(3)
_CALLS = "call backward() and step() equally often on all ranks"
_CLOSURES = (
    "a closure has failed on some of them, whose next call would take part in this one of the others: let a closure "
    "fail on all ranks or on none"
)
_OPTIONS = "change learning rates and other options on all ranks alike"
_LOADS = "load the same state on all ranks"


@dataclass(frozen=True)
class Place:
    """Steps since the last load, loads of this rank alone, a digest of new options, and whether there are gradients.

    `failed_calls` are calls of `step()` since the last load that have ended in the user's closure.
    """

    steps: int
    loads: int
    options: int
    gradients: int
    failed_calls: int = UNKNOWN

    def to_ints(self) -> list[int]:
        """As integers to send."""
        return list(astuple(self))


class Progress:
    """Counts the steps of one rank since the last load, and notes the options of each."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._options = GroupOptions()
        self._recoveries, self._steps, self._digest = 0, 0, UNKNOWN
        self._failed_calls = 0

    @property
    def health(self) -> Health:
        """Whether parameters and state belong to one step."""
        return self._health

    @property
    def steps(self) -> int:
        """Steps since the last load."""
        if self._recoveries != self._health.recoveries:
            self._recoveries, self._steps, self._failed_calls = self._health.recoveries, 0, 0
            self._options.forget()
        return self._steps

    @property
    def loads(self) -> int:
        """How often this rank has loaded a state by itself."""
        return self._health.loads

    @contextmanager
    def calling_closure(self) -> Iterator[None]:
        """Inside, `step()` calls the user's closure; an error there ends the call, unless a step was made by then."""
        steps = self.steps
        try:
            yield
        except BaseException:
            if self.steps == steps:
                self._failed_calls += 1
            raise

    def begin_step(self, groups: Sequence[Group]) -> None:
        """An update is about to use the options of these groups."""
        assert self.steps >= 0  # after a load, everything begins anew
        self._digest = self._options.begin_step(groups)

    def place(self, gradients: int, joined: bool = False) -> Place:
        """Where this rank is; the options and gradients of one that has joined are those of the others."""
        if joined:
            return Place(self.steps, self.loads, UNKNOWN, UNKNOWN)
        return Place(self.steps, self.loads, self._digest, gradients, self._failed_calls)

    def end_step(self, groups: Sequence[Group]) -> None:
        """A step is complete."""
        self._steps, self._digest = self.steps + 1, UNKNOWN
        self._options.end_step(groups)

    def facts(self) -> list[Fact]:
        """The options of the last update, in words."""
        return self._options.facts()


def compare_places(
    rows: Sequence[Sequence[int]], before: int, facts: Callable[[], Sequence[Fact]], ask: AllGather | None
) -> None:
    """Raise a `StepMismatchError` unless all ranks are in the same place.

    `before` is the number of steps before the last load. `ask` gathers integers of all ranks, if they are all here:
    then the first option that differs is named by its `facts`.
    """
    places = {rank: Place(*row) for rank, row in enumerate(rows)}
    compare_loads([place.loads for place in places.values()])
    _refuse_other({rank: place.steps + before + 1 for rank, place in places.items()}, _at_step, _CALLS)
    calls = {rank: place.steps + before + 1 + place.failed_calls for rank, place in places.items()}
    known = {rank: call for rank, call in calls.items() if places[rank].failed_calls != UNKNOWN}
    _refuse_other(known, _in_call, _CLOSURES)
    gradients = {
        rank: place.gradients != NONE for rank, place in places.items() if place.gradients not in (OWN, UNKNOWN)
    }
    _refuse_other(gradients, _with_gradients, _CALLS)
    digests = {rank: place.options for rank, place in places.items() if place.options != UNKNOWN}
    if len(set(digests.values())) > 1:
        _refuse_options(digests, None if ask is None else first_difference(ask, facts()))


def compare_loads(loads: Sequence[int]) -> None:
    """Raise a `StepMismatchError` if some rank has loaded a state dict that others have not; `loads` by rank."""
    _refuse_other(dict(enumerate(loads)), _loaded, _LOADS)


def _refuse_other(values: Mapping[int, Any], say: Callable[[Any, bool], str], remedy: str) -> None:
    if len(set(values.values())) > 1:
        raise StepMismatchError(f"ranks are not in the same place: {by_value(values, say)}; {remedy}")


def _refuse_options(digests: Mapping[int, int], found: tuple[str, list[str]] | None) -> None:
    if found is None:
        what = f"options of the parameter groups: {by_value(digests, _with_digest)}"
    else:
        title, texts = found
        what = f"{title}: {by_value(dict(enumerate(texts)), _has)}"
    raise StepMismatchError(f"ranks differ in the {what}; {_OPTIONS}")


def by_value(values: Mapping[int, Any], say: Callable[[Any, bool], str]) -> str:
    """What ranks have, in words; `say(value, several)` is what is said of the ranks with one value."""
    ranks = defaultdict[Any, list[int]](list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return ", ".join(f"{_name(those)} {say(value, len(those) > 1)}" for value, those in ranks.items())


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _loaded(loads: int, several: bool) -> str:
    return f"{'have' if several else 'has'} loaded a state dict {loads} {'time' if loads == 1 else 'times'}"


def _at_step(step: int, several: bool) -> str:
    return f"{'are' if several else 'is'} at step {step}"


def _in_call(call: int, several: bool) -> str:
    return f"{'are' if several else 'is'} in call {call} of step()"


def _with_gradients(some: bool, several: bool) -> str:
    return f"{'have' if several else 'has'} {'gradients' if some else 'called step() without any gradient'}"


def _with_digest(digest: int, several: bool) -> str:
    return f"{'have' if several else 'has'} digest {digest % 2**32:08x}"


def _has(value: str, several: bool) -> str:
    return f"{'have' if several else 'has'} {value}"
