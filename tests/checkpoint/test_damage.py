"""Damaged checkpoints are refused with one kind of error on every rank, and nothing is half loaded."""

import os
import pickle
import shutil
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import zerostep
from tests.helpers.checkpoints import Body, advance, assert_trained, edit, make, sign_files, snapshot, with_header
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_state_dict
from zerostep import CheckpointError

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
    "huge shape": (MANIFEST, _set("layouts", 0, "layout", "params", 0, 1, to=[1 << 40, 1 << 40])),
    "shape that is no number": (MANIFEST, _set("layouts", 0, "layout", "params", 0, 1, to=[float("nan"), 7])),
    "shape in fractions": (MANIFEST, _set("layouts", 0, "layout", "params", 0, 1, to=[13.0, 7.0])),
    "negative shape": (MANIFEST, _set("layouts", 0, "layout", "params", 0, 1, to=[-13, -7])),
    "other dtype": (MANIFEST, _set("layouts", 0, "layout", "params", 0, 2, to="float64")),
    "more ranks": (MANIFEST, _set("layouts", 0, "layout", "world_size", to=3)),
    "unknown version": (MANIFEST, _set("version", to=3)),
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
