"""The model's state dict in a checkpoint: each parameter written once, by its owners, and loaded in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zerostep.checkpoint.reader import Reader
from zerostep.checkpoint.regions import Region
from zerostep.checkpoint.seats import Seats
from zerostep.checkpoint.tensor_file import TensorFile
from zerostep.comm.agreement import Fact, agreed
from zerostep.comm.objects import broadcast_object, copy_object
from zerostep.comm.transport import Transport
from zerostep.dtensors import is_dtensor, local_of
from zerostep.errors import CheckpointError
from zerostep.optim.view import OptimizerView
from zerostep.plan.blocks import block_of, whole
from zerostep.plan.layout import Span
from zerostep.state.param_state import MASTER, order_of, shaped
from zerostep.tensors import flat_alias, is_dense

Entries = Sequence[tuple[Any, ...]]

_REMEDY = "pass model= to save on every rank, or on none"


def _state_of(model: nn.Module) -> dict[str, Any]:
    """Return the state dict, whose tensors are the model's own."""
    bare = _unwrapped(model)
    state = dict(bare.state_dict(keep_vars=True))
    own = {id(tensor) for tensor in (*bare.parameters(), *bare.buffers())}
    for key, value in state.items():
        if isinstance(value, Tensor) and id(value) not in own and not _is_extra(key):
            raise CheckpointError(
                f"the model makes up {key!r} when it is asked for its state dict, so nothing could be loaded into it: "
                "make it a buffer, or save without model= and keep the weights yourself"
            )
    return state


