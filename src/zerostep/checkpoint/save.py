"""`save`: every rank writes what it owns, and the checkpoint appears when all have."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from torch import Tensor, nn

from zerostep.checkpoint.directory import claimed, complete_in, draft_of, prune, publish
from zerostep.checkpoint.manifest import (
    MOST_BYTES,
    FileRecord,
    GroupRecord,
    Manifest,
    file_name,
    put_small,
    take_small,
)
from zerostep.checkpoint.progress import progress
from zerostep.checkpoint.tensor_file import sync_directory, write_tensors
from zerostep.checkpoint.weights import describe_weights, own_weights
from zerostep.comm.agreement import Fact, agreed
from zerostep.comm.background import PendingSave
from zerostep.comm.codec import decode, encode
from zerostep.comm.objects import copy_object, gather_object
from zerostep.comm.transport import Transport
from zerostep.errors import CheckpointError
from zerostep.optim.view import OptimizerView, view_of
from zerostep.plan.groups import own_options
from zerostep.state.param_state import order_of
from zerostep.state.state_dict import pack_groups
from zerostep.tensors import is_dense

__all__ = ["save"]

_REMEDY = "save the same optimizer and model, under the same name, on every rank"
_FEWEST = 2
_SEEN_SECONDS = 10
_FIRST_BEAT, _LAST_BEAT = 0.002, 0.5  # seconds: what is quick should not wait, and what takes long need not hurry

T = TypeVar("T")


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
        path: the directory to make, on a file system that all ranks see. It must not exist yet.
        optimizer: a `ShardedOptimizer` or a `ZeroRedundancyOptimizer`. Every rank writes what it owns.
        model: also write the model's state dict, each parameter once.
        extra: numbers, text, lists, tuples, dicts and small tensors, for `load` to return as they are: the scheduler's
            state, a sampler's position. Ranks may give different ones.
        wait: `False` copies what this rank owns, returns, and writes in the background. A failure is raised on all
            ranks before the next step or save; the returned `PendingSave` can be waited for.
        keep: afterwards remove older complete checkpoints beside this one, but keep this many; at least two.
    """
    view, target = view_of(optimizer), Path(os.path.abspath(path))
    view.saves.finish()
    with agreed(view.everyone) as agreement:
        _check(target, keep, view.everyone.rank)
        view.settle()
        draft = _drafted(view, target, model, keep)
        extra_text = _extra_text(extra, view.everyone.world_size)
        draft = draft if wait else draft.copied()
        agreement.facts, agreement.remedy = _facts(view, draft, wait), _REMEDY
    extras = gather_object(view.everyone, lambda: extra_text, 0)
    if wait:
        _write(view.everyone, draft, extras)
        return None
    return view.saves.begin(lambda transport: _write(transport, draft, extras))


def _extra_text(extra: Any, world_size: int) -> str:
    text, most = json.dumps(encode(extra, put_small, "extra")), MOST_BYTES // 2 // world_size
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
        raise CheckpointError(_taken(path))
    if keep is not None and (not isinstance(keep, int) or keep < _FEWEST):
        raise ValueError(f"keep must be at least {_FEWEST}, or None to remove nothing; got {keep!r}")


def _taken(path: Path) -> str:
    return f"{path} exists already: give each checkpoint a name of its own, such as step-1200"


# ---------------------------------------------------------------------- what is written


@dataclass(frozen=True)
class _Draft:
    """Everything that a save needs and that does not depend on other ranks; tensors are views of live ones."""

    path: Path
    keep: int | None
    rank: int
    writes: bool
    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]
    manifest: Manifest  # without id, extra and files

    def copied(self) -> _Draft:
        """The same with tensors of its own, in host memory."""
        return _Draft(
            **{**vars(self), "tensors": {name: each.to("cpu", copy=True) for name, each in self.tensors.items()}}
        )


def _drafted(view: OptimizerView, path: Path, model: nn.Module | None, keep: int | None) -> _Draft:
    entries = None if model is None else tuple(describe_weights(model, view))
    tensors: dict[str, Tensor] = {}
    about = _describe_state(view, tensors) if view.writes else {}
    if model is not None and entries is not None and view.writes:
        tensors |= own_weights(model, entries, view)
    orders = {number: order_of(param) for number, param in enumerate(view.params) if not param.is_contiguous()}
    manifest = Manifest(
        id="",
        created=time.time_ns(),
        step=view.step,
        layout=view.layout,
        named=view.named,
        orders={number: order for number, order in orders.items() if is_dense(view.params[number])},
        groups=tuple(_groups(view)),
        model=entries,
        extra=(),
        files=(),
    )
    if len(manifest.encode()) > MOST_BYTES // 4:  # what cannot be written is an error now, and on every rank
        raise CheckpointError(
            f"the layout and the options would take more than {MOST_BYTES // 4} bytes in the manifest"
        )
    return _Draft(path, keep, view.rank, view.writes, tensors, about, manifest)


def _describe_state(view: OptimizerView, tensors: dict[str, Tensor]) -> dict[str, Any]:
    def put(tensor: Tensor) -> list[Any]:
        place = f"tensor.{len(tensors)}"
        tensors[place] = tensor.contiguous()
        return ["stored", int(place.removeprefix("tensor."))]

    state = []
    for share in view.shares():
        tensors |= {f"state.{share.param}.{key}": value for key, value in share.per_element.items()}
        rest = {key: encode(value, put, f"state {key!r}") for key, value in share.shared.items()}
        state.append([share.param, share.part.start, share.part.stop, list(share.per_element), rest])
    others = {key: encode(value, put, f"state {key!r}") for key, value in view.others().items()}
    return {"rank": view.rank, "state": state, "others": others if view.rank == 0 else {}}


