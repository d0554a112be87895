"""What a scenario is, and the list of all of them.

A scenario is a function that every rank runs, and an expectation. The function trains, lets a fault happen at a named
point, and notes what is raised or logged; the parent process compares that with the expectation, rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tests.chaos.stage import Stage

ZERO = ("drop-in", "hook", "interleaved")
OVERLAP = ("hook", "interleaved")
BARE = ("bare", "bare-forward")
IN_DDP = ("ddp", "ddp-forward")
BACKWARD = ("backward", "backward-forward")
SHARDED = (*BARE, *IN_DDP, *BACKWARD)
ALL = (*ZERO, *SHARDED)
CLASSES = ("drop-in", "bare")  # where only the class of the optimizer counts
DDP_WAITS = "(?i:timed out|timeout|closed|reset)"  # of those that wait inside DDP: its own error

After = Literal["checkpoint", "nothing"]
Body = Callable[["Stage"], object]
Patterns = str | tuple[str, ...]


@dataclass(frozen=True)
class Told:
    """Patterns that must be found in what a rank has noted, in any order.

    `<rank>` stands for the rank itself, `<victim>` for the one that the fault is on, `<step>` for the step it is in.
    `victim` is `None` if that rank ends without a word, with the exit code `ends`. `at_once` are patterns that the
    first note of the others must have: the error itself, and not what is said to those who try to go on.
    """

    others: Patterns
    victim: Patterns | None = None
    ends: int = 0
    never: str = ""  # a pattern that no rank may have noted
    at_once: tuple[str, ...] = ()

    def patterns(self, rank: int, victim: int) -> tuple[str, ...] | None:
        """What this rank must have noted; `None` if it cannot have."""
        found = self.victim if rank == victim else self.others
        return found if found is None or isinstance(found, tuple) else (found,)


@dataclass(frozen=True)
class Scenario:
    """A fault and what must come of it.

    `after` says what is checked in new ranks when all is over: `"checkpoint"` that the newest one is that of the step
    before the fault, loads, is equal to what was saved, and that training goes on from it.
    """

    name: str
    faults: tuple[str, ...]
    body: Body
    told: Told
    modes: tuple[str, ...] = ALL
    worlds: tuple[int, ...] = (2, 3)
    after: After = "nothing"
    lost: str = "nothing"
    deadline: float = 30.0
    victim: int = 1
    warm: bool = True  # on ranks that serve other scenarios, too: nobody dies
    quick: tuple[tuple[str, int], ...] = ()  # what runs in the test suite; one mode and world if empty
    pending: Mapping[str, str] = field(default_factory=dict)  # mode, or "" for all -> what does not hold yet
    told_in: Mapping[str, Told] = field(default_factory=dict)  # in place of `told`, by mode
    launch: Callable[[Path, int], list[str]] | None = None  # in place of the body: ranks that a launcher starts

    def told_for(self, mode: str) -> Told:
        """What must be told in a mode."""
        return self.told_in.get(mode, self.told)

    def why_pending(self, mode: str) -> str:
        """Why this does not hold yet in a mode; empty if it does."""
        return self.pending.get(mode, self.pending.get("", ""))


@dataclass(frozen=True)
class Case:
    """A scenario in one mode at one number of ranks."""

    scenario: Scenario
    mode: str
    world: int

    def __str__(self) -> str:
        return f"{self.scenario.name}-{self.mode}-{self.world}"


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, faults: str, told: Told, **options: object) -> Callable[[Body], Body]:
    """Register a function as the body of a scenario; `faults` are separated by spaces."""

    def register(body: Body) -> Body:
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(name, tuple(faults.split()), body, told, **options)  # type: ignore[arg-type]
        return body

    return register


def all_cases() -> Iterator[Case]:
    """Every scenario in every mode and world that it names."""
    for each in SCENARIOS.values():
        for mode in each.modes:
            for world in each.worlds:
                yield Case(each, mode, world)


def quick_cases() -> Iterator[Case]:
    """Each scenario at least once, in modes and worlds that take turns."""
    for number, each in enumerate(SCENARIOS.values()):
        usual = (each.modes[number % len(each.modes)], each.worlds[number % len(each.worlds)])
        for mode, world in each.quick or (usual,):
            yield Case(each, mode, world)
