"""Saves that fail or wait for each other: the same error on every rank, and no draft left behind."""

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

import zerostep
from tests.helpers.checkpoints import KINDS, advance, assert_trained, make, snapshot
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_state_dict
from zerostep import CheckpointError
from zerostep.checkpoint import tensor_file
from zerostep.comm.background import PendingSave

EACH_KIND = pytest.mark.parametrize("kind", KINDS)


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
@pytest.mark.parametrize(("options", "excerpt"), [("size=24k", "No space left"), ("ro", "Read-only")])
def test_a_full_or_read_only_disk_leaves_nothing_behind(pool: Pool, tmp_path: Path, options: str, excerpt: str) -> None:
    with _mounted(tmp_path / "disk", options):
        for text, names in pool.run(_refused_save, 2, tmp_path / "disk"):
            assert excerpt in text
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
    gate, write, join = threading.Event(), tensor_file._write_all, PendingSave.wait_until_done

    def late(file: Any, piece: memoryview) -> None:
        assert gate.wait(30)
        write(file, piece)

    def opening(pending: PendingSave) -> None:
        gate.set()
        join(pending)

    advance(model, optimizer, 1)
    with mock.patch.object(tensor_file, "_write_all", late), mock.patch.object(PendingSave, "wait_until_done", opening):
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
