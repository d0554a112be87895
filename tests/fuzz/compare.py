"""The first difference between what two sides have shown."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.execute import Record

# A sum in another order differs by some 1e-6 after a few steps; a gradient that is lost or counted twice by 1e-3.
TOLERANCE = 5e-5
# A loss that is nearly nought has no relative precision.
SMALLEST = 0.1


def difference(ours: Record, plain: Record, exact: bool, late: bool) -> str:
    """Where our record differs from the plain one; empty if nowhere. A late side shows no parameters in step()."""
    expected = [
        item for item in plain.seen if not (late and item[0].startswith("parameters at") and "Step(" in item[0])
    ]
    for (label, mine), (wanted, theirs) in zip(ours.seen, expected, strict=False):
        if label != wanted:
            return f"{label} instead of {wanted}"
        # Norms are added in another order than torch's, see docs/numerics.md.
        found = _difference(mine, theirs, exact and not label.startswith("norm at"))
        if found:
            return f"{label}: {found}"
    return "" if len(ours.seen) == len(expected) else "another number of values"


def _difference(ours: Any, plain: Any, exact: bool) -> str:
    if isinstance(plain, Mapping):
        if ours.keys() != plain.keys():
            return f"{sorted(set(ours) ^ set(plain))} only on one side"
        found = ((key, _difference(ours[key], plain[key], exact)) for key in plain)
        return next((f"{key} {text}" for key, text in found if text), "")
    if isinstance(plain, (list, tuple)):
        if len(ours) != len(plain):
            return f"{len(ours)} values instead of {len(plain)}"
        return next((text for a, b in zip(ours, plain, strict=True) if (text := _difference(a, b, exact))), "")
    if isinstance(plain, Tensor):
        return _of_tensors(torch.as_tensor(ours), plain, exact)
    if isinstance(plain, float):
        return _of_tensors(torch.tensor(float(ours)), torch.tensor(plain), exact)
    return "" if ours == plain else f"{ours} instead of {plain}"


def _of_tensors(ours: Tensor, plain: Tensor, exact: bool) -> str:
    if ours.shape != plain.shape:
        return f"shape {tuple(ours.shape)} instead of {tuple(plain.shape)}"
    if not plain.numel() or torch.equal(ours, plain.to(ours.dtype)):
        return ""
    finite = torch.isfinite(plain)
    if not torch.equal(torch.isfinite(ours), finite):
        return "is not finite on one side"
    gap = (ours.double() - plain.double())[finite].abs().max().item() if finite.any() else 0.0
    largest = plain[finite].double().abs().max().item() if finite.any() else 1.0
    relative = gap / max(largest, SMALLEST)
    if gap and (exact or relative > TOLERANCE or math.isnan(relative)):
        return f"differs by {relative:.1e}{' (bits are promised)' if relative <= TOLERANCE else ''}"
    return ""
