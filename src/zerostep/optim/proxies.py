"""Wrappers of frameworks that imitate our class: Fabric's and Lightning's derive from it, and hold the real optimizer.

Such a wrapper was never built by our constructor. A method of ours that ran on it would read fields of the real
optimizer, by `__getattr__`, but write its own. So all that it inherits from us is done by the real optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from typing import Any

from torch.optim import Optimizer


def delegate_if_proxy(cls: type, ours: type) -> None:
    """If `cls` is the class of a wrapper around an optimizer of class `ours`, let that do what `cls` inherits from it.

    A wrapper is recognised by what its own classes have: `__getattr__` and `optimizer`.
    """
    added = [each for each in cls.__mro__ if each not in ours.__mro__ and not issubclass(each, Optimizer)]
    if {"__getattr__", "optimizer"} <= {name for each in added for name in vars(each)}:
        for name in _inherited(cls, ours):
            setattr(cls, name, _delegating(name, getattr(ours, name)))


def _inherited(cls: type, ours: type) -> list[str]:
    """The methods and properties that `cls` has from `ours` and its bases, and not from another class in front."""
    names = [name for name in dir(ours) if not (name.startswith("__") and name.endswith("__"))]
    same = [name for name in names if getattr(cls, name, None) is getattr(ours, name)]
    return [name for name in same if isinstance(getattr(ours, name), property) or isfunction(getattr(ours, name))]


def _delegating(name: str, attribute: Any) -> Any:
    if not isinstance(attribute, property):
        return _delegating_method(name, attribute)

    def read(proxy: Any) -> Any:
        return getattr(proxy.optimizer, name)

    def write(proxy: Any, value: Any) -> None:
        setattr(proxy.optimizer, name, value)

    return property(read, write, doc=attribute.__doc__)


def _delegating_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(proxy: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(proxy.optimizer, name)(*args, **kwargs)

    return call
