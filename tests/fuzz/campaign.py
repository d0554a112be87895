"""Run many programs over many variants, collect what differs, and shrink it."""

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Self

from tests.fuzz.generate import generate
from tests.fuzz.program import AllReduce, Drop, Pass, Program, Step
from tests.fuzz.ranks import DEADLINE, QUICK, Crew, Verdict
from tests.fuzz.refusals import expected
from tests.fuzz.shrink import shrink
from tests.fuzz.variants import VARIANTS

SHRINK_SECONDS = 60.0


@dataclass(frozen=True)
class Finding:
    """A run that went wrong."""

    run: int
    seed: int
    variant: str
    program: Program
    kind: str  # different, raised, hang, silent (not refused), plain (a defect of this test)
    detail: str

    @property
    def signature(self) -> tuple[str, ...]:
        """Findings with the same one are taken for one defect."""
        kind = VARIANTS[self.variant].kind if self.variant in VARIANTS else ""
        if self.kind == "hang":
            return self.kind, self.variant
        text = re.sub(r"operation \d+, \w+\(.*?\)(?=:|$)|[\d.e+-]+|'\w+'|blocks\S+", "", self.detail)
        what = re.sub(r"\s+", " ", text)[:60] if self.kind != "different" else self.detail.split(" at ")[0][8:]
        return self.kind, kind, what


@dataclass
class Team:
    """A crew for each number of ranks, replaced after a failure."""

    deadline: float = DEADLINE
    crews: dict[int, Crew] = field(default_factory=dict)
    plain: dict[int, Program] = field(default_factory=dict)  # the program whose plain side a crew has

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for world in list(self.crews):
            self.discard(world)

    def discard(self, world: int) -> None:
        """Throw a crew away."""
        self.plain.pop(world, None)
        self.crews.pop(world).close()

    def run(self, program: Program, variant: str | None) -> Verdict:
        """Carry out one side, after the plain one if this crew has not done that."""
        world = program.world
        if world not in self.crews:
            self.crews[world] = Crew(world)
        if self.plain.get(world) != program:
            verdict = self._command(program, None)
            if verdict.status != "same":
                return Verdict("plain", f"{verdict.status}: {verdict.detail}", verdict.errors)
            self.plain[world] = program
        return self._command(program, variant) if variant is not None else Verdict("same")

    def _command(self, program: Program, variant: str | None) -> Verdict:
        verdict = self.crews[program.world].run(program, variant, self.deadline)
        refusal = expected(program, VARIANTS[variant]) if variant is not None else None
        harmless = refusal is not None and all(refusal.message in text for text in verdict.errors)
        if verdict.failed and not (verdict.status == "raised" and harmless):
            self.discard(program.world)
        return verdict


def judge(program: Program, variant: str, verdict: Verdict) -> tuple[str, str]:
    """The kind of a finding and its detail; `same` or `refused` if all is well."""
    refusal = expected(program, VARIANTS[variant])
    if refusal is None or verdict.status == "plain":
        return verdict.status, verdict.detail
    if verdict.status == "raised" and all(refusal.message in text for text in verdict.errors):
        return "refused", refusal.name
    if verdict.status in ("same", "different"):
        return "silent", f"{refusal.name} was not refused ({verdict.status})"
    return verdict.status, f"{verdict.detail} (expected: {refusal.name})"


def run_one(team: Team, program: Program, variant: str) -> tuple[str, str]:
    """Run one program on one variant."""
    return judge(program, variant, team.run(program, variant))


# Classes of defects, by what is left of a program when it has been shrunk.


def traits(program: Program) -> list[str]:
    """What a program does, in words."""
    found = set[str]()
    passes = 0
    for op in program.ops:
        if isinstance(op, Pass):
            passes += 1
            found |= {"different subsets"} if len(set(op.uses)) > 1 else set()
            found |= {"two passes in a step"} if passes > 1 else set()
            found |= {"no_sync"} if not op.sync else set()
            for name in ("twice", "retain", "checkpoint", "talk"):
                found |= {name} if getattr(op, name) else set()
            found |= {"infinite loss"} if op.inf_rank >= 0 else set()
        elif isinstance(op, (Step, Drop)):
            passes = 0
            found |= {f"drop by {op.how}"} if isinstance(op, Drop) and op.how != "optimizer" else set()
        elif isinstance(op, AllReduce):
            found.add("collective")
        else:
            found.add(type(op).__name__)
    found |= {name for name in ("scaler", "schedule") if getattr(program, name)}
    return sorted(found)


