"""One thread per process that says who has not come when this rank waits for long.

It compares what `Presence` shows with what it showed before. A rank that does not move posts where it is on the board;
one that waits for too long reads the notes of the others, and logs one warning. Nothing here changes the training,
except that the failure of a peer is noted where the host does not wait for it: see `_give_up`.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread
from typing import Any
from weakref import ref

import torch.distributed as dist

from zerostep.comm.board import Board, Note, default_store
from zerostep.comm.transport.presence import Failure, Presence, Wait

logger = logging.getLogger("zerostep")

DEFAULT_SECONDS = 60.0
_VARIABLE = "ZEROSTEP_STALL_SECONDS"
_FIRST_STEP = 5  # times the limit: compilation, and the start of data loaders
_POST_AFTER = 0.75  # of the limit
_NEWS_AFTER = 2.0  # seconds of waiting after which the failures of others are looked for
_MOST_NAMED = 8


def check_stall_seconds(given: float | str | None) -> None:
    """Raise if an optimizer's argument is not a limit for waits."""
    if given != "default" and _parsed(given) is None:
        raise ValueError(
            f'stall_seconds must be a number of seconds, or 0, None or "off" for no reports; got {given!r}'
        )


def stall_limit(given: float | str | None) -> float | None:
    """The seconds after which a wait is reported, or `None` for never, from an argument of an optimizer.

    What is no number of seconds counts as the default: `check_stall_seconds` refuses it once ranks are connected.
    """
    if given == "default":
        text = os.environ.get(_VARIABLE, "") or str(DEFAULT_SECONDS)
        if _parsed(text) is None:
            logger.warning("%s=%s is not a number of seconds: %s are used", _VARIABLE, text, DEFAULT_SECONDS)
        given = text
    seconds = _parsed(given)
    return DEFAULT_SECONDS if seconds is None else seconds or None


def _parsed(given: float | str | None) -> float | None:
    """The seconds, 0 for no reports, or `None` if it cannot be read."""
    if given is None or given == "off":
        return 0.0
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        return None
    return seconds if seconds >= 0 else None


def watch(presence: Presence, label: str, limit: float | None, give_up: Callable[[str], object] | None = None) -> None:
    """Report when the rank that `presence` is about waits for longer than `limit` seconds.

    `give_up` is told of the failure of a peer for which only the device waits. Everything is held weakly.
    """
    if limit is None or len(presence.ranks) < 2:
        presence.introduce(label, None)
        return
    global _watch
    if _watch is None:
        _watch = StallWatch()
    _watch.add(_Seat(presence, label, limit, give_up))


class _Seat:
    """What the watch knows about one presence."""

    def __init__(self, presence: Presence, label: str, limit: float, give_up: Callable[[str], object] | None) -> None:
        self.presence, self.label, self.limit, self.give_up = ref(presence), label, limit, give_up
        self.number = 0
        self._ticks, self._moved = -1, time.monotonic()
        self._wait: Wait | None = None
        self._mark: Any = None
        self._waits_since = self._moved
        self.asked: float | None = None
        self.reported = False
        self.told: set[tuple[int, str]] = set()
        self.news: int | None = None  # what was read for the present wait

    def look(self, presence: Presence, now: float) -> None:
        """Compare with the last look."""
        if presence.ticks != self._ticks:
            self._ticks, self._moved = presence.ticks, now
        wait, mark = presence.oldest_wait(), presence.unfinished
        if mark is not None and not mark():
            mark = None
        if wait is not self._wait or (wait is None and mark is not self._mark):
            self._wait, self._mark, self._waits_since = wait, mark, now
            self.asked, self.reported, self.news = None, False, None
            self.told.clear()

    def saw_news(self, news: int) -> None:
        """The notes of the others were read for the present wait."""
        self.news = news

    def still(self, now: float) -> float:
        """Seconds for which this rank has not moved, or for which its oldest wait lasts."""
        return max(now - self._moved, self.waited(now))

    def waited(self, now: float) -> float:
        """Seconds for which the oldest wait lasts, of a thread or of the device; 0 without one."""
        return now - self._waits_since if self.waits else 0.0

    @property
    def waits(self) -> bool:
        """Whether a thread, or the device, waits."""
        return self._wait is not None or self._mark is not None

    @property
    def on_device(self) -> bool:
        """Whether only the device waits."""
        return self._wait is None and self._mark is not None

    def patience(self, presence: Presence) -> float:
        """Seconds after which a wait is reported."""
        return self.limit if presence.first_step_done else _FIRST_STEP * self.limit

    def describe(self, presence: Presence) -> str:
        """Where the rank is."""
        return f"the device has not finished step {presence.steps}" if self.on_device else presence.describe()


