"""The part of a DCP checkpoint that is not tensors: options, parameters and state keys, as JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zerostep.checkpoint.load import names_of
from zerostep.checkpoint.manifest import decode_value, encode_value
from zerostep.checkpoint.regions import rows_of
from zerostep.dtensors import is_dtensor
from zerostep.errors import MALFORMED, CheckpointError
from zerostep.optim.view import OptimizerView
from zerostep.plan.groups import Group, own_options
from zerostep.state.param_state import order_of
from zerostep.version import __version__

_VERSION = 1


ParamInfo = tuple[tuple[int, ...], int, tuple[int, ...]]  # shape, group, order of dimensions in memory


class StateInfo(NamedTuple):
    """The state of one parameter: keys of per-element tensors, keys of shared tensors, and all other values."""

    per_element: list[str]
    shared: list[str]
    values: dict[str, Any]


@dataclass(frozen=True)
class DcpMetadata:
    """The saved optimizer; `params` has shape, group and order of dimensions in memory of each parameter by name."""

    step: int
    optimizer_names: tuple[str, ...]
    options: tuple[Group, ...]
    params: Mapping[str, ParamInfo]
    state: Mapping[str, StateInfo]
    global_state: Mapping[str, Any]

    @staticmethod
    def of(view: OptimizerView, params: Mapping[str, ParamInfo], state: Mapping[str, StateInfo]) -> DcpMetadata:
        """Describe an optimizer as it is now; parameters and state are merged from all ranks."""
        options = tuple(own_options(group) for group in view.groups)
        return DcpMetadata(view.step, tuple(view.optimizer_names), options, params, state, view.global_state())

    def encode(self) -> str:
        """Return the JSON text."""
        body = {
            "step": self.step,
            "kinds": list(self.optimizer_names),
            "options": list(self.options),
            "params": dict(self.params),
            "state": {name: list(info) for name, info in self.state.items()},
            "others": dict(self.global_state),
        }
        return json.dumps({"zerostep": __version__, "version": _VERSION, "about": encode_value(body)}, allow_nan=False)

    @staticmethod
    def decode(text: Any) -> DcpMetadata:
        """Return what `encode` wrote; `CheckpointError` for any other text."""
        try:
            document = json.loads(text)
            _check_version(document["version"], document["zerostep"])
            return _from_body(decode_value(document["about"]))
        except CheckpointError:
            raise
        except MALFORMED as error:
            raise CheckpointError(
                "the checkpoint's description of the optimizer is damaged: "
                f"{str(error)[:200] or type(error).__name__}; load another checkpoint"
            ) from error


def _check_version(version: Any, writer: Any) -> None:
    if version != _VERSION:
        raise CheckpointError(
            f"the optimizer was saved by zerostep {writer!r} in version {version!r} of its description; this zerostep, "
            f"{__version__}, reads version {_VERSION}: use the one that wrote it, or a later one"
        )


def _from_body(body: Mapping[str, Any]) -> DcpMetadata:
    return DcpMetadata(
        body["step"],
        tuple(body["kinds"]),
        tuple(body["options"]),
        {name: (tuple(shape), group, tuple(order)) for name, (shape, group, order) in body["params"].items()},
        {
            name: StateInfo(list(per_element), list(shared), values)
            for name, (per_element, shared, values) in body["state"].items()
        },
        body["others"],
    )


def params_of(view: OptimizerView) -> dict[str, ParamInfo]:
    """Return what is said of each parameter of this rank by its name; of a DTensor, what is true of the whole."""
    found: dict[str, ParamInfo] = {}
    for part, names in zip(view.parts, names_of(view), strict=True):
        blocks = part.blocks
        for index, name in names.items():
            param, shape = part.params[index], blocks[index].shape
            order = rows_of(shape) if is_dtensor(param) else order_of(param)
            found[name] = (shape, part.layout.params[index].group, order)
    return found
