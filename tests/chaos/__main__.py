"""`python -m tests.chaos`: every scenario in every mode and world, in random order, as often as one likes."""

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.campaign import as_json, finish_line, run_all, table
from tests.chaos.families import SCENARIOS
from tests.chaos.registry import all_cases, quick_cases


def main() -> int:
    """Parse the command line and run; the exit code says whether something was not as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--rounds", type=int, default=1, help="how often everything is run")
    parser.add_argument("--load", type=int, default=0, help="busy loops beside, one process each")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--only", default="", help="scenarios whose name has this")
    parser.add_argument("--mode", default="", help="modes, with commas between them")
    parser.add_argument("--world", default="", help="numbers of ranks, with commas between them")
    parser.add_argument("--quick", action="store_true", help="only the cases of the test suite")
    parser.add_argument("--skip-pending", action="store_true", help="leave out what is known not to hold yet")
    parser.add_argument("--list", action="store_true", help="print the scenarios and end")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{each.name}  {' '.join(each.faults)}  {' '.join(each.modes)}" for each in SCENARIOS.values()))
        return 0
    modes, worlds = filter(None, given.mode.split(",")), filter(None, given.world.split(","))
    chosen_modes, chosen_worlds = set(modes), set(map(int, worlds))
    cases = [
        case
        for case in (quick_cases() if given.quick else all_cases())
        if given.only in case.scenario.name
        and not (given.skip_pending and case.scenario.why_pending(case.mode))
        and (not chosen_modes or case.mode in chosen_modes)
        and (not chosen_worlds or case.world in chosen_worlds)
    ]
    order = random.Random(given.seed)
    results = []
    began = time.monotonic()
    with busy_loops(given.load):
        for _ in range(given.rounds):
            order.shuffle(cases)
            results += run_all(cases, lambda text: print(text, flush=True))
    print(table(results))
    print(finish_line(results, time.monotonic() - began))
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(as_json(results), indent=1))
    return (
        1 if any(result.problem and not result.case.scenario.why_pending(result.case.mode) for result in results) else 0
    )


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Processes that compute all the time, for as long as the block runs."""
    loops = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


if __name__ == "__main__":
    sys.exit(main())
