"""The examples, run as a user runs them, and what they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import HOST, LOOPBACK

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0


pytestmark = pytest.mark.timeout(3 * DEADLINE)


def run(name: str) -> str:
    """Run an example on two ranks; what it prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", HOST]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    command = [*launcher, "--nproc-per-node", "2", str(ROOT / "examples" / f"{name}.py")]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            printed, errors = process.communicate(timeout=DEADLINE)
        except BaseException:
            process.terminate()  # and not kill: the launcher ends its ranks
            raise
    assert process.returncode == 0, errors
    return printed


def numbers(text: str) -> list[float]:
    """All numbers in a text, in order."""
    return [float(found) for found in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?", text)]


def test_before_and_after_print_the_same_loss_and_half_the_state() -> None:
    before, after = numbers(run("before")), numbers(run("after"))
    assert len(before) == 2
    assert after == [before[0], before[1] / 2]


def test_accumulation_sends_less_for_the_same_numbers() -> None:
    loss, norm, sent, same_loss, same_norm, more = numbers(run("accumulation"))
    assert (same_loss, same_norm) == pytest.approx((loss, norm), abs=5e-4)
    assert norm > 1.0, "nothing was clipped"
    assert more / sent == pytest.approx(5 / 2, rel=0.01)  # of gradients four or one, and once the parameters


def test_masters_follow_float32_where_bfloat16_lags() -> None:
    rows = [numbers(line)[-4:] for line in run("bf16_masters").splitlines()[1:]]
    full, plain, masters = (row[0] for row in rows)
    assert abs(masters - full) < 0.02
    assert plain > full + 0.1
    whole = rows[0][1]
    assert [row[1:] for row in rows] == [[whole, 0, whole], [whole / 2, 0, whole / 2], [whole / 2, whole / 2, whole]]


def test_muon_and_adamw_divide_the_model() -> None:
    *lines, last = run("muon_adamw").splitlines()
    ranks = [numbers(line) for line in lines if line.startswith("rank")]
    matrices = [line.strip() for line in lines if not line.startswith("rank")]
    assert [row[0] for row in ranks] == [0, 1]
    assert sum(row[1] for row in ranks) == ranks[0][2] == ranks[1][2]
    assert len(set(matrices)) == len(matrices) == 8
    assert "bit for bit" in last


def test_uneven_inputs_end_with_the_same_parameters() -> None:
    first, second = (numbers(line) for line in run("uneven_inputs").splitlines())
    assert first[:3] == [0, 10, 15]
    assert second[:3] == [1, 15, 15]
    assert first[3] == second[3]
