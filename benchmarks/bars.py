"""Bars: how one variant's median must compare with a peer's, and whether it does."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from benchmarks.cases import Measure
from benchmarks.timing import Timing


@dataclass(frozen=True)
class Bar:
    """The median of ``variant`` may be at most ``limit`` times that of ``peer``."""

    case: str
    measure: Measure
    variant: str
    peer: str
    limit: Fraction


def judge(bar: Bar, seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Hold the rounds of the two variants against the bar; a miss says whether noise could explain it."""
    ours, peer = Timing(tuple(seconds[bar.variant])), Timing(tuple(seconds[bar.peer]))
    allowed = bar.limit * peer.median
    verdict = "met" if ours.median <= allowed else "NOT met"
    if ours.median > allowed >= ours.quartiles[0]:
        verdict = "NOT met by the median, though the bar lies within the quartiles"
    text = f"{bar.measure} of '{bar.variant}' takes at most {_shown(bar.limit)} of '{bar.peer}'"
    return {"measure": bar.measure, "bar": text, "ratio": ours.median / peer.median, "verdict": verdict}


def _shown(limit: Fraction) -> str:
    return f"{float(limit):g}" if 100 % limit.denominator == 0 else str(limit)


def bar_lines(bars: Iterable[Mapping[str, Any]]) -> str:
    """Return one line per judged bar."""
    return "\n".join(f"- Bar: {bar['bar']}. Measured {bar['ratio']:.3f}: {bar['verdict']}." for bar in bars)
