"""Drafts and who owns them."""

import fcntl
from pathlib import Path

import pytest

from zerostep.checkpoint.directory import claimed, draft_of, prune

TOKEN = "0123456789abcdef" * 2


def test_a_draft_has_an_owner_as_soon_as_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job cleans up at the worst moment: the directory is there, and nobody has locked it yet."""
    lock, draft, cleaned = fcntl.flock, draft_of(tmp_path / "step-1", TOKEN), list[bool]()

    def after_others(handle: int, how: int) -> None:
        if not cleaned:
            cleaned.append(True)
            prune(tmp_path / "step-2", 2)
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", after_others)
    with claimed(draft):
        assert cleaned
        assert draft.is_dir()
        prune(tmp_path / "step-2", 2)
        assert draft.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [draft.name]
    prune(tmp_path / "step-2", 2)
    assert not draft.exists()
