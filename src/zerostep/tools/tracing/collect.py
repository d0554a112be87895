"""Start a script on local ranks, as torchrun would, and collect the trace of one step from each rank.

Each rank runs `worker`, which writes its trace into a temporary folder and then blocks on its standard input. This
process polls for the files, and closes the pipes when all are there.
"""

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

from zerostep.tools.errors import TraceError
from zerostep.tools.tracing.events import RankTrace, read, sort_by_rank
from zerostep.tools.tracing.worker import trace_file

_HOST = "127.0.0.1"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_POLL_SECONDS = 0.05
_EXIT_SECONDS = 5.0  # how long ranks may take to exit after their pipe is closed
_PROFILER_LOG = re.compile(r"\w+:\d{4}-\d\d-\d\d ")


@dataclass(frozen=True)
class TraceJob:
    """A script with its arguments, the number of ranks and the step to trace, which must end in `timeout` seconds."""

    script: Path
    arguments: Sequence[str]
    ranks: int
    step: int
    timeout: float

    def check(self) -> None:
        """Raise `TraceError` for values that cannot work."""
        if not self.script.is_file():
            raise TraceError(f"{self.script} is not a file: name the training script")
        if self.ranks < 1:
            raise TraceError(f"--ranks must be at least 1, not {self.ranks}")
        if self.step < 2:
            raise TraceError(f"--step must be at least 2, not {self.step}: the first step only builds the state")
        if self.timeout <= 0:
            raise TraceError(f"--timeout must be more than 0 seconds, not {self.timeout:g}")


def collect(job: TraceJob) -> list[RankTrace]:
    """Run the script up to the end of the traced step, end it there, and return the traces of all ranks."""
    job.check()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _running_ranks(job, folder) as processes:
            _wait_for_traces(job, folder, processes)
        return sort_by_rank([read(trace_file(folder, rank), rank) for rank in range(job.ranks)])


@contextmanager
def _running_ranks(job: TraceJob, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    port = _free_port()
    with ExitStack() as stack:
        errors = [stack.enter_context(_stderr_file(folder, rank).open("wb")) for rank in range(job.ranks)]
        processes = list[subprocess.Popen[bytes]]()
        # Registered before the first start, so that a failed start ends the ranks that run already.
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
    indices = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    defaults = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "OMP_NUM_THREADS": "1"}
    return {
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
        **{name: str(value) for name, value in indices.items()},
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    # Another process may take the port before rank 0 binds it; the script then fails, and says so.
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for_traces(job: TraceJob, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when every rank has written its trace; raise `TraceError` if a rank ends before or time runs out."""
    deadline = time.monotonic() + job.timeout
    while not all(trace_file(folder, rank).exists() for rank in range(job.ranks)):
        ended = [rank for rank, process in enumerate(processes) if process.poll() is not None]
        # One rank's failure breaks the connections of the others: report a rank that failed for another reason, if any.
        failed = sorted((rank for rank in ended if processes[rank].returncode), key=lambda r: _lost_a_peer(folder, r))
        if failed:
            raise TraceError(_failure_message(job, folder, failed[0], processes[failed[0]].returncode))
        if ended:
            raise TraceError(_too_short_message(job, folder, ended[0]))
        if time.monotonic() > deadline:
            raise TraceError(
                f"step {job.step} was not reached in {job.timeout:g} seconds: choose an earlier --step or a longer "
                "--timeout"
            )
        time.sleep(_POLL_SECONDS)


def _failure_message(job: TraceJob, folder: Path, rank: int, code: int) -> str:
    lines = [line for line in _stderr_text(folder, rank).splitlines() if line.strip() and not _PROFILER_LOG.match(line)]
    reason = lines[-1].strip() if lines else f"exit code {code}"
    return f"rank {rank} of {job.script.name} failed: {reason}; run it under torchrun to see where"


def _lost_a_peer(folder: Path, rank: int) -> bool:
    text = _stderr_text(folder, rank)
    return "Connection closed by peer" in text or "Connection reset by peer" in text


def _stderr_text(folder: Path, rank: int) -> str:
    return _stderr_file(folder, rank).read_text(errors="replace")


def _too_short_message(job: TraceJob, folder: Path, rank: int) -> str:
    path = folder / f"steps{rank}"
    steps = int(path.read_text()) if path.exists() else 0
    if steps:
        return f"{job.script.name} ended after {steps} optimizer steps: choose --step {steps} or less"
    return f"{job.script.name} ended without a call of optimizer.step(): name a script that trains"


def _stderr_file(folder: Path, rank: int) -> Path:
    return folder / f"stderr{rank}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Close the pipes on which the ranks block, and kill the ranks that do not exit; at once after an error."""
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    deadline = time.monotonic() + (_EXIT_SECONDS if sys.exc_info()[0] is None else 0.0)
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
