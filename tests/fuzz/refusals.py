"""What DDP allows and this package refuses: the table of docs/refused.md, and which programs each row is about."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.program import CopyOptimizer, Program, RawState, ReadGrad, Step
from tests.fuzz.variants import Variant

PAGE = Path(__file__).parents[2] / "docs" / "refused.md"
CONSTRUCTOR = -1


@dataclass(frozen=True)
class Refusal:
    """A row of the table: its id, and a piece of the error's text."""

    name: str
    message: str


def table(text: str | None = None) -> dict[str, Refusal]:
    """The rows of the page."""
    rows = re.findall(r"^\| `([a-z-]+)` \|[^|]*\|[^`|]*`([^`]+)`[^|]*\|", text or PAGE.read_text(), re.MULTILINE)
    return {name: Refusal(name, message) for name, message in rows}


def expected(program: Program, variant: Variant) -> Refusal | None:
    """The row by which this variant must refuse the program, on all ranks; `None` if it must carry it out."""
    found = [(place, name) for name, find in PLACES.items() if (place := find(program, variant)) is not None]
    first = min(found, key=lambda item: item[0])[1] if found else ""
    return TABLE.get(first)


# For each row, the first operation that is refused.


def _first(program: Program, wanted: Callable[[object], bool]) -> int | None:
    return next((number for number, op in enumerate(program.ops) if wanted(op)), None)


def _shared_memory(program: Program, variant: Variant) -> int | None:
    return CONSTRUCTOR if program.shared_memory else None


def _left_out(program: Program, variant: Variant) -> int | None:
    return CONSTRUCTOR if variant.kind == "ddp" and variant.scatters and program.left_out >= 0 else None


def _whole_model(program: Program, variant: Variant) -> int | None:
    return CONSTRUCTOR if variant.kind != "zero" and program.optimizer == "LBFGS" else None


def _read_gradient(program: Program, variant: Variant) -> int | None:
    return _first(program, lambda op: isinstance(op, ReadGrad)) if variant.scatters else None


def _step_inside(program: Program, variant: Variant) -> int | None:
    return _first(program, lambda op: isinstance(op, Step) and op.inside) if variant.kind != "zero" else None


def _copy(program: Program, variant: Variant) -> int | None:
    return _first(program, lambda op: isinstance(op, CopyOptimizer))


def _raw_state(program: Program, variant: Variant) -> int | None:
    return _first(program, lambda op: isinstance(op, RawState))


TABLE = table()
# Those of the constructor in the order in which it looks.
PLACES: dict[str, Callable[[Program, Variant], int | None]] = {
    "whole-model-optimizer": _whole_model,
    "shared-memory": _shared_memory,
    "left-out-of-ddp": _left_out,
    "read-gradient": _read_gradient,
    "step-inside-no-sync": _step_inside,
    "copy-optimizer": _copy,
    "state-dict-alone": _raw_state,
}
