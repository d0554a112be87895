"""One process per rank, each on its host: started, waited for up to a deadline, and ended with the caller."""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.network import Host

_ROOT = Path(__file__).parent.parent
_LAST_LINES = 20
_GRACE_SECONDS = 10
_PR_SET_PDEATHSIG = 1


class LaunchError(RuntimeError):
    """A rank failed or ran out of time; the message ends with what it said last."""


def run_on(
    hosts: Sequence[Host], job: Callable[..., object], *arguments: object, seconds: int, backend: str = "gloo"
) -> list[Any]:
    """Run ``job(*arguments)`` on one rank of one thread per host; return what each returned.

    The job is a function of a module; its arguments and answers are passed on as JSON.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        task = {"job": _address(job), "ranks": len(hosts), "seconds": seconds, "backend": backend}
        (folder / "task.json").write_text(json.dumps({**task, "arguments": arguments}))
        processes = [stack.enter_context(_started(host, rank, folder)) for rank, host in enumerate(hosts)]
        _await(processes, folder, deadline)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(hosts))]


def _address(job: Callable[..., object]) -> str:
    spec = sys.modules[job.__module__].__spec__  # knows the name even of a module that runs as a script
    assert spec is not None
    return f"{spec.name}:{job.__name__}"


@contextmanager
def _started(host: Host, rank: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [*host.enter, sys.executable, "-m", "benchmarks.launch", str(folder), str(rank)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"}
    with (folder / f"{rank}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()  # `ip netns exec` becomes the rank, so this is the rank itself
        process.wait()


def _await(processes: Sequence[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if process.poll():
                raise LaunchError(f"rank {rank} failed:\n{_last_words(folder, rank)}")
        time.sleep(0.1)
    for rank, process in enumerate(processes):
        if process.poll() is None:
            raise LaunchError(f"rank {rank} ran out of time:\n{_last_words(folder, rank)}")
        if process.returncode:
            raise LaunchError(f"rank {rank} failed:\n{_last_words(folder, rank)}")


def _last_words(folder: Path, rank: int) -> str:
    return "\n".join((folder / f"{rank}.log").read_text(errors="replace").splitlines()[-_LAST_LINES:])


def _rank_main(folder: Path, rank: int) -> None:
    task = json.loads((folder / "task.json").read_text())
    _die_with_parent()
    signal.alarm(task["seconds"] + _GRACE_SECONDS)
    module, _, name = task["job"].partition(":")
    job = getattr(importlib.import_module(module), name)
    torch.set_num_threads(1)
    timeout, store = timedelta(seconds=task["seconds"]), (folder / "store").as_uri()
    dist.init_process_group(task["backend"], store, timeout=timeout, world_size=task["ranks"], rank=rank)
    try:
        (folder / f"{rank}.json").write_text(json.dumps(job(*task["arguments"])))
    finally:
        dist.destroy_process_group()


def _die_with_parent() -> None:
    """A launcher that is killed outright cannot end its ranks. Linux only; elsewhere the alarm does it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]), int(sys.argv[2]))
