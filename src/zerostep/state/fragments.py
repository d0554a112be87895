"""State that lies in the leaves of all ranks, as one `torch.optim` state dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerostep.state.param_state import Entry, ParamState, shaped
from zerostep.tensors import flat_alias

__all__ = ["assemble", "ready_to_travel"]


def ready_to_travel(shares: Iterable[ParamState]) -> list[dict[str, Any]]:
    """What one rank has of each parameter, in plain values."""
    return [
        {
            "param": share.param,
            "part": [share.part.start, share.part.stop],
            "per_element": dict(share.per_element),
            "shared": dict(share.shared),
        }
        for share in shares
    ]


def assemble(shares: Iterable[Sequence[Mapping[str, Any]]], params: Sequence[Tensor]) -> dict[int, Entry]:
    """The state of all whole parameters, from what every rank has."""
    found: dict[int, Entry] = {}
    for share in reversed(list(shares)):
        for item in share:
            _put(found.setdefault(item["param"], {}), item, params[item["param"]])
    return dict(sorted(found.items()))


def _put(entry: Entry, item: Mapping[str, Any], param: Tensor) -> None:
    start, stop = item["part"]
    entry.update(item["shared"])
    for key, value in item["per_element"].items():
        if key not in entry:
            entry[key] = shaped(torch.empty(param.numel(), dtype=value.dtype), param)
        flat_alias(entry[key])[start:stop].copy_(value)
