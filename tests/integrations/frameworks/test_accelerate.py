"""Accelerate with both sharded optimizers, against Accelerate with the plain one."""

from pathlib import Path

import pytest

from tests.integrations.frameworks.allowed import allowed
from tests.integrations.frameworks.launch import DEADLINE, once, result, run

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(4 * DEADLINE)

CASES = "tests.integrations.frameworks.accelerate_cases"
KINDS = ("sharded", "zero")
ALL = (*KINDS, "overlap")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of results of two ranks, and of three, of one, and of a process without a launcher, that resume."""
    return once(tmp_path_factory, "accelerate", fill)


def fill(folder: Path) -> None:
    run(CASES, str(folder), "train")
    run(CASES, str(folder), "resume", ranks=3)
    run(CASES, str(folder), "resume", ranks=1)
    run(CASES, str(folder), "resume", ranks=None)


@pytest.mark.parametrize("options", ["train", "clip", "accumulate", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_weights_of_plain_training(found: Path, kind: str, options: str) -> None:
    for rank in range(2):
        assert result(found, f"{kind}-{options}", rank) <= allowed(kind, options)


@pytest.mark.parametrize("options", ["train", "accumulate", "bf16"])
def test_steps_inside_backward_give_the_weights_of_plain_training(found: Path, options: str) -> None:
    for rank in range(2):
        assert result(found, f"overlap-{options}", rank) == allowed("overlap", options) == 0.0


@pytest.mark.parametrize("kind", ALL)
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


@pytest.mark.parametrize("kind", ALL)
def test_a_run_resumes_on_three_ranks_and_on_one(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-elsewhere-3") <= allowed(kind, "three")
    assert result(found, f"{kind}-elsewhere-1") == allowed(kind, "one") == 0.0


@pytest.mark.parametrize("kind", ALL)
def test_a_run_resumes_with_a_plain_optimizer_without_a_launcher(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-unsharded") == 0.0


def test_clipping_behind_steps_inside_backward_is_refused(found: Path) -> None:
    for rank in range(2):
        assert "gradients were edited after backward(), as clip_grad_norm_() does" in result(
            found, "overlap-clip", rank
        )


@pytest.mark.parametrize("kind", ALL)
def test_nothing_is_left_of_a_run(found: Path, kind: str) -> None:
    for rank in range(2):
        assert result(found, f"{kind}-teardown", rank) == []


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
