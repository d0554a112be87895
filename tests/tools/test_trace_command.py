"""`zerostep trace` on the command line."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.helpers.documents import blocks_of, commands_of
from zerostep.tools import cli

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0

pytestmark = pytest.mark.timeout(2 * DEADLINE)


def run_as_a_user(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, what it prints, and its errors."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "zerostep.tools.cli", "trace", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
    return done.returncode, done.stdout, done.stderr


@dataclass(frozen=True)
class Command:
    """`zerostep trace` in this process, which has all modules; the ranks are processes of their own."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    captured: pytest.CaptureFixture[str]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, what it prints, and its errors."""
        self.monkeypatch.setattr(sys, "argv", ["zerostep", "trace", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = self.captured.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("NO_COLOR", "1")
    return Command(tmp_path, monkeypatch, capfd)


def script(folder: Path, body: str) -> str:
    """A script without ranks that talk to each other: one optimizer and what `body` does with it."""
    path = folder / "train.py"
    path.write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]) if len(sys.argv) > 2 else 0.1)\n"
        "def step():\n"
        "    model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n" + body
    )
    return str(path)


def documented() -> list[tuple[str, ...]]:
    """The commands of docs/tracing.md, without `zerostep trace`."""
    blocks = [block for block in blocks_of(ROOT / "docs" / "tracing.md") if block.kind == "sh"]
    return [command.words[2:] for block in blocks for command in commands_of(block)]


