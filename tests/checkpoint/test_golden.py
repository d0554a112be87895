"""Checkpoints of every released format, kept as files, load at any world size and on any mesh."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Replicate, Shard

import zerostep
from tests.golden import make_v2, mesh_training
from tests.golden.make_v1 import EXTRA, STEPS
from tests.golden.training import everything, make, train
from tests.helpers.meshes import place
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


# Of a mesh.

SAME, OTHER = mesh_training.PLACEMENTS, {"up.weight": Shard(1), "down.weight": Shard(0), "norm.bias": Replicate()}


def _loaded_on_mesh(
    group: ProcessGroup, path: Path, mesh: tuple[int, int] | None, placements: dict[str, Any]
) -> tuple[zerostep.Checkpoint, dict[str, Any]]:
    here = None if mesh is None else place(*mesh)
    dp, tp = (group, None) if here is None else (here.dp, here.tp)
    model, optimizer = mesh_training.make(dp, tp, placements)
    mesh_training.train(model, optimizer, 1)  # so that what is loaded is not what was there
    return zerostep.load(path, optimizer, model), mesh_training.everything(model, optimizer)


@pytest.mark.parametrize("placements", [SAME, OTHER], ids=["same", "other"])
@pytest.mark.parametrize("mesh", [None, (2, 2), (1, 4)])
def test_a_checkpoint_of_version_2_loads(pool: Pool, mesh: tuple[int, int] | None, placements: dict[str, Any]) -> None:
    expected = json.loads((GOLDEN / "v2" / "values.json").read_text())
    world = 2 if mesh is None else 4
    for checkpoint, found in pool.run(_loaded_on_mesh, world, GOLDEN / "v2" / "checkpoint", mesh, placements):
        assert (checkpoint.step, checkpoint.world_size, checkpoint.extra) == (make_v2.STEPS, 4, make_v2.EXTRA)
        assert json.loads(json.dumps(found)) == expected


def test_the_golden_files_of_a_mesh_are_of_their_version() -> None:
    text = json.loads((GOLDEN / "v2" / "checkpoint" / "manifest.json").read_text())
    assert text["manifest"]["version"] == 2
    assert len(text["manifest"]["layouts"]) == 2
    assert {entry[1] for entry in text["manifest"]["model"]} == {"param", "buffer", "same"}
    assert sum(file.stat().st_size for file in (GOLDEN / "v2").rglob("*") if file.is_file()) < 60_000
