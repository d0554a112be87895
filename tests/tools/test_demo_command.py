"""`zerostep demo` on the command line."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import start_processes

from zerostep.tools.demo import Demo, Progress, compare_runs, launch, run_demo

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0

pytestmark = pytest.mark.timeout(2 * DEADLINE)


def test_the_command() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1", "COLUMNS": "80"}
    command = [sys.executable, "-m", "zerostep.tools.cli", "demo", "--steps", "7", "--device", "cpu"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert "\x1b" not in printed and "…" not in printed
    assert printed.count("bit-equal to plain DDP's on every rank") == 3
    assert "plain DDP: step 7 of 7, loss" in printed
    runs = r" ?(plain DDP|drop-in|Sharded\w+|in backward)"
    memory, costs = (
        [list(map(float, re.findall(r"\d+\.\d+", line))) for line in printed.splitlines() if re.match(pattern, line)]
        for pattern in (rf"{runs} .* / ", rf"{runs} [\d. ]+$")
    )
    plain, dropped_in, sharded, inside = memory
    for row in memory:
        assert row[0::2] == row[1::2], "predicted and measured differ"
    assert dropped_in[5] == sharded[5] == inside[5] == pytest.approx(plain[5] / 2, abs=0.01)
    assert sharded[3] < 0.7 * plain[3]
    assert inside[3] == 0
    (_, sent, *_), (_, half_more, *_), (_, as_much, *_), (_, as_much_again, *_) = costs
    assert as_much == pytest.approx(sent, rel=0.01)
    assert as_much_again == pytest.approx(sent, rel=0.01)
    assert half_more == pytest.approx(1.5 * sent, rel=0.01)
    assert len({tuple(row[-2:]) for row in costs}) == 1, "the losses differ"


def test_whole_matrices_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    from_warm_server = partial(start_processes, start_method="forkserver")  # new interpreters take most of the time
    monkeypatch.setattr(launch, "spawn", from_warm_server)
    told = list[Progress]()
    reports = run_demo(Demo(ranks=2, steps=2, optimizer="muon", device="cpu"), told.append)
    passed, lines = compare_runs(reports)
    assert passed, lines
    for runs in reports:
        for run in runs:
            assert run.measured.state == run.predicted.state, run.name
            # No parameter's storage has the few elements that make the parts of a bucket equal.
            assert 0 <= run.predicted.parameters - run.measured.parameters <= 4 * 2 * 64, run.name
            # What is under way when backward ends depends on the order in which gradients come, which is only about
            # that of the parameters.
            assert run.measured.total == pytest.approx(run.predicted.total, rel=0.02)
            assert run.exposed_ms is not None and 0 <= run.exposed_ms < run.step_ms
    names = ["plain DDP", "drop-in", "ShardedOptimizer", "in backward"]
    assert [(each.run, each.steps) for each in told] == [(name, 2) for name in names]
