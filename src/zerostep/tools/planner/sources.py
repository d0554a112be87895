"""Load a model's parameters as meta tensors: from a factory, a safetensors file or index, or a named shape."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zerostep.checkpoint.tensor_file import SAFETENSORS_DTYPES
from zerostep.dtensors import local_of
from zerostep.tools.errors import PlanError
from zerostep.tools.planner.shapes import NAMED_SHAPES

_WANTED = "give package.module:factory, a .safetensors file, an index .safetensors.index.json, or one of " + ", ".join(
    NAMED_SHAPES
)
_MAX_HEADER_BYTES = 100_000_000
_DTYPES = {**SAFETENSORS_DTYPES, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


@dataclass(frozen=True)
class Source:
    """Named parameters and buffers on the meta device, in the model's order, as one rank holds them.

    `whole_shapes` are those of the model's parameters, of which tensor parallelism leaves a rank a part.
    """

    title: str
    params: tuple[tuple[str, nn.Parameter], ...]
    buffers: tuple[Tensor, ...] = ()
    whole_shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def buffer_bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def whole_elements(self) -> int:
        """Number of elements of all parameters of the model."""
        return sum(map(math.prod, self.whole_shapes))

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(param.numel() for _, param in self.params)

    @property
    def trained_elements(self) -> int:
        """Number of elements of the parameters that have gradients."""
        return sum(param.numel() for _, param in self.params if param.requires_grad)


DivideModule = Callable[[nn.Module], nn.Module]
DivideTensor = Callable[[str, Tensor], Tensor]


def load(
    model: str,
    dtype: torch.dtype | None = None,
    divide_module: DivideModule | None = None,
    divide_tensor: DivideTensor | None = None,
) -> Source:
    """Return the parameters and buffers that `model` names; floating-point ones in `dtype`, as by `model.to(dtype)`.

    What a factory makes is given to `divide_module`, each tensor of a named shape to `divide_tensor`; what counts then
    is what this rank holds of it.
    """
    source = _load(model, divide_module or _undivided, divide_tensor or _unchanged)
    if not source.params:
        raise PlanError(f"--model {model} has no parameters of a floating-point dtype: there is nothing to plan")
    if dtype is None:
        return source
    params = [(name, meta_parameter(param.shape, dtype, param.requires_grad)) for name, param in source.params]
    buffers = [buffer.to(dtype) if buffer.is_floating_point() else buffer for buffer in source.buffers]
    return replace(source, params=tuple(params), buffers=tuple(buffers))


def _undivided(model: nn.Module) -> nn.Module:
    return model


def _unchanged(_: str, tensor: Tensor) -> Tensor:
    return tensor


def _load(model: str, divide_module: DivideModule, divide_tensor: DivideTensor) -> Source:
    if model in NAMED_SHAPES:
        shapes = ((name, meta_parameter(shape, torch.float32)) for name, shape in NAMED_SHAPES[model]())
        return _source(model, [(name, divide_tensor(name, param)) for name, param in shapes], ())
    if model.endswith((".safetensors", ".json")):
        return _from_headers(Path(model))
    if ":" in model:
        return _from_factory(model, divide_module)
    raise PlanError(f"--model {model} is none that is known: {_WANTED}")


def meta_parameter(shape: Iterable[int], dtype: torch.dtype, trainable: bool = True) -> nn.Parameter:
    """Return a parameter without memory."""
    return nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"), requires_grad=trainable)


# ---------------------------------------------------------------------- a factory


def _source(title: str, params: Sequence[tuple[str, Tensor]], buffers: Iterable[Tensor]) -> Source:
    """What this rank holds of parameters and buffers."""
    held = [(name, local_of(param), param.requires_grad) for name, param in params]
    metas = [(name, meta_parameter(local.shape, local.dtype, trainable)) for name, local, trainable in held]
    whole_shapes = tuple(tuple(param.shape) for _, param in params)
    return Source(title, tuple(metas), tuple(local_of(buffer).to("meta") for buffer in buffers), whole_shapes)


def _from_factory(path: str, divide: DivideModule) -> Source:
    factory = resolve(path, "--model")
    if not callable(factory):
        raise PlanError(f"--model {path} is a {type(factory).__name__}: name a function or class that makes the model")
    model = _build(path, factory)
    if not isinstance(model, nn.Module):
        raise PlanError(f"--model {path} makes a {type(model).__name__}: the factory must return a torch.nn.Module")
    divided = divide(model)
    return _source(path, list(divided.named_parameters()), divided.buffers())


def _build(path: str, factory: Callable[[], Any]) -> Any:
    """Build on the meta device; a factory that fails there, because it reads values, is called again without it."""
    try:
        with torch.device("meta"):
            return factory()
    except Exception:
        try:
            return factory()
        except Exception as error:
            raise PlanError(
                f"--model {path} fails with {type(error).__name__}: {error}: the factory must run without arguments"
            ) from error


def resolve(path: str, option: str) -> Any:
    """Import what `package.module:name` names; the working directory is searched too. `option` is for messages."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise PlanError(f"{option} {path} is not an import path: write package.module:name")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module_name)
        for part in name.split("."):
            value = getattr(value, part)
    except ModuleNotFoundError as error:
        raise PlanError(
            f"{option} {path} cannot be imported: no module named {error.name!r}: install it, or run this where it lies"
        ) from error
    except AttributeError as error:
        raise PlanError(f"{option} {path} cannot be found: {error}: check the name behind the colon") from error
    except Exception as error:
        raise PlanError(
            f"{option} {path} cannot be imported: {type(error).__name__}: {error}: mend it first"
        ) from error
    return value


# ---------------------------------------------------------------------- safetensors


def _from_headers(path: Path) -> Source:
    if not path.is_file():
        raise PlanError(f"--model {path} is not a file that is there: {_WANTED}")
    files = _files_of_index(path) if path.suffix == ".json" else [path]
    entries = {name: entry for file in files for name, entry in _header(file).items()}
    tensors = [(name, *_shape_and_dtype(name, entry)) for name, entry in entries.items()]
    # A header does not say which tensors are parameters; integers are not trained.
    params = [(name, meta_parameter(shape, dtype)) for name, shape, dtype in tensors if dtype.is_floating_point]
    others = [
        torch.empty(shape, dtype=dtype, device="meta") for _, shape, dtype in tensors if not dtype.is_floating_point
    ]
    return _source(str(path), params, others)


def _files_of_index(path: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f'{path} is not an index: it has no "weight_map" ({error}): {_WANTED}') from error
    files = [path.parent / str(name) for name in names]
    for file in files:
        if not file.is_file():
            raise PlanError(f"{path} names {file.name}, which is not beside it: download that file too")
    return files


def _header(path: Path) -> dict[str, Any]:
    """Return the header's entries in the order of the data; the data is not read."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # A file of another kind may start with any number: do not allocate that much.
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(file.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return dict(sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise PlanError(f"{path} is not a safetensors file: {error}: download or save it again") from error


def _shape_and_dtype(name: str, entry: Any) -> tuple[tuple[int, ...], torch.dtype]:
    dtype, shape = entry.get("dtype"), entry.get("shape")
    if dtype not in _DTYPES:
        raise PlanError(f"tensor {name} has dtype {dtype}, which no torch optimizer takes: convert the file first")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise PlanError(f"tensor {name} has shape {shape}, which is none: download or save the file again")
    return tuple(shape), _DTYPES[dtype]
