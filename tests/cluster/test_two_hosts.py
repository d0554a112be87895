"""Two hosts with two ranks each, under torchrun: numbers, bytes between them, their disks, and the loss of one."""

import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network import Host
from tests.helpers.hosts import laid, launcher, needs_root
from tests.integrations.frameworks.launch import result

DEADLINE = 240.0
PROGRAM = ("-m", "tests.cluster.training")
RESUME = "examples/resume.py"

pytestmark = [needs_root, pytest.mark.timeout(3 * DEADLINE)]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with laid() as found:
        yield found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of results of all cases."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "disk").mkdir()
    arguments = (*PROGRAM, str(folder), str(folder / "disk"))
    with laid() as hosts, ExitStack() as stack:
        launchers = [
            stack.enter_context(launcher(host, place, "2", folder / f"host-{place}.txt", *arguments))
            for place, host in enumerate(hosts)
        ]
        for each in launchers:
            assert each.ended(DEADLINE) == 0, each.printed
    return folder


def everywhere(found: Path, name: str) -> list[Any]:
    return [result(found, name, rank) for rank in range(4)]


@pytest.mark.parametrize("kind", ["zero", "sharded-all"])
def test_sums_of_ddp_give_the_bits_of_plain_training(found: Path, kind: str) -> None:
    assert everywhere(found, f"{kind}-trained") == [0.0] * 4


@pytest.mark.parametrize("kind", ["sharded", "mesh"])
def test_sharded_sums_give_the_numbers_of_plain_training(found: Path, kind: str) -> None:
    assert max(everywhere(found, f"{kind}-trained")) <= 1e-6


def crossing(found: Path, kind: str, rank: int) -> float:
    """What a step sends from the rank's host, in sizes of the model."""
    case = result(found, f"{kind}-crossing", rank)
    return float(case["sent"] / case["model"])


def test_of_a_mesh_only_the_sums_over_replicas_leave_a_host(found: Path) -> None:
    """With two hosts a ring sends each summed part once; a host has all parts, so it sends the size of the model.

    A tenth on top is for the headers of packets and for what ranks tell each other in a step.
    """
    for rank in range(4):
        mesh, flat, plain = (crossing(found, kind, rank) for kind in ("mesh", "sharded", "plain"))
        assert 1.0 <= mesh < 1.1
        assert flat > 1.9 and plain > 1.4


@pytest.mark.parametrize("kind", ["zero", "mesh"])
def test_a_checkpoint_on_a_shared_disk_is_loaded_by_both_hosts(found: Path, kind: str) -> None:
    # A new DDP sums in another order in its first steps.
    assert max(everywhere(found, f"{kind}-shared")) <= (1e-6 if kind == "zero" else 0.0)


def test_disks_of_single_hosts_are_refused_and_training_goes_on(found: Path) -> None:
    for rank, (text, on_disk, written) in enumerate(everywhere(found, "sharded-local")):
        assert "ranks 2, 3 do not see" in text and "is not shared by all hosts" in text
        assert (on_disk, written) == ([f"host-{rank // 2}", "runs"], [])


def losses(text: str) -> dict[int, float]:
    """The loss of each step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss ([\d.]+)$", text, re.MULTILINE)}


def test_a_host_whose_processes_die_leaves_the_other_one_training(hosts: list[Host], tmp_path: Path) -> None:
    program = (RESUME, "--folder", str(tmp_path / "checkpoints"), "--steps", "12")
    with (
        launcher(hosts[0], 0, "1:2", tmp_path / "stays.txt", *program) as stays,
        launcher(hosts[1], 1, "1:2", tmp_path / "dies.txt", *program, "--die-at", "7") as dies,
    ):
        assert dies.ended(DEADLINE) == -signal.SIGKILL, dies.printed
        assert stays.ended(DEADLINE) == 0, stays.printed
        printed, _, resumed = stays.printed.partition("ranks 2 start after step 5\n")
        before, after = losses(printed + dies.printed), losses(resumed)
        assert "ranks 4 start after step 0\n" in printed + dies.printed
    assert list(after) == list(range(6, 13)), stays.printed
    assert [after[step] for step in (6, 7)] == pytest.approx([before[step] for step in (6, 7)], rel=1e-4)
    assert before[1] > before[5] > after[12]


def test_a_host_that_is_unplugged_is_named_and_left_behind(hosts: list[Host], tmp_path: Path) -> None:
    program = ("-m", "tests.cluster.unplugged", str(tmp_path / "checkpoints"))
    with (
        launcher(hosts[0], 0, "1:2", tmp_path / "stays.txt", *program) as stays,
        launcher(hosts[1], 1, "1:2", tmp_path / "unplugged.txt", *program, "5"),
    ):
        assert stays.ended(DEADLINE) == 0, stays.printed
        printed, _, resumed = stays.printed.partition("ranks 2 start after step 4\n")
    before, after = losses(printed), losses(resumed)
    assert list(after) == list(range(5, 9)), stays.printed
    assert after[5] == pytest.approx(before[5], rel=1e-4)
    assert re.search(
        r"rank [01] has waited for 1 s, in step 6.*rank 2: no sign of life.*rank 3: no sign of life", printed
    )
    assert re.search(r"step 6 failed on rank [01].* restart from the last checkpoint", printed)
