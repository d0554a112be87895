"""Saves that are killed or fail, damaged checkpoints, and ranks that see different ones."""

import errno
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zerostep
from tests.chaos.points import Act, disk_full, kill
from tests.chaos.registry import ALL, BARE, Told, scenario
from tests.chaos.stage import SAFE, STEP, Stage, Training, assert_same, build, reference
from tests.helpers.checkpoints import edit, whole_state

ONE_SAVE = "the steps since the checkpoint before"
SAVES = ("drop-in", "hook", "bare", "ddp", "backward")
KILLED = Told("rank <victim>|all-gather", ends=-signal.SIGKILL)


def _third_save(stage: Stage, training: Training, wait: bool) -> None:
    pending = zerostep.save(stage.series / f"step-{STEP}", training.optimizer, training.model, wait=wait)
    if pending is not None:
        pending.wait()


def _killed_at(stage: Stage, point: str, wait: bool = True) -> None:
    training = stage.trained()
    training.advance(STEP)
    training.settle()
    with stage.fault(point, kill):
        stage.raises(lambda: _third_save(stage, training, wait), "a save")


@scenario("save-killed-at-write", "F13", KILLED, modes=SAVES, after="checkpoint", lost=ONE_SAVE, warm=False)
def _at_write(stage: Stage) -> None:
    _killed_at(stage, "write")


@scenario("save-killed-at-fsync", "F13", KILLED, modes=SAVES, after="checkpoint", lost=ONE_SAVE, warm=False)
def _at_fsync(stage: Stage) -> None:
    _killed_at(stage, "fsync")


@scenario("background-save-killed", "F13", KILLED, modes=SAVES, after="checkpoint", lost=ONE_SAVE, warm=False)
def _in_background(stage: Stage) -> None:
    _killed_at(stage, "write", wait=False)


# Rank 0 writes the manifest and renames.
FIRST = {"modes": SAVES, "after": "checkpoint", "lost": ONE_SAVE, "warm": False, "victim": 0}


@scenario("save-killed-at-manifest", "F13", KILLED, **FIRST)
def _at_manifest(stage: Stage) -> None:
    _killed_at(stage, "manifest")


@scenario("save-killed-at-rename", "F13", KILLED, **FIRST)
def _at_rename(stage: Stage) -> None:
    _killed_at(stage, "rename")


# Disks.

UNWRITTEN = ("CheckpointError", "could not be written", "save again", "intact")


def _failing_disk(stage: Stage, act: Act, wait: bool = True) -> None:
    training = stage.trained()
    training.advance(STEP)
    training.settle()
    before = training.whole()
    with stage.fault("write", act):
        stage.raises(lambda: _third_save(stage, training, wait), "a save on a bad disk")
    dist.barrier(stage.group)
    assert not [name for name in os.listdir(stage.series) if name not in ("step-1", "step-2")]
    assert_same(training.whole(), before)


def _input_output_error() -> None:
    raise OSError(errno.EIO, "Input/output error")


def _read_only() -> None:
    raise OSError(errno.EROFS, "Read-only file system")


for _name, _act, _text in (
    ("disk-full", disk_full, "No space left"),
    ("disk-fails", _input_output_error, "Input/output error"),
    ("disk-read-only", _read_only, "Read-only"),
):

    def _disk(stage: Stage, act: Act = _act) -> None:
        _failing_disk(stage, act)

    scenario(
        _name,
        "F14",
        Told((*UNWRITTEN, _text), victim=(*UNWRITTEN, _text)),
        modes=SAVES,
        after="checkpoint",
        lost=ONE_SAVE,
    )(_disk)


@scenario(
    "background-save-fails",
    "F16",
    Told(("could not be written", "No space left"), victim=("could not be written", "No space left")),
    modes=SAVES,
    after="checkpoint",
    lost=ONE_SAVE,
)
def _background_fails(stage: Stage) -> None:
    """The next step of every rank says so, before it changes anything."""
    training = stage.trained()
    before = training.whole()
    with stage.fault("write", disk_full):
        pending = zerostep.save(stage.series / "late", training.optimizer, training.model, wait=False)
        assert pending is not None
        pending.wait_until_done()
    stage.raises(lambda: training.advance(STEP), "a step after a failed save")
    after = training.whole()
    assert all(torch.equal(value, after["model"][key]) for key, value in before["model"].items() if "norm" not in key)
    dist.barrier(stage.group)


