"""A stock Trainer with both sharded optimizers, against the same Trainer with the plain one."""

from pathlib import Path

import pytest

from tests.integrations.frameworks.launch import DEADLINE, launch, result, run

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(4 * DEADLINE)

CASES = "tests.integrations.frameworks.trainer_cases"
KINDS = ("sharded", "zero")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of results of two ranks, and of three that resume from them, and of one process without a group."""
    folder = tmp_path_factory.mktemp("trainer")
    run(CASES, str(folder), "train")
    run(CASES, str(folder), "resume", ranks=3)
    run(CASES, str(folder), "resume", ranks=1)
    return folder


@pytest.mark.parametrize("options", ["train", "clip", "accumulate", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_weights_of_plain_training(found: Path, kind: str, options: str) -> None:
    allowed = 1e-6 if (kind, options) == ("sharded", "clip") else 0.0  # norms are summed in another order
    for rank in range(2):
        assert result(found, f"{kind}-{options}", rank) <= allowed


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_the_uninterrupted_one(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-resume", 0) == result(found, f"{kind}-resume", 1) == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_on_three_ranks_and_in_one_process(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-elsewhere-3") <= (1e-6 if kind == "sharded" else 0.0)
    assert result(found, f"{kind}-elsewhere-1") == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_torch_s_own_file_resumes_sharded_and_plain(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-torch_format") == [["optimizer.pt"], 0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_checkpoint_alone_is_kept_and_resumed(found: Path, kind: str) -> None:
    assert len(result(found, f"{kind}-best")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_weights_alone_are_saved_if_that_is_asked_for(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-epochs") == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_trains_twice(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-twice") == 0.0


def test_a_save_without_the_line_ends_on_all_ranks_and_names_it(tmp_path: Path) -> None:
    ended = launch(CASES, str(tmp_path), "forgotten")
    assert ended.exitcode != 0
    advice = "zerostep.integrations.transformers.enable(trainer) before trainer.train()"
    assert "RuntimeError: the optimizer state has not been consolidated" in ended.errors
    assert "UserWarning: this optimizer cannot be saved or loaded yet" in ended.errors
    assert ended.errors.count(advice) >= 2
