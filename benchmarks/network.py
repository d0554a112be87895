"""The networks that ranks are measured on: the machine's own loopback, or hosts behind links of a chosen speed.

A shaped network is one switch and one host per rank, each a network namespace of its own. A cable joins every host to
the switch, and a token bucket at both of its ends limits both directions. Nothing outside these namespaces changes.
Linux only; it takes root and the commands ``ip`` and ``tc`` of iproute2.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

LOOPBACK = "lo"
CABLE = "wire"
MAX_HOSTS = 64

_PREFIX = "zerostep-"
_NAMESPACES = Path("/run/netns")
_STATISTICS = Path("/sys/class/net")
_COMMAND_SECONDS = 20
_RATE = re.compile(r"[1-9][0-9]*[kmg]bit")
_STOPPERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NetworkError(RuntimeError):
    """The network cannot be had; the message is one line for the user."""


@dataclass(frozen=True)
class Host:
    """Where a rank runs: what to put before its command, and the interface that leads to the others."""

    enter: tuple[str, ...]
    interface: str


@contextmanager
def loopback(ranks: int) -> Iterator[list[Host]]:
    """All ranks on this machine, without a limit."""
    yield [Host((), LOOPBACK)] * ranks


@contextmanager
def shaped(ranks: int, rate: str) -> Iterator[list[Host]]:
    """A host for every rank, with links of ``rate``, e.g. ``1gbit``, in both directions; removed on the way out.

    The way out includes SIGINT, SIGTERM and SIGHUP. What a run that was killed outright left behind goes when the next
    starts.
    """
    _check(ranks, rate)
    _remove(_leftovers())
    stem = f"{_PREFIX}{os.getpid()}-"
    switch, hosts = f"{stem}switch", [f"{stem}host{rank}" for rank in range(ranks)]
    with _stoppable():
        try:
            _lay_switch(switch)
            for place, host in enumerate(hosts):
                _lay_host(host, switch, place, rate)
            yield [Host(("ip", "netns", "exec", host), CABLE) for host in hosts]
        finally:
            with _undisturbed():
                _remove([*hosts, switch])


def obstacle() -> str | None:
    """Why this machine cannot have a shaped network, or nothing."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"a shaped network needs the command {missing[0]!r}: install iproute2"
    return "a shaped network takes root, to make network namespaces" if os.geteuid() != 0 else None


def _check(ranks: int, rate: str) -> None:
    reason = obstacle()
    if reason is not None:
        raise NetworkError(reason)
    if not 1 <= ranks <= MAX_HOSTS:
        raise NetworkError(f"a shaped network has between 1 and {MAX_HOSTS} hosts, not {ranks}")
    if not _RATE.fullmatch(rate):
        raise NetworkError(f"a rate is a whole number of kbit, mbit or gbit, as in 1gbit, not {rate!r}")


def _lay_switch(switch: str) -> None:
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")


def _lay_host(host: str, switch: str, place: int, rate: str) -> None:
    port = f"port{place}"
    _ip("netns", "add", host)
    _ip("link", "add", CABLE, "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", host, "address", "add", f"10.0.0.{place + 1}/24", "dev", CABLE)
    _ip("-n", host, "link", "set", LOOPBACK, "up")
    _ip("-n", host, "link", "set", CABLE, "up")
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    for namespace, interface in ((host, CABLE), (switch, port)):
        bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        _command("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *bucket)


def _leftovers() -> list[str]:
    """Our namespaces whose maker is gone."""
    names = [path.name for path in _NAMESPACES.glob(f"{_PREFIX}*-*")]
    return [name for name in names if not Path("/proc", name.removeprefix(_PREFIX).split("-")[0]).exists()]


def _remove(namespaces: Sequence[str]) -> None:
    for namespace in namespaces:
        if (_NAMESPACES / namespace).exists():
            with contextlib.suppress(NetworkError):  # the others must go all the same
                _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> None:
    _command("ip", *arguments)


def _command(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except subprocess.CalledProcessError as error:
        raise NetworkError(f"{' '.join(words)!r} failed: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise NetworkError(f"{' '.join(words)!r} hung") from error


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP leave by the same way as an exception does."""
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second signal waits until the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def bytes_sent(interface: str) -> int:
    """Bytes that have left the calling rank's host on that interface."""
    return int((_STATISTICS / interface / "statistics" / "tx_bytes").read_text())


def throughput(direction: Literal["one way", "both ways"], size: int = 32 << 20) -> float:
    """Gigabits per second that a message of ``size`` bytes makes between ranks 0 and 1; collective."""
    rank, memory = dist.get_rank(), torch.zeros(2, size, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    works = []
    if rank == 1 or (rank == 0 and direction == "both ways"):
        works.append(dist.irecv(memory[0], 1 - rank))
    if rank == 0 or (rank == 1 and direction == "both ways"):
        works.append(dist.isend(memory[1], 1 - rank))
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()
    return 8e-9 * size / (time.perf_counter() - start)
