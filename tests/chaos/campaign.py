"""Run many cases, and report on them: how often each went wrong, how soon a fault was noticed, and who said what."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.execute import Result, run_case
from tests.chaos.registry import Case
from tests.helpers.pool import Pool

_LONGEST = 90  # characters of a text in the table
_LINE = 400


def run_all(cases: Iterable[Case], say: Callable[[str], object]) -> list[Result]:
    """Run cases one after the other, and say how each went."""
    results = []
    with Pool() as pool:
        for case in cases:
            with tempfile.TemporaryDirectory(prefix="chaos-") as root:
                results.append(run_case(case, pool, Path(root)))
            say(_line(results[-1]))
    return results


def _line(result: Result) -> str:
    pending = result.case.scenario.why_pending(result.case.mode)
    word = "ok" if not result.problem else "pending" if pending else "WRONG"
    word += " (was pending)" if pending and not result.problem else ""
    return f"{word} {result.case}" + (f"\n{_brief(result.problem)}" if result.problem and not pending else "")


def _brief(problem: str) -> str:
    """Without the frames of tracebacks."""
    lines = [line for line in problem.splitlines() if line.strip() and not line.startswith(("  ", "Traceback"))]
    return "\n".join(f"    {line[:_LINE]}" for line in lines)


def finish_line(results: Sequence[Result], seconds: float) -> str:
    """How many went wrong, and which of them only sometimes."""
    counted = [result for result in results if not result.case.scenario.why_pending(result.case.mode)]
    outcomes = defaultdict[str, list[bool]](list)
    for result in counted:
        outcomes[str(result.case)].append(not result.problem)
    wrong = sum(bool(result.problem) for result in counted)
    flaky = sorted(name for name, good in outcomes.items() if len(set(good)) > 1)
    rate = 100.0 * wrong / max(1, len(counted))
    parts = [f"{len(counted)} runs of {len(outcomes)} cases in {seconds:.0f} s: {wrong} wrong ({rate:.2f} %)"]
    parts += [f"only sometimes: {', '.join(flaky)}"] if flaky else []
    pending = {str(result.case) for result in results if result not in counted}
    parts += [f"{len(pending)} cases are pending"] if pending else []
    return "; ".join(parts)


def table(results: Sequence[Result]) -> str:
    """A Markdown table with one row for each case; of several runs the slowest to detect."""
    last: dict[str, Result] = {}
    for result in results:
        before = last.get(str(result.case))
        if before is None or (result.detected or 0.0) >= (before.detected or 0.0):
            last[str(result.case)] = result
    rows = ["| scenario | mode | ranks | detected after | text on each rank | lost |", "|---|---|---|---|---|---|"]
    rows += [_row(result) for _, result in sorted(last.items())]
    return "\n".join(rows)


def _row(result: Result) -> str:
    case = result.case
    detected = "" if result.detected is None else f"{result.detected:.2f} s"
    texts = "<br>".join(f"{rank}: {_shortened(text, result.ends.get(rank))}" for rank, text in result.texts.items())
    lost = case.scenario.lost if not result.problem else "**not as expected**"
    return f"| {case.scenario.name} | {case.mode} | {case.world} | {detected} | {texts} | {lost} |"


def _shortened(text: str, end: int | None) -> str:
    if not text:
        return f"ended with {end}" if end else "nothing"
    line = text.split("\n", 1)[0].replace("|", "\\|")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The results for programs."""
    return [
        {
            "scenario": result.case.scenario.name,
            "mode": result.case.mode,
            "world": result.case.world,
            "problem": result.problem,
            "pending": result.case.scenario.why_pending(result.case.mode),
            "detected": result.detected,
            "texts": result.texts,
        }
        for result in results
    ]
