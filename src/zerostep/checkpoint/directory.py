"""Checkpoints as directories: written beside and renamed, so that each exists completely or not at all."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zerostep.checkpoint.manifest import MOST_BYTES, NAME, Manifest
from zerostep.checkpoint.tensor_file import sync_directory, write_bytes
from zerostep.errors import CheckpointError

__all__ = ["claimed", "complete_in", "draft_of", "newest", "prune", "publish", "read_manifest"]

logger = logging.getLogger("zerostep")

_UNCLAIMED, _DRAFT, _DOOMED = ".new-", ".draft-", ".old-"
_LEFT = re.compile(r"\..+(\.new-|\.draft-|\.old-)[0-9a-f]{32}")
_ATTEMPTS = 5
_FILE = re.compile(r"rank-[0-9]+\.safetensors")


def draft_of(path: Path, token: str) -> Path:
    """Where a checkpoint is written before it exists: beside it, hidden, under a name that no other save has."""
    return path.parent / f".{path.name}{_DRAFT}{token}"


@contextmanager
def claimed(draft: Path) -> Iterator[None]:
    """Make a draft, which inside has an owner. The system takes the claim back when the process ends, however it ends.

    It gets its name when it is claimed: a draft without an owner is anyone's to remove.
    """
    handle = _made(draft)
    try:
        yield
    finally:
        os.close(handle)


def _made(draft: Path) -> int:
    """A new draft, open and locked."""
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):  # others who clean up may have taken it before it was locked
            return _attempt(draft)
    return _attempt(draft)


def _attempt(draft: Path) -> int:
    name, _, token = draft.name.rpartition(_DRAFT)
    unclaimed, handle = draft.with_name(f"{name}{_UNCLAIMED}{token}"), -1
    unclaimed.mkdir()
    try:
        handle = os.open(unclaimed, os.O_RDONLY)
        with suppress(OSError):  # where directories cannot be locked, every draft counts as claimed
            fcntl.flock(handle, fcntl.LOCK_EX)
        unclaimed.rename(draft)
    except BaseException:
        if handle >= 0:
            os.close(handle)
        with suppress(OSError):
            unclaimed.rmdir()
        raise
    return handle


def _is_abandoned(draft: Path) -> bool:
    try:
        handle = os.open(draft, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(handle)


def publish(draft: Path, path: Path, manifest: Manifest) -> None:
    """Make a checkpoint of a draft whose files are all on disk."""
    write_bytes(draft / NAME, manifest.encode())
    sync_directory(draft)
    os.rename(draft, path)
    sync_directory(path.parent)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files all have the right sizes; `CheckpointError` if it is not complete."""
    try:
        text = _read_text(path / NAME)
        names = os.listdir(path)
    except OSError as error:
        raise CheckpointError(_nothing_here(path, error)) from error
    manifest = Manifest.decode(text, str(path / NAME))
    for file in manifest.files:
        _check_size(path / file.name, file.nbytes)
    for name in sorted(set(names) - {file.name for file in manifest.files}):
        if name.startswith("rank-") and name.endswith(".safetensors"):
            raise CheckpointError(f"{path / name} is not of this checkpoint: take it away, or load another checkpoint")
    return manifest


def _read_text(path: Path) -> bytes:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise CheckpointError(f"{path} is not a plain file; load another checkpoint")
    with open(path, "rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise CheckpointError(f"{path} is damaged: it has more than {MOST_BYTES} bytes; load another checkpoint")
    return text


def _nothing_here(path: Path, error: OSError) -> str:
    if path.is_file():
        return (
            f"{path} is a file, and a checkpoint is a directory; a state dict that torch.save() wrote is loaded by "
            "optimizer.load_state_dict(torch.load(path, weights_only=True))"
        )
    story = f"{path} is not a checkpoint: {path / NAME} cannot be read, {error.strerror or error}"
    found = [each.name for each, _ in complete_in(path)]
    where = f"in it there are {', '.join(found[-3:])}" if found else "load another checkpoint"
    return f"{story}; {where}, see zerostep.latest()"


def _check_size(path: Path, nbytes: int) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{path} is missing: {error.strerror}; load another checkpoint") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is not a plain file; load another checkpoint")
    if found.st_size != nbytes:
        raise CheckpointError(
            f"{path} is damaged: it has {found.st_size} bytes instead of {nbytes}; load another checkpoint"
        )


def complete_in(root: Path) -> list[tuple[Path, Manifest]]:
    """The complete checkpoints in a directory, oldest first."""
    return sorted(_complete(root), key=lambda item: (item[1].created, item[1].step, item[0].name))


def _complete(root: Path) -> Iterator[tuple[Path, Manifest]]:
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return
    for name in names:
        if not name.startswith(".") and (root / name / NAME).is_file():
            try:
                yield root / name, read_manifest(root / name)
            except CheckpointError:
                continue


def newest(root: Path) -> tuple[Path, Manifest] | None:
    """The newest complete checkpoint in a directory."""
    found = complete_in(root)
    return found[-1] if found else None


def prune(path: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints beside `path`, and drafts whose writers are gone.

    One that is to go loses its name first: whenever this is interrupted, what has a name is complete.
    """
    for old, manifest in complete_in(path.parent)[:-keep]:
        with _only_telling(old):
            os.rename(old, old.parent / f".{old.name}{_DOOMED}{manifest.id}")
            sync_directory(old.parent)
    for left in path.parent.iterdir():
        with _only_telling(left):
            kind = _kind(left)
            if kind == _DOOMED or (kind == _DRAFT and _is_abandoned(left)):
                shutil.rmtree(left)
            elif kind == _UNCLAIMED and _is_abandoned(left):
                with suppress(FileNotFoundError):  # it has just got its name
                    left.rmdir()


@contextmanager
def _only_telling(path: Path) -> Iterator[None]:
    """The new checkpoint is there: what cannot be removed is no reason to call it a failure."""
    try:
        yield
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)


def _kind(path: Path) -> str | None:
    """What was a checkpoint, or was to become one, and nothing else: by which sign it is hidden."""
    found = _LEFT.fullmatch(path.name)
    if found is None or path.is_symlink() or not path.is_dir():
        return None
    return found[1] if all(name == NAME or _FILE.fullmatch(name) for name in os.listdir(path)) else None
