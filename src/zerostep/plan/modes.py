"""Optimizers with a training and an evaluation mode, such as schedule-free ones: they step in training mode only."""

from __future__ import annotations

from torch.optim import Optimizer

EVALUATION, TRAINING = "eval", "train"


def switch(optimizer: Optimizer, mode: str) -> None:
    """Call the method `train` or `eval` of an optimizer that has it; without one there is nothing to switch."""
    method = getattr(optimizer, mode, None)
    if callable(method):
        method()
