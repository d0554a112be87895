"""Callbacks that do not keep their object alive: hooks stay on a model after its optimizer was dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a bound method while its object lives, and does nothing afterwards."""
    reference = WeakMethod(method)

    def call(*args: Any) -> Any:
        target = reference()
        return None if target is None else target(*args)

    return call