class StallWatch:
    """The thread, and what it watches."""

    def __init__(self) -> None:
        self._seats: list[_Seat] = []
        self._lock = Lock()
        self._stop = Event()
        self._thread: Thread | None = None
        self._store: Any = None
        self._board: Board | None = None
        self._news: int | None = None
        self._polled = 0.0

    def add(self, seat: _Seat) -> None:
        """Watch one more presence."""
        presence = seat.presence()
        assert presence is not None
        presence.introduce(seat.label, self.tell)
        with self._lock:
            same = [each for each, other in self._alive() if (each.label, other.ranks) == (seat.label, presence.ranks)]
            seat.number = max((each.number + 1 for each in same), default=0)
            self._seats = [each for each, _ in self._alive()] + [seat]
            if self._thread is None:
                self._thread = Thread(target=self._run, name="zerostep-watch", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _alive(self) -> list[tuple[_Seat, Presence]]:
        found = [(seat, seat.presence()) for seat in self._seats]
        return [(seat, presence) for seat, presence in found if presence is not None]

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stop.wait(self._interval()):
            with self._lock:
                seats = self._alive()
                if not seats:
                    self._thread = None
                    return
            try:
                self._look(seats, time.monotonic())
            except Exception:
                logger.debug("the stall report failed", exc_info=True)
            del seats  # between two looks nothing is kept alive

    def _interval(self) -> float:
        return min([_NEWS_AFTER, *(seat.limit / 8 for seat in self._seats)])

    def _look(self, seats: Sequence[tuple[_Seat, Presence]], now: float) -> None:
        for seat, presence in seats:
            seat.look(presence, now)
        board = self._open_board()
        asked = self._read_news(board, seats, now)
        if board is not None and (asked or self._something_to_post(seats, now)):
            board.post(self._note(asked, now), urgent=False)
        for seat, presence in seats:
            self._report(board, seat, presence, now)

    def _read_news(self, board: Board | None, seats: Sequence[tuple[_Seat, Presence]], now: float) -> bool:
        """Whether some rank has news, or asks; looked up often only while this rank waits."""
        waiting = any(seat.waited(now) >= min(_NEWS_AFTER, seat.limit / 10) for seat, _ in seats)
        due = now - self._polled >= min(seat.limit / 8 for seat, _ in seats)
        if board is None or not (waiting or due):
            return False
        self._polled = now
        news, before = board.news(), self._news
        self._news = news
        for seat, presence in seats:
            if seat.waits and news and seat.news != news:
                seat.saw_news(news)
                self._read_failures(board, seat, presence)
        return news is not None and news not in (before, 0)

    def _something_to_post(self, seats: Sequence[tuple[_Seat, Presence]], now: float) -> bool:
        still = any(seat.still(now) >= _POST_AFTER * seat.limit for seat, _ in seats)
        return still or self._has_posted()

    def _has_posted(self) -> bool:
        return self._board is not None and self._board.has_posted

    # ------------------------------------------------------------------ notes

    def _open_board(self) -> Board | None:
        """The board of the job's present store."""
        store = default_store()
        if store is not self._store:
            self._store, self._board, self._news = store, None, None
            try:
                self._board = None if store is None else Board(store, dist.get_rank())
            except RuntimeError:
                logger.debug("the job's store cannot be used for notes", exc_info=True)
        return self._board

    def _note(self, asked: bool, now: float) -> Note:
        """Where this process is, with all its optimizers that have something to say."""
        entries = []
        for seat, presence in self._alive():
            if asked or presence.failure is not None or seat.still(now) >= _POST_AFTER * seat.limit:
                entries.append(_entry(seat, presence))
        return {"entries": entries} if entries else {}

    def tell(self, presence: Presence) -> str:
        """Post the failure of this rank, and return what is known of the others. Runs on the thread that failed."""
        board = self._open_board() if _watch is self else None  # a forked child must leave the parent's board alone
        if board is None:
            return ""
        board.post(self._note(False, time.monotonic()), urgent=True)
        seat = next((seat for seat, other in self._alive() if other is presence), None)
        if seat is None:
            return ""
        notes = _notes_about(board, seat, presence)
        if not board.reachable:
            return f"; what the other ranks do is not known: the {board.host} does not answer"
        return _known_failures(presence, notes)

    def _read_failures(self, board: Board, seat: _Seat, presence: Presence) -> None:
        """Log the failures of ranks that this one waits for, once each."""
        for rank, entry in _notes_about(board, seat, presence).items():
            text = entry.get("failure")
            if text and (rank, text) not in seat.told:
                seat.told.add((rank, text))
                message = (
                    f"{_name(presence, rank)} has failed, and {_name(presence, presence.rank)} waits for it: {text}"
                )
                logger.error("%s: %s", seat.label, message)
                if seat.on_device:
                    _give_up(seat, message)

    # ------------------------------------------------------------------ the report

    def _report(self, board: Board | None, seat: _Seat, presence: Presence, now: float) -> None:
        if seat.reported or seat.waited(now) < seat.patience(presence):
            return
        if board is not None and board.reachable and seat.asked is None:
            board.ask()
            seat.asked = now
            return
        # Every rank that is alive answers at its next look.
        if seat.asked is not None and now - seat.asked < seat.limit / 4:
            return
        seat.reported = True
        notes = {} if board is None else _notes_about(board, seat, presence)
        logger.warning("%s", _stall_text(seat, presence, board, notes, seat.waited(now)))


def _give_up(seat: _Seat, message: str) -> None:
    """The device waits for a rank that has failed: end that wait, so that the next call on this rank raises."""
    if seat.give_up is not None:
        seat.give_up(message)


def _entry(seat: _Seat, presence: Presence) -> Note:
    failure = presence.failure or Failure("", None)
    return {
        "label": seat.label,
        "number": seat.number,
        "ranks": list(presence.ranks),
        "place": list(presence.place()),
        "where": seat.describe(presence),
        "waits": seat.waits,
        "failure": failure.text,
        "peer": failure.peer,
    }


def _notes_about(board: Board, seat: _Seat, presence: Presence) -> dict[int, Note]:
    """What the other ranks of the group have posted, by rank of the group."""
    notes = board.read(global_rank for rank, global_rank in enumerate(presence.ranks) if rank != presence.rank)
    found = {}
    for rank, global_rank in enumerate(presence.ranks):
        entries = notes.get(global_rank, {}).get("entries", [])
        same = [each for each in entries if _identity(each) == [seat.label, seat.number, list(presence.ranks)]]
        if entries:
            found[rank] = (same or entries)[-1]  # of other optimizers, the newest
    return found


def _identity(entry: Note) -> list[Any]:
    return [entry.get("label"), entry.get("number"), entry.get("ranks")]


def _name(presence: Presence, rank: int) -> str:
    same = presence.ranks[rank] == rank
    return f"rank {rank}" if same else f"rank {rank} of the group (global rank {presence.ranks[rank]})"


def _stall_text(seat: _Seat, presence: Presence, board: Board | None, notes: dict[int, Note], waited: float) -> str:
    own = f"{seat.label}: {_name(presence, presence.rank)} has waited for {waited:.0f} s, {seat.describe(presence)}"
    if board is None or not board.reachable:
        host = "of this job" if board is None else board.host
        return f"{own}. What the other ranks do is not known: the store {host} does not answer"
    here = list(presence.place())
    others = [rank for rank in range(len(presence.ranks)) if rank != presence.rank]
    missing = [rank for rank in others if not (rank in notes and notes[rank]["waits"] and notes[rank]["place"] == here)]
    if not missing:
        return f"{own}. All other ranks wait in the same place: see to the network between them"
    # Those that do not wait come first: the others may wait for them, too.
    missing.sort(key=lambda rank: notes.get(rank, {}).get("waits", False))
    lines = [f"{_name(presence, rank)}: {_where(presence, notes.get(rank))}" for rank in missing[:_MOST_NAMED]]
    more = f"; and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return f"{own}. Not there: {'; '.join(lines)}{more}"


def _where(presence: Presence, entry: Note | None) -> str:
    if entry is None:
        return f"no sign of life; it was there for step {presence.steps}"
    if entry["failure"]:
        return f"failed, {entry['failure']}"
    other = (
        "" if tuple(entry["ranks"]) == presence.ranks and entry["label"] == presence.label else f" ({entry['label']})"
    )
    return f"{entry['where']}{other}"


def _known_failures(presence: Presence, notes: dict[int, Note]) -> str:
    """The failures that the other ranks have posted, as the end of an error message."""
    texts = []
    for rank, entry in notes.items():
        if entry.get("failure"):
            lost = entry.get("peer")
            reason = f"it lost {_name(presence, lost)}" if lost is not None else "it failed"
            texts.append(f"{_name(presence, rank)} stopped because {reason} ({entry['failure']})")
        elif entry.get("waits"):
            texts.append(f"{_name(presence, rank)} is {entry['where']}")
    return f"; {'; '.join(texts[:_MOST_NAMED])}" if texts else ""


_watch: StallWatch | None = None


def _forget() -> None:
    """In a forked child: it has no thread, and its locks may be held for ever."""
    global _watch
    _watch = None


@atexit.register
def _stop() -> None:
    if _watch is not None:
        _watch.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