# The runs.


@dataclass
class Campaign:
    """Programs by seed, over the chosen variants."""

    worlds: Sequence[int] = (2, 3)
    variants: Sequence[str] = tuple(VARIANTS)
    shrinks: bool = True
    say: Callable[[str], None] = print
    runs: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    known: Counter[tuple[str, ...]] = field(default_factory=Counter)
    shrinking: float = 0.0

    def go(self, seed: int, minutes: float) -> None:
        """Run until the time is over; the time that shrinking takes does not count."""
        begin = time.monotonic()
        with Team() as team:
            for number in count(seed):
                for world in self.worlds:
                    self.program(team, number, world)
                if time.monotonic() - begin - self.shrinking > minutes * 60:
                    break
        spent = time.monotonic() - begin - self.shrinking
        self.say(self.table(spent))

    def program(self, team: Team, seed: int, world: int) -> None:
        """One program over all variants."""
        program = generate(seed, world)
        for name in self.variants:
            if VARIANTS[name].takes(program):
                kind, detail = run_one(team, program, name)
                self.count(team, Finding(sum(self.runs.values()), seed, name, program, kind, detail))
                if kind == "plain":
                    break

    def count(self, team: Team, finding: Finding) -> None:
        """Add a run to the table, and print it if it is a finding."""
        self.runs[finding.variant] += 1
        self.outcomes[finding.variant, finding.kind] += 1
        if finding.kind in ("same", "refused"):
            return
        self.findings.append(finding)
        self.known[finding.signature] += 1
        first = self.known[finding.signature] == 1
        self.say(
            f"run {finding.run}: {finding.kind}{'' if first else ' again'}: --seed {finding.seed} "
            f"--variant {finding.variant} --world {finding.program.world}: {finding.detail[:200]}"
        )
        if first and self.shrinks:
            begin = time.monotonic()
            self.say(describe(team, finding))
            self.shrinking += time.monotonic() - begin

    def table(self, seconds: float) -> str:
        """Runs, differences, hangs and refusals by variant."""
        kinds = ("same", "refused", "different", "raised", "hang", "silent", "plain")
        lines = [f"{'variant':22}{'runs':>8}" + "".join(f"{kind:>11}" for kind in kinds)]
        for name in [*self.runs, ""]:
            chosen = [name] if name else list(self.runs)
            numbers = [sum(self.outcomes[each, kind] for each in chosen) for kind in kinds]
            total = sum(self.runs[each] for each in chosen)
            lines.append(f"{name or 'all':22}{total:>8}" + "".join(f"{number:>11}" for number in numbers))
        rate = sum(self.runs.values()) / max(seconds, 1e-9) * 60
        return "\n".join([*lines, f"{rate:.0f} runs per minute, {len(self.known)} kinds of findings"])


def describe(team: Team, finding: Finding, seconds: float = SHRINK_SECONDS) -> str:
    """The shrunken program of a finding, and what it does."""
    small = minimal(team, finding, seconds)
    lines = [f"  {line}" for line in str(small).splitlines()]
    return "\n".join([f"  shrunk ({', '.join(traits(small)) or 'nothing special'}):", *lines])


def minimal(team: Team, finding: Finding, seconds: float) -> Program:
    """A smaller program that goes wrong in the same way."""

    def fails(program: Program) -> bool:
        if finding.kind == "plain":
            return team.run(program, None).status == "plain"
        if not VARIANTS[finding.variant].takes(program):
            return False
        kind, detail = run_one(team, program, finding.variant)
        return replace(finding, kind=kind, detail=detail).signature == finding.signature

    team.deadline = QUICK
    try:
        return shrink(finding.program, fails, seconds)
    finally:
        team.deadline = DEADLINE