@scenario("same-path-twice", "F15", Told("exists already", victim="exists already"), modes=ALL, after="checkpoint")
def _same_path(stage: Stage) -> None:
    training = stage.trained()
    training.advance(STEP)
    stage.mark()
    stage.raises(
        lambda: zerostep.save(stage.series / f"step-{SAFE}", training.optimizer, training.model), "a second save"
    )


@scenario("save-during-a-background-save", "F15", Told("", victim=""), modes=SAVES)
def _queued(stage: Stage) -> None:
    """The second waits for the first; each has its own step."""
    training = stage.trained()
    first = zerostep.save(stage.root / "a" / "first", training.optimizer, training.model, wait=False)
    training.advance(STEP)
    second = zerostep.save(stage.root / "a" / "second", training.optimizer, training.model, wait=False)
    assert first is not None and first.done
    assert second is not None
    second.wait()
    dist.barrier(stage.group)
    assert zerostep.load(stage.root / "a" / "first", training.optimizer, training.model).step == SAFE
    assert_same(training.whole(), reference(stage.root))
    assert zerostep.load(stage.root / "a" / "second", training.optimizer, training.model).step == STEP
    stage.assert_like_undisturbed(training, STEP)


# Damage: whatever is changed is refused on all ranks before anything is applied.

Damage = Callable[[Path], object]


