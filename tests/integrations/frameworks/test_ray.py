"""Loops in workers of Ray Train with both sharded optimizers, against the same loops with the plain one."""

from pathlib import Path

import pytest

from tests.integrations.frameworks.launch import DEADLINE, result, run

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(4 * DEADLINE)

CASES = "tests.integrations.frameworks.ray_cases"
KINDS = ("sharded", "bare", "zero")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of results of three trainers in one cluster."""
    folder = tmp_path_factory.mktemp("ray")
    run(CASES, str(folder), ranks=None, deadline=2 * DEADLINE)
    return folder


@pytest.mark.parametrize("how", ["train", "accumulate", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_gives_the_weights_of_the_plain_loop(found: Path, kind: str, how: str) -> None:
    assert [result(found, f"{kind}-{how}", rank) for rank in range(2)] == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_by_norm_gives_the_weights_of_the_plain_loop(found: Path, kind: str) -> None:
    for rank in range(2):  # norms of sharded gradients are summed in another order
        assert result(found, f"{kind}-clip", rank) <= (0.0 if kind == "zero" else 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_ray_has_resumes_in_both_forms(found: Path, kind: str) -> None:
    assert [result(found, f"{kind}-resumed-2", rank) for rank in range(2)] == [[0.0] * 4] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_it_resumes_with_another_number_of_workers(found: Path, kind: str) -> None:
    for rank in range(3):
        *against_plain, _ = result(found, f"{kind}-resumed-3", rank)
        assert max(against_plain) <= (0.0 if kind == "zero" else 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_ray_ends_workers_between_backward_and_step(found: Path, kind: str) -> None:
    assert [result(found, f"{kind}-open", rank) for rank in range(2)] == [None, None]
