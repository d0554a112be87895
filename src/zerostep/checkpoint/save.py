"""`save`: every rank writes its own file into a hidden directory, and rank 0 renames it when all have finished.

Everything that needs the live optimizer happens in the caller's thread, before `_write`. With `wait=False`, `_write`
runs in a background thread, on copies and over a transport of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any, TypeVar

from torch import Tensor, nn

from zerostep.checkpoint.directory import complete_in, draft_of, locked_draft, prune, publish
from zerostep.checkpoint.manifest import (
    MOST_BYTES,
    FileRecord,
    GroupRecord,
    Manifest,
    decode_value,
    encode_value,
    file_name,
)
from zerostep.checkpoint.progress import progress
from zerostep.checkpoint.seats import Seats, find_seats
from zerostep.checkpoint.tensor_file import sync_directory, write_tensors
from zerostep.checkpoint.weights import Entries, agree_on_entries, describe_weights, own_weights
from zerostep.comm.agreement import Fact, agreed, short_list
from zerostep.comm.background import PendingSave
from zerostep.comm.codec import encode
from zerostep.comm.objects import copy_object, gather_object
from zerostep.comm.transport import Transport, calling
from zerostep.errors import CheckpointError, TransportError
from zerostep.optim.view import OptimizerView, view_of
from zerostep.plan.groups import own_options

_REMEDY = "save the same optimizer and model, under the same name, on every rank"
_FEWEST_KEPT = 2
_SEEN_SECONDS = 10  # how long a shared file system may take to show a new directory on all hosts
_RECORD_WORDS = 6  # number, size and digest of a file, as integers
_FIRST_BEAT, _LAST_BEAT = 0.002, 0.5  # seconds between heartbeats, growing from the first to the last

T = TypeVar("T")


@calling("save")
def save(
    path: str | os.PathLike[str],
    optimizer: Any,
    model: nn.Module | None = None,
    extra: Any = None,
    *,
    wait: bool = True,
    keep: int | None = None,
) -> PendingSave | None:
    """Write a checkpoint: a directory that exists completely or not at all. All ranks call it.

    Arguments:
        path: the directory to write, on a file system that all ranks see. It must not exist yet.
        optimizer: a `ShardedOptimizer` or a `ZeroRedundancyOptimizer`. Every rank writes what it owns.
        model: also write the model's state dict, each parameter once.
        extra: numbers, text, lists, tuples, dicts and small tensors, returned unchanged by `load`: the scheduler's
            state, a sampler's position. Ranks may give different ones.
        wait: `False` copies what this rank owns, returns, and writes in the background. A failure is raised on all
            ranks before the next step or save; the returned `PendingSave` can be waited for.
        keep: afterwards remove older complete checkpoints beside this one, but keep this many; at least two.
    """
    view, target = view_of(optimizer), Path(os.path.abspath(path))
    view.saves.finish()
    everyone = view.everyone()
    seats = find_seats(view, everyone)
    # Only here do ranks have several layouts, and then perhaps several models.
    merged = agree_on_entries(model, view, seats, everyone) if len(seats.layouts) > 1 else None
    with agreed(everyone) as agreement:
        _check(target, keep, everyone.rank)
        view.ensure_complete()
        entries = describe_weights(model, view, seats) if merged is None and model is not None else merged
        content = _prepare(_Saved(view, seats, model, entries), target, keep)
        extra_text = _extra_text(extra, everyone.world_size)
        # Copied before this returns: the next step changes the live tensors while the background thread writes.
        if not wait:
            with _reporting_copy_errors(content, everyone.rank):
                content = content.to_host()
        agreement.compare(_facts(view, content, wait), _REMEDY)
    extras = gather_object(everyone, lambda: extra_text, 0)
    if wait:
        _write(everyone, content, extras)
        return None
    return view.saves.begin(lambda transport: _write(transport, content, extras), everyone)


def _extra_text(extra: Any, world_size: int) -> str:
    text, most = json.dumps(encode_value(extra, "extra")), MOST_BYTES // 2 // world_size
    if len(text) > most:
        raise CheckpointError(
            f"extra takes {len(text)} bytes as text, and {most} are all that each of {world_size} ranks can have: keep "
            "large things in the model's buffers, or in files of your own"
        )
    return text


def _check(path: Path, keep: int | None, rank: int) -> None:
    if path.name.startswith("."):
        raise CheckpointError(f"{path.name!r} begins with a dot, as unfinished checkpoints do: choose another name")
    if rank == 0 and os.path.lexists(path):
        raise CheckpointError(_already_exists(path))
    if keep is not None and (not isinstance(keep, int) or keep < _FEWEST_KEPT):
        raise ValueError(f"keep must be at least {_FEWEST_KEPT}, or None to remove nothing; got {keep!r}")


def _already_exists(path: Path) -> str:
    return f"{path} exists already: give each checkpoint a name of its own, such as step-1200"


# ---------------------------------------------------------------------- what this rank will write


@dataclass(frozen=True)
class _Saved:
    """What is saved: an optimizer, the seats of its parts, and where the entries of the model go."""

    view: OptimizerView
    seats: Seats
    model: nn.Module | None
    entries: Entries | None


@dataclass(frozen=True)
class _OwnFile:
    """A file that this rank writes; tensors are views of live ones until `to_host`."""

    number: int
    name: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to_host(self) -> _OwnFile:
        """Return a copy whose tensors are in host memory and shared with nothing."""
        return replace(self, tensors={name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()})


@dataclass(frozen=True)
class _Content:
    """What this rank saves, before it communicates; `most` is how many files a rank writes at most."""

    path: Path
    keep: int | None
    files: tuple[_OwnFile, ...]
    most: int
    manifest: Manifest  # id, extra and files are filled in by rank 0, in _publish

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.nbytes for file in self.files)

    def to_host(self) -> _Content:
        """Return a copy whose tensors are in host memory and shared with nothing."""
        return replace(self, files=tuple(file.to_host() for file in self.files))


def _prepare(saved: _Saved, path: Path, keep: int | None) -> _Content:
    view, seats = saved.view, saved.seats
    manifest = Manifest(
        id="",
        created=time.time_ns(),
        step=view.step,
        ranks=seats.ranks,
        named=view.named,
        params=seats.params,
        layouts=seats.layouts,
        groups=tuple(_groups(view, seats)),
        model=None if saved.entries is None else tuple(saved.entries),
        extra=(),
        files=(),
    )
    if len(manifest.encode()) > MOST_BYTES // 4:  # checked here, where a failure is one of every rank
        raise CheckpointError(
            f"the layout and the options would take more than {MOST_BYTES // 4} bytes in the manifest"
        )
    files = tuple(_own_file(saved, number) for number, seat in enumerate(seats.own) if seat.writes)
    for part, seat in zip(view.parts, seats.own, strict=True):
        if view.crosses and not seat.writes:
            # Asked for on every rank: shared state that is divided over a mesh is collected over it.
            deque(part.param_states(), maxlen=0)
    return _Content(path, keep, files, seats.most, manifest)


def _own_file(saved: _Saved, number: int) -> _OwnFile:
    """The file of one of this rank's parts."""
    tensors: dict[str, Tensor] = {}
    seat, metadata = saved.seats.own[number], _describe_state(saved, number, tensors)
    if saved.model is not None and saved.entries is not None:
        tensors |= own_weights(saved.model, saved.entries, saved.view, saved.seats, number)
    return _OwnFile(saved.seats.file_number(seat), file_name(seat.rank, seat.layout), tensors, metadata)


