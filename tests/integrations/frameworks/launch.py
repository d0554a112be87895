"""Start ranks as a user of a framework does, with torchrun, and read what they found out.

Starting ranks takes seconds, most of them the import of the framework: a program of these tests runs many cases in one
start, writes what it found with `report`, and each test looks at one of them. `once` keeps it to one start however many
workers run the tests.
"""

import fcntl
import gc
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from tests.helpers.pool import HOST, LOOPBACK

ROOT = Path(__file__).parents[3]
DEADLINE = 360.0
# What a program must not leave on its standard error when it has succeeded.
UNCLEAN = re.compile(
    r"Traceback|Exception ignored|terminate called|leaked|has not been destroyed|Connection (closed|reset)"
)


@dataclass(frozen=True)
class Ended:
    """How a launch has ended."""

    exitcode: int
    printed: str
    errors: str


def launch(program: str | Path, *arguments: str, ranks: int | None = 2, deadline: float = DEADLINE) -> Ended:
    """Run a script (a `Path`) or a module (its name) on local CPU ranks, or on its own if it starts ranks itself."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", HOST, "--nproc-per-node", str(ranks)]
    name = [str(program)] if isinstance(program, Path) else ["-m", program]
    command = [sys.executable, *(() if ranks is None else torchrun), *name, *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            printed, errors = process.communicate(timeout=deadline)
        except BaseException:
            process.terminate()  # and not kill: the launcher ends its ranks
            raise
    return Ended(process.returncode, printed, errors)


def run(program: str | Path, *arguments: str, ranks: int | None = 2, deadline: float = DEADLINE) -> str:
    """Like `launch`, for a program that must succeed; what it prints."""
    ended = launch(program, *arguments, ranks=ranks, deadline=deadline)
    assert ended.exitcode == 0, ended.errors
    assert not UNCLEAN.search(ended.errors), ended.errors
    return ended.printed


def once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder that `fill` has filled; the first of several workers fills it, the others wait."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, failed = shared / name, shared / f"{name}.failed"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed, also by a worker that dies
        if not folder.exists():
            folder.mkdir()
            try:
                fill(folder)
            except BaseException as error:
                failed.write_text(str(error))
                raise
        assert not failed.exists(), failed.read_text()
    return folder


def environment() -> dict[str, str]:
    """For local ranks of one thread, without a GPU and without a network."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "ACCELERATE_USE_CPU": "true",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_AUTH_MODE": "disabled",  # else it writes a token into the home directory
        "RAY_USAGE_STATS_ENABLED": "0",
    }


# Inside a program of many cases.


def report(folder: Path, rank: int, cases: Mapping[str, Callable[[], Any]]) -> None:
    """Run the cases in order and write, for each, what it returned; stop at the first that fails, and raise.

    After a failure the ranks may not be in step with each other, so nothing further would mean anything.
    """
    for name, case in cases.items():
        file = folder / f"{name}.{rank}.json"
        try:
            file.write_text(json.dumps({"result": case()}))
        except BaseException:
            file.write_text(json.dumps({"error": traceback.format_exc()}))
            raise


def result(folder: Path, name: str, rank: int = 0) -> Any:
    """What a case returned on a rank; fails with the rank's error, or if the rank never came to the case."""
    file = folder / f"{name}.{rank}.json"
    assert file.exists(), f"rank {rank} never ended the case {name!r}"
    read = json.loads(file.read_text())
    assert "error" not in read, f"case {name!r} failed on rank {rank}: {read.get('error')}"
    return read["result"]


def error_of(case: Callable[[], Any]) -> str:
    """Run what all ranks refuse; the error's text."""
    try:
        case()
    except RuntimeError as error:
        return str(error)
    return ""


def still_there(objects: Iterable[Any]) -> Callable[[], list[str]]:
    """Return a function that names those of the objects' classes that still exist when the caller has dropped them."""
    found = [(type(each).__name__, ref(each)) for each in objects]

    def check() -> list[str]:
        gc.collect()
        return [name for name, each in found if each() is not None]

    return check
