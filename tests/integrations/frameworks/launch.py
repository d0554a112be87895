"""Start ranks as a user of a framework does, with torchrun, and read what they found out.

Starting ranks takes seconds, most of them the import of the framework: a program of these tests runs many cases in one
start, writes what it found with `report`, and each test looks at one of them.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.pool import HOST, LOOPBACK

ROOT = Path(__file__).parents[3]
DEADLINE = 360.0


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
    return ended.printed


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
