"""A new file or directory, written offline, that exists completely or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from zerostep.checkpoint.directory import draft_of
from zerostep.checkpoint.tensor_file import sync_directory
from zerostep.errors import CheckpointError


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to; it gets its name when it is complete and on disk, and a failure leaves nothing."""
    check_free(path)
    with new_draft(path, secrets.token_hex(16)) as draft:
        with open(draft, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _rename_new(draft, path)
        sync_directory(path.parent)


@contextmanager
def new_draft(path: Path, token: str) -> Iterator[Path]:
    """Yield the hidden path of a draft; what is still there at the end is removed."""
    draft = draft_of(path, token)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error}; nothing is left of it: make room, or choose another place"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # does nothing to a file
        with suppress(OSError):
            draft.unlink()


def check_free(path: Path) -> None:
    """Raise `CheckpointError` if the path exists."""
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already: choose another name, or remove it first")


def _rename_new(draft: Path, path: Path) -> None:
    """Give the draft its final name without replacing a file that has appeared meanwhile."""
    try:
        os.link(draft, path)
    except FileExistsError:
        check_free(path)
        raise
    except OSError:
        # No hard links here. Between the check and the rename, another process could still create the file.
        check_free(path)
        os.rename(draft, path)
