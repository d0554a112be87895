"""Noticing what others do to gradients between two moments."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import Tensor

__all__ = ["GradSnapshot"]


class GradSnapshot:
    """The gradients of some parameters as they were when the marks were set.

    Gradients that are nothing but zeros count as unset: that is how some people reset them.
    """

    def __init__(self) -> None:
        # Weak references, not addresses: a new gradient may well lie where an old one lay.
        self._grads: dict[Tensor, tuple[ref[Tensor], int]] = {}

    def take(self, params: Iterable[Tensor]) -> None:
        """Remember the gradients of `params` as they are now."""
        found = ((param, param.grad) for param in params)
        self._grads = {param: (ref(grad), grad._version) for param, grad in found if grad is not None}

    def clear(self) -> None:
        """Remember nothing."""
        self._grads = {}

    def edited(self) -> list[Tensor]:
        """The marked parameters whose gradient was changed in place since."""
        same = [(param, version) for param, (grad, version) in self._grads.items() if grad() is param.grad]
        return [param for param, version in same if _version(param) != version and _filled(param)]

    def new_in(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The `params` that have a gradient which they did not have when the marks were set."""
        return [param for param in params if _filled(param) and not self._unchanged(param)]

    def _unchanged(self, param: Tensor) -> bool:
        grad, version = self._grads.get(param, (None, 0))
        return grad is not None and grad() is param.grad and _version(param) == version


def _version(param: Tensor) -> int:
    return -1 if param.grad is None else param.grad._version


def _filled(param: Tensor) -> bool:
    return param.grad is not None and bool(param.grad.any())
