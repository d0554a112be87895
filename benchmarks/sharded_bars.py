"""How the sharded optimizer must compare: with plain DDP, with every peer, on the wire and in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from benchmarks.bars import Bar, judge
from benchmarks.peers.entries import (
    BACKWARD,
    BACKWARD_STEP,
    ENTRIES,
    FORWARD,
    FUSED,
    NAMED,
    PLAIN,
    STEP,
    TUNED,
    UNDER_DDP,
    Entry,
)
from benchmarks.timing import Timing

NAMES = {entry.key: entry.name for entry in (*ENTRIES, *NAMED)}
JUDGED_RATE = "1gbit"
ROUNDS_TO_JUDGE = 5
SLACK = 1.02
SHARDED = (FORWARD, STEP, UNDER_DDP, FUSED, BACKWARD, BACKWARD_STEP)


@dataclass(frozen=True)
class Limit:
    """On a shaped network, ``entry`` may take this many hundredths of plain DDP's time."""

    workload: str
    ranks: int
    entry: Entry
    hundredths: int


LIMITS = (
    Limit("gpt", 2, FORWARD, 78),
    Limit("gpt", 2, STEP, 86),
    Limit("wide", 2, FORWARD, 90),
    Limit("tiny", 2, FORWARD, 55),
    Limit("frozen", 2, FORWARD, 70),
    Limit("gpt", 4, FORWARD, 72),
    Limit("gpt", 4, STEP, 82),
)


def verdicts(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Judge everything that was measured of what is asked."""
    return [*_times(result), *_amounts(result)]


def _times(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    seconds = {NAMES[key]: values for key, values in result["seconds"].items()}
    bars = [*_against_plain(result), *_against_peers(result)]
    judged = [judge(bar, seconds) for bar in bars if {bar.variant, bar.peer} <= seconds.keys()]
    few = min(map(len, seconds.values())) < ROUNDS_TO_JUDGE
    return [{**verdict, "verdict": "too few rounds to judge"} for verdict in judged] if few else judged


def _against_plain(result: Mapping[str, Any]) -> list[Bar]:
    case, ranks, rate = result["case"], result["ranks"], result["rate"]
    if rate is None:
        return [_bar(case, FORWARD, PLAIN, Fraction(1))]
    asked = [limit for limit in LIMITS if (limit.workload, limit.ranks, JUDGED_RATE) == (case, ranks, rate)]
    return [_bar(case, limit.entry, PLAIN, Fraction(limit.hundredths, 100)) for limit in asked]


def _against_peers(result: Mapping[str, Any]) -> list[Bar]:
    peers = [entry for entry in ENTRIES if entry.role == "peer" and entry.key in result["seconds"]]
    bars = [_bar(result["case"], FORWARD, peer, Fraction(1)) for peer in _fastest(peers, result["seconds"])]
    return [*bars, _bar(result["case"], FUSED, TUNED, Fraction(1))]


def _fastest(peers: Sequence[Entry], seconds: Mapping[str, Sequence[float]]) -> list[Entry]:
    return sorted(peers, key=lambda entry: Timing(tuple(seconds[entry.key])).median)[:1]


def _bar(case: str, ours: Entry, other: Entry, limit: Fraction) -> Bar:
    return Bar(case, "training step", ours.name, other.name, limit)


def _amounts(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    ranks, sent, state = result["ranks"], result["sent over P"], result["state bytes"]
    least, share = 2 * (ranks - 1) / ranks, state[PLAIN.key] / ranks
    measured = [entry for entry in SHARDED if entry.key in result["seconds"]]
    wire = [
        _amount(f"'{entry.name}' sends at most {SLACK} x {least:g} P", sent[entry.key] / least)
        for entry in measured
        if sent and least
    ]
    held = [
        _amount(f"the state of '{entry.name}' takes at most {SLACK} of an even share", state[entry.key] / share)
        for entry in measured
    ]
    return [*wire, *held]


def _amount(text: str, ratio: float) -> dict[str, Any]:
    return {"measure": "amount", "bar": text, "ratio": ratio, "verdict": "met" if ratio <= SLACK else "NOT met"}
