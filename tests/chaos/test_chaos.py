"""Every scenario at least once, in one mode and world; `make chaos` runs all of them, as often as one likes."""

import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.campaign import finish_line, table
from tests.chaos.execute import Result, compare, run_case
from tests.chaos.families import SCENARIOS
from tests.chaos.registry import ALL, Case, Scenario, Told, all_cases, quick_cases
from tests.chaos.stage import Report, Stage
from tests.helpers.documents import ROOT
from tests.helpers.pool import Outcome, Pool

FAULTS = {f"F{number:02}" for number in range(1, 33)}


def _parameters() -> Iterator[Any]:
    for case in quick_cases():
        reason = case.scenario.why_pending(case.mode)
        marks = [pytest.mark.xfail(reason=reason, strict=False)] if reason else []
        yield pytest.param(case, id=str(case), marks=marks)


@pytest.mark.parametrize("case", list(_parameters()))
def test_every_rank_says_what_happened_and_nothing_torn_is_left(pool: Pool, tmp_path: Path, case: Case) -> None:
    result = run_case(case, pool, tmp_path)
    assert not result.problem, result.problem


def test_every_fault_has_a_scenario() -> None:
    assert {fault for each in SCENARIOS.values() for fault in each.faults} == FAULTS
    assert len(SCENARIOS) >= 45
    assert {case.mode for case in quick_cases()} == set(ALL)
    assert {case.scenario.name for case in quick_cases()} == set(SCENARIOS)
    assert {case.world for case in quick_cases()} == {2, 3}


def test_the_page_about_reliability_names_every_scenario_and_no_other() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|") or "`" in line]
    named = re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", "\n".join(rows))
    assert sorted(named) == sorted(SCENARIOS)


def test_modes_are_known() -> None:
    assert {case.mode for case in all_cases()} == set(ALL)
    assert all(set(each.pending) <= {"", *each.modes} for each in SCENARIOS.values())


# The machinery: a scenario that goes wrong must be seen to.


def _body(stage: Stage) -> None:
    stage.report.note(f"step 3 failed on rank {stage.rank}")


def _case(told: Told, world: int = 2, **options: Any) -> Case:
    return Case(Scenario("x", ("F01",), _body, told, **options), "bare", world)


SAID = Report(["step 3 failed on rank 1"], [1.0])


@pytest.mark.parametrize(
    ("told", "outcome", "excerpt"),
    [
        (Told("failed on rank <victim>"), Outcome(0, SAID, None, 0), ""),
        (Told(("step <step>", "remedy")), Outcome(0, SAID, None, 0), "rank 0 does not say 'remedy'"),
        (Told("", at_once=("remedy",)), Outcome(0, SAID, None, 0), "rank 0 does not say 'remedy'"),
        (Told("", never="step"), Outcome(0, SAID, None, 0), "rank 0 says 'step'"),
        (Told(""), Outcome(0, None, "AssertionError: no", 0), "rank 0 failed:\nAssertionError: no"),
        (Told(""), Outcome(0, None, "died", -signal.SIGABRT), "rank 0 was aborted"),
        (Told(""), Outcome(0, None, "stacks", -signal.SIGUSR1), "rank 0 did not come back before the deadline"),
    ],
)
def test_whatever_is_not_as_expected_is_a_problem(tmp_path: Path, told: Told, outcome: Outcome, excerpt: str) -> None:
    result = Result(_case(replace(told, ends=-9)))
    compare(result, [outcome, Outcome(1, None, "died", -9)], tmp_path)
    assert excerpt in result.problem
    assert bool(result.problem) == bool(excerpt)


def test_a_victim_that_does_not_end_as_it_should_is_a_problem(tmp_path: Path) -> None:
    result = Result(_case(Told("", ends=-9)))
    compare(result, [Outcome(0, SAID, None, 0), Outcome(1, None, "died", -11)], tmp_path)
    assert "rank 1 ended with -11, not with -9" in result.problem


@pytest.mark.parametrize(
    ("results", "excerpt"),
    [([""], "1 runs of 1 cases in 2 s: 0 wrong (0.00 %)"), (["", "no"], "only sometimes: x-bare-2")],
)
def test_the_last_line_counts_what_went_wrong(results: list[str], excerpt: str) -> None:
    case = _case(Told(""))
    assert excerpt in finish_line([Result(case, problem) for problem in results], 2.0)


def test_the_table_has_the_slowest_run_of_each_case() -> None:
    case = _case(Told(""))
    slow = Result(case, "", 2.5, {0: "RuntimeError: a|b", 1: ""}, {0: 0, 1: -9})
    text = table([Result(case, "", 0.5), slow, Result(case, "", 1.0)])
    assert text.count("\n") == 2
    assert r"| x | bare | 2 | 2.50 s | 0: RuntimeError: a\|b<br>1: ended with -9 | nothing |" in text
