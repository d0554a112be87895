"""Checkpoints that are damaged, and saves that fail: one kind of error on every rank, and nothing half done."""

import errno
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

import zerostep
from tests.helpers.checkpoints import (
    KINDS,
    Body,
    advance,
    assert_trained,
    edit,
    make,
    sign_files,
    snapshot,
    whole_state,
    with_header,
)
from tests.helpers.pool import Pool, run_fresh
from tests.helpers.reference import assert_same_state_dict
from zerostep import CheckpointError
from zerostep.checkpoint import tensor_file
from zerostep.comm.background import PendingSave

EACH_KIND = pytest.mark.parametrize("kind", KINDS)
STEPS = 3  # of the good checkpoint
FIRST, SECOND, MANIFEST = "rank-0.safetensors", "rank-1.safetensors", "manifest.json"

Damage = Callable[[Path], object]

# What a damaged checkpoint looks like.


def _flip(name: str, place: float) -> Damage:
    """Turn over one bit, that far into the file."""

    def damage(path: Path) -> None:
        text = bytearray((path / name).read_bytes())
        text[int(place * (len(text) - 1))] ^= 4
        (path / name).write_bytes(text)

    return damage


def _zero_page(name: str) -> Damage:
    def damage(path: Path) -> None:
        text = (path / name).read_bytes()
        assert any(text[4096:8192])
        (path / name).write_bytes(text[:4096] + bytes(4096) + text[8192:])

    return damage


def _cut(name: str, keep: float) -> Damage:
    return lambda path: os.truncate(path / name, int(keep * (path / name).stat().st_size))


def _grow(name: str) -> Damage:
    return lambda path: (path / name).write_bytes((path / name).read_bytes() + b"\0")


