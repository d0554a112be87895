"""Short notes of the ranks to each other, in the job's store: they get through when messages do not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_TIMEOUT = timedelta(seconds=2)
_PAUSE = 30.0  # seconds for which a store that did not answer is not asked again
_NEWS = "zerostep/news"

Note = dict[str, Any]


class Board:
    """One note per global rank, and a counter that changes when a rank has news, or asks for notes.

    Used by the watching thread and by threads that fail. Every operation ends within seconds; `None` and empty answers
    mean that the store cannot be reached.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._rank, self._lock = rank, Lock()
        self._silent_until = 0.0
        self._posted: str | None = None
        self.host = _host_of(store)
        # A connection of its own: a store blocks all threads that use it while one of them waits in it.
        self._store = store.clone()
        self._store.set_timeout(_TIMEOUT)
        self._do(lambda store: store.delete_key(_key(rank)))  # of an earlier program in the same store

    @property
    def has_posted(self) -> bool:
        """Whether a note of this rank is there."""
        return self._posted is not None

    @property
    def reachable(self) -> bool:
        """Whether the store has answered when it was asked last."""
        return time.monotonic() >= self._silent_until

    def post(self, note: Note, urgent: bool) -> None:
        """Replace this rank's note; an empty one removes it. If it is urgent, the others read it soon."""
        text = json.dumps(note) if note else None
        if text == self._posted:
            return
        if text is None:
            self._do(lambda store: store.delete_key(_key(self._rank)))
        else:
            self._do(lambda store: store.set(_key(self._rank), text))
        self._posted = text
        if urgent:
            self.ask()

    def ask(self) -> None:
        """Ask all ranks for notes about where they are."""
        self._do(lambda store: store.add(_NEWS, 1))

    def news(self) -> int | None:
        """A number that changes when some rank asks, or has posted something urgent."""
        found: int | None = self._do(lambda store: store.add(_NEWS, 0))
        return found

    def read(self, ranks: Iterable[int]) -> dict[int, Note]:
        """The notes of those of these global ranks that have posted one."""
        end, notes = time.monotonic() + _TIMEOUT.total_seconds(), dict[int, Note]()
        for rank in ranks:
            if not self.reachable or time.monotonic() > end:
                break
            text = self._do(partial(_get, key=_key(rank)))
            if text:
                with suppress(ValueError):
                    notes[rank] = json.loads(text)
        return notes

    def _do(self, call: Any) -> Any:
        """Call the store, or return `None` if it does not answer in time, or did not a moment ago."""
        if not self.reachable or not self._lock.acquire(timeout=_TIMEOUT.total_seconds()):
            return None
        try:
            return call(self._store)
        except RuntimeError:
            self._silent_until = time.monotonic() + _PAUSE
            return None
        finally:
            self._lock.release()


def default_store() -> Any:
    """The job's store, or `None` without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return distributed_c10d._get_default_store()


def _get(store: Any, key: str) -> Any:
    """The value of a key, or `None`; `get` alone would wait for a key that is not there."""
    return store.get(key) if store.check([key]) else None


def _key(rank: int) -> str:
    return f"zerostep/where/{rank}"


def _host_of(store: Any) -> str:
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    host, port = getattr(inner, "host", None), getattr(inner, "port", None)
    return f"{type(inner).__name__}" + (f" at {host}:{port}" if host else "")
