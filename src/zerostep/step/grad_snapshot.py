"""Detects gradients that were edited or set since a snapshot of them was taken."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import Tensor


class GradSnapshot:
    """Identity and version of the gradients of some parameters.

    A gradient of zeros alone counts as unset, because `zero_grad(set_to_none=False)` resets gradients that way.
    """

    def __init__(self) -> None:
        # Weak references, not addresses: a new gradient may be allocated where an old one was.
        self._grads: dict[Tensor, tuple[ref[Tensor], int]] = {}

    def take(self, params: Iterable[Tensor]) -> None:
        """Remember the gradients of `params` as they are now."""
        grads = ((param, param.grad) for param in params)
        self._grads = {param: (ref(grad), grad._version) for param, grad in grads if grad is not None}

    def clear(self) -> None:
        """Drop the snapshot."""
        self._grads = {}

    def edited(self) -> list[Tensor]:
        """The parameters whose gradient is still the same tensor, but was changed in place."""
        same = [(param, version) for param, (grad, version) in self._grads.items() if grad() is param.grad]
        return [param for param, version in same if _version(param) != version and _is_set(param)]

    def new_in(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The `params` with a gradient that they did not have in the snapshot."""
        return [param for param in params if _is_set(param) and not self._unchanged(param)]

    def _unchanged(self, param: Tensor) -> bool:
        grad, version = self._grads.get(param, (None, 0))
        return grad is not None and grad() is param.grad and _version(param) == version


def _version(param: Tensor) -> int:
    return -1 if param.grad is None else param.grad._version


def _is_set(param: Tensor) -> bool:
    return param.grad is not None and bool(param.grad.any())
