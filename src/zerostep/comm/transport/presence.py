"""Where this rank is with one optimizer: its step and phase, and what each of its threads waits for.

Written in every transfer, so it costs a few attribute writes and never asks for the time. `comm.stall_watch` reads it
from another thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import NamedTuple

from zerostep.comm.transport.calls import all_calls, current_call

_PEER = re.compile(r"\b(?:from|to|of) rank (\d+)")
_PAIR = re.compile(r"\bof ranks (\d+), (\d+)$")


class Place(NamedTuple):
    """A place in a program; two ranks that are in the same place have equal ones."""

    call: str
    steps: int
    phase: str
    bucket: int | None

    def __str__(self) -> str:
        if self.call:
            return f"in {self.call}"
        bucket = "" if self.bucket is None else f" of bucket {self.bucket}"
        return f"in step {self.steps + 1}" + (f", {self.phase}{bucket}" if self.phase else "")


# One thread waits: the transfer and the fields of its place. A plain tuple, because one is made for every transfer, and
# a new object for every wait: as long as it stays, nothing has moved.
Wait = tuple[str, str, int, str, int | None]


class Failure(NamedTuple):
    """Why this rank stopped, and the rank that it lost, if it was that."""

    text: str
    peer: int | None


class Presence:
    """Where this rank is with one optimizer, over a group of these global `ranks`, of which it is number `rank`.

    Transfers between some of these ranks, as in a row of a mesh, name them by their numbers in the whole group.
    """

    def __init__(self, ranks: Sequence[int] = (0,), rank: int = 0) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        self.label = ""
        self.ticks = 0  # changes whenever this rank moves on
        self.steps, self.first_step_done = 0, False
        self.waits: dict[int, Wait] = {}
        self.failure: Failure | None = None
        self.unfinished: Callable[[], bool] | None = None  # whether the device has not finished a step
        self._stepping = 0
        self._phase = ""
        self._bucket: int | None = None
        self._tell: Callable[[Presence], str] | None = None

    def numbers_of(self, global_ranks: Sequence[int]) -> tuple[int, ...]:
        """The numbers of some ranks in the whole group."""
        return tuple(self.ranks.index(rank) for rank in global_ranks)

    def introduce(self, label: str, tell: Callable[[Presence], str] | None) -> None:
        """Name the optimizer; `tell` posts this rank's failure, and returns what is known of the others."""
        self.label, self._tell = label, tell

    # ------------------------------------------------------------------ written by the threads that work

    def begin_wait(self, transfer: str) -> None:
        """This thread waits for a transfer."""
        self.ticks += 1
        self.waits[get_ident()] = (transfer, current_call(), self.steps, self._phase, self._bucket)

    def end_wait(self) -> None:
        """This thread waits no more."""
        self.ticks += 1
        self.waits.pop(get_ident(), None)

    def at(self, phase: str, bucket: int | None = None) -> None:
        """A phase of a step begins."""
        self.ticks += 1
        self._phase, self._bucket = phase, bucket

    def begin_step(self) -> None:
        """`step()` was called, or an update begins inside backward."""
        self.ticks += 1
        self._stepping = 1

    def end_step(self, steps: int, complete: bool = True) -> None:
        """The step is over; `steps` of them are complete. Without `complete` it has raised."""
        self.ticks += 1
        self._stepping, self.steps = 0, steps
        self._phase, self._bucket = "", None
        if complete:
            self.first_step_done, self.failure = True, None

    def device_mark(self, done: Callable[[], bool]) -> None:
        """The host has launched a step on an accelerator; `done` is whether the device has finished it."""
        self.unfinished = lambda: not done()

    def fail(self, text: str) -> None:
        """This rank has failed: tell the others."""
        if self.failure is None:
            self.failure = Failure(text, None)
            self._told()

    def recover(self) -> None:
        """A state was loaded: this rank goes on."""
        self.ticks += 1
        self.failure = None

    def restart(self, steps: int) -> None:
        """A state was loaded, which `steps` steps have made."""
        self.ticks += 1
        self.steps = steps

    def lost(self, transfer: str) -> str:
        """A transfer has failed: tell the others, and return what is known of them, as the end of a message."""
        if self.failure is None:
            self.failure = Failure(f"{self.place()}: {transfer} failed", self._peer_in(transfer))
        return self._told()

    def _peer_in(self, transfer: str) -> int | None:
        """The only other rank that takes part in a transfer."""
        if match := _PEER.search(transfer):
            return int(match[1])
        match = _PAIR.search(transfer)
        return None if match is None else next(rank for rank in map(int, match.groups()) if rank != self.rank)

    def _told(self) -> str:
        return "" if self._tell is None else self._tell(self)

    # ------------------------------------------------------------------ read by the thread that watches

    def oldest_wait(self) -> Wait | None:
        """What some thread waits for; of several, the one that began first."""
        return next(iter(list(self.waits.values())), None)

    def place(self) -> Place:
        """Where this rank is now, if it is inside of zerostep."""
        wait = self.oldest_wait()
        if wait is not None:
            return Place(*wait[1:])
        return Place(next(iter(all_calls()), ""), self.steps, self._phase, self._bucket)

    def describe(self) -> str:
        """Where this rank is now, in words."""
        wait = self.oldest_wait()
        if wait is not None:
            return f"{Place(*wait[1:])}, {wait[0]}"
        if self._stepping or all_calls():
            return f"{self.place()}, not waiting"
        return f"outside of zerostep, after step {self.steps}"
