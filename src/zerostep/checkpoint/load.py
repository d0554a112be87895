"""`load`: restore an optimizer from a checkpoint of any world size, optimizer class of zerostep and partition."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain
from operator import or_
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from zerostep.checkpoint.directory import complete_in, read_manifest
from zerostep.checkpoint.layouts import WholeParam
from zerostep.checkpoint.manifest import Manifest
from zerostep.checkpoint.progress import progress
from zerostep.checkpoint.reader import Reader, StoredState, verify
from zerostep.checkpoint.regions import Region
from zerostep.checkpoint.weights import apply_weights, check_weights
from zerostep.comm.agreement import Fact, agreed
from zerostep.comm.stall_watch import stall_limit, watch
from zerostep.comm.transport import NullTransport, Transport, calling, connect, control_of
from zerostep.dtensors import local_of
from zerostep.errors import CheckpointError
from zerostep.optim.view import OptimizerView, ViewPart, applying, view_of
from zerostep.plan.layout import ParamSpec
from zerostep.state.param_state import SavedState, order_of

_REMEDY = "let all ranks load the same checkpoint, from a file system that all of them share"
_BITS = 62  # of an integer that is sent
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    `extra` is what this rank saved, or what rank 0 saved if the number of ranks has changed; `extras` has all of them.
    """

    path: Path
    step: int
    world_size: int
    extra: Any
    extras: tuple[Any, ...]


@calling("load")
def load(path: str | os.PathLike[str], optimizer: Any, model: nn.Module | None = None) -> Checkpoint:
    """Load a checkpoint that `save` wrote, at any world size. All ranks call it.

    Everything is verified before anything is applied; a bad checkpoint raises `CheckpointError` on every rank and
    leaves optimizer and model as they were.
    """
    view, source = view_of(optimizer), Path(os.path.abspath(path))
    view.saves.finish()
    everyone = view.everyone()
    with agreed(everyone) as agreement:
        manifest = read_manifest(source)
        agreement.compare([Fact("the checkpoint", f"{source.name!r}, {manifest.id}")], _REMEDY)
    with agreed(everyone):
        # Each rank verifies some of the files; `agreed` makes a failure one of all ranks.
        files = range(everyone.rank, len(manifest.files), everyone.world_size)
        total = sum(manifest.files[number].nbytes for number in files)
        with progress(f"verifying {source.name}", total, everyone.rank) as advance:
            verify(source, manifest, files, advance)
    with agreed(everyone):
        reader = Reader(source, manifest)
    _apply(reader, view, everyone, model)
    extras = manifest.extra
    own = extras[everyone.rank] if len(extras) == everyone.world_size > 1 else extras[0] if extras else None
    return Checkpoint(source, manifest.step, manifest.ranks, own, extras)


def _apply(reader: Reader, view: OptimizerView, everyone: Transport, model: nn.Module | None) -> None:
    has_all = len(view.parts) == 1  # otherwise other ranks may have other parameters
    if not has_all:
        _check_all_taken(reader, view, everyone, model)
    with agreed(everyone):
        matched = _match(reader.manifest, view, has_all)
        if model is not None:
            check_weights(reader, model, has_all)
        states = [
            _states(reader, part, saved_index, model is not None)
            for part, saved_index in zip(view.parts, matched, strict=True)
        ]
        chosen = [dict(group.options) for group in reader.manifest.groups]
        commit = view.restore(states, reader.global_state(), chosen, reader.manifest.step)
    with applying(view, everyone, f"loading {reader.path}"):
        if model is not None:
            apply_weights(reader, model)
        commit()


def _states(
    reader: Reader, part: ViewPart, saved_index: Mapping[int, int], with_weights: bool
) -> dict[int, SavedState]:
    """The saved state of each parameter of a part that has some."""
    states: dict[int, SavedState] = {}
    blocks = part.blocks
    for ours, theirs in saved_index.items():
        local = local_of(part.params[ours])
        state = StoredState(reader, theirs, Region(blocks[ours], order_of(local)), local, with_weights)
        if state.names():
            states[ours] = state
    return states


# ---------------------------------------------------------------------- matching parameters


def _match(manifest: Manifest, view: OptimizerView, has_all: bool) -> list[dict[int, int]]:
    """Return for each part the index in the checkpoint of each parameter."""
    _check_groups(manifest, view)
    count = sum(len(part.params) for part in view.parts)
    if manifest.named and view.named:
        matched = _by_name(manifest, view, has_all)
    elif count == len(manifest.params) and has_all:
        matched = [{index: index for index in range(count)}]
    else:
        raise CheckpointError(
            f"the checkpoint has {len(manifest.params)} parameters, the optimizer {count}, and not both know their "
            "names: build the same optimizer"
        )
    for part, saved_index in zip(view.parts, matched, strict=True):
        blocks = part.blocks
        for index, saved in saved_index.items():
            _check_alike(part.layout.params[index], blocks[index].shape, manifest.params[saved])
    return matched


