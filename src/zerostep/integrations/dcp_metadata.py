"""What a DCP checkpoint of an optimizer says beside its tensors, as JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerostep.checkpoint.load import bare_names
from zerostep.checkpoint.manifest import put_small, take_small
from zerostep.comm.codec import decode, encode
from zerostep.errors import MALFORMED, CheckpointError
from zerostep.optim.view import OptimizerView
from zerostep.plan.groups import Group, options
from zerostep.state.param_state import order_of
from zerostep.version import __version__

__all__ = ["About", "Entry", "names_of"]

_VERSION = 1
_NOT_OPTIONS = ("optimizer_class",)


@dataclass(frozen=True)
class Entry:
    """The state of one parameter: names of what is like it, names of other tensors, and all other values."""

    per_element: tuple[str, ...]
    shared: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class About:
    """The optimizer that was saved. `params` has shape, group and order in memory of each parameter by name."""

    step: int
    kinds: tuple[str, ...]
    options: tuple[Group, ...]
    params: Mapping[str, tuple[tuple[int, ...], int, tuple[int, ...]]]
    state: Mapping[str, Entry]
    others: Mapping[str, Any]

    @staticmethod
    def of(view: OptimizerView, state: Mapping[str, Entry]) -> About:
        """The optimizer now, with what all ranks have of its state."""
        chosen = [{k: v for k, v in options(group).items() if k not in _NOT_OPTIONS} for group in view.groups]
        specs = view.layout.params
        params = {
            name: (specs[number].shape, specs[number].group, order_of(view.params[number]))
            for number, name in names_of(view).items()
        }
        return About(view.step, tuple(view.kinds), tuple(chosen), params, state, view.others())

    def encode(self) -> str:
        """As text."""
        state = {
            name: [list(each.per_element), list(each.shared), dict(each.values)] for name, each in self.state.items()
        }
        found = {
            "step": self.step,
            "kinds": list(self.kinds),
            "options": list(self.options),
            "params": dict(self.params),
            "state": state,
            "others": dict(self.others),
        }
        return json.dumps(
            {"zerostep": __version__, "version": _VERSION, "about": encode(found, put_small)}, allow_nan=False
        )

    @staticmethod
    def decode(text: Any) -> About:
        """What `encode` wrote; `CheckpointError` for anything else."""
        try:
            found = json.loads(text)
            version, writer = found["version"], found["zerostep"]
            about = decode(found["about"], lambda kind, items: take_small(*items)) if version == _VERSION else None
            return _refused(version, writer) if about is None else _about(about)
        except CheckpointError:
            raise
        except MALFORMED as error:
            raise CheckpointError(
                "the checkpoint's description of the optimizer is damaged: "
                f"{str(error)[:200] or type(error).__name__}; load another checkpoint"
            ) from error


def _refused(version: Any, writer: Any) -> About:
    raise CheckpointError(
        f"the optimizer was saved by zerostep {writer!r} in version {version!r} of its description; this zerostep, "
        f"{__version__}, reads version {_VERSION}: use the one that wrote it, or a later one"
    )


def _about(found: Mapping[str, Any]) -> About:
    return About(
        found["step"],
        tuple(found["kinds"]),
        tuple(found["options"]),
        {name: (tuple(shape), group, tuple(order)) for name, (shape, group, order) in found["params"].items()},
        {name: Entry(tuple(like), tuple(rest), values) for name, (like, rest, values) in found["state"].items()},
        found["others"],
    )


def names_of(view: OptimizerView) -> dict[int, str]:
    """The name of each parameter, by number, without the prefixes of wrappers; once for one that is listed twice."""
    first: dict[int, int] = {}
    for number, param in enumerate(view.params):
        first.setdefault(id(param), number)
    return bare_names(view.layout.params, list(first.values()))
