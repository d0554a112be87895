"""What every rank sends at the end of a backward pass: where it is, and which parameters have a gradient on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from zerostep.errors import StepMismatchError
from zerostep.plan.groups import Group, own_options
from zerostep.step.used_mask import pack_mask, union_of_masks

_FLAGS = ("amsgrad", "centered", "decoupled_weight_decay", "maximize", "nesterov")  # of torch's own rules
UNKNOWN = 0  # the digest of a rank whose options do not count


@dataclass(frozen=True)
class PassMessage:
    """The number of the step and of the pass, a digest of the groups' options, and a mask of used parameters."""

    step: int
    passes: int
    options: int
    used: Sequence[bool]

    def to_ints(self) -> list[int]:
        """The message as integers to send."""
        return [self.step, self.passes, self.options, *pack_mask(self.used)]


def used_by_any(rows: Sequence[Sequence[int]], count: int) -> set[int]:
    """The parameters that some rank has used, from the messages of all ranks; raises if ranks are not in one place."""
    _compare([row[:2] for row in rows], "step and pass", "call backward() and step() equally often on all ranks")
    digests = [row[2:3] if row[2] != UNKNOWN else None for row in rows]
    _compare(digests, "options of the parameter groups", "change learning rates and other options on all ranks alike")
    return {index for index, flag in enumerate(union_of_masks([row[3:] for row in rows], count)) if flag}


def _compare(values: Sequence[Sequence[int] | None], what: str, remedy: str) -> None:
    known = {rank: tuple(value) for rank, value in enumerate(values) if value is not None}
    if len(set(known.values())) > 1:
        raise StepMismatchError(f"ranks differ in the {what} at the end of a backward pass: {known}. {remedy}")


def options_digest(groups: Sequence[Group]) -> int:
    """A number that differs where plain options of the groups differ; tensors and other objects are left out.

    So are nested lists, and flags that torch's rules do not know: some classes set them by the tensors that an instance
    holds, such as the choice of a kernel.
    """
    plain = [{key: value for key, value in own_options(group).items() if _counts(key, value)} for group in groups]
    text = json.dumps(plain, sort_keys=True)
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little") or 1


def _counts(key: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return key in _FLAGS
    items = value if isinstance(value, (list, tuple)) else [value]
    return all(item is None or isinstance(item, (bool, int, float, str)) for item in items)
