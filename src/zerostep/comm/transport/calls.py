"""The public call that each thread is in, and its number of collectives so far: ranks compare both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

# The name of the call by thread, and the number of its collectives over each transport: those of other ranks may be
# more or fewer. Each thread writes its own entry alone.
_names: dict[int, str] = {}
_counts: dict[int, dict[int, int]] = {}


@contextmanager
def calling(name: str) -> Iterator[None]:
    """Inside, collectives on this thread belong to the public call `name`; the outermost block counts."""
    thread = get_ident()
    if thread in _names:
        yield
        return
    _names[thread], _counts[thread] = name, {}
    try:
        yield
    finally:
        del _names[thread], _counts[thread]


def current_call() -> str:
    """The call that this thread is in; empty outside of all."""
    return _names.get(get_ident(), "")


def all_calls() -> list[str]:
    """The calls that some thread of this process is in."""
    return list(_names.values())


def next_collective(transport: object) -> int:
    """The number of this thread's next collective over a transport inside its call; 0 outside of all."""
    counts = _counts.get(get_ident())
    if counts is None:
        return 0
    counts[id(transport)] = counts.get(id(transport), 0) + 1
    return counts[id(transport)]