def _describe_state(saved: _Saved, number: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    def put(tensor: Tensor) -> list[Any]:
        position = len(tensors)
        tensors[f"tensor.{position}"] = tensor.contiguous()
        return ["stored", position]

    seat, state = saved.seats.own[number], []
    stored = saved.seats.stored_in(seat.layout)
    for each in saved.view.parts[number].param_states():
        if each.param not in stored:
            continue
        tensors |= {f"state.{each.param}.{key}": value for key, value in each.per_element.items()}
        shared = {key: encode(value, put, f"state {key!r}") for key, value in each.shared.items()}
        state.append([each.param, each.part.start, each.part.stop, list(each.per_element), shared])
    is_first = (seat.layout, seat.rank) == (0, 0)
    of_none = saved.view.global_state()  # on all ranks: it says on each what is not saved
    global_state = {key: encode(value, put, f"state {key!r}") for key, value in of_none.items() if is_first}
    return {"layout": seat.layout, "rank": seat.rank, "state": state, "others": global_state}


def _groups(view: OptimizerView, seats: Seats) -> list[GroupRecord]:
    members: list[list[int]] = [[] for _ in view.groups]
    for index, param in enumerate(seats.params):
        members[param.group].append(seats.repeats.get(index, index))
    return [
        # Copied: training may change options during a background save.
        GroupRecord(copy_object(own_options(group)), tuple(params), name)
        for group, params, name in zip(view.groups, members, view.optimizer_names, strict=True)
    ]


def _facts(view: OptimizerView, content: _Content, wait: bool) -> list[Fact]:
    model = content.manifest.model
    keys = None if model is None else [entry[:2] for entry in model]
    return [
        Fact("the name of the checkpoint", repr(content.path.name)),
        Fact("the number of steps", str(view.step)),
        Fact("the layout", ", ".join(record.layout.digest() for record in content.manifest.layouts)),
        Fact("the model's state dict", repr(keys)),
        Fact("how to save", f"wait={wait}, keep={content.keep}"),
    ]


# ---------------------------------------------------------------------- writing


def _write(transport: Transport, content: _Content, extras: list[str]) -> None:
    """Write all files and let rank 0 publish the checkpoint; a failure on any rank is raised on all and leaves nothing.

    Collective: all ranks pass the same sequence of `agreed` blocks and all-gathers.
    """
    token = _token(transport)
    draft = draft_of(content.path, token)
    with ExitStack() as lock:  # held until the end: rank 0's lock keeps other jobs from removing the draft
        try:
            with agreed(transport), _reporting_write_errors(content.path, transport.rank):
                if transport.rank == 0:
                    _make_parents(content.path)
                    lock.enter_context(locked_draft(draft))
            _ensure_shared(transport, content.path, draft)
            written = _run_with_heartbeat(transport, lambda: _write_own(content, draft, token))
            with agreed(transport), _reporting_write_errors(content.path, transport.rank):
                records = written.result()
            files = _all_gather_records(transport, content, records)
            with agreed(transport), _reporting_write_errors(content.path, transport.rank):
                if transport.rank == 0:
                    _publish(content, draft, token, extras, files)
        except BaseException:
            if transport.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise


def _ensure_shared(transport: Transport, path: Path, draft: Path) -> None:
    """Raise, on all ranks and before anything is written, if a rank does not see the draft that rank 0 has made."""
    if all(row[0] for row in transport.all_gather_ints([_is_seen(draft)])):
        return
    waited = _run_with_heartbeat(transport, lambda: _wait_until_seen(draft))
    with agreed(transport):
        seen = waited.result()
    blind = [rank for rank, row in enumerate(transport.all_gather_ints([seen])) if not row[0]]
    if blind:
        who = f"ranks {short_list(blind)} do" if len(blind) > 1 else f"rank {blind[0]} does"
        raise CheckpointError(
            f"{path} cannot be saved: {who} not see what rank 0 has made in {path.parent}, so this directory is not "
            "shared by all hosts, and nothing was written: save to a file system that all ranks see, or collect the "
            "state on one rank with optimizer.consolidate_state_dict()"
        )


def _is_seen(draft: Path) -> bool:
    """Whether this rank sees the draft. It must not raise: the other ranks wait for its answer."""
    if os.path.isdir(draft):
        return True
    # A client of NFS remembers for up to a minute that the parent was not there; an attempt to make it asks the server.
    with suppress(OSError):
        draft.parent.mkdir(parents=True, exist_ok=True)
    return os.path.isdir(draft)


def _wait_until_seen(draft: Path) -> bool:
    """Return whether the draft is seen in time; runs in the thread of `_run_with_heartbeat`."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while not (seen := _is_seen(draft)) and time.monotonic() < deadline:
        sleep(0.05)
    return seen


def _run_with_heartbeat(transport: Transport, function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread and return its result when it has ended on all ranks, however unequal they are.

    Meanwhile the ranks exchange small messages: no wait outlasts the group's timeout, and a rank that dies is noticed.
    Must not be called inside `agreed`: after a lost peer, that would send messages which the others do not expect.
    """
    result: Future[T] = Future()
    thread = Thread(target=_run_into, args=(result, function), name="zerostep-write")
    try:
        thread.start()
    except RuntimeError as error:  # no room for a further thread: the others must not wait for this rank's messages
        result.set_exception(error)
    beat = _FIRST_BEAT
    try:
        while True:
            if not result.done():
                thread.join(beat)
            beat = min(1.2 * beat, _LAST_BEAT)
            if all(row[0] for row in transport.all_gather_ints([result.done()])):
                return result
    finally:
        # Also after a lost peer: the thread still writes files that the caller is about to remove.
        if thread.ident is not None:
            thread.join()


def _run_into(result: Future[T], function: Callable[[], T]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)


@contextmanager
def _reporting_copy_errors(content: _Content, rank: int) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise CheckpointError(
            f"{content.path} could not be saved: rank {rank} has no memory for a copy of {content.nbytes} bytes: "
            f"{error}; older checkpoints are intact: save with wait=True, which copies nothing"
        ) from error


@contextmanager
def _reporting_write_errors(path: Path, rank: int) -> Iterator[None]:
    """Convert OSError, which names a hidden directory, into a CheckpointError that names checkpoint and rank.

    The same for a lack of memory, but not for a lost peer.
    """
    try:
        yield
    except (CheckpointError, TransportError):
        raise
    except (OSError, MemoryError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} could not be written: {error} (on rank {rank}); older checkpoints are intact: see "
            "to the disk and the memory, then save again"
        ) from error


