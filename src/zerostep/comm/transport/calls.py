"""The public call that each thread is in, and its number of collectives so far: ranks compare both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

# The name of the call by thread, and the number of its collectives. Each thread writes its own entry alone.
_names: dict[int, str] = {}
_counts: dict[int, int] = {}


@contextmanager
def calling(name: str) -> Iterator[None]:
    """Inside, collectives on this thread belong to the public call `name`; the outermost block counts."""
    thread = get_ident()
    if thread in _names:
        yield
        return
    _names[thread], _counts[thread] = name, 0
    try:
        yield
    finally:
        del _names[thread], _counts[thread]


@contextmanager
def among_some_ranks() -> Iterator[None]:
    """Inside, collectives on this thread are among some ranks of the call; the others, which make none, count on."""
    thread = get_ident()
    before = _counts.get(thread)
    try:
        yield
    finally:
        if before is not None:
            _counts[thread] = before


def current_call() -> str:
    """The call that this thread is in; empty outside of all."""
    return _names.get(get_ident(), "")


def all_calls() -> list[str]:
    """The calls that some thread of this process is in."""
    return list(_names.values())


def next_collective() -> int:
    """The number of this thread's next collective inside its call; 0 outside of all."""
    thread = get_ident()
    if thread not in _counts:
        return 0
    _counts[thread] += 1
    return _counts[thread]
