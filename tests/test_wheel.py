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
from email import message_from_bytes
from functools import partial
from importlib.metadata import distribution as metadata_of
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

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
        self.check([sys.executable, "-m", "venv", "--without-pip", str(self.bin.parent)])

    def install(self, wheel: Path) -> None:
        """Install a wheel beside what it declares, which is linked from the environment that runs the tests."""
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        pip += ["--python", str(self.bin / "python")]
        self.check([*pip, "install", "--no-deps", str(wheel)])
        (packages,) = self.bin.parent.glob("lib/python*/site-packages")
        for name in set(needed_by(wheel)):
            for entry in entries(name):
                if not (packages / entry.name).exists():
                    (packages / entry.name).symlink_to(entry)
        self.check([*pip, "check"])

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

    def run_ranks(self) -> None:
        """Run the program on all ranks; it must succeed on each."""
        program = str(shutil.copy(PROGRAM, self.outside))
        outputs = [self.outside / f"{rank}.txt" for rank in range(RANKS)]
        commands = [[str(self.bin / "python"), "-X", "faulthandler", program, str(rank)] for rank in range(RANKS)]
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


def needed_by(wheel: Path) -> Iterator[str]:
    """The distributions that a wheel declares, with those that they declare, and so on."""
    with ZipFile(wheel) as file:
        (metadata,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        declared = message_from_bytes(file.read(metadata)).get_all("Requires-Dist") or []
    found, left = set[str](), [*declared]
    while left:
        requirement = Requirement(left.pop())
        if requirement.name not in found and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
            found.add(requirement.name)
            left += metadata_of(requirement.name).requires or []
    yield from found


def entries(name: str) -> set[Path]:
    """What a distribution has put into the directory of packages, by the first part of each path."""
    found = metadata_of(name)
    parts = {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}
    return {Path(str(found.locate_file(part))) for part in parts}


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """An empty environment, removed afterwards: pytest would keep it for three more runs."""
    try:
        yield Environment(tmp_path)
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.timeout(LIMIT)
def test_the_wheel_outside_the_repository(environment: Environment) -> None:
    wheel = build_wheel(environment)
    assert "zerostep/py.typed" in ZipFile(wheel).namelist()
    environment.install(wheel)
    environment.run_ranks()
    check_hint(environment)


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