def _token(transport: Transport) -> str:
    """Return a random name, drawn by rank 0 for all ranks."""
    row = transport.all_gather_ints([secrets.randbits(62), secrets.randbits(62)])[0]
    return f"{row[0]:016x}{row[1]:016x}"


def _make_parents(path: Path) -> None:
    if os.path.lexists(path):
        raise CheckpointError(_already_exists(path))
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in missing:
        sync_directory(parent.parent)


def _write_own(content: _Content, draft: Path, token: str) -> list[FileRecord]:
    """Write this rank's files; runs in the thread of `_run_with_heartbeat`."""
    records = []
    for file in content.files:
        with progress(f"saving {content.path.name}", file.nbytes, file.number) as advance:
            records.append(write_tensors(draft / file.name, file.tensors, {"id": token, **file.metadata}, advance))
    return records


def _all_gather_records(transport: Transport, content: _Content, records: list[FileRecord]) -> list[FileRecord]:
    """Return the records of all files, in the order of their numbers, on every rank."""
    own = [_to_words(file.number, record) for file, record in zip(content.files, records, strict=True)]
    padded = [*own, *[[-1] + [0] * (_RECORD_WORDS - 1)] * (content.most - len(own))]
    rows = transport.all_gather_ints([word for words in padded for word in words])
    words = [row[at : at + _RECORD_WORDS] for row in rows for at in range(0, len(row), _RECORD_WORDS)]
    places = content.manifest.places
    return [
        _from_words(file_name(places[each[0]][1], places[each[0]][0]), each) for each in sorted(words) if each[0] >= 0
    ]


def _to_words(number: int, record: FileRecord) -> list[int]:
    digest = bytes.fromhex(record.sha256)
    return [number, record.nbytes, *(int.from_bytes(digest[i : i + 8], "big", signed=True) for i in range(0, 32, 8))]


def _from_words(name: str, words: Sequence[int]) -> FileRecord:
    _, nbytes, *digest = words
    return FileRecord(name, nbytes, b"".join(word.to_bytes(8, "big", signed=True) for word in digest).hex())


def _publish(content: _Content, draft: Path, token: str, extras: list[str], files: list[FileRecord]) -> None:
    values = [decode_value(json.loads(text)) for text in extras]
    older = [manifest.created for _, manifest in complete_in(content.path.parent)]
    manifest = replace(
        content.manifest,
        id=token,
        # Later than every checkpoint beside it, even if this host's clock is behind: `latest` sorts by it.
        created=max(content.manifest.created, *(created + 1 for created in older), 0),
        extra=tuple(values if any(text != extras[0] for text in extras) else values[:1]),
        files=tuple(files),
    )
    publish(draft, content.path, manifest)
    if content.keep is not None:
        prune(content.path, content.keep)
