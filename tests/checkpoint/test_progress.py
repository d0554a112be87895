"""The progress bar of a long save is shown on rank 0, on a terminal, and nowhere else."""

import io
import os
import pty
import sys

import pytest

from zerostep.checkpoint.progress import progress

LONG = 64 << 20
END = "that was all"
TITLE = "saving a{b}[red]"  # names are the user's


def shown(monkeypatch: pytest.MonkeyPatch, total: int, rank: int = 0) -> str:
    """What a terminal gets to see."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, open(ours, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress(TITLE, total, rank) as advance:
            advance(total)
        terminal.write(END)
        terminal.flush()
        text = ""
        while not text.endswith(END):
            text += os.read(screen.fileno(), 1 << 16).decode(errors="replace")
        return text.removesuffix(END)


def test_a_bar_has_a_title_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, LONG)
    assert TITLE in text
    assert "67.1/67.1 MB" in text


@pytest.mark.parametrize(("total", "rank"), [(LONG - 1, 0), (LONG, 1)])
def test_what_is_short_and_other_ranks_have_none(total: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, total, rank) == ""


def test_there_is_none_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", found := io.StringIO())
    with progress(TITLE, LONG) as advance:
        advance(LONG)
    assert found.getvalue() == ""
