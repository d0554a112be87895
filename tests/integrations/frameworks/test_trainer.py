"""A stock Trainer with both sharded optimizers, against the same Trainer with the plain one."""

from pathlib import Path

import pytest

from tests.integrations.frameworks.allowed import allowed
from tests.integrations.frameworks.launch import DEADLINE, launch, once, result, run

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(4 * DEADLINE)

CASES = "tests.integrations.frameworks.trainer_cases"
KINDS = ("sharded", "zero")
ALL = (*KINDS, "overlap")
LARGE_RATE, STEPS = 1e-2, 4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of results of two ranks, and of three that resume from them, and of one process without a group."""
    return once(tmp_path_factory, "trainer", fill)


def fill(folder: Path) -> None:
    run(CASES, str(folder), "train")
    run(CASES, str(folder), "resume", ranks=3)
    run(CASES, str(folder), "resume", ranks=1)


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
    assert result(found, f"{kind}-resume", 0) == result(found, f"{kind}-resume", 1) == [0.0, 0.0]


@pytest.mark.parametrize("kind", ALL)
def test_a_run_resumes_on_three_ranks_and_in_one_process(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-elsewhere-3") <= allowed(kind, "three")
    assert result(found, f"{kind}-elsewhere-1") == allowed(kind, "one") == 0.0


def test_another_order_of_sums_shows_where_gradients_are_rounding_alone(found: Path) -> None:
    """Three ranks and a large rate. AdamW divides what rounding leaves of a zero gradient by its size, up to `eps`."""
    keys, others = result(found, "sharded-order_of_sums")
    assert 0.0 < others <= 1e-4 * LARGE_RATE
    assert others < keys <= STEPS * LARGE_RATE
    assert result(found, "zero-order_of_sums") == [0.0, 0.0]


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
