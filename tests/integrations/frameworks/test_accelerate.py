"""Accelerate with both sharded optimizers, against Accelerate with the plain one."""

from pathlib import Path

import pytest

from tests.integrations.frameworks.launch import DEADLINE, result, run

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(4 * DEADLINE)

CASES = "tests.integrations.frameworks.accelerate_cases"
KINDS = ("sharded", "zero")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of results of two ranks, and of three that resume from them."""
    folder = tmp_path_factory.mktemp("accelerate")
    run(CASES, str(folder), "train")
    run(CASES, str(folder), "resume", ranks=3)
    return folder


@pytest.mark.parametrize("options", ["train", "clip", "accumulate", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_weights_of_plain_training(found: Path, kind: str, options: str) -> None:
    allowed = 1e-6 if (kind, options) == ("sharded", "clip") else 0.0  # norms are summed in another order
    for rank in range(2):
        assert result(found, f"{kind}-{options}", rank) <= allowed


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_the_uninterrupted_one(found: Path, kind: str) -> None:
    for rank in range(2):
        assert result(found, f"{kind}-resume", rank) == [["optimizer.bin", "optimizer.zerostep"], 0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_torch_s_own_file_resumes_sharded_and_plain(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-torch") == [["optimizer.bin"], 0.0, 0.0]
    assert result(found, f"{kind}-resume_plain") == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_run_goes_on_sharded(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-from_plain") == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_on_three_ranks(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-elsewhere-3") <= (1e-6 if kind == "sharded" else 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_with_automatic_names_are_kept_as_accelerate_keeps_them(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-named") == ["checkpoint_1"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_in_the_files(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-whole_model") == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_load_take_the_wrapped_optimizer(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-wrapped") == [0.0, 0.0]


def test_a_save_without_the_line_names_it_on_every_rank(found: Path) -> None:
    for rank in range(2):
        advice = "zerostep.integrations.accelerate.enable(accelerator) before accelerator.prepare()"
        assert advice in result(found, "forgotten", rank)
