"""A series of checkpoints: `keep`, `latest`, and stale drafts."""

import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

import zerostep
from tests.helpers.checkpoint_setups import SETUPS, save_extra
from tests.helpers.pool import Pool


def _series(group: ProcessGroup, root: str) -> list[list[str]]:
    pair = SETUPS["adamw"].make(group, "auto")
    found = []
    for name in ("step-9", "step-10", "step-11", "step-12"):
        zerostep.save(Path(root, name), pair[1], keep=2)
        found.append(sorted(os.listdir(root)))
        assert zerostep.latest(root, group) == Path(root, name)
    pending = zerostep.save(Path(root, "step-13"), pair[1], keep=3, wait=False)
    assert pending is not None
    pending.wait()
    found.append(sorted(os.listdir(root)))
    return found


def test_keep_removes_the_oldest_complete_ones_and_stale_drafts(pool: Pool, tmp_path: Path) -> None:
    others = ["notes.txt", "other", "step-1"]
    hidden = [".hidden", ".backup.old-2024", f".precious.old-{1:032x}"]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "manifest.json").write_text("{}")  # damaged: not counted, and not removed either
    (tmp_path / f".step-8.draft-{2:032x}").mkdir()
    (tmp_path / f".step-8.draft-{2:032x}" / "rank-0.safetensors").write_bytes(b"half a file")
    (tmp_path / f".step-7.old-{3:032x}").mkdir()
    for name in hidden:
        (tmp_path / name).mkdir()
    (tmp_path / hidden[-1] / "thesis.txt").write_text("not a file of ours")
    for found in pool.run(_series, 2, str(tmp_path)):
        names = [[name for name in names if name not in (*others, *hidden)] for names in found]
        assert names == [
            ["step-9"],
            ["step-10", "step-9"],
            ["step-10", "step-11"],
            ["step-11", "step-12"],
            ["step-11", "step-12", "step-13"],
        ]
        assert all({*others, *hidden} <= set(each) for each in found)


def _latest(group: ProcessGroup, root: str) -> Path | None:
    return zerostep.latest(root, group)


def test_latest_is_the_newest_complete_one(pool: Pool, tmp_path: Path) -> None:
    root = tmp_path / "series"
    assert zerostep.latest(root) is None
    assert pool.run(_latest, 2, str(root)) == [None, None]
    pool.run(save_extra, 2, str(root / "b"), "x")
    pool.run(save_extra, 2, str(root / "a"), "x")
    shutil.copytree(root / "a", root / ".z.draft-1")
    assert pool.run(_latest, 2, str(root)) == [root / "a"] * 2 and zerostep.latest(root) == root / "a"
    for damage in (_shorten, _empty_manifest, _forget_a_file):
        shutil.copytree(root / "a", tmp_path / "spare")
        damage(root / "a")
        assert pool.run(_latest, 2, str(root)) == [root / "b"] * 2
        shutil.rmtree(root / "a")
        os.rename(tmp_path / "spare", root / "a")
        assert zerostep.latest(root) == root / "a"
    shutil.rmtree(root / "b")
    _shorten(root / "a")
    assert zerostep.latest(root) is None


def _shorten(path: Path) -> None:
    file = path / "rank-1.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def _empty_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 0)


def _forget_a_file(path: Path) -> None:
    (path / "rank-0.safetensors").unlink()


def _ranks_see_different_ones(group: ProcessGroup, root: str) -> str:
    with pytest.raises(ValueError, match="the ranks disagree on the newest checkpoint") as caught:
        zerostep.latest(Path(root, str(dist.get_rank(group))), group)
    return str(caught.value)


def test_ranks_that_see_different_checkpoints_say_so(pool: Pool, tmp_path: Path) -> None:
    pool.run(save_extra, 1, str(tmp_path / "0" / "a"), 1)
    pool.run(save_extra, 1, str(tmp_path / "1" / "b"), 1)
    for text in pool.run(_ranks_see_different_ones, 2, str(tmp_path)):
        assert (
            "rank 0 has 'a', " in text
            and "but rank 1 has 'b', " in text
            and "from a file system that all of them share" in text
        )