def _groups(view: OptimizerView) -> list[GroupRecord]:
    packed = pack_groups(view.groups)
    return [
        GroupRecord(
            copy_object(own_options(group)),  # a background save must not see what they become
            tuple(group["params"]),
            kind,
        )
        for group, kind in zip(packed, view.kinds, strict=True)
    ]


def _facts(view: OptimizerView, draft: _Draft, wait: bool) -> list[Fact]:
    model = draft.manifest.model
    keys = None if model is None else [entry[:2] for entry in model]
    return [
        Fact("the name of the checkpoint", repr(draft.path.name)),
        Fact("the number of steps", str(view.step)),
        Fact("the layout", view.layout.digest()),
        Fact("the model's state dict", repr(keys)),
        Fact("how to save", f"wait={wait}, keep={draft.keep}"),
    ]


# ---------------------------------------------------------------------- writing it


def _write(transport: Transport, draft: _Draft, extras: list[str]) -> None:
    """Together: make room, write, and let rank 0 publish. A failure anywhere is one everywhere, and leaves nothing."""
    token = _token(transport)
    place = draft_of(draft.path, token)
    with ExitStack() as claim:
        try:
            with agreed(transport), _telling_of(draft.path):
                if transport.rank == 0:
                    _make_room(draft.path)
                    claim.enter_context(claimed(place))
            written = _run_with_heartbeat(transport, lambda: _write_own(draft, place, token))
            with agreed(transport), _telling_of(draft.path):
                record = written.result()
            files = _exchange(transport, draft, record)
            with agreed(transport), _telling_of(draft.path):
                if transport.rank == 0:
                    _publish(draft, place, token, extras, files)
        except BaseException:
            if transport.rank == 0:
                shutil.rmtree(place, ignore_errors=True)
            raise


def _run_with_heartbeat(transport: Transport, act: Callable[[], T]) -> Future[T]:
    """Do something that takes some ranks much longer than others: all ask each other again and again who is done.

    Not inside of `agreed`: who misses a rank here must not send others what they do not expect.

    Nobody waits for a word longer than a moment, so no time-out of the group strikes, and whoever is gone is missed.
    """
    done: Future[T] = Future()
    thread = Thread(target=_fulfil, args=(done, act), name="zerostep-write")
    thread.start()
    beat = _FIRST_BEAT
    try:
        while True:
            thread.join(beat)
            beat = min(1.2 * beat, _LAST_BEAT)
            if all(row[0] for row in transport.all_gather_ints([done.done()])):
                return done
    finally:
        thread.join()


def _fulfil(done: Future[T], act: Callable[[], T]) -> None:
    try:
        done.set_result(act())
    except BaseException as error:
        done.set_exception(error)


@contextmanager
def _telling_of(path: Path) -> Iterator[None]:
    """The system's own errors name a hidden directory; ours the checkpoint, and what can be done."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error}; older checkpoints are intact: see to the disk, then save again"
        ) from error


def _token(transport: Transport) -> str:
    """A name that rank 0 draws for all."""
    row = transport.all_gather_ints([secrets.randbits(62), secrets.randbits(62)])[0]
    return f"{row[0]:016x}{row[1]:016x}"


def _make_room(path: Path) -> None:
    if os.path.lexists(path):
        raise CheckpointError(_taken(path))
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in missing:
        sync_directory(parent.parent)


def _write_own(draft: _Draft, place: Path, token: str) -> FileRecord | None:
    deadline = time.monotonic() + _SEEN_SECONDS
    while not place.is_dir() and time.monotonic() < deadline:
        time.sleep(0.05)  # a shared file system may tell other hosts a little later
    if not place.is_dir():
        raise CheckpointError(f"{place} is not seen by every rank: save to a file system that all ranks share")
    if not draft.writes:
        return None
    total = sum(tensor.nbytes for tensor in draft.tensors.values())
    with progress(f"saving {draft.path.name}", total, draft.rank) as advance:
        return write_tensors(place / file_name(draft.rank), draft.tensors, {"id": token, **draft.about}, advance)


def _exchange(transport: Transport, draft: _Draft, record: FileRecord | None) -> list[FileRecord]:
    """What every rank wrote, in rank order, on every rank."""
    words = [-1, 0, 0, 0, 0, 0]
    if record is not None:
        digest = bytes.fromhex(record.sha256)
        words = [
            draft.rank,
            record.nbytes,
            *(int.from_bytes(digest[i : i + 8], "big", signed=True) for i in range(0, 32, 8)),
        ]
    rows = sorted(row for row in transport.all_gather_ints(words) if row[0] >= 0)
    return [
        FileRecord(file_name(rank), nbytes, b"".join(word.to_bytes(8, "big", signed=True) for word in digest).hex())
        for rank, nbytes, *digest in rows
    ]


def _publish(draft: _Draft, place: Path, token: str, extras: list[str], files: list[FileRecord]) -> None:
    found = [decode(json.loads(text), lambda kind, items: take_small(*items)) for text in extras]
    older = [manifest.created for _, manifest in complete_in(draft.path.parent)]
    manifest = Manifest(
        **{
            **vars(draft.manifest),
            "id": token,
            "created": max(draft.manifest.created, *(each + 1 for each in older), 0),
            "extra": tuple(found if any(text != extras[0] for text in extras) else found[:1]),
            "files": tuple(files),
        }
    )
    publish(place, draft.path, manifest)
    if draft.keep is not None:
        prune(draft.path, draft.keep)
