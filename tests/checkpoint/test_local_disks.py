"""Hosts without a common file system: a save is refused before anything is written, by one sentence on all ranks."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

import zerostep
from tests.helpers.checkpoints import KINDS, OPTIONS, Known, advance, assert_trained, make, snapshot
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_state_dict
from zerostep import CheckpointError, ShardedOptimizer
from zerostep.checkpoint import save as save_module
from zerostep.checkpoint import tensor_file

RANKS_OF_A_HOST = 2


def _disk(group: ProcessGroup, root: Path) -> Path:
    """The directory that stands for the disk of this rank's host."""
    disk = root / f"host-{dist.get_rank(group) // RANKS_OF_A_HOST}"
    disk.mkdir(exist_ok=True)
    dist.barrier(group)
    return disk


def _quickly() -> Any:
    """Without the patience that a shared file system needs."""
    return mock.patch.object(save_module, "_SEEN_SECONDS", 0.2)


def _refusal(path: Path, model: Any, optimizer: Any, **options: Any) -> str:
    with _quickly(), pytest.raises(CheckpointError) as caught:
        pending = zerostep.save(path, optimizer, model, **options)
        if pending is not None:
            pending.wait()
    return str(caught.value)


def _files(disk: Path) -> list[str]:
    return sorted(str(path.relative_to(disk)) for path in disk.rglob("*"))


def _to_local_disks(group: ProcessGroup, kind: str, root: Path) -> list[str]:
    model, optimizer = make(group, kind)
    disk = _disk(group, root)
    advance(model, optimizer, 1)
    before = snapshot(model, optimizer)
    texts = [_refusal(disk / "runs" / "step-1", model, optimizer, keep=2) for _ in range(2)]
    texts.append(_refusal(disk / "runs" / "step-1", model, optimizer, keep=2, wait=False))
    dist.barrier(group)
    assert _files(disk) == ["runs"]
    assert_same_state_dict({"state": snapshot(model, optimizer)["state"]}, {"state": before["state"]})
    advance(model, optimizer, 2)
    assert_trained(model, optimizer, 2)
    zerostep.save(root / "shared" / kind, optimizer, model)
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_disks_of_single_hosts_are_refused_on_all_ranks(pool: Pool, tmp_path: Path, kind: str) -> None:
    for texts in pool.run(_to_local_disks, 4, kind, tmp_path):
        for text in texts:
            assert "step-1 cannot be saved: ranks 2, 3 do not see" in text
            assert "host-0/runs" in text or "host-1/runs" in text
            assert "is not shared by all hosts" in text and "consolidate_state_dict" in text


def _writes_nothing(group: ProcessGroup, root: Path) -> int:
    model, optimizer = make(group, "sharded")
    advance(model, optimizer, 1)
    with mock.patch.object(tensor_file, "_write_all") as write:
        _refusal(_disk(group, root) / "step-1", model, optimizer)
    return write.call_count


def test_no_rank_has_written_anything_when_a_save_is_refused(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_writes_nothing, 4, tmp_path) == [0] * 4


def _copy_on_every_host(group: ProcessGroup, root: Path) -> str:
    model = Known()
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, RANKS_OF_A_HOST), mesh_dim_names=("replicate", "shard"))
    optimizer = ShardedOptimizer(model, AdamW, process_group=mesh, **OPTIONS)
    advance(model, optimizer, 1)
    return _refusal(_disk(group, root) / "step-1", model, optimizer)


def test_a_host_that_would_write_nothing_must_see_the_directory_too(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(_copy_on_every_host, 4, tmp_path):
        assert "ranks 2, 3 do not see" in text


def _shown_late(group: ProcessGroup, root: Path) -> None:
    """Rank 1 looks through a link that leads to the directory only after a while, as caches of NFS do."""
    model, optimizer = make(group, "sharded")
    advance(model, optimizer, 1)
    own, looks = root / f"mount-{optimizer.rank}", []
    if optimizer.rank == 0:
        own.symlink_to(root / "server")
        (root / "server").mkdir()
    else:
        own.mkdir()

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            shutil.rmtree(own)
            own.symlink_to(root / "server")

    with mock.patch.object(save_module, "sleep", look):
        zerostep.save(own / "step-1", optimizer, model)
    dist.barrier(group)
    assert (len(looks) >= 3) == (optimizer.rank == 1)
    assert sorted(os.listdir(root / "server" / "step-1")) == [
        "manifest.json",
        *(f"rank-{n}.safetensors" for n in (0, 1)),
    ]


def test_a_directory_that_appears_late_is_waited_for(pool: Pool, tmp_path: Path) -> None:
    pool.run(_shown_late, 2, tmp_path)


def _loaded_from_one_host(group: ProcessGroup, root: Path) -> tuple[str, str]:
    model, optimizer = make(group, "zero")
    disk = _disk(group, root)
    advance(model, optimizer, 1)
    zerostep.save(root / "host-0" / "step-1", optimizer, model)
    with pytest.raises(ValueError) as newest:
        zerostep.latest(disk, group)
    with pytest.raises(CheckpointError) as loaded:
        zerostep.load(disk / "step-1", optimizer, model)
    assert_trained(model, optimizer, 1)
    return str(newest.value), str(loaded.value)


def test_a_checkpoint_on_the_disk_of_one_host_is_not_loaded_by_some(pool: Pool, tmp_path: Path) -> None:
    for newest, loaded in pool.run(_loaded_from_one_host, 4, tmp_path):
        assert "the ranks disagree on the newest checkpoint" in newest
        assert "file system that all of them share" in newest
        assert "host-1/step-1" in loaded
