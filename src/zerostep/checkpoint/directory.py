"""Checkpoint directories: written under a hidden name and renamed, so that each exists completely or not at all.

| name | what it is |
|---|---|
| `step-1` | a complete checkpoint |
| `.step-1.new-<token>` | a draft that is not locked yet; empty |
| `.step-1.draft-<token>` | a draft, locked by the process that writes it |
| `.step-1.old-<id>` | a checkpoint that is being removed |
"""

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

logger = logging.getLogger("zerostep")

_UNLOCKED, _DRAFT, _REMOVED = ".new-", ".draft-", ".old-"
_HIDDEN = re.compile(r"\..+(\.new-|\.draft-|\.old-)[0-9a-f]{32}")
_ATTEMPTS = 5
_FILE = re.compile(r"(layout-[0-9]+-)?rank-[0-9]+\.safetensors")
_OF_A_RANK = re.compile(r"(layout-[0-9]+-)?rank-.*\.safetensors", re.DOTALL)


def draft_of(path: Path, token: str) -> Path:
    """Return the hidden path, beside `path`, at which a checkpoint is written; the token makes it unique."""
    return path.parent / f".{path.name}{_DRAFT}{token}"


@contextmanager
def locked_draft(draft: Path) -> Iterator[None]:
    """Create a draft directory and hold its lock inside the context.

    The operating system releases the lock when the process ends, however it ends; other jobs remove drafts that are
    not locked.
    """
    handle = _create_locked(draft)
    try:
        yield
    finally:
        os.close(handle)


def _create_locked(draft: Path) -> int:
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):  # another job's prune() may remove it before it is locked
            return _try_create_locked(draft)
    return _try_create_locked(draft)


def _try_create_locked(draft: Path) -> int:
    """Create the directory under another name, lock it, then rename it: no draft is ever visible without its lock."""
    name, _, token = draft.name.rpartition(_DRAFT)
    unlocked, handle = draft.with_name(f"{name}{_UNLOCKED}{token}"), -1
    unlocked.mkdir()
    try:
        handle = os.open(unlocked, os.O_RDONLY)
        with suppress(OSError):  # some file systems cannot lock directories: there, no draft counts as abandoned
            fcntl.flock(handle, fcntl.LOCK_EX)
        unlocked.rename(draft)
    except BaseException:
        if handle >= 0:
            os.close(handle)
        with suppress(OSError):
            unlocked.rmdir()
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
    """Turn a draft whose files are all on disk into a checkpoint."""
    write_bytes(draft / NAME, manifest.encode())
    # The names in the draft must be on disk before the rename, and the rename before anyone relies on it.
    sync_directory(draft)
    os.rename(draft, path)
    sync_directory(path.parent)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files all have the right sizes; `CheckpointError` otherwise."""
    try:
        text = _read_text(path / NAME)
        names = os.listdir(path)
    except OSError as error:
        raise CheckpointError(_describe_missing(path, error)) from error
    manifest = Manifest.decode(text, str(path / NAME))
    for file in manifest.files:
        _check_size(path / file.name, file.nbytes)
    for name in sorted(set(names) - {file.name for file in manifest.files}):
        if _OF_A_RANK.fullmatch(name):
            raise CheckpointError(f"{path / name} is not of this checkpoint: take it away, or load another checkpoint")
    return manifest


def _read_text(path: Path) -> bytes:
    _plain_size(path)  # not a pipe or a device, which may block or never end
    with open(path, "rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise CheckpointError(f"{path} is damaged: it has more than {MOST_BYTES} bytes; load another checkpoint")
    return text


def _describe_missing(path: Path, error: OSError) -> str:
    if path.is_file():
        return (
            f"{path} is a file, and a checkpoint is a directory; a state dict that torch.save() wrote is loaded by "
            "optimizer.load_state_dict(torch.load(path, weights_only=True))"
        )
    problem = f"{path} is not a checkpoint: {path / NAME} cannot be read, {error.strerror or error}"
    inside = [checkpoint.name for checkpoint, _ in complete_in(path)]
    remedy = f"in it there are {', '.join(inside[-3:])}" if inside else "load another checkpoint"
    return f"{problem}; {remedy}, see zerostep.latest()"


def _check_size(path: Path, nbytes: int) -> None:
    try:
        size = _plain_size(path)
    except OSError as error:
        raise CheckpointError(f"{path} is missing: {error.strerror}; load another checkpoint") from error
    if size != nbytes:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes instead of {nbytes}; load another checkpoint")


def _plain_size(path: Path) -> int:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a plain file; load another checkpoint")
    return status.st_size


def complete_in(root: Path) -> list[tuple[Path, Manifest]]:
    """Return the complete checkpoints in a directory, oldest first."""
    names, checkpoints = list[str](), list[tuple[Path, Manifest]]()
    with suppress(OSError):
        names = os.listdir(root)
    for name in names:
        if not name.startswith(".") and (root / name / NAME).is_file():
            with suppress(CheckpointError):
                checkpoints.append((root / name, read_manifest(root / name)))
    return sorted(checkpoints, key=lambda item: (item[1].created, item[1].step, item[0].name))


def prune(path: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints beside `path`, and drafts whose writers have ended."""
    for old, manifest in complete_in(path.parent)[:-keep]:
        with _log_failure(old):
            # Renamed before anything in it is removed: a visible checkpoint is complete even if this is interrupted.
            os.rename(old, old.parent / f".{old.name}{_REMOVED}{manifest.id}")
            sync_directory(old.parent)
    for entry in path.parent.iterdir():
        with _log_failure(entry):
            kind = _kind(entry)
            if kind == _REMOVED or (kind == _DRAFT and _is_abandoned(entry)):
                shutil.rmtree(entry)
            elif kind == _UNLOCKED and _is_abandoned(entry):
                with suppress(FileNotFoundError):  # its writer has just renamed it
                    entry.rmdir()


@contextmanager
def _log_failure(path: Path) -> Iterator[None]:
    """Log an error instead of raising it: the new checkpoint is complete, whatever could not be removed."""
    try:
        yield
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)


def _kind(path: Path) -> str | None:
    """Return the infix of a hidden directory of ours; `None` if the name differs or it holds any other file."""
    match = _HIDDEN.fullmatch(path.name)
    if match is None or path.is_symlink() or not path.is_dir():
        return None
    return match[1] if all(name == NAME or _FILE.fullmatch(name) for name in os.listdir(path)) else None
