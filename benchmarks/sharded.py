"""The training step with ShardedOptimizer against plain DDP and every other sharded optimizer.

Run as ``python -m benchmarks.sharded [--case gpt,wide,tiny,frozen] [--ranks 2,4] [--peers KEY,...]
[--network loopback|shaped|auto] [--rate 1gbit] [--rounds N] [--steps N] [--batch N] [--json OUT] [--plot OUT]``. All
entries run in the same processes, in interleaved rounds; a round counts as long as its slowest rank. Only ratios within
one run mean anything. Peers come with the extra ``bench``; one that is missing or fails is a row that says why. A
shaped network takes root and iproute2.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import bar_lines
from benchmarks.contest import attempt, chosen, measure
from benchmarks.launch import LaunchError, run_on
from benchmarks.machine import hardware, versions
from benchmarks.network import Host, NetworkError, loopback, obstacle, shaped
from benchmarks.peers.entries import ALWAYS, BOUND, ENTRIES, NAMED, PLAIN, WIRE, entries_of
from benchmarks.picture import draw
from benchmarks.sharded_bars import NAMES, verdicts
from benchmarks.timing import Timing, another_run, markdown, spread_cells
from benchmarks.workloads import WORKLOADS

START_SECONDS = 120
TRIAL_SECONDS = 90
STEP_SECONDS = 3  # of one entry on one rank, at most; ranks share the cores


@dataclass(frozen=True)
class Setting:
    """One table: a workload and its entries on a number of ranks."""

    case: str
    ranks: int
    rate: str | None  # of a shaped network's links; none on loopback
    keys: tuple[str, ...]
    batch: int | None
    rounds: int
    steps: int

    @property
    def seconds(self) -> int:
        """How long a run may take."""
        return START_SECONDS + STEP_SECONDS * self.ranks * len(self.keys) * (self.steps + 1) * (self.rounds + 2)


def run(setting: Setting) -> dict[str, Any]:
    """Lay the network, measure on it, and judge."""
    load = os.getloadavg()[0]
    network = loopback(setting.ranks) if setting.rate is None else shaped(setting.ranks, setting.rate)
    with network as hosts:
        result = _measured(hosts, setting)
    workload = chosen(setting.case, setting.batch)
    place = {"case": setting.case, "ranks": setting.ranks, "rate": setting.rate, "batch": workload.batch}
    title = f"{workload.title.format(workload.batch)}, {setting.ranks} ranks"
    whole = {**place, "title": title, **result, "load": [load, os.getloadavg()[0]]}
    return {**whole, "bars": verdicts(whole)}


def _measured(hosts: Sequence[Host], setting: Setting) -> dict[str, Any]:
    try:
        return _contest(hosts, setting, setting.keys)
    except LaunchError:
        failures = _culprits(hosts, setting)
        if not failures or failures.keys() & {entry.key for entry in ALWAYS}:
            raise
    result = _contest(hosts, setting, [key for key in setting.keys if key not in failures])
    return {**result, "failures": {**result["failures"], **failures}}


def _contest(hosts: Sequence[Host], setting: Setting, keys: Sequence[str]) -> dict[str, Any]:
    arguments = (setting.case, keys, setting.batch, setting.rounds, setting.steps, hosts[0].interface)
    answers = run_on(hosts, measure, *arguments, seconds=setting.seconds)
    return {**answers[0], "failures": _first_reasons([answer["failures"] for answer in answers])}


def _first_reasons(failures: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """A rank on which all went well has no reason to give."""
    return {key: next((each[key] for each in failures if each[key]), "unknown") for key in failures[0]}


def _culprits(hosts: Sequence[Host], setting: Setting) -> dict[str, str]:
    """After a run that hung or lost a rank: each entry alone, to find those that cannot take part."""
    reasons = {}
    for key in setting.keys:
        try:
            answers = run_on(hosts, attempt, setting.case, key, setting.batch, seconds=TRIAL_SECONDS)
            reasons[key] = next(filter(None, answers), "")
        except LaunchError as error:
            reasons[key] = f"{str(error).splitlines()[0]} {str(error).splitlines()[-1]}"
    return {key: reason for key, reason in reasons.items() if reason}


def render(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown: the network, a table and the bars."""
    speeds = ", ".join(f"{rate:.3f} Gbit/s {way}" for way, rate in result["gigabits per second"].items())
    # With more at work on the machine than the ranks themselves, the numbers mean little.
    load = "Load of the machine before and at the end: {:.1f}, {:.1f}.".format(*result["load"])
    head = f"## {result['title']}: training step\n\nRanks 0 and 1: {speeds}. {load}"
    parts = [head, _table(result), *_bounds(result), bar_lines(result["bars"])]
    return "\n\n".join(parts) + "\n"


def ideals(seconds: Mapping[str, Sequence[float]]) -> tuple[float, float] | None:
    """The medians of a step with perfect overlap and with none; nothing where the network alone was not measured.

    Computing and the network cannot both be shorter than the longer of them, and need not be longer than their sum.
    """
    if not {BOUND.key, WIRE.key} <= seconds.keys():
        return None
    computing, network = (Timing(tuple(seconds[entry.key])).median for entry in (BOUND, WIRE))
    return max(computing, network), computing + network


