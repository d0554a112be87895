"""A stock Lightning Trainer with both sharded optimizers, against the same Trainer with the plain one."""

from pathlib import Path

import pytest

from tests.integrations.frameworks.allowed import allowed
from tests.integrations.frameworks.launch import DEADLINE, once, result, run

pytest.importorskip("lightning")
pytestmark = pytest.mark.timeout(4 * DEADLINE)

CASES = "tests.integrations.frameworks.lightning_cases"
KINDS = ("sharded", "zero")
ALL = (*KINDS, "overlap")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of results of two ranks, and of three and of one that resume from what they saved."""
    return once(tmp_path_factory, "lightning", fill)


def fill(folder: Path) -> None:
    run(CASES, str(folder), "train", "2")
    run(CASES, str(folder), "resume", "3", ranks=3)
    run(CASES, str(folder), "resume", "1", ranks=1)


def both(found: Path, name: str) -> list[object]:
    return [result(found, name, rank) for rank in range(2)]


@pytest.mark.parametrize("options", ["train", "clip_value", "accumulate", "bf16", "manual", "twice"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_weights_of_plain_training(found: Path, kind: str, options: str) -> None:
    assert both(found, f"{kind}-{options}") == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_by_norm_gives_the_weights_of_plain_training(found: Path, kind: str) -> None:
    for rank in range(2):
        assert result(found, f"{kind}-clip", rank) <= allowed(kind, "clip")


@pytest.mark.parametrize("kind", ["sharded-net", "sharded-ddp", "sharded-all", "sharded-forward", "zero-views"])
def test_every_way_to_build_the_optimizer_gives_the_weights_of_plain_training(found: Path, kind: str) -> None:
    assert both(found, f"{kind}-train") == [0.0, 0.0]


@pytest.mark.parametrize("options", ["train", "accumulate", "bf16"])
def test_steps_inside_backward_give_the_weights_of_plain_training(found: Path, options: str) -> None:
    assert both(found, f"overlap-{options}") == [0.0, 0.0]


@pytest.mark.parametrize("kind", ALL)
def test_a_run_that_was_saved_and_resumed_equals_plain(found: Path, kind: str) -> None:
    assert both(found, f"{kind}-saved") == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("kind", ALL)
def test_checkpoints_are_those_of_the_plain_optimizer(found: Path, kind: str) -> None:
    assert both(found, f"{kind}-exchanged") == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("kind", ALL)
def test_a_run_resumes_at_another_world_size(found: Path, kind: str) -> None:
    assert result(found, f"{kind}-elsewhere-1") == [allowed(kind, "one"), 0.0] == [0.0, 0.0]
    ours, plain = result(found, f"{kind}-elsewhere-3")
    assert ours <= allowed(kind, "three") and plain == 0.0


def test_clipping_behind_steps_inside_backward_is_refused(found: Path) -> None:
    for rank in range(2):
        assert "gradients were edited after backward(), as clip_grad_norm_() does" in result(
            found, "overlap-clip", rank
        )


@pytest.mark.parametrize("kind", ALL)
def test_nothing_is_left_of_a_run(found: Path, kind: str) -> None:
    assert both(found, f"{kind}-teardown") == [[], []]
