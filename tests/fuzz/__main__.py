"""`python -m tests.fuzz`: run random training programs for some minutes, or one of them again."""

import argparse
import sys

from tests.fuzz.campaign import Campaign, Finding, Team, describe, run_one
from tests.fuzz.generate import generate
from tests.fuzz.variants import VARIANTS


def main() -> int:
    """Parse the command line and run; the exit code says whether something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seed", type=int, default=0, help="the program, or the first one")
    parser.add_argument("--variant", help="one of: " + ", ".join(VARIANTS))
    parser.add_argument("--world", default="2,3", help="numbers of ranks, with commas between them")
    parser.add_argument("--minutes", type=float, help="run from the seed on for so long; without it, one program")
    parser.add_argument("--no-shrink", action="store_true", help="print findings as they are")
    given = parser.parse_args()
    worlds = [int(each) for each in given.world.split(",")]
    variants = given.variant.split(",") if given.variant else list(VARIANTS)
    if given.minutes is None:
        return sum(replay(given.seed, world, variants, not given.no_shrink) for world in worlds) and 1
    campaign = Campaign(worlds, variants, not given.no_shrink, lambda text: print(text, flush=True))
    campaign.go(given.seed, given.minutes)
    return 1 if campaign.findings else 0


def replay(seed: int, world: int, variants: list[str], shrinks: bool) -> int:
    """Run one program, and print it; returns the number of findings."""
    program, found = generate(seed, world), 0
    print(program)
    with Team() as team:
        for name in variants:
            if not VARIANTS[name].takes(program):
                continue
            kind, detail = run_one(team, program, name)
            print(f"{name}: {kind} {detail}")
            if kind not in ("same", "refused"):
                found += 1
                if shrinks:
                    print(describe(team, Finding(0, seed, name, program, kind, detail)))
    return found


if __name__ == "__main__":
    sys.exit(main())
