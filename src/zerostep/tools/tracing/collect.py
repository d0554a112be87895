"""Start a script on local ranks, as torchrun would, and collect the trace of one step from each."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from zerostep.tools.tracing.events import RankTrace, TraceError, in_order, read
from zerostep.tools.tracing.worker import trace_file

__all__ = ["TraceJob", "collect"]

_HOST = "127.0.0.1"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_PAUSE = 0.05
_GRACE = 5.0
_PROFILER_LOG = re.compile(r"\w+:\d{4}-\d\d-\d\d ")


@dataclass(frozen=True)
class TraceJob:
    """A script, its arguments, on how many ranks and which step; it has `timeout` seconds to get there."""

    script: Path
    arguments: Sequence[str]
    ranks: int
    step: int
    timeout: float

    def check(self) -> None:
        """`TraceError` for what cannot work."""
        if not self.script.is_file():
            raise TraceError(f"{self.script} is not a file: name the training script")
        if self.ranks < 1:
            raise TraceError(f"--ranks must be at least 1, not {self.ranks}")
        if self.step < 2:
            raise TraceError(f"--step must be at least 2, not {self.step}: the first step only builds the state")
        if self.timeout <= 0:
            raise TraceError(f"--timeout must be more than 0 seconds, not {self.timeout:g}")


def collect(job: TraceJob) -> list[RankTrace]:
    """The traces of all ranks; the script does not go on after the traced step."""
    job.check()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _started(job, folder) as processes:
            _watch(job, folder, processes)
        return in_order([read(trace_file(folder, rank), rank) for rank in range(job.ranks)])


@contextmanager
def _started(job: TraceJob, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    port = _free_port()
    with ExitStack() as stack:
        errors = [stack.enter_context(_errors(folder, rank).open("wb")) for rank in range(job.ranks)]
        processes = list[subprocess.Popen[bytes]]()
        stack.callback(_end, processes)
        for rank in range(job.ranks):
            processes.append(_start(job, folder, rank, port, errors[rank]))
        yield processes


def _start(job: TraceJob, folder: Path, rank: int, port: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "zerostep.tools.tracing.worker", str(folder), str(job.step), str(job.script)]
    return subprocess.Popen(
        [*command, *job.arguments],
        env={**os.environ, **_environment(job.ranks, rank, port)},
        stdin=subprocess.PIPE,
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=errors,
    )


def _environment(ranks: int, rank: int, port: int) -> dict[str, str]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    usual = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "OMP_NUM_THREADS": "1"}
    return {
        **{name: os.environ.get(name, value) for name, value in usual.items()},
        **{name: str(value) for name, value in places.items()},
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _watch(job: TraceJob, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when every rank has left its trace."""
    deadline = time.monotonic() + job.timeout
    while not all(trace_file(folder, rank).exists() for rank in range(job.ranks)):
        ended = [rank for rank, process in enumerate(processes) if process.poll() is not None]
        # The first to fail is often not the lowest, and the others fail because of it: those that were told come last.
        failed = sorted((rank for rank in ended if processes[rank].returncode), key=lambda r: _lost_a_peer(folder, r))
        if failed:
            raise TraceError(_failure(job, folder, failed[0], processes[failed[0]].returncode))
        if ended:
            raise TraceError(_too_short(job, folder, ended[0]))
        if time.monotonic() > deadline:
            raise TraceError(
                f"step {job.step} was not reached in {job.timeout:g} seconds: choose an earlier --step or a longer "
                "--timeout"
            )
        time.sleep(_PAUSE)


def _failure(job: TraceJob, folder: Path, rank: int, code: int) -> str:
    lines = [line for line in _text(folder, rank).splitlines() if line.strip() and not _PROFILER_LOG.match(line)]
    what = lines[-1].strip() if lines else f"exit code {code}"
    return f"rank {rank} of {job.script.name} failed: {what}; run it under torchrun to see where"


def _lost_a_peer(folder: Path, rank: int) -> bool:
    text = _text(folder, rank)
    return "Connection closed by peer" in text or "Connection reset by peer" in text


def _text(folder: Path, rank: int) -> str:
    return _errors(folder, rank).read_text(errors="replace")


def _too_short(job: TraceJob, folder: Path, rank: int) -> str:
    path = folder / f"steps{rank}"
    steps = int(path.read_text()) if path.exists() else 0
    if steps:
        return f"{job.script.name} ended after {steps} optimizer steps: choose --step {steps} or less"
    return f"{job.script.name} ended without a call of optimizer.step(): name a script that trains"


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"stderr{rank}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let the ranks go, and end those that do not leave."""
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    deadline = time.monotonic() + (_GRACE if sys.exc_info()[0] is None else 0.0)
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
