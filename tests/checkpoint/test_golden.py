"""Checkpoints of every released format, kept as files, load at any world size."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import ProcessGroup

import zerostep
from tests.golden.make_v1 import EXTRA, STEPS
from tests.golden.training import everything, make, train
from tests.helpers.pool import Pool

GOLDEN = Path(__file__).parent.parent / "golden"


def _loaded(group: ProcessGroup, path: Path) -> tuple[zerostep.Checkpoint, dict[str, Any]]:
    model, optimizer = make(group)
    train(model, optimizer, 1)  # so that what is loaded is not what was there
    return zerostep.load(path, optimizer, model), everything(model, optimizer)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_checkpoint_of_version_1_loads(pool: Pool, world: int) -> None:
    expected = json.loads((GOLDEN / "v1" / "values.json").read_text())
    for checkpoint, found in pool.run(_loaded, world, GOLDEN / "v1" / "checkpoint"):
        assert (checkpoint.step, checkpoint.world_size, checkpoint.extra) == (STEPS, 2, EXTRA)
        assert json.loads(json.dumps(found)) == expected


def test_the_golden_files_are_small_and_of_their_version() -> None:
    text = json.loads((GOLDEN / "v1" / "checkpoint" / "manifest.json").read_text())
    assert text["manifest"]["version"] == 1
    assert {group["class"] for group in text["manifest"]["groups"]} == {"AdamW", "Muon"}
    assert {entry[1] for entry in text["manifest"]["model"]} == {"param", "buffer", "same"}
    assert sum(file.stat().st_size for file in (GOLDEN / "v1").rglob("*") if file.is_file()) < 60_000
