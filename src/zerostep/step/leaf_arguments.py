"""The tensors of one leaf in one step, as a compiled update takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zerostep.tensors import flat_alias, is_dense

# The length of examples of flat leaves: long enough that compilers plan for many threads, and not only full rows.
_EXAMPLE = (1 << 18) + 48
_ALIGNMENT = 16


@dataclass(frozen=True)
class Arguments:
    """The tensors of one leaf in one step. `any_length` if its program is one for flat leaves of any length.

    `measured` are the names of state that is one number, but depends on elements, as a norm does.
    """

    grad: Tensor
    leaf: Tensor
    rounded: Tensor | None
    state: Mapping[str, Any]
    any_length: bool = False
    measured: frozenset[str] = frozenset()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """State that is a tensor of elements."""
        return {key: each for key, each in self._tensor_state.items() if not self._is_number(key, each)}

    @property
    def numbers(self) -> dict[str, Tensor]:
        """State that is one number for the whole leaf."""
        return {key: each for key, each in self._tensor_state.items() if self._is_number(key, each)}

    @property
    def _tensor_state(self) -> dict[str, Tensor]:
        return {key: value for key, value in self.state.items() if isinstance(value, Tensor)}

    def _is_number(self, key: str, value: Tensor) -> bool:
        return value.dim() == 0 and self.leaf.dim() > 0 and key not in self.measured

    @property
    def number_dtype(self) -> torch.dtype:
        """The precision of numbers beside elements, at least that in which kernels compute."""
        return torch.float64 if self.leaf.dtype == torch.float64 else torch.float32

    @property
    def elements(self) -> list[Tensor]:
        """Gradient, leaf, rounded parameter and tensors of the state, in the order of a graph's inputs."""
        return [self.grad, self.leaf, *([] if self.rounded is None else [self.rounded]), *self.tensors.values()]

    def kind(self) -> tuple[Any, ...]:
        """Whatever a program depends on, but for options."""
        state = tuple((key, self._described(value)) for key, value in self.state.items())
        given = [self.grad, self.leaf, *([] if self.rounded is None else [self.rounded])]
        return (self.any_length, self.measured, *map(self._described, given), state)

    def _described(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return repr(value)
        like = self.any_length and value.shape == self.leaf.shape
        where = "any" if like else (tuple(value.shape), value.stride())
        return where, value.dtype, value.device, is_aligned(value)

    def obstacle(self) -> str | None:
        """Why these tensors cannot be shown to a graph, if they cannot."""
        tensors = [*self.elements, *self.numbers.values()]
        if any(type(each) is not Tensor or each.layout != torch.strided for each in tensors):
            return "its state is in tensors of another class or layout"
        if any(each.is_complex() for each in tensors):
            return "complex numbers are not compiled"
        storages = {each.untyped_storage().data_ptr() for each in tensors if each.numel()}
        if len(storages) != sum(each.numel() > 0 for each in tensors):
            return "tensors of its state share memory"
        return None

    @property
    def is_flattenable(self) -> bool:
        """Whether all elements lie in one order of memory."""
        alike = {(each.shape, each.stride()) for each in self.elements}
        return len(alike) == 1 and self.leaf.dim() > 1 and is_dense(self.leaf)

    def flattened(self) -> Arguments:
        """The same memory as flat tensors."""
        tensors = {key: flat_alias(value) for key, value in self.tensors.items()}
        low = None if self.rounded is None else flat_alias(self.rounded)
        return replace(
            self, grad=flat_alias(self.grad), leaf=flat_alias(self.leaf), rounded=low, state={**self.state, **tensors}
        )

    def examples(self) -> Arguments:
        """New tensors of the same kind, to trace and to compile with: flat leaves of any length have a common one."""
        state = {key: self._example(value) for key, value in self.state.items()}
        low = None if self.rounded is None else self._example(self.rounded)
        return replace(self, grad=self._example(self.grad), leaf=self._example(self.leaf), rounded=low, state=state)

    def _example(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self.any_length and value.shape == self.leaf.shape:
            return _zeros((_EXAMPLE,), (1,), value)
        return _zeros(tuple(value.shape), value.stride(), value)


def _zeros(shape: tuple[int, ...], stride: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros with these strides, at an address that is aligned if that of `like` is."""
    start = 0 if is_aligned(like) else 1
    length = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    return like.new_zeros(length + start).as_strided(shape, stride, start)


def is_aligned(tensor: Tensor) -> bool:
    """Whether a kernel may read several elements at once from the first on; on the host it always may."""
    return tensor.device.type == "cpu" or tensor.data_ptr() % _ALIGNMENT == 0