def _flip_bit(path: Path) -> None:
    text = bytearray((path / "rank-1.safetensors").read_bytes())
    text[len(text) // 2] ^= 4
    (path / "rank-1.safetensors").write_bytes(text)


def _zero_page(path: Path) -> None:
    text = (path / "rank-1.safetensors").read_bytes()
    (path / "rank-1.safetensors").write_bytes(text[:4096] + bytes(4096) + text[8192:])


def _truncate(path: Path) -> None:
    os.truncate(path / "rank-1.safetensors", 1000)


def _delete(path: Path) -> None:
    (path / "rank-1.safetensors").unlink()


def _duplicate(path: Path) -> None:
    shutil.copy(path / "rank-1.safetensors", path / "rank-9.safetensors")


def _swap(path: Path) -> None:
    (path / "rank-0.safetensors").rename(path / "x")
    (path / "rank-1.safetensors").rename(path / "rank-0.safetensors")
    (path / "x").rename(path / "rank-1.safetensors")


def _older(path: Path) -> None:
    shutil.copy(path.parent / "step-1" / "rank-1.safetensors", path / "rank-1.safetensors")


def _wrong_hash(path: Path) -> None:
    edit(path, lambda body: body["files"][1].update(sha256="0" * 64))


def _path_above(path: Path) -> None:
    edit(path, lambda body: body["files"][1].update(name="../step-1/rank-1.safetensors"))


def _huge_shape(path: Path) -> None:
    edit(path, lambda body: body["layouts"][0]["layout"]["params"][0].__setitem__(1, [1 << 40, 1 << 40]))


def _no_json(path: Path) -> None:
    (path / "manifest.json").write_bytes(b"step 3\n")


DAMAGES: dict[str, tuple[str, Damage]] = {
    "shard-with-a-flipped-bit": ("F17", _flip_bit),
    "shard-with-a-zeroed-page": ("F17", _zero_page),
    "shard-cut-off": ("F17", _truncate),
    "shard-missing": ("F17", _delete),
    "shard-too-many": ("F17", _duplicate),
    "shards-swapped": ("F17", _swap),
    "shard-of-another-step": ("F17", _older),
    "manifest-with-a-wrong-hash": ("F18", _wrong_hash),
    "manifest-with-a-path-above": ("F18", _path_above),
    "manifest-with-a-huge-shape": ("F18", _huge_shape),
    "manifest-without-sense": ("F18", _no_json),
}
DAMAGED = Told("CheckpointError: .*(damaged|missing|not of this checkpoint|not a checkpoint)", victim="CheckpointError")

for _name, (_fault, _damage) in DAMAGES.items():

    def _damaged(stage: Stage, damage: Damage = _damage) -> None:
        """Nothing is applied, and the checkpoint before loads."""
        training = stage.trained()
        stage.meet("saved")
        if stage.rank == 0:
            damage(stage.series / f"step-{SAFE}")
        stage.meet("damaged")
        before = training.whole()
        stage.mark()
        stage.raises(
            lambda: zerostep.load(stage.series / f"step-{SAFE}", training.optimizer, training.model), "a damaged one"
        )
        assert_same(training.whole(), before)
        assert zerostep.load(stage.series / "step-1", training.optimizer, training.model).step == 1
        training.advance(2)
        training.settle()
        assert_same(training.whole(), before)

    scenario(_name, _fault, DAMAGED, modes=("drop-in", "hook", "bare", "ddp"), lost=ONE_SAVE)(_damaged)


class Payload:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@scenario("pickle-offered", "F19", Told("CheckpointError", victim="CheckpointError"), modes=("drop-in", "bare"))
def _pickle_offered(stage: Stage) -> None:
    """Code in a file is never run, under whatever name the file comes."""
    training = stage.trained()
    mark, offered = stage.root / "mark", stage.root / "offered" / "step-9"
    stage.meet("saved")
    if stage.rank == 0:
        shutil.copytree(stage.series / "step-2", offered)
        for name in ("manifest.json", "rank-0.safetensors"):
            (offered / name).write_bytes(pickle.dumps(Payload(mark)))
    stage.meet("offered")
    stage.mark()
    stage.raises(lambda: zerostep.load(offered, training.optimizer, training.model), "a pickle")
    assert not mark.exists()


@scenario("ranks-see-different-checkpoints", "F20", Told("the ranks disagree on", victim="the ranks disagree on"))
def _different(stage: Stage) -> None:
    """A local disk in place of a shared one: one rank is a checkpoint behind."""
    training = stage.trained()
    stage.meet("saved")
    own = stage.root / f"own-{stage.rank}"
    shutil.copytree(stage.series / ("step-1" if stage.is_victim else "step-2"), own / "last")
    stage.meet("copied")
    stage.mark()
    stage.raises(lambda: zerostep.latest(own, stage.group), "different newest ones")
    before = training.whole()
    stage.raises(lambda: zerostep.load(own / "last", training.optimizer, training.model), "different ones")
    assert_same(training.whole(), before)


# Other numbers of ranks, and other ways to a state.


@scenario("loaded-by-fewer-ranks", "F21", Told(""), modes=ALL, worlds=(3,))
def _fewer(stage: Stage) -> None:
    """Saved by three, loaded by one: the same state to the last bit."""
    stage.trained()
    stage.meet("saved")
    groups = [dist.new_group([rank]) for rank in _world_ranks(stage)]
    training = build(groups[stage.rank], stage.mode)
    found = zerostep.latest(stage.series, groups[stage.rank])
    assert found is not None
    zerostep.load(found, training.optimizer, training.model)
    assert_same(training.whole(), reference(stage.root))


def _world_ranks(stage: Stage) -> list[int]:
    return dist.get_process_group_ranks(stage.group)


class Tiny(nn.Module):
    """One small parameter: most ranks own nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, step: int) -> torch.Tensor:
        """A loss."""
        return (self.weight * step).sum()


@scenario("fewer-parameters-than-ranks", "F21", Told("", victim=""), modes=ALL)
def _empty_shards(stage: Stage) -> None:
    training = build(stage.group, stage.mode, Tiny())
    training.advance(1)
    zerostep.save(stage.series / "step-1", training.optimizer, training.model)
    before = training.whole()
    training.advance(2)
    zerostep.load(stage.series / "step-1", training.optimizer, training.model)
    assert_same(training.whole(), before)
    training.advance(2)


@scenario("state-dict-on-one-rank", "F23", Told("", victim="not been consolidated"), modes=ALL)
def _state_dict_alone(stage: Stage) -> None:
    """It never communicates: no rank waits, and the one that asks is told what to do."""
    training = stage.trained()
    training.optimizer.release_state_dict()
    if stage.is_victim:
        stage.raises(training.optimizer.state_dict, "state_dict() without consolidation")
    training.advance(STEP)
    stage.assert_like_undisturbed(training, STEP)


@scenario("dcp-twice", "F24", Told("", victim=""), modes=("drop-in", *BARE, "ddp"))
def _dcp_twice(stage: Stage) -> None:
    """Writing a checkpoint changes nothing: not the state, and not the next one that is written."""
    training = stage.trained()
    before = whole_state(training.optimizer)
    for number in range(2):
        dcp.save(  # type: ignore[attr-defined]
            {"optim": zerostep.dcp_state(training.optimizer)},
            checkpoint_id=stage.root / f"dcp-{number}",
            process_group=stage.group,
        )
    assert_same({"model": {}, "optimizer": whole_state(training.optimizer)}, {"model": {}, "optimizer": before})
    training.advance(STEP)
    stage.assert_like_undisturbed(training, STEP)
