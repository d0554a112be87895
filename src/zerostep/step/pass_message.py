"""What every rank sends at the end of a backward pass: where it is, and which parameters have a gradient on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerostep.errors import StepMismatchError
from zerostep.step.place import by_value, compare_loads
from zerostep.step.used_mask import pack_mask, union_of_masks


@dataclass(frozen=True)
class PassMessage:
    """Steps since the last load, passes since the last step, own loads, and a mask of used parameters."""

    steps: int
    passes: int
    loads: int
    used: Sequence[bool]

    def to_ints(self) -> list[int]:
        """The message as integers to send."""
        return [self.steps, self.passes, self.loads, *pack_mask(self.used)]


def used_by_any(rows: Sequence[Sequence[int]], count: int, before: int = 0) -> set[int]:
    """The parameters that some rank has used, from the messages of all ranks; raises if ranks are not in one place.

    `before` is the number of steps before the last load.
    """
    compare_loads([row[2] for row in rows])
    values = {rank: (row[0] + before + 1, row[1] + 1) for rank, row in enumerate(rows)}
    if len(set(values.values())) > 1:
        raise StepMismatchError(f"{by_value(values, _in_pass)}; call backward() and step() equally often on all ranks")
    return {index for index, flag in enumerate(union_of_masks([row[3:] for row in rows], count)) if flag}


def _in_pass(place: tuple[int, int], several: bool) -> str:
    step, number = place
    return f"{'are' if several else 'is'} at step {step}, backward pass {number}"