def profiled(path: Path) -> None:
    """What torch's profiler writes of two steps."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile() as found:
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    found.export_chrome_trace(str(path))


def test_an_example_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    code, printed, errors = run_as_a_user(tmp_path, *documented()[0], "--chrome", "step.json")
    assert (code, errors) == (0, ""), errors
    assert "step 10: docs/pictures/step.svg, docs/pictures/step.png, step.json" in printed
    rows = [list(map(float, line.split())) for line in printed.splitlines() if re.fullmatch(r" *\d[\d. ]+", line)]
    assert [row[0] for row in rows] == [0, 1]
    for _, step, forward, backward, update, exposed, *phases in rows:
        assert min(forward, backward, update) > 0
        assert forward + backward + update < step + 0.05
        assert 0 <= exposed <= sum(phases) + 0.05
    assert (tmp_path / "docs" / "pictures" / "step.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "docs" / "pictures" / "step.svg").read_text()
    buckets = set(re.findall(r"<!-- (bucket \d+) -->", picture))
    assert len(buckets) > 3
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank * 1000]
        communications = {event["name"] for event in mine if event["ph"] == "b"}
        assert communications == {f"{phase} {bucket}" for phase in ("reduce", "gather") for bucket in buckets}
        assert {f"zerostep/reduce {bucket} wait" for bucket in buckets} <= {event["name"] for event in mine}


def test_the_other_commands_of_the_page(command: Command) -> None:
    script(command.folder, "for _ in range(25): step()\n")
    for rank in range(2):
        profiled(command.folder / f"rank{rank}.json")
    command.captured.readouterr()  # what the profiler says
    commands = documented()[1:]
    assert len(commands) == 3
    for words in commands:
        ranks = [] if "--read" in words else ["--ranks", "1"]  # more of them would do the same
        code, printed, errors = command.run(*words, *ranks)
        assert (code, errors) == (0, ""), errors
        assert re.search(r"^step \d+: ", printed, re.MULTILINE)
    assert {"trace.svg", "step.svg", "step.json"} <= {path.name for path in command.folder.iterdir()}


def test_a_step_inside_backward(command: Command) -> None:
    step = 30  # the last one, after which no forward pass comes
    example = str(ROOT / "examples" / "step_in_backward.py")
    code, printed, errors = command.run(example, "--step", str(step), "--out", "step.svg")
    assert (code, errors) == (0, ""), errors
    assert f"step {step}: step.svg" in printed
    rows = set(re.findall(r"<!-- ([a-z-]+ \d+) -->", (command.folder / "step.svg").read_text()))
    buckets = sorted(row for row in rows if row.startswith("bucket"))
    assert buckets == [f"bucket {number}" for number in range(4)]
    assert {f"all-reduce {number}" for number in range(4)} <= rows
    table = [list(map(float, line.split())) for line in printed.splitlines() if re.fullmatch(r" *\d[\d. ]+", line)]
    assert [row[0] for row in table] == [0, 1]
    assert all(min(forward, backward, update) > 0 for _, _, forward, backward, update, *_ in table)


def test_updates_inside_backward(command: Command) -> None:
    example = str(ROOT / "examples" / "update_in_backward.py")
    code, printed, errors = command.run(example, "--step", "10", "--out", "step.svg", "--chrome", "step.json")
    assert (code, errors) == (0, ""), errors
    assert "step 10: step.svg, step.json" in printed
    rows = [list(map(float, line.split())) for line in printed.splitlines() if re.fullmatch(r" *\d[\d. ]+", line)]
    assert [row[0] for row in rows] == [0, 1]
    for _, step, forward, backward, update, *_ in rows:
        assert min(forward, backward, update) > 0
        assert forward + backward + update < step + 0.05
    buckets = set(re.findall(r"<!-- (bucket \d+) -->", (command.folder / "step.svg").read_text()))
    assert len(buckets) > 3
    events = json.loads((command.folder / "step.json").read_text())["traceEvents"]
    for rank in (0, 1):
        ranges = [event for event in events if event["pid"] == rank * 1000 and event["ph"] == "X"]
        begins = {event["name"]: event["ts"] for event in ranges}  # the last of each name: those of the traced step
        for bucket in buckets:
            phases = [f"reduce {bucket}", f"reduce {bucket} wait", f"update {bucket}", f"gather {bucket}"]
            moments = [begins[f"zerostep/{phase}"] for phase in phases]
            assert moments == sorted(moments)
            assert moments[-1] < begins["Optimizer.step#ShardedOptimizer.step"]


def test_a_script_that_ends_one_step_too_soon_inside_backward(command: Command) -> None:
    code, _, errors = command.run(str(ROOT / "examples" / "step_in_backward.py"), "--step", "31", "--ranks", "1")
    assert (code, errors) == (
        2,
        "zerostep: step_in_backward.py ended after 30 optimizer steps: choose --step 30 or less\n",
    )


def test_a_script_that_ends_too_soon_and_its_arguments(command: Command) -> None:
    path = script(
        command.folder, "assert sys.argv[1:] == ['--lr', '0.5'], sys.argv\nstep(); step(); step()\nsys.exit(0)\n"
    )
    code, _, errors = command.run(path, "--lr", "0.5", "--ranks", "1", "--step", "9")
    assert code == 2
    assert errors == "zerostep: train.py ended after 3 optimizer steps: choose --step 3 or less\n"


def test_a_rank_that_fails(command: Command) -> None:
    path = script(
        command.folder, "import os\nif os.environ['RANK'] == '1': raise ValueError('no data')\nsys.stdin.read()\n"
    )
    code, _, errors = command.run(path, "--ranks", "2")
    assert code == 2
    assert errors == ("zerostep: rank 1 of train.py failed: ValueError: no data; run it under torchrun to see where\n")


def test_a_script_that_never_gets_there(command: Command) -> None:
    path = script(command.folder, "step()\nimport threading\nthreading.Event().wait()\n")
    code, _, errors = command.run(path, "--ranks", "1", "--timeout", "3")
    assert code == 2
    assert "step 5 was not reached in 3 seconds" in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name either a script or, with --read, the traces of all ranks"),
        (["train.py", "--read", "a.json"], "name either a script or, with --read, the traces of all ranks"),
        (["nowhere.py"], "nowhere.py is not a file: name the training script"),
        (["train.py", "--out", "step.gif"], "step.gif is no picture"),
        (["train.py", "--ranks", "0"], "--ranks must be at least 1, not 0"),
        (["train.py", "--step", "1"], "--step must be at least 2, not 1"),
        (["train.py", "--timeout", "0"], "--timeout must be more than 0 seconds, not 0"),
        (["train.py", "--ranks", "two"], "Invalid value for '--ranks'"),
        (["--read", "nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    command: Command,
) -> None:
    script(command.folder, "")
    code, _, errors = command.run(*arguments)
    assert code == 2
    (line,) = errors.splitlines()
    assert line.startswith("zerostep: ")
    assert message in line
