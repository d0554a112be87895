"""A reduced gradient with the factor that it has yet to be multiplied by, so that clipping costs no pass of its own."""

from __future__ import annotations

import torch
from torch import Tensor


class ScaledSum:
    """This rank's part of a bucket's sum; `settled` multiplies it, and is what everyone but a compiled update reads."""

    def __init__(self, part: Tensor) -> None:
        self._part = part
        self._factor: Tensor | None = None

    @property
    def unsettled(self) -> Tensor:
        """The numbers before the factor, for those who take both."""
        return self._part

    @property
    def factor(self) -> Tensor | None:
        """A number on the sum's device, or nothing where the sum is as it should be."""
        return self._factor

    def scale(self, factor: Tensor) -> None:
        """Multiply by a number, when the sum is used."""
        self.settled()
        self._factor = factor.to(self._part.device)

    def settled(self) -> Tensor:
        """The sum, multiplied in place by the factor that was left to do."""
        if self._factor is not None:
            with torch.no_grad():
                multiply(self._part, self._factor)
            self._factor = None
        return self._part


def multiply(part: Tensor, factor: Tensor) -> None:
    """Multiply gradients in place by a number of higher precision, which is not rounded to theirs first."""
    if part.device.type == "cpu" or part.element_size() > 2:
        part.mul_(factor)
    elif not part.dim():
        part.copy_(part.float() * factor.float())
    else:
        # With a dimension, so that it is not rounded to the precision of the part before it is used.
        torch.mul(part, factor.float().view(1), out=part)