def _check_all_taken(reader: Reader, view: OptimizerView, everyone: Transport, model: nn.Module | None) -> None:
    """Raise on all ranks if the checkpoint has a parameter or a key of a model that no rank has; a collective."""
    names = [param.name for param in reader.manifest.params]
    names += [] if model is None else [entry[0] for entry in reader.manifest.model or ()]
    with agreed(everyone):
        own = {theirs for part in _match(reader.manifest, view, False) for theirs in part.values()}
        keys = set[int]() if model is None else check_weights(reader, model, False)
    own |= {len(reader.manifest.params) + position for position in keys}
    rows = everyone.all_gather_ints(_packed([number in own for number in range(len(names))]))
    words = [reduce(or_, column) for column in zip(*rows, strict=True)]
    for number, name in enumerate(names):
        if not words[number // _BITS] >> number % _BITS & 1:
            raise CheckpointError(f"the checkpoint has {name!r}, and no rank has it: build the same model")


def _packed(flags: Sequence[bool]) -> list[int]:
    return [
        sum(flag << bit for bit, flag in enumerate(flags[start : start + _BITS]))
        for start in range(0, max(len(flags), 1), _BITS)
    ]


def _check_groups(manifest: Manifest, view: OptimizerView) -> None:
    if len(manifest.groups) != len(view.groups):
        raise CheckpointError(
            f"the checkpoint has {len(manifest.groups)} parameter groups, the optimizer has {len(view.groups)}: "
            "build the same groups"
        )
    for index, (group, name) in enumerate(zip(manifest.groups, view.optimizer_names, strict=True)):
        if group.optimizer_name != name:
            raise CheckpointError(
                f"group {index} was optimized by {group.optimizer_name} and is now by {name}, which cannot use its "
                "state: build the same optimizer"
            )


def _by_name(manifest: Manifest, view: OptimizerView, has_all: bool) -> list[dict[int, int]]:
    saved = bare_names(manifest.params, sorted(set(chain.from_iterable(group.params for group in manifest.groups))))
    known = {name: index for index, name in saved.items()}
    live = names_of(view)
    wanted = {name for names in live for name in names.values()}
    for verb, missing in (("lacks", wanted - known.keys()), ("has", known.keys() - wanted)):
        if missing and (has_all or verb == "lacks"):
            raise CheckpointError(
                f"the checkpoint {verb} parameter {min(missing)!r}, unlike the optimizer: build the same model"
            )
    return [{index: known[name] for index, name in names.items()} for names in live]


def names_of(view: OptimizerView) -> list[dict[int, str]]:
    """Return for each part the names of its parameters, without prefixes of wrappers; one listed twice has one name."""
    specs = [spec for part in view.parts for spec in part.layout.params]
    first: dict[int, int] = {}
    for index, param in enumerate(chain.from_iterable(part.params for part in view.parts)):
        first.setdefault(id(param), index)
    names = bare_names(specs, list(first.values()))
    starts = accumulate((len(part.params) for part in view.parts), initial=0)
    return [
        {index: names[start + index] for index in range(len(part.params)) if start + index in names}
        for start, part in zip(starts, view.parts, strict=False)
    ]


def bare_names(specs: Sequence[ParamSpec] | Sequence[WholeParam], indices: Sequence[int]) -> dict[int, str]:
    """Return the names of these parameters by index; `CheckpointError` if two are equal.

    A prefix that a wrapper such as DDP gives to all names is removed.
    """
    names = {index: specs[index].name for index in indices}
    while names and any(all(name.startswith(wrapper) for name in names.values()) for wrapper in _WRAPPERS):
        names = {index: name.partition(".")[2] for index, name in names.items()}
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    if twice:
        raise CheckpointError(f"two parameters are called {twice[0]!r}: give each a name of its own, or none to any")
    return names


def _check_alike(ours: ParamSpec, shape: tuple[int, ...], theirs: WholeParam) -> None:
    if shape != theirs.shape:
        raise CheckpointError(
            f"parameter {ours.name!r} has shape {shape}, {theirs.name!r} in the checkpoint has {theirs.shape}: "
            "build the same model"
        )
    if ours.group != theirs.group:
        raise CheckpointError(
            f"parameter {ours.name!r} is in group {ours.group}, and was in group {theirs.group}: build the same groups"
        )


# ---------------------------------------------------------------------- the newest checkpoint


@calling("latest")
def latest(root: str | os.PathLike[str], process_group: dist.ProcessGroup | None = None) -> Path | None:
    """Return the newest complete checkpoint in a directory, or `None`. All ranks call it if there is a process group.

    Raises if ranks see different ones. A complete checkpoint has all its files in the right sizes; `load` also compares
    the checksums.
    """
    group = process_group if process_group is not None or not dist.is_initialized() else dist.group.WORLD
    transport = NullTransport() if group is None else connect(group)
    watch(transport.presence, "zerostep", stall_limit("default"))
    transport = control_of(transport)
    with agreed(transport) as agreement:
        newest = complete_in(Path(os.path.abspath(root)))[-1:]
        description = "".join(f"{path.name!r}, {manifest.id}" for path, manifest in newest) or "none"
        agreement.compare([Fact("the newest checkpoint", description)], _REMEDY)
    return newest[0][0] if newest else None