def _bounds(result: Mapping[str, Any]) -> list[str]:
    found, plain = ideals(result["seconds"]), Timing(tuple(result["seconds"][PLAIN.key])).median
    if found is None:
        return []
    best, worst = (f"{1e3 * value:.0f} ms, {value / plain:.3f} of {PLAIN.name}" for value in found)
    overlapped = f"With perfect overlap the longer of '{BOUND.name}' and '{WIRE.name}' remains: {best}."
    return [f"{overlapped} Without any they add up: {worst}."]


def _table(result: Mapping[str, Any]) -> str:
    header = ["entry", "rounds", "median ms", "quartiles ms", f"/ {PLAIN.name}", "another run", "sent / P"]
    header += ["calls / step", "state / even share", "peak MiB", "lost", "numbers"]
    keys = [entry.key for entry in (*ENTRIES, *NAMED)]
    rows = [_row(key, result) for key in keys if key in result["seconds"]]
    failed = [
        [NAMES[key], *["-"] * (len(header) - 2), result["failures"][key]] for key in keys if key in result["failures"]
    ]
    return markdown(header, [*rows, *failed])


def _row(key: str, result: Mapping[str, Any]) -> list[str]:
    timing, plain = (Timing(tuple(result["seconds"][each])) for each in (key, PLAIN.key))
    sent = f"{result['sent over P'][key]:.3f}" if result["sent over P"] else "unknown"
    state = result["state bytes"][key] * result["ranks"] / result["state bytes"][PLAIN.key]
    spread = [str(len(timing.seconds)), *spread_cells(timing)]
    amounts = [sent, _called(result.get("calls", {}).get(key)), f"{state:.3f}", _mebibytes(result, key)]
    behaviour = [_lost(key, result), _numbers(result["difference"].get(key))]
    ratios = [f"{timing.median / plain.median:.3f}", _another_run(timing, plain)]
    return [NAMES[key], *spread, *ratios, *amounts, *behaviour]


def _another_run(timing: Timing, plain: Timing) -> str:
    found = another_run(timing, plain)
    return "unknown" if found is None else f"{found[0]:.3f} - {found[1]:.3f}"


def _called(calls: Mapping[str, int] | None) -> str:
    if calls is None:
        return "-"
    collectives, messages = calls["collectives"], calls["messages"]
    return f"{collectives} + {messages} messages" if messages else str(collectives)


def _mebibytes(result: Mapping[str, Any], key: str) -> str:
    peaks = result.get("peak bytes", {})
    return f"{peaks[key] / 2**20:.0f}" if key in peaks else "-"


def _lost(key: str, result: Mapping[str, Any]) -> str:
    """A bound updates nothing of the model's."""
    lost = result.get("lost", {}).get(key)
    return "-" if lost is None or key not in result["difference"] else str(lost)


def _numbers(gap: float | None) -> str:
    if gap is None:
        return "-"
    return f"as {PLAIN.name}" if gap == 0 else f"off by {gap:.1e}"


def _listed(text: str, known: Sequence[str]) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    unknown = [item for item in items if item not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return items


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def _arguments() -> argparse.Namespace:
    cases, keys = [each.name for each in WORKLOADS], [each.key for each in ENTRIES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", type=lambda text: _listed(text, cases), default=cases, help=", ".join(cases))
    parser.add_argument("--ranks", type=lambda text: list(map(_positive, text.split(","))), default=[2])
    known = [*keys, *(each.key for each in NAMED)]
    parser.add_argument("--peers", type=lambda text: _listed(text, known), default=keys, help=", ".join(known))
    parser.add_argument(
        "--network", choices=("loopback", "shaped", "auto"), default="loopback", help="auto: shaped if possible"
    )
    parser.add_argument("--rate", default="1gbit", help="speed of a shaped network's links")
    parser.add_argument("--rounds", type=_positive, help="rounds per entry instead of each case's own number")
    parser.add_argument("--steps", type=_positive, default=2, help="steps that are timed in a row in each round")
    parser.add_argument("--batch", type=_positive, help="batch per rank instead of each case's own")
    parser.add_argument("--plot", type=Path, help="also draw the ratios into this file, .png or .svg")
    parser.add_argument("--json", type=Path, help="also write every round to this file")
    return parser.parse_args()


def _settings(arguments: argparse.Namespace) -> list[Setting]:
    rate = arguments.rate if arguments.network == "shaped" else None
    keys = tuple(entry.key for entry in entries_of(arguments.peers))
    return [
        Setting(
            case, ranks, rate, keys, arguments.batch, arguments.rounds or chosen(case, None).rounds, arguments.steps
        )
        for ranks in arguments.ranks
        for case in arguments.case
    ]


def main() -> None:
    """Measure the chosen cases and print their tables."""
    arguments = _arguments()
    if arguments.network == "auto":
        arguments.network = "loopback" if obstacle() else "shaped"
        print(f"On loopback: {obstacle()}." if obstacle() else f"On links of {arguments.rate}.", end="\n\n")
    environment = {
        "versions": versions(),
        "hardware": hardware(),
        "network": arguments.network,
        "steps in a row": arguments.steps,
    }
    print(*(f"{key} {value}" for part in (versions(), hardware()) for key, value in part.items()), sep=", ", end="\n\n")
    results = []
    for setting in _settings(arguments):
        try:
            results.append(run(setting))
        except (NetworkError, LaunchError) as error:
            raise SystemExit(str(error)) from error
        print(render(results[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({**environment, "results": results}, indent=1) + "\n")
        if arguments.plot:
            draw(results, arguments.plot)


if __name__ == "__main__":
    main()
