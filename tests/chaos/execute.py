"""Run one case, and compare what every rank has noted, and what is left, with what the scenario expects."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from tests.chaos.families import SCENARIOS
from tests.chaos.registry import Case
from tests.chaos.stage import FAILED, STEP, Report, Stage, recovered
from tests.helpers.pool import DeadlineError, Outcome, Pool, RankError, run_fresh


@dataclass
class Result:
    """How a case went: `problem` is empty if all was as expected."""

    case: Case
    problem: str = ""
    detected: float | None = None  # seconds from the fault until the last rank had noticed
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, int | None] = field(default_factory=dict)


def perform(group: ProcessGroup, name: str, mode: str, root: Path) -> Report:
    """One rank's part of a scenario."""
    stage = Stage(group, mode, root, SCENARIOS[name].victim)
    try:
        SCENARIOS[name].body(stage)
    except BaseException:
        stage.tell(FAILED)  # so that nobody waits for this rank
        raise
    return stage.report


def run_case(case: Case, pool: Pool, root: Path) -> Result:
    """Run a case in a directory of its own."""
    result = Result(case)
    try:
        outcomes = _run(case, pool, root)
        compare(result, outcomes, root)
        if not result.problem and case.scenario.after == "checkpoint":
            pool.run(recovered, case.world, case.mode, root)
    except (AssertionError, OSError) as error:
        result.problem = f"{type(error).__name__}: {error}"
    return result


def _run(case: Case, pool: Pool, root: Path) -> list[Outcome]:
    arguments = case.scenario.name, case.mode, root
    if case.scenario.launch is not None:
        texts = case.scenario.launch(root, case.world)
        return [Outcome(rank, Report([text], [0.0]), None, 0) for rank, text in enumerate(texts)]
    if not case.scenario.warm:
        return run_fresh(perform, case.world, *arguments, deadline=case.scenario.deadline)
    try:
        reports: list[Any] = pool.run(perform, case.world, *arguments, deadline=case.scenario.deadline)
    except DeadlineError as error:
        return [_silent(rank, rank in error.ranks, str(error)) for rank in range(case.world)]
    except RankError as error:
        return [_failed(rank, error.errors.get(rank)) for rank in range(case.world)]
    return [Outcome(rank, report, None, 0) for rank, report in enumerate(reports)]


def _silent(rank: int, silent: bool, text: str) -> Outcome:
    return Outcome(rank, Report(), text if silent else None, -signal.SIGUSR1 if silent else 0)


def _failed(rank: int, error: str | None) -> Outcome:
    died = re.match(r"died with exit code (-?\d+)", error or "")
    return Outcome(rank, Report(), error, int(died[1]) if died else 0)


def compare(result: Result, outcomes: list[Outcome], root: Path) -> None:
    """Compare how each rank has ended, and what it has noted, with what the scenario expects."""
    case, told, victim = result.case, result.case.scenario.told_for(result.case.mode), result.case.scenario.victim
    reports = {each.rank: each.result for each in outcomes if isinstance(each.result, Report)}
    result.texts = {each.rank: reports[each.rank].text if each.rank in reports else "" for each in outcomes}
    result.ends = {each.rank: each.exitcode for each in outcomes}
    result.detected = _detected(reports, root)
    problems = [_fatal(each) for each in outcomes]
    for each in outcomes:
        patterns = told.patterns(each.rank, victim)
        if patterns is None:
            problems.append(_wrong_end(each, told.ends))
        elif each.error is not None:
            problems.append(f"rank {each.rank} failed:\n{each.error}")
        else:
            problems += [_missing(pattern, each.rank, victim, result.texts[each.rank]) for pattern in patterns]
            first = reports[each.rank].notes[:1] if each.rank != victim else []
            problems += [_missing(pattern, each.rank, victim, text) for text in first for pattern in told.at_once]
        if told.never and re.search(told.never, result.texts[each.rank]):
            problems.append(f"rank {each.rank} says {told.never!r}: {result.texts[each.rank]}")
    result.problem = "\n".join(filter(None, problems))
    assert case.world == len(outcomes)


def _fatal(outcome: Outcome) -> str:
    if outcome.exitcode == -signal.SIGABRT:
        return f"rank {outcome.rank} was aborted"
    if outcome.exitcode == -signal.SIGUSR1:
        return f"rank {outcome.rank} did not come back before the deadline:\n{outcome.error}"
    return ""


def _wrong_end(outcome: Outcome, ends: int) -> str:
    if outcome.exitcode != ends:
        return f"rank {outcome.rank} ended with {outcome.exitcode}, not with {ends}: {outcome.error}"
    return ""


def _missing(pattern: str, rank: int, victim: int, text: str) -> str:
    wanted = pattern.replace("<rank>", str(rank)).replace("<victim>", str(victim)).replace("<step>", str(STEP))
    return "" if re.search(wanted, text) else f"rank {rank} does not say {wanted!r}, but: {text or 'nothing'}"


def _detected(reports: dict[int, Report], root: Path) -> float | None:
    """The time from the fault until every rank that noted something later had noted its first thing after it."""
    if not (root / "fired").exists():
        return None
    fired = float((root / "fired").read_text())
    firsts = [[moment for moment in report.times if moment >= fired][:1] for report in reports.values()]
    moments = [moment for first in firsts for moment in first]
    return max(moments) - fired if moments else None
