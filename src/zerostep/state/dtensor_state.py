"""State of DTensor parameters: what this rank holds of it, and how an unsharded optimizer on them has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from zerostep.dtensors import as_like, is_dtensor, local_grad, whole_of
from zerostep.plan.blocks import block_of

Entry = dict[str, Any]


def as_entry_of(param: Tensor, entry: Mapping[str, Any], per_element: Collection[str]) -> Entry:
    """The state of a parameter with DTensors like it in place of what this rank holds of its per-element values."""
    return {key: as_like(value, param) if key in per_element else value for key, value in entry.items()}


def as_local_entry(entry: Mapping[str, Any], param: Tensor) -> tuple[Entry, list[str]]:
    """A parameter's state in ordinary tensors, as this rank holds it, and the keys of its per-element values.

    Values may be DTensors, or whole: of those this rank takes its block. A collective over the mesh of a DTensor that
    has other placements than the parameter, or belongs to no element.
    """
    per_element = [key for key, value in entry.items() if isinstance(value, Tensor) and _is_per_element(value, param)]
    local = {key: _block(value, param) if key in per_element else whole_of(value) for key, value in entry.items()}
    return local, per_element


def _is_per_element(value: Tensor, param: Tensor) -> bool:
    return is_dtensor(param) and value.shape == param.shape


def _block(value: Tensor, param: Tensor) -> Tensor:
    if is_dtensor(value):
        return local_grad(value, param)
    block = block_of(param)
    return value if block.is_whole else value[tuple(slice(span.start, span.stop) for span in block.spans)].contiguous()