def _remove(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def _swap(path: Path) -> None:
    (path / FIRST).rename(path / "other")
    (path / SECOND).rename(path / FIRST)
    (path / "other").rename(path / SECOND)


def _link(name: str) -> Damage:
    def damage(path: Path) -> None:
        target = path.parent / f"{path.name} {name}"
        (path / name).rename(target)
        (path / name).symlink_to(target)

    return damage


def _pipe(path: Path) -> None:
    (path / MANIFEST).unlink()
    os.mkfifo(path / MANIFEST)


def _copy_from_older(name: str) -> Damage:
    return lambda path: shutil.copy(path.parent.parent / "good" / "step-2" / name, path / name)


def _write(name: str, text: bytes) -> Damage:
    return lambda path: (path / name).write_bytes(text)


def _header_length(length: int) -> Damage:
    def damage(path: Path) -> None:
        text = (path / FIRST).read_bytes()
        (path / FIRST).write_bytes(struct.pack("<Q", length) + text[8:])

    return damage


def _header(change: Callable[[Body, Body], object], name: str = SECOND) -> Damage:
    return lambda path: (path / name).write_bytes(with_header((path / name).read_bytes(), change))


def _then_signed(damage: Damage) -> Damage:
    """As one who can also compute checksums."""

    def both(path: Path) -> None:
        damage(path)
        sign_files(path)

    return both


def _set(*keys: Any, to: Any) -> Damage:
    """Change one entry of the manifest, and sign it."""

    def change(body: Any) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = to

    return lambda path: edit(path, change)


def _unsigned(path: Path) -> None:
    text = (path / MANIFEST).read_text()
    changed = text.replace('"step":3', '"step":4')
    assert changed != text
    (path / MANIFEST).write_text(changed)


def _drop_state(header: Body, about: Body) -> None:
    """Of a parameter whose other part another file has."""
    place = next(place for place, (_, start, *_) in enumerate(about["state"]) if start > 0)
    about["state"].pop(place)


def _repeat_state(header: Body, about: Body) -> None:
    about["state"].append(about["state"][0])


def _narrow_weight(header: Body, about: Body) -> None:
    name = next(name for name in header if name.startswith("model."))
    header[name].update(dtype="F16", shape=[2 * header[name]["shape"][0]])


def _without_weight(header: Body, about: Body) -> None:
    name = next(name for name in header if name.startswith("model."))
    header["other"] = header.pop(name)


def _one_tensor_twice(header: Body, about: Body) -> None:
    places = [rest["step"] for *_, rest in about["state"]]
    places[0][1] = places[1][1]


def _others_in_disorder(header: Body, about: Body) -> None:
    about["others"] = [1]


DAMAGES: dict[str, tuple[str, Damage]] = {
    **{f"flip {name} at {at}": (name, _flip(name, at)) for name in (FIRST, SECOND) for at in (0, 0.002, 0.05, 0.5, 1)},
    **{f"flip {MANIFEST} at {at}": (MANIFEST, _flip(MANIFEST, at)) for at in (0, 0.003, 0.2, 0.5, 0.99)},
    **{f"zeroed page of {name}": (name, _zero_page(name)) for name in (FIRST, SECOND)},
    **{f"{name} cut to {at}": (name, _cut(name, at)) for name in (FIRST, SECOND, MANIFEST) for at in (0, 0.4, 0.999)},
    **{f"{name} longer": (name, _grow(name)) for name in (FIRST, SECOND)},
    **{f"no {name}": (name, _remove(name)) for name in (FIRST, SECOND, MANIFEST)},
    "a file too many": ("rank-2.safetensors", lambda path: shutil.copy(path / SECOND, path / "rank-2.safetensors")),
    "a copy beside": (
        "rank-1 (1).safetensors",
        lambda path: shutil.copy(path / SECOND, path / "rank-1 (1).safetensors"),
    ),
    "one over the other": (SECOND, lambda path: shutil.copy(path / FIRST, path / SECOND)),
    "one over the other, signed": (SECOND, _then_signed(lambda path: shutil.copy(path / FIRST, path / SECOND))),
    "swapped": ("rank-", _swap),
    "swapped, signed": (FIRST, _then_signed(_swap)),
    "of an older step": (SECOND, _copy_from_older(SECOND)),
    "of an older step, signed": (SECOND, _then_signed(_copy_from_older(SECOND))),
    "manifest of an older step": ("rank-", _copy_from_older(MANIFEST)),
    **{f"linked {name}": (name, _link(name)) for name in (FIRST, SECOND, MANIFEST)},
    "manifest is a pipe": (MANIFEST, _pipe),
    **{
        f"header of {size} bytes": (FIRST, _then_signed(_header_length(size)))
        for size in (0, 1 << 20, 1 << 40, 2**64 - 1)
    },
    "no header": (SECOND, _then_signed(_write(SECOND, b""))),
    "edited manifest": (MANIFEST, _unsigned),
    "no json": (MANIFEST, _write(MANIFEST, b"step 3\n")),
    "deep json": (MANIFEST, _write(MANIFEST, b"[" * 100_000)),
    "wrong hash": (FIRST, _set("files", 0, "sha256", to="0" * 64)),
    "no hash": (MANIFEST, _set("files", 0, "sha256", to="")),
    "path above": (MANIFEST, _set("files", 0, "name", to="../good/step-3/rank-0.safetensors")),
    "absolute path": (MANIFEST, _set("files", 0, "name", to="/etc/passwd")),
    "file named twice": (MANIFEST, _set("files", 1, "name", to=FIRST)),
    "huge file": (FIRST, _set("files", 0, "bytes", to=1 << 62)),
    "endless file": (MANIFEST, _set("files", 0, "bytes", to=float("inf"))),
    "huge shape": (MANIFEST, _set("layout", "params", 0, 1, to=[1 << 40, 1 << 40])),
    "shape that is no number": (MANIFEST, _set("layout", "params", 0, 1, to=[float("nan"), 7])),
    "shape in fractions": (MANIFEST, _set("layout", "params", 0, 1, to=[13.0, 7.0])),
    "negative shape": (MANIFEST, _set("layout", "params", 0, 1, to=[-13, -7])),
    "other dtype": (MANIFEST, _set("layout", "params", 0, 2, to="float64")),
    "more ranks": (MANIFEST, _set("layout", "world_size", to=3)),
    "unknown version": (MANIFEST, _set("version", to=2)),
    "true version": (MANIFEST, _set("version", to=True)),
    "other format": (MANIFEST, _set("format", to="torch")),
    "unknown key": (MANIFEST, _set("secret", to=1)),
    "weights nowhere": (MANIFEST, _set("model", 0, to=["words.weight", "param", 99])),
    "other weights": ("checkpoint", _set("model", 0, to=["words.weights", "param", 0])),
    "other id": ("rank-", _set("id", to="0" * 32)),
    "state twice": (SECOND, _then_signed(_header(_repeat_state))),
    "narrow weight": (SECOND, _then_signed(_header(_narrow_weight))),
    "weight missing": (SECOND, _then_signed(_header(_without_weight))),
    "one tensor twice": (SECOND, _then_signed(_header(_one_tensor_twice))),
    "others in disorder": (FIRST, _then_signed(_header(_others_in_disorder, FIRST))),
}

IN_SPLIT_STATE: dict[str, tuple[str, Damage]] = {"state missing": ("checkpoint", _then_signed(_header(_drop_state)))}


class Payload:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def _torch_file(payload: Payload) -> bytes:
    file = BytesIO()
    torch.save({"state": payload}, file)
    return file.getvalue()


# Loading them.

Report = list[tuple[str, str]]


def _saved_series(group: ProcessGroup, kind: str, root: Path) -> None:
    model, optimizer = make(group, kind)
    for step in range(1, STEPS + 1):
        advance(model, optimizer, step)
        zerostep.save(root / f"step-{step}", optimizer, model, extra={"step": step})


def _attempts(group: ProcessGroup, kind: str, good: Path, paths: list[Path]) -> Report:
    """What each load says; it must change nothing, and training goes on afterwards."""
    model, optimizer = make(group, kind)
    advance(model, optimizer, 1)
    before, report = snapshot(model, optimizer), Report()
    for path in paths:
        try:
            zerostep.load(path, optimizer, model)
        except Exception as error:
            report.append((type(error).__name__, str(error)))
        else:
            report.append(("", f"{path} was loaded"))
        assert_same_state_dict(snapshot(model, optimizer), before)
    advance(model, optimizer, 2)
    assert_trained(model, optimizer, 2)
    assert zerostep.load(good, optimizer, model).step == STEPS
    assert_trained(model, optimizer, STEPS)
    return report


def _remedy(text: str) -> bool:
    return any(
        word in text for word in ("load another", "load it without", "use zerostep", "build the same", "take it away")
    )


@pytest.mark.parametrize("kind", ["zero", "sharded"])
def test_whatever_is_damaged_is_refused_by_all_ranks(pool: Pool, tmp_path: Path, kind: str) -> None:
    good = tmp_path / "good" / f"step-{STEPS}"
    pool.run(_saved_series, 2, kind, good.parent)
    damages = DAMAGES | (IN_SPLIT_STATE if kind == "sharded" else {})
    paths = [tmp_path / "bad" / f"checkpoint {number}" for number in range(len(damages))]
    for path, (_, damage) in zip(paths, damages.values(), strict=True):
        shutil.copytree(good, path)
        damage(path)
    reports = pool.run(_attempts, 2, kind, good, paths, deadline=100)
    wrong = [
        (name, found)
        for report in reports
        for (name, (file, _)), found in zip(damages.items(), report, strict=True)
        if found[0] != "CheckpointError" or file not in found[1] or not _remedy(found[1])
    ]
    assert not wrong, wrong


def _offers(group: ProcessGroup, paths: list[Path]) -> Report:
    model, optimizer = make(group, "sharded")
    report = Report()
    for path in paths:
        with pytest.raises(CheckpointError) as caught:
            zerostep.load(path, optimizer, model)
        report.append((path.name, str(caught.value)))
        assert zerostep.latest(path.parent, group) is None
    return report


def test_a_pickle_offered_as_a_checkpoint_is_never_run(pool: Pool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    texts = [pickle.dumps(Payload(mark)), pickle.dumps(Payload(mark), 0), _torch_file(Payload(mark))]
    pool.run(_saved_series, 2, "sharded", tmp_path / "good")
    paths = []
    for number, text in enumerate(texts):
        (tmp_path / f"file {number}").mkdir()
        paths.append(tmp_path / f"file {number}" / "model.pt")
        paths[-1].write_bytes(text)
        for name in (MANIFEST, FIRST):
            paths.append(tmp_path / f"{name} {number}" / "step-3")
            shutil.copytree(tmp_path / "good" / "step-3", paths[-1])
            (paths[-1] / name).write_bytes(text)
        sign_files(paths[-1])
        edit(paths[-1], lambda body: body["files"][1].update(bytes=1))  # so that it is not the newest either
    for report in pool.run(_offers, 2, paths):
        assert all("torch.load(path, weights_only=True)" in text for name, text in report if name == "model.pt")
    pickle.loads(texts[0])  # noqa: S301 - shows that it would have run
    assert mark.is_dir()


# Saves that fail.


def _names(group: ProcessGroup, root: Path) -> list[str]:
    """What is in a directory when all ranks are through with it."""
    dist.barrier(group)
    return sorted(os.listdir(root))


@contextmanager
def _failing_writes(here: bool, code: int = errno.EIO) -> Iterator[None]:
    """The disk of this rank fails in the middle of its file."""

    def fail(file: Any, piece: memoryview) -> None:
        file.write(piece[: len(piece) // 2])
        raise OSError(code, os.strerror(code))

    with mock.patch.object(tensor_file, "_write_all", fail) if here else ExitStack():
        yield


@contextmanager
def _small_files(here: bool) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


FAILURES: dict[str, Callable[[bool], Any]] = {
    "eio": _failing_writes,
    "full": lambda here: _failing_writes(here, errno.ENOSPC),
    "limit": _small_files,
}


def _one_rank_fails(group: ProcessGroup, kind: str, root: Path, victim: int, how: str) -> str:
    model, optimizer = make(group, kind)
    advance(model, optimizer, 1)
    zerostep.save(root / "step-1", optimizer, model)
    advance(model, optimizer, 2)
    with FAILURES[how](optimizer.rank == victim), pytest.raises(CheckpointError) as caught:
        zerostep.save(root / "step-2", optimizer, model, keep=2)
    assert _names(group, root) == ["step-1"]
    advance(model, optimizer, 3)
    zerostep.save(root / "step-2", optimizer, model)
    advance(model, optimizer, 4)
    assert zerostep.load(root / "step-1", optimizer, model).step == 1
    assert_trained(model, optimizer, 1)
    zerostep.load(root / "step-2", optimizer, model)
    assert_trained(model, optimizer, 3)
    return str(caught.value)


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_fails_on_one_rank_fails_the_save_of_all(pool: Pool, tmp_path: Path, how: str, victim: int) -> None:
    for kind in KINDS:
        texts = pool.run(_one_rank_fails, 2, kind, tmp_path / kind, victim, how)
        assert all("step-2 could not be written" in text and "save again" in text for text in texts), texts


@contextmanager
def _mounted(path: Path, options: str) -> Iterator[None]:
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def _refused_save(group: ProcessGroup, root: Path) -> tuple[str, list[str]]:
    model, optimizer = make(group, "sharded")
    advance(model, optimizer, 1)
    with pytest.raises(CheckpointError) as caught:
        zerostep.save(root / "step-1", optimizer, model)
    return str(caught.value), _names(group, root)


@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs")
@pytest.mark.parametrize(("options", "story"), [("size=24k", "No space left"), ("ro", "Read-only")])
def test_a_full_or_read_only_disk_leaves_nothing_behind(pool: Pool, tmp_path: Path, options: str, story: str) -> None:
    with _mounted(tmp_path / "disk", options):
        for text, names in pool.run(_refused_save, 2, tmp_path / "disk"):
            assert story in text
            assert not names


def _twice(group: ProcessGroup, root: Path) -> None:
    model, optimizer = make(group, "zero")
    advance(model, optimizer, 1)
    zerostep.save(root / "one", optimizer, model)
    advance(model, optimizer, 2)
    for wait in (True, False):
        with pytest.raises(CheckpointError, match="one exists already"):
            found = zerostep.save(root / "one", optimizer, model, wait=wait)
            assert found is not None
            found.wait()
    assert _names(group, root) == ["one"]
    zerostep.load(root / "one", optimizer, model)
    assert_trained(model, optimizer, 1)


def test_a_second_save_into_one_path_is_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(_twice, 2, tmp_path)


def _queued(group: ProcessGroup, kind: str, root: Path) -> None:
    """The first save is held back until the second waits for it; training goes on between them."""
    model, optimizer = make(group, kind)
    gate, write, join = threading.Event(), tensor_file._write_all, PendingSave.join

    def late(file: Any, piece: memoryview) -> None:
        assert gate.wait(30)
        write(file, piece)

    def opening(pending: PendingSave) -> None:
        gate.set()
        join(pending)

    advance(model, optimizer, 1)
    with mock.patch.object(tensor_file, "_write_all", late), mock.patch.object(PendingSave, "join", opening):
        first = zerostep.save(root / "first", optimizer, model, wait=False)
        assert first is not None
        advance(model, optimizer, 2)
        assert not first.done
        assert not (root / "first").exists()
        second = zerostep.save(root / "second", optimizer, model, wait=False)
        assert second is not None
        assert first.done
        advance(model, optimizer, 3)
        second.wait()
    assert _names(group, root) == ["first", "second"]
    for name, steps in (("first", 1), ("second", 2)):
        zerostep.load(root / name, optimizer, model)
        assert_trained(model, optimizer, steps)


@EACH_KIND
def test_a_save_waits_for_the_one_before_and_they_never_mix(pool: Pool, tmp_path: Path, kind: str) -> None:
    pool.run(_queued, 2, kind, tmp_path)


def _fails_in_background(group: ProcessGroup, kind: str, root: Path, then: str) -> str:
    model, optimizer = make(group, kind)
    advance(model, optimizer, 1)
    zerostep.save(root / "step-1", optimizer, model)
    with _failing_writes(optimizer.rank == 1):
        pending = zerostep.save(root / "step-1b", optimizer, model, wait=False)
        assert pending is not None
        pending._thread.join(30)
    before = snapshot(model, optimizer)["state"]
    with pytest.raises((CheckpointError, RuntimeError), match="could not be written") as caught:
        if then == "step":
            advance(model, optimizer, 2)
        else:
            zerostep.save(root / "step-2", optimizer, model)
    assert_same_state_dict({"state": snapshot(model, optimizer)["state"]}, {"state": before})
    assert _names(group, root) == ["step-1"]
    _goes_on(group, model, optimizer, root)
    return f"{type(caught.value).__name__}: {caught.value}"


def _goes_on(group: ProcessGroup, model: nn.Module, optimizer: Any, root: Path) -> None:
    zerostep.load(root / "step-1", optimizer, model)
    advance(model, optimizer, 2)
    assert_trained(model, optimizer, 2)
    zerostep.save(root / "step-2", optimizer, model)
    assert _names(group, root) == ["step-1", "step-2"]


@EACH_KIND
@pytest.mark.parametrize("then", ["step", "save"])
def test_a_failure_in_the_background_ends_the_next_step_or_save_of_all(
    pool: Pool, tmp_path: Path, kind: str, then: str
) -> None:
    texts = pool.run(_fails_in_background, 2, kind, tmp_path, then)
    assert all("Input/output error" in text and "intact" in text for text in texts), texts
    if kind != "overlap" or then == "save":  # autograd makes errors of hooks its own
        assert all(text.startswith("CheckpointError") for text in texts), texts


# Ranks that see different directories.


def _different(group: ProcessGroup, roots: list[Path]) -> list[tuple[str, str]]:
    model, optimizer = make(group, "sharded")
    mine = roots[dist.get_rank(group)]
    report = []
    for call in (
        lambda: zerostep.latest(mine, group),
        lambda: zerostep.load(mine / "last", optimizer, model),
    ):
        with pytest.raises((ValueError, CheckpointError)) as caught:
            call()
        report.append((type(caught.value).__name__, str(caught.value)))
    advance(model, optimizer, 1)
    assert_trained(model, optimizer, 1)
    return report


def test_ranks_that_see_different_checkpoints_all_raise(pool: Pool, tmp_path: Path) -> None:
    pool.run(_saved_series, 2, "sharded", tmp_path / "good")
    for number in (1, 2):
        shutil.copytree(tmp_path / "good" / f"step-{number}", tmp_path / str(number) / "last")
    (tmp_path / "empty").mkdir()
    for latest, load in pool.run(_different, 2, [tmp_path / "1", tmp_path / "2"]):
        for kind, text in (latest, load):
            assert kind == "ValueError"
            assert "the ranks disagree on the" in text
            assert "file system that all of them share" in text
    for roots in ([tmp_path / "1", tmp_path / "empty"], [tmp_path / "empty", tmp_path / "1"]):
        for latest, load in pool.run(_different, 2, roots):
            assert latest[0] == "ValueError"
            assert "none" in latest[1]
            assert load[0] == "CheckpointError"
            assert "empty/last" in load[1]


# Nothing is unpickled.


class Unpickling:
    """Counts what pickle does while it is armed. An audit hook is for the life of a process."""

    def __init__(self) -> None:
        self.armed, self.events = False, list[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.armed and event == "pickle.find_class":
            self.events.append(f"{event} {args}")

    def during(self, work: Callable[[], object]) -> list[str]:
        """What happens while `work` runs; also loads that find no class."""

        def refuse(*args: Any, **kwargs: Any) -> Any:
            self.events.append("pickle.loads")
            raise AssertionError("something is unpickled")

        self.events.clear()
        self.armed = True
        try:
            with (
                mock.patch.object(pickle, "loads", refuse),
                mock.patch.object(pickle, "load", refuse),
                mock.patch.object(dist.distributed_c10d, "_unpickler", refuse),
            ):
                work()
        finally:
            self.armed = False
        return list(self.events)


def _audited(group: ProcessGroup, root: Path) -> dict[str, list[str]]:
    unpickling = Unpickling()
    report = {}
    for kind in KINDS:
        model, optimizer = make(group, kind)

        def life(kind: str = kind, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            advance(model, optimizer, 1)
            zerostep.save(root / kind / "one", optimizer, model, extra=[1])
            advance(model, optimizer, 2)
            pending = zerostep.save(root / kind / "two", optimizer, model, wait=False, keep=2)
            assert pending is not None
            advance(model, optimizer, 3)
            pending.wait()
            found = zerostep.latest(root / kind, group)
            assert found == root / kind / "two"
            zerostep.load(found, optimizer, model)
            assert_same_state_dict(whole_state(optimizer), whole_state(optimizer))

        report[kind] = unpickling.during(life)
        assert_trained(model, optimizer, 2)
    raw = pickle.dumps(nn.Module)
    report["control"] = unpickling.during(lambda: pickle.Unpickler(BytesIO(raw)).load())  # noqa: S301
    with pytest.raises(AssertionError, match="something is unpickled"):
        unpickling.during(lambda: dist.all_gather_object([None, None], 1, group=group))
    return report


def test_no_save_load_step_or_consolidation_unpickles_anything(tmp_path: Path) -> None:
    for outcome in run_fresh(_audited, 2, tmp_path):
        assert outcome.error is None, outcome.error
        control = outcome.result.pop("control")
        assert len(control) == 1
        assert "Module" in control[0]
        assert outcome.result == {kind: [] for kind in KINDS}
