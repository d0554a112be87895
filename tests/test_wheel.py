"""The wheel in an environment that has what it declares and nothing else, used from outside the repository.

One test, because the environment takes most of the time and tests of one file may run in several processes.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.wheel_program import RANKS

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "wheel_program.py"
LIMIT = 600
GRACE = 10.0
BUDGET = 500.0  # for all commands together; the rest is for removing the environment
HINT = "zerostep: the command line needs typer: pip install 'zerostep[cli]'\n"


class Environment:
    """A virtual environment, and a directory outside the repository in which its programs run."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "environment" / "bin"
        self.outside = directory / "outside"
        self.outside.mkdir()
        self.end = time.monotonic() + BUDGET
        # Neither this repository's sources nor the environment that runs the tests may be found.
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self.variables = {name: value for name, value in os.environ.items() if name not in hidden}
        self.check([sys.executable, "-m", "venv", str(self.bin.parent)])

    def install(self, *packages: str) -> None:
        """Install packages and what they declare, in the versions that development is pinned to."""
        options = ["--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
        self.check([str(self.bin / "python"), "-m", "pip", "install", *options, *packages])

    def left(self) -> float:
        """Seconds until everything must have ended."""
        return max(0.0, self.end - time.monotonic())

    def check(self, command: Sequence[str]) -> None:
        """Run a command that must succeed."""
        done = self.run(command)
        assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"

    def run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command outside the repository."""
        run = partial(subprocess.run, cwd=self.outside, env=self.variables, timeout=self.left(), check=False)
        return run(command, capture_output=True, text=True)

    def run_ranks(self, part: str) -> None:
        """Run a part of the program on all ranks; it must succeed on each."""
        program = str(shutil.copy(PROGRAM, self.outside))
        outputs = [self.outside / f"{part}-{rank}.txt" for rank in range(RANKS)]
        commands = [[str(self.bin / "python"), "-X", "faulthandler", program, part, str(rank)] for rank in range(RANKS)]
        ranks = list(map(self._start, commands, outputs))
        try:
            statuses = [self._status(process) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        assert statuses == [0] * RANKS, "\n".join(output.read_text() for output in outputs)

    def _start(self, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(command, cwd=self.outside, env=self.variables, stdout=file, stderr=file)

    def _status(self, process: subprocess.Popen[bytes]) -> int:
        """How a rank ended; one that does not is aborted, which makes it print the stacks of its threads."""
        try:
            return process.wait(self.left())
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            return process.wait(GRACE)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """An empty environment, removed afterwards: pytest would keep its gigabyte for three more runs."""
    try:
        yield Environment(tmp_path)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.timeout(LIMIT)
def test_the_wheel_outside_the_repository(environment: Environment) -> None:
    wheel = build_wheel(environment)
    assert "zerostep/py.typed" in ZipFile(wheel).namelist()
    environment.install(str(wheel))
    environment.run_ranks("train")
    check_hint(environment)
    environment.run_ranks("checkpoint")


def build_wheel(environment: Environment) -> Path:
    target = environment.outside / "wheels"
    environment.check([sys.executable, "-m", "build", "--wheel", "--outdir", str(target), str(ROOT)])
    (wheel,) = target.glob("*.whl")
    return wheel


def check_hint(environment: Environment) -> None:
    """Without the extra `cli` the command line says so in one line."""
    for command in ([str(environment.bin / "python"), "-m", "zerostep.tools.cli"], [str(environment.bin / "zerostep")]):
        done = environment.run(command)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", HINT)


def test_the_citation_names_the_newest_release() -> None:
    newest = re.search(r"^## (\d\S*) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    cited = dict(re.findall(r"^(version|date-released): (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert (cited["version"], cited["date-released"]) == newest.groups()
