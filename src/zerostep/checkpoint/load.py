"""`load`: a checkpoint into an optimizer, whatever world size, class and partition either of them has."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from zerostep.checkpoint.directory import newest, read_manifest
from zerostep.checkpoint.manifest import Manifest
from zerostep.checkpoint.progress import progress
from zerostep.checkpoint.reader import Reader, StoredState, verify
from zerostep.checkpoint.weights import apply_weights, check_weights
from zerostep.comm.agreement import Fact, agreed
from zerostep.comm.transport import NullTransport, connect
from zerostep.errors import CheckpointError
from zerostep.optim.view import OptimizerView, view_of
from zerostep.plan.layout import ParamSpec
from zerostep.state.state_dict import pack_groups

__all__ = ["Checkpoint", "bare_names", "latest", "load"]

_REMEDY = "let all ranks load the same checkpoint, from a file system that all of them share"
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded: `extra` is what this rank saved, or rank 0 if there were other numbers of ranks."""

    path: Path
    step: int
    world_size: int
    extra: Any
    extras: tuple[Any, ...]


def load(path: str | os.PathLike[str], optimizer: Any, model: nn.Module | None = None) -> Checkpoint:
    """Load a checkpoint that `save` wrote, at any world size. All ranks call it.

    Everything is verified before anything is applied; whatever is wrong is a `CheckpointError` on every rank, and
    leaves optimizer and model as they were.
    """
    view, source = view_of(optimizer), Path(os.path.abspath(path))
    everyone = view.everyone
    view.saves.finish()
    with agreed(everyone) as agreement:
        manifest = read_manifest(source)
        agreement.facts = [Fact("the checkpoint", f"{source.name!r}, {manifest.id}")]
        agreement.remedy = _REMEDY
    with agreed(everyone):
        files = range(everyone.rank, len(manifest.files), everyone.world_size)
        total = sum(manifest.files[number].nbytes for number in files)
        with progress(f"verifying {source.name}", total, everyone.rank) as advance:
            verify(source, manifest, files, advance)
    with agreed(everyone):
        reader = Reader(source, manifest)
    _apply(reader, view, model)
    return _about(source, manifest, everyone.rank, everyone.world_size)


def _apply(reader: Reader, view: OptimizerView, model: nn.Module | None) -> None:
    with agreed(view.everyone):
        numbers = _match(reader.manifest, view)
        if model is not None:
            check_weights(reader, model)
        found = {
            ours: StoredState(reader, theirs, view.params[ours], with_weights=model is not None)
            for ours, theirs in numbers.items()
        }
        saved = {number: state for number, state in found.items() if state.names()}
        chosen = [dict(group.options) for group in reader.manifest.groups]
        commit = view.restore(saved, reader.others(), chosen, reader.manifest.step)
    try:
        with agreed(view.everyone):
            if model is not None:
                apply_weights(reader, model)
            commit()
    except BaseException as error:
        # Here or on another rank: nobody can say what has been applied.
        view.spoil(f"loading {reader.path} failed half-way: {error}")
        raise


def _about(path: Path, manifest: Manifest, rank: int, world_size: int) -> Checkpoint:
    extras = manifest.extra
    own = extras[rank] if len(extras) == world_size > 1 else extras[0] if extras else None
    return Checkpoint(path, manifest.step, manifest.layout.world_size, own, extras)


# ---------------------------------------------------------------------- which parameter is which


def _match(manifest: Manifest, view: OptimizerView) -> dict[int, int]:
    """The number in the checkpoint of each parameter of the optimizer."""
    ours, theirs = view.layout.params, manifest.layout.params
    _check_groups(manifest, view)
    if manifest.named and view.named:
        found = _by_name(manifest, view)
    elif len(ours) == len(theirs):
        found = {number: number for number in range(len(ours))}
    else:
        raise CheckpointError(
            f"the checkpoint has {len(theirs)} parameters, the optimizer {len(ours)}, and not both know their names: "
            "build the same optimizer"
        )
    for number, other in found.items():
        _check_alike(ours[number], theirs[other])
    return found


def _check_groups(manifest: Manifest, view: OptimizerView) -> None:
    if len(manifest.groups) != len(view.groups):
        raise CheckpointError(
            f"the checkpoint has {len(manifest.groups)} parameter groups, the optimizer has {len(view.groups)}: "
            "build the same groups"
        )
    for number, (group, kind) in enumerate(zip(manifest.groups, view.kinds, strict=True)):
        if group.kind != kind:
            raise CheckpointError(
                f"group {number} was optimized by {group.kind} and is now by {kind}, which cannot use its state: build "
                "the same optimizer"
            )


def _by_name(manifest: Manifest, view: OptimizerView) -> dict[int, int]:
    ours, theirs = view.layout.params, manifest.layout.params
    known = {name: number for number, name in bare_names(theirs, _listed(manifest)).items()}
    wanted = {name: number for number, name in bare_names(ours, _held(view)).items()}
    for story, missing in (("lacks", wanted.keys() - known.keys()), ("has", known.keys() - wanted.keys())):
        if missing:
            raise CheckpointError(
                f"the checkpoint {story} parameter {min(missing)!r}, unlike the optimizer: build the same model"
            )
    return {number: known[name] for name, number in wanted.items()}


def _held(view: OptimizerView) -> list[int]:
    """The numbers of the optimizer's parameters, each once."""
    return sorted({number for group in pack_groups(view.groups) for number in group["params"]})


def _listed(manifest: Manifest) -> list[int]:
    return sorted({number for group in manifest.groups for number in group.params})


def bare_names(specs: Sequence[ParamSpec], numbers: Sequence[int]) -> dict[int, str]:
    """The names of some parameters, without the prefixes of wrappers, which all of them have; `CheckpointError` if two
    are called the same.
    """
    found = {number: specs[number].name for number in numbers}
    while found and any(all(name.startswith(wrapper) for name in found.values()) for wrapper in _WRAPPERS):
        found = {number: name.partition(".")[2] for number, name in found.items()}
    twice = [name for name, count in Counter(found.values()).items() if count > 1]
    if twice:
        raise CheckpointError(f"two parameters are called {twice[0]!r}: give each a name of its own, or none to any")
    return found


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


# ---------------------------------------------------------------------- which checkpoint


def latest(root: str | os.PathLike[str], process_group: dist.ProcessGroup | None = None) -> Path | None:
    """The newest complete checkpoint in a directory, or `None`. If there is a process group, all its ranks call it.

    Ranks that see different ones raise. What is complete has all its files in their sizes; `load` verifies the rest.
    """
    group = process_group if process_group is not None or not dist.is_initialized() else dist.group.WORLD
    transport = NullTransport() if group is None else connect(group)
    with agreed(transport) as agreement:
        found = newest(Path(os.path.abspath(root)))
        chosen = "none" if found is None else f"{found[0].name!r}, {found[1].id}"
        agreement.facts, agreement.remedy = [Fact("the newest checkpoint", chosen)], _REMEDY
    return None if found is None else found[0]
