"""The wheel in an environment that has what it declares and nothing else, used from outside the repository.

One test, because the environment takes most of the time and tests of one file may run in several processes.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.wheel_program import RANKS

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "wheel_program.py"
INSTALLING = 400.0
RUNNING = 120.0
HINT = "zerostep: the command line needs typer: pip install 'zerostep[cli]'\n"


class Environment:
    """A virtual environment, and a directory outside the repository in which its programs run."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "environment" / "bin"
        self.outside = directory / "outside"
        self.outside.mkdir()
        # Neither this repository's sources nor the environment that runs the tests may be found.
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self.variables = {name: value for name, value in os.environ.items() if name not in hidden}
        self.check([sys.executable, "-m", "venv", str(self.bin.parent)], RUNNING)

    def install(self, *packages: str) -> None:
        """Install packages and what they declare, in the versions that development is pinned to."""
        options = ["--quiet", "--disable-pip-version-check", "--no-compile", "-c", str(ROOT / "constraints.txt")]
        self.check([str(self.bin / "python"), "-m", "pip", "install", *options, *packages], INSTALLING)

    def check(self, command: Sequence[str], deadline: float) -> None:
        """Run a command that must succeed."""
        done = self.run(command, deadline)
        assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"

    def run(self, command: Sequence[str], deadline: float) -> subprocess.CompletedProcess[str]:
        """Run a command outside the repository."""
        run = partial(subprocess.run, cwd=self.outside, env=self.variables, timeout=deadline, check=False)
        return run(command, capture_output=True, text=True)

    def run_ranks(self, part: str) -> None:
        """Run a part of the program on all ranks; it must succeed on each."""
        program = str(shutil.copy(PROGRAM, self.outside))
        outputs = [self.outside / f"{part}-{rank}.txt" for rank in range(RANKS)]
        commands = [[str(self.bin / "python"), program, part, str(rank)] for rank in range(RANKS)]
        ranks = list(map(self._start, commands, outputs))
        try:
            statuses = [_status(process) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        assert statuses == [0] * RANKS, "\n".join(output.read_text() for output in outputs)

    def _start(self, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(command, cwd=self.outside, env=self.variables, stdout=file, stderr=file)


def _status(process: subprocess.Popen[bytes]) -> int:
    """How a rank ended; one that does not is killed, so that what it and the other printed can be shown."""
    try:
        return process.wait(RUNNING)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """An empty environment, removed afterwards: pytest would keep its gigabyte for three more runs."""
    try:
        yield Environment(tmp_path)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.timeout(600)
def test_the_wheel_outside_the_repository(environment: Environment) -> None:
    wheel = build_wheel(environment)
    assert "zerostep/py.typed" in ZipFile(wheel).namelist()
    environment.install(str(wheel))
    environment.run_ranks("train")
    check_hint(environment)
    environment.install("numpy")  # saving calls Tensor.numpy(), and neither torch nor the package declares numpy
    environment.run_ranks("checkpoint")


def build_wheel(environment: Environment) -> Path:
    target = environment.outside / "wheels"
    environment.check([sys.executable, "-m", "build", "--wheel", "--outdir", str(target), str(ROOT)], INSTALLING)
    (wheel,) = target.glob("*.whl")
    return wheel


def check_hint(environment: Environment) -> None:
    """Without the extra `cli` the command line says so in one line; torch's warning about numpy is silenced."""
    environment.variables["PYTHONWARNINGS"] = "ignore"
    for command in ([str(environment.bin / "python"), "-m", "zerostep.tools.cli"], [str(environment.bin / "zerostep")]):
        done = environment.run(command, RUNNING)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", HINT)


def test_the_citation_names_the_newest_release() -> None:
    newest = re.search(r"^## (\d\S*) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    cited = dict(re.findall(r"^(version|date-released): (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert (cited["version"], cited["date-released"]) == newest.groups()
