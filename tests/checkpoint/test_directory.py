"""Drafts of checkpoints: how they are claimed, and when they are removed."""

import fcntl
from pathlib import Path

import pytest

from zerostep.checkpoint.directory import draft_of, locked_draft, prune

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
    with locked_draft(draft):
        assert cleaned
        assert draft.is_dir()
        prune(tmp_path / "step-2", 2)
        assert draft.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [draft.name]
    prune(tmp_path / "step-2", 2)
    assert not draft.exists()


def test_what_a_kill_left_before_the_claim_goes(tmp_path: Path) -> None:
    left = tmp_path / f".step-1.new-{TOKEN}"
    left.mkdir()
    prune(tmp_path / "step-2", 2)
    assert not left.exists()


def test_a_draft_that_cannot_be_named_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> Path:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError), locked_draft(draft_of(tmp_path / "step-1", TOKEN)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_claimed_draft_stays_whatever_its_name_says(tmp_path: Path) -> None:
    draft = draft_of(tmp_path / f"a.old-{TOKEN}.draft-b", TOKEN)
    with locked_draft(draft):
        prune(tmp_path / "step-2", 2)
        assert draft.is_dir()


def test_a_directory_without_parents_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), locked_draft(draft_of(tmp_path / "nowhere" / "step-1", TOKEN)):
        pass
