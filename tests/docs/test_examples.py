"""The examples, and what they print; two of them as a user runs them, under torchrun."""

import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.helpers.pool import HOST, LOOPBACK, PRELOAD
from tests.helpers.ports import free_port

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0


pytestmark = pytest.mark.timeout(3 * DEADLINE)


def run_with_torchrun(name: str) -> str:
    """Run an example on two ranks as a user does; what it prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", HOST]
    command = [*launcher, "--nproc-per-node", "2", str(ROOT / "examples" / f"{name}.py")]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            printed, errors = process.communicate(timeout=DEADLINE)
        except BaseException:
            process.terminate()  # and not kill: the launcher ends its ranks
            raise
    assert process.returncode == 0, errors
    return printed


def run(name: str) -> str:
    """Run an example on two ranks that have torch loaded already; what it prints."""
    exitcodes, printed = run_ranks(name, 2)
    assert exitcodes == [0, 0], printed
    return printed


def run_ranks(name: str, count: int, *arguments: str) -> tuple[list[int | None], str]:
    """Run an example on ranks from the fork server, with what torchrun would set; how they end and what they print."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    meeting = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port()), "TORCHELASTIC_RESTART_COUNT": "0"}
    common = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), **meeting}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"{rank}.txt") for rank in range(count)]
        ranks = [
            context.Process(
                target=as_script,
                args=(name, arguments, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, output),
            )
            for rank, output in enumerate(outputs)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(DEADLINE)
            process.kill()
            process.join()
        printed = "".join(output.read_text() for output in outputs if output.exists())
    return [process.exitcode for process in ranks], printed


def as_script(name: str, arguments: Sequence[str], variables: dict[str, str], output: Path) -> None:
    """Be one rank of an example."""
    os.environ.update({**environment(), **variables})
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    torch.set_num_threads(1)
    sys.argv = [f"{name}.py", *arguments]
    sys.path.insert(0, str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    sys.stdout.flush()


def environment() -> dict[str, str]:
    """For local ranks of one thread, and a launcher that gives ranks which it starts again a store of their own."""
    names = {"PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    return {**os.environ, **names, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def numbers(text: str) -> list[float]:
    """All numbers in a text, in order."""
    return [float(found) for found in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?", text)]


@cache
def before_sharding() -> list[float]:
    """The loss and the bytes of state of plain training."""
    return numbers(run("before"))


def test_before_and_after_print_the_same_loss_and_half_the_state() -> None:
    before, after = before_sharding(), numbers(run_with_torchrun("after"))
    assert len(before) == 2
    assert after == [before[0], before[1] / 2]


def test_a_step_inside_backward_prints_the_loss_of_plain_training() -> None:
    before, inside = before_sharding(), numbers(run("step_in_backward"))
    assert inside[0] == before[0]
    assert 0.4 < inside[-1] / before[1] < 0.6


def test_an_update_inside_backward_prints_the_loss_of_plain_training() -> None:
    loss, _, held = numbers(run("update_in_backward"))
    assert (loss, held) == (before_sharding()[0], 0)


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


def of_mesh(name: str, ranks: int, *arguments: str) -> list[float]:
    """What an example prints behind the shape of its mesh: loss, norm and a size."""
    exitcodes, printed = run_ranks(name, ranks, *arguments)
    assert exitcodes == [0] * ranks, printed
    return numbers(printed.strip().rpartition(":")[2])[:3]


def test_tensor_parallelism_divides_state_and_changes_no_numbers() -> None:
    loss, norm, state = of_mesh("tensor_parallel", 4)
    same_loss, same_norm, whole = of_mesh("tensor_parallel", 2)
    assert (loss, norm) == pytest.approx((same_loss, same_norm), abs=2e-4)
    assert 0.5 <= state / whole < 0.51  # norms and biases are on both ranks


def test_experts_are_divided_and_change_no_numbers() -> None:
    loss, norm, size = of_mesh("experts", 4)
    same_loss, same_norm, whole = of_mesh("experts", 4, "--whole")
    assert (loss, norm) == pytest.approx((same_loss, same_norm), abs=2e-4)
    assert size < 0.7 * whole


def test_stages_change_no_numbers() -> None:
    loss, norm, state = of_mesh("pipeline", 4)
    same_loss, same_norm, whole = of_mesh("pipeline", 2)
    assert (loss, norm) == pytest.approx((same_loss, same_norm), abs=2e-4)
    assert 0.4 < state / whole < 0.6


@contextmanager
def machine(port: int, folder: Path, output: Path, hosts: bool, *more: str) -> Iterator["subprocess.Popen[bytes]"]:
    """One of two launchers with a rank each, which goes on alone if it must, if it hosts their meeting."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    meeting = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={HOST}:{port}",
        f"--local-addr={HOST}",
        "--monitor-interval=0.1",
    ]
    patience = f"--rdzv-conf=is_host={int(hosts)},last_call_timeout=5,keep_alive_interval=1"
    script = [str(ROOT / "examples" / "resume.py"), "--folder", str(folder), *more]
    with output.open("wb") as file:
        command = [*launcher, *meeting, patience, *script]
        process = subprocess.Popen(command, env=environment(), stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def losses(text: str) -> dict[int, float]:
    """The loss of each step."""
    found = re.findall(r"^step (\d+) loss ([\d.]+)$", text, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def test_a_run_that_loses_a_machine_goes_on_with_the_rest(tmp_path: Path) -> None:
    port, folder, outputs = free_port(), tmp_path / "checkpoints", [tmp_path / "stays.txt", tmp_path / "dies.txt"]
    with (
        machine(port, folder, outputs[0], True) as stays,
        machine(port, folder, outputs[1], False, "--die-at", "12") as dies,
    ):
        assert dies.wait(DEADLINE) == -signal.SIGKILL, outputs[1].read_text()
        assert stays.wait(DEADLINE) == 0, outputs[0].read_text()
    printed, _, resumed = outputs[0].read_text().partition("ranks 1 start after step 10\n")  # saved after 5 and 10
    before, after = losses(printed + outputs[1].read_text()), losses(resumed)
    assert "ranks 2 start after step 0\n" in printed + outputs[1].read_text()
    assert (list(before), list(after)) == (list(range(1, 13)), list(range(11, 21)))
    assert [after[step] for step in (11, 12)] == pytest.approx([before[step] for step in (11, 12)], rel=1e-4)
    assert before[1] > before[10] > after[20]
    assert sorted(path.name for path in folder.iterdir()) == ["step-15", "step-20"]