def _unwrapped(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    inner = getattr(model, "_orig_mod", model)  # torch.compile may wrap DDP, or be wrapped by it
    inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
    bare: nn.Module = getattr(inner, "_orig_mod", inner)
    return bare


# ---------------------------------------------------------------------- writing


def describe_weights(model: nn.Module, view: OptimizerView, seats: Seats) -> Entries:
    """Return where each entry of the model's state dict will be stored; the same on all ranks with the same layouts.

    A parameter of the optimizer is written by its owners, any other parameter by the rank with fewest bytes to write.
    Buffers may differ between ranks and must be consistent with each other, so rank 0 writes all of them. If there are
    several layouts, what this rank describes is in its own file.
    """
    index_of, entries = _whole_indices(view, seats), list[tuple[Any, ...]]()
    shared = len(seats.layouts) == 1
    loads = [0] * (seats.layouts[0].layout.world_size if shared else 1)
    own_file = next((seats.file_number(seat) for seat in seats.own if seat.writes), 0)
    first_key = dict[int, str]()
    for position, (key, value) in enumerate(_state_of(model).items()):
        if not isinstance(value, Tensor):
            entries.append((key, "value", copy_object(value)))  # training may change it during a background save
        elif first_key.setdefault(id(value), key) != key:
            entries.append((key, "same", first_key[id(value)]))
        elif id(value) in index_of:
            entries.append((key, "param", index_of[id(value)]))
        else:
            _refuse_dtensor(key, value)
            rank = loads.index(min(loads)) if isinstance(value, nn.Parameter) else 0
            loads[rank] += value.nbytes
            entries.append((key, "buffer", rank if shared else own_file, position))
    return entries


def _whole_indices(view: OptimizerView, seats: Seats) -> dict[int, int]:
    """The index of each parameter of the optimizer, by its id; of one that is listed twice, the first."""
    found: dict[int, int] = {}
    for part, seat in zip(view.parts, seats.own, strict=True):
        for param, index in zip(part.params, seats.layouts[seat.layout].whole, strict=True):
            found.setdefault(id(param), index)
    return found


def _refuse_dtensor(key: str, value: Tensor) -> None:
    if is_dtensor(value):
        raise CheckpointError(
            f"the model's {key!r} is a DTensor that the optimizer does not hold, so no rank would write it: add it to "
            "the optimizer, frozen or not, or save without model= and keep the weights yourself"
        )


def agree_on_entries(model: nn.Module | None, view: OptimizerView, seats: Seats, everyone: Transport) -> Entries | None:
    """Return the entries of all ranks' models together; a collective.

    Ranks with experts have keys that others do not have. One rank with each layout tells what it has.
    """
    with agreed(everyone) as agreement:
        own = None if model is None else describe_weights(model, view, seats)
        agreement.compare([Fact("whether a model is saved", str(own is not None))], _REMEDY)
    if own is None:
        return None
    merged: dict[str, tuple[Any, ...]] = {}
    for leader in seats.leaders:
        told = broadcast_object(everyone, list(own) if everyone.rank == leader else None, leader, torch.device("cpu"))
        for entry in told:
            merged.setdefault(entry[0], tuple(entry))
    with agreed(everyone):
        for key, kind, *_ in own:
            if key not in merged or (merged[key][1] == "param") != (kind == "param"):
                raise CheckpointError(
                    f"only some of the ranks that divide the same parameters have {key!r} in their model, or in their "
                    "optimizer: build the same model on all of them"
                )
    return tuple(merged.values())


def own_weights(
    model: nn.Module, entries: Entries, view: OptimizerView, seats: Seats, number: int
) -> dict[str, Tensor]:
    """Return the tensors of the file of one of this rank's parts, by name; views of live memory where possible."""
    part, seat = view.parts[number], seats.own[number]
    record, stored = seats.layouts[seat.layout], seats.stored_in(seat.layout)
    with_weights = {rest[0] for _, kind, *rest in entries if kind == "param"}
    tensors = {
        f"model.{each.param}": _flat(local_of(part.params[each.param]))[each.part.start : each.part.stop]
        for each in part.layout.fragments(seat.rank)
        if each.param in stored and record.whole[each.param] in with_weights
    }
    state = _state_of(model)
    for key, kind, *rest in entries:
        if kind == "buffer" and rest[0] == seats.file_number(seat):
            tensors[f"buffer.{rest[1]}"] = state[key].detach().contiguous()
    return tensors


def _flat(tensor: Tensor) -> Tensor:
    return flat_alias(tensor) if is_dense(tensor) else tensor.detach().contiguous().view(-1)


# ---------------------------------------------------------------------- reading


def check_weights(reader: Reader, model: nn.Module, has_all: bool) -> set[int]:
    """Raise `CheckpointError` if the checkpoint has no weights, or those of another model.

    Without `has_all` other ranks may have other keys: return the positions of this rank's among the entries.
    """
    if reader.manifest.model is None:
        raise CheckpointError(f"{reader.path} was saved without model=, so it has no weights to load: load it without")
    state, saved = _state_of(model), {entry[0]: entry for entry in reader.manifest.model}
    for verb, missing in (("lacks", state.keys() - saved.keys()), ("has", saved.keys() - state.keys())):
        if missing and (has_all or verb == "lacks"):
            raise CheckpointError(f"{reader.path} {verb} {min(missing)!r}, unlike the model: build the same model")
    for key, value in state.items():
        if isinstance(value, Tensor) == (saved[key][1] == "value"):
            raise CheckpointError(
                f"{key!r} is a tensor only in the model or only in {reader.path}: build the same model"
            )
        if isinstance(value, Tensor) and not _is_extra(key) and _shape(reader, saved, key) != tuple(value.shape):
            raise CheckpointError(
                f"{key!r} has shape {_shape(reader, saved, key)} in {reader.path} and {tuple(value.shape)} in the "
                "model: build the same model"
            )
    return {position for position, entry in enumerate(reader.manifest.model) if entry[0] in state}


def _shape(reader: Reader, saved: Mapping[str, tuple[Any, ...]], key: str) -> tuple[int, ...] | None:
    _, kind, *rest = saved[key]
    if kind == "same":
        return _shape(reader, saved, rest[0])
    if kind == "param":
        return reader.spec(rest[0]).shape
    return reader.buffer(rest[0], rest[1], TensorFile.shape) if kind == "buffer" else None


def apply_weights(reader: Reader, model: nn.Module) -> None:
    """Overwrite the model's tensors in place, after `check_weights`; an error leaves the model half overwritten."""
    state = _state_of(model)
    with torch.no_grad():
        for key, kind, *rest in reader.manifest.model or ():
            if key in state or _is_extra(key):
                _apply_entry(reader, model, state, (key, kind, *rest))


def _apply_entry(reader: Reader, model: nn.Module, state: Mapping[str, Any], entry: tuple[Any, ...]) -> None:
    key, kind, *rest = entry
    if kind == "param":
        _fill(reader, rest[0], state[key])
    elif kind == "buffer" and _is_extra(key):
        _module_of(model, key).set_extra_state(reader.buffer(*rest))
    elif kind == "buffer":
        block = block_of(state[key])
        local_of(state[key]).copy_(reader.buffer(*rest)[block.inside(whole(block.shape))])
    elif kind == "same" and state[key] is not state[rest[0]]:
        local_of(state[key]).copy_(local_of(state[rest[0]]))
    elif kind == "value":
        _module_of(model, key).set_extra_state(*rest)


def _fill(reader: Reader, index: int, param: Tensor) -> None:
    """Load a parameter; from its masters if they were saved and the dtype differs from the saved one."""
    target = local_of(param)
    region, elements = Region(block_of(param), order_of(target)), Span(0, target.numel())
    if MASTER in reader.per_element_keys(index) and target.dtype != reader.weight_dtype(index):
        values = reader.elements(index, MASTER, elements, region)
    else:
        values = reader.weight(index, elements, region)
    target.copy_(shaped(values, target))


def _is_extra(key: str) -> bool:
    """Whether this is a module's extra state: set by `set_extra_state`, never written in place."""
    return key.rpartition(".")[2] == "_extra_state"


def _module_of(model: nn.Module, key: str) -> nn.Module:
    return _unwrapped(model).get_submodule(key.rpartition(".")[0])
