"""The model's state dict in a checkpoint: each parameter written once, by its owners, and loaded in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zerostep.checkpoint.reader import Reader, in_order
from zerostep.checkpoint.tensor_file import TensorFile
from zerostep.comm.objects import copy_object
from zerostep.errors import CheckpointError
from zerostep.optim.view import OptimizerView
from zerostep.plan.layout import Span
from zerostep.state.param_state import MASTER, shaped
from zerostep.tensors import flat_alias, is_dense

Entries = Sequence[tuple[Any, ...]]


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


def describe_weights(model: nn.Module, view: OptimizerView) -> list[tuple[Any, ...]]:
    """Return where each entry of the model's state dict will be stored; the same on all ranks.

    A parameter of the optimizer is written by its owners, any other parameter by the rank with fewest bytes to write.
    Buffers may differ between ranks and must be consistent with each other, so rank 0 writes all of them.
    """
    index_of = {id(param): index for index, param in reversed(list(enumerate(view.params)))}
    loads, first_key, entries = [0] * view.layout.world_size, dict[int, str](), list[tuple[Any, ...]]()
    for position, (key, value) in enumerate(_state_of(model).items()):
        if not isinstance(value, Tensor):
            entries.append((key, "value", copy_object(value)))  # training may change it during a background save
        elif first_key.setdefault(id(value), key) != key:
            entries.append((key, "same", first_key[id(value)]))
        elif id(value) in index_of:
            entries.append((key, "param", index_of[id(value)]))
        else:
            rank = loads.index(min(loads)) if isinstance(value, nn.Parameter) else 0
            loads[rank] += value.nbytes
            entries.append((key, "buffer", rank, position))
    return entries


def own_weights(model: nn.Module, entries: Entries, view: OptimizerView) -> dict[str, Tensor]:
    """Return the tensors that this rank writes, by their names in the file; views of live memory where possible."""
    state, parts = _state_of(model), {each.param: each.part for each in view.layout.fragments(view.rank)}
    tensors = {}
    for key, kind, *rest in entries:
        if kind == "param" and rest[0] in parts:
            part = parts[rest[0]]
            tensors[f"model.{rest[0]}"] = _flat(state[key])[part.start : part.stop]
        elif kind == "buffer" and rest[0] == view.rank:
            tensors[f"buffer.{rest[1]}"] = state[key].detach().contiguous()
    return tensors


def _flat(tensor: Tensor) -> Tensor:
    return flat_alias(tensor) if is_dense(tensor) else tensor.detach().contiguous().view(-1)


# ---------------------------------------------------------------------- reading


def check_weights(reader: Reader, model: nn.Module) -> None:
    """Raise `CheckpointError` if the checkpoint has no weights, or those of another model."""
    if reader.manifest.model is None:
        raise CheckpointError(f"{reader.path} was saved without model=, so it has no weights to load: load it without")
    state, saved = _state_of(model), {entry[0]: entry for entry in reader.manifest.model}
    for verb, missing in (("lacks", state.keys() - saved.keys()), ("has", saved.keys() - state.keys())):
        if missing:
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
            if kind == "param":
                _fill(reader, rest[0], state[key])
            elif kind == "buffer" and _is_extra(key):
                _module_of(model, key).set_extra_state(reader.buffer(*rest))
            elif kind == "buffer":
                state[key].copy_(reader.buffer(*rest))
            elif kind == "same" and state[key] is not state[rest[0]]:
                state[key].copy_(state[rest[0]])
            elif kind == "value":
                _module_of(model, key).set_extra_state(*rest)


def _fill(reader: Reader, index: int, target: Tensor) -> None:
    """Load a parameter; from its masters if they were saved and the dtype differs from the saved one."""
    whole = Span(0, target.numel())
    read = partial(reader.weight, index)
    if MASTER in reader.per_element_keys(index) and target.dtype != reader.weight_dtype(index):
        read = partial(reader.elements, index, MASTER)
    target.copy_(shaped(in_order(reader, index, target, whole, read), target))


def _is_extra(key: str) -> bool:
    """Whether this is a module's extra state: set by `set_extra_state`, never written in place."""
    return key.rpartition(".")[2] == "_extra_state"


def _module_of(model: nn.Module, key: str) -> nn.Module:
    return _unwrapped(model).get_submodule(key.rpartition(".")[0])
