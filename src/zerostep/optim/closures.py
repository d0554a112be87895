"""Closures that users pass to `step()`."""

from __future__ import annotations

from functools import partial
from traceback import walk_tb
from typing import Any

import torch


def evaluated(closure: Any) -> Any:
    """Run a closure now; a closure that returns its result again. For steps that need gradients before the update."""
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


def raised_in(closure: Any, error: BaseException) -> bool:
    """Whether an error was raised inside a closure: a function, a method, a partial or another callable."""
    while isinstance(closure, partial):
        closure = closure.func
    candidates = (closure, getattr(closure, "__func__", None), getattr(type(closure), "__call__", None))  # noqa: B004
    codes = {getattr(candidate, "__code__", None) for candidate in candidates} - {None}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))
