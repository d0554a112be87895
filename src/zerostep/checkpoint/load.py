"""`load`: restore an optimizer from a checkpoint of any world size, optimizer class of zerostep and partition."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from zerostep.checkpoint.directory import complete_in, read_manifest
from zerostep.checkpoint.manifest import Manifest
from zerostep.checkpoint.progress import progress
from zerostep.checkpoint.reader import Reader, StoredState, verify
from zerostep.checkpoint.weights import apply_weights, check_weights
from zerostep.comm.agreement import Fact, agreed
from zerostep.comm.stall_watch import stall_limit, watch
from zerostep.comm.transport import NullTransport, calling, connect, control_of
from zerostep.errors import CheckpointError
from zerostep.optim.view import OptimizerView, applying, view_of
from zerostep.plan.layout import ParamSpec
from zerostep.state.consolidate import pack_groups

_REMEDY = "let all ranks load the same checkpoint, from a file system that all of them share"
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
    everyone = view.everyone
    view.saves.finish()
    with agreed(everyone) as agreement:
        manifest = read_manifest(source)
        agreement.compare([Fact("the checkpoint", f"{source.name!r}, {manifest.id}")], _REMEDY)
    with agreed(everyone):
        # Each rank verifies some of the files; `agreed` makes a failure one of all ranks.
        files = range(everyone.rank, len(manifest.files), everyone.world_size)
        total = sum(manifest.files[rank].nbytes for rank in files)
        with progress(f"verifying {source.name}", total, everyone.rank) as advance:
            verify(source, manifest, files, advance)
    with agreed(everyone):
        reader = Reader(source, manifest)
    _apply(reader, view, model)
    extras = manifest.extra
    own = extras[everyone.rank] if len(extras) == everyone.world_size > 1 else extras[0] if extras else None
    return Checkpoint(source, manifest.step, manifest.layout.world_size, own, extras)


def _apply(reader: Reader, view: OptimizerView, model: nn.Module | None) -> None:
    with agreed(view.everyone):
        saved_index = _match(reader.manifest, view)
        if model is not None:
            check_weights(reader, model)
        states = {
            ours: StoredState(reader, theirs, view.params[ours], with_weights=model is not None)
            for ours, theirs in saved_index.items()
        }
        saved = {index: state for index, state in states.items() if state.names()}
        chosen = [dict(group.options) for group in reader.manifest.groups]
        commit = view.restore(saved, reader.global_state(), chosen, reader.manifest.step)
    with applying(view, f"loading {reader.path}"):
        if model is not None:
            apply_weights(reader, model)
        commit()


# ---------------------------------------------------------------------- matching parameters


def _match(manifest: Manifest, view: OptimizerView) -> dict[int, int]:
    """Return the index in the checkpoint of each parameter of the optimizer."""
    ours, theirs = view.layout.params, manifest.layout.params
    _check_groups(manifest, view)
    if manifest.named and view.named:
        saved_index = _by_name(manifest, view)
    elif len(ours) == len(theirs):
        saved_index = {index: index for index in range(len(ours))}
    else:
        raise CheckpointError(
            f"the checkpoint has {len(theirs)} parameters, the optimizer {len(ours)}, and not both know their names: "
            "build the same optimizer"
        )
    for index, saved in saved_index.items():
        _check_alike(ours[index], theirs[saved])
    return saved_index


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


def _by_name(manifest: Manifest, view: OptimizerView) -> dict[int, int]:
    known = _index_of(manifest.layout.params, (group.params for group in manifest.groups))
    wanted = _index_of(view.layout.params, (group["params"] for group in pack_groups(view.groups)))
    for verb, missing in (("lacks", wanted.keys() - known.keys()), ("has", known.keys() - wanted.keys())):
        if missing:
            raise CheckpointError(
                f"the checkpoint {verb} parameter {min(missing)!r}, unlike the optimizer: build the same model"
            )
    return {index: known[name] for name, index in wanted.items()}


def _index_of(specs: Sequence[ParamSpec], groups: Iterable[Sequence[int]]) -> dict[str, int]:
    """Return the index of each parameter in the groups by its name."""
    return {name: index for index, name in bare_names(specs, sorted(set(chain.from_iterable(groups)))).items()}


def bare_names(specs: Sequence[ParamSpec], indices: Sequence[int]) -> dict[int, str]:
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


def _check_alike(ours: ParamSpec, theirs: ParamSpec) -> None:
    if ours.shape != theirs.shape:
        raise CheckpointError(
            f"parameter {ours.name!r} has shape {ours.shape}, {theirs.name!r} in the checkpoint has {theirs.shape}: "
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
