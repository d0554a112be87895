"""A compiled update of leaves of one kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from zerostep.step.leaf_arguments import Arguments
from zerostep.step.leaf_graph import LeafGraph, on_device

# How a flat leaf of any length is shown to a graph on an accelerator: "flat", as it is; "rows", as a matrix of rows of
# a fixed length, because kernels read several elements at once only where they know that all rows are aligned, and what
# is left of the leaf by itself; "static", with a graph for each length.
PRESENTATION: Literal["flat", "rows", "static"] = "rows"
ROW = 1024
BACKEND = "inductor"
_FEW = 16


class LeafProgram:
    """A compiled graph for leaves of one kind, whose example it is made with."""

    def __init__(self, graph: LeafGraph, example: Arguments, numbers_on: torch.device) -> None:
        self._device, self._numbers_on = example.leaf.device, numbers_on
        numbers = on_device(graph.numbers, numbers_on)
        # A few operations on numbers in host memory need no compiler.
        self._numbers: Callable[..., Any] = numbers if numbers_on.type == "cpu" else _compile(numbers)
        self._elements = _compile(graph.elements)
        self._latest: tuple[Any, Tensor, Sequence[Tensor]] | None = None
        self._takes_flat = example.leaf.dim() == 1
        on_host = self._device.type == "cpu"
        self._in_rows = example.any_length and graph.pointwise and PRESENTATION == "rows" and not on_host

    def compile(self, example: Arguments, options: Sequence[Tensor], factor: Tensor) -> None:
        """Compile by running over an example, so that an error leaves everything real as it was."""
        vector, _ = self._vector(example, options, factor)
        for shown in self._shown(example):
            # Behind others in memory, a part would make a graph for parts that are behind others.
            elements = [each if each.storage_offset() < _FEW else each.clone() for each in shown]
            for each in elements if example.any_length else ():
                if each.shape == elements[1].shape:
                    torch._dynamo.mark_dynamic(each, 0)
            self._elements(elements[0], factor, *elements[1:], vector)

    def run(self, arguments: Arguments, options: Sequence[Tensor], factor: Tensor) -> None:
        """Update a leaf. `options` are the numbers that are inputs, each a tensor without dimensions."""
        vector, numbers = self._vector(arguments, options, factor)
        flatten = self._takes_flat and arguments.leaf.dim() > 1
        for elements in self._shown(arguments.flattened() if flatten else arguments):
            self._elements(elements[0], factor, *elements[1:], vector)
        # Last: a kernel that could not be compiled for this leaf has changed nothing then.
        for state, value in zip(arguments.numbers.values(), numbers, strict=True):
            state.copy_(value)

    def _vector(
        self, arguments: Arguments, options: Sequence[Tensor], factor: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """What the elements need of the numbers, on their device, and the new numbers of the state."""
        given = [_on(each, self._numbers_on) for each in (*options, *arguments.numbers.values())]
        if self._numbers_on.type != "cpu":
            vector, *numbers = self._numbers(*given)
            return factor if vector is None else vector, numbers
        # Most leaves have the same numbers in a step.
        key = *[each.item() for each in given], self._stream()
        if self._latest is None or self._latest[0] != key:
            vector, *numbers = self._numbers(*given)
            # From ordinary host memory: the numbers are copied away at once, and the host does not wait for the device.
            vector = factor if vector is None else vector.to(self._device, non_blocking=True)
            self._latest = key, vector, numbers
        return self._latest[1:]

    def _stream(self) -> Any:
        """The stream in whose order the numbers are copied: no other may read them."""
        return None if self._device.type == "cpu" else torch.accelerator.current_stream(self._device)

    def _shown(self, arguments: Arguments) -> Iterator[list[Tensor]]:
        """The tensors of elements as the graph takes them, in one part or in two."""
        elements = arguments.elements
        rows = elements[0].numel() // ROW
        # Compilers take a length of one for a constant.
        rows -= elements[0].numel() % ROW == 1
        if not self._in_rows or rows < 2:
            yield elements
            return
        yield [each[: rows * ROW].view(rows, ROW) for each in elements]
        if elements[0].numel() > rows * ROW:
            yield [each[rows * ROW :] for each in elements]


def is_of_any_length(leaf: Tensor) -> bool:
    """Whether a leaf shares a program with leaves of other lengths."""
    return leaf.dim() == 1 and leaf.numel() > 1 and (leaf.device.type == "cpu" or PRESENTATION != "static")


def _compile(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(graph, fullgraph=True, backend=BACKEND)
    return compiled


def _on(number: Tensor, device: torch.device) -> Tensor:
    """A number on a device; one in host memory goes there without a copy that the host would wait for."""
    if number.device == device:
        return number
    return torch.full((), number.item(), dtype=number.dtype, device=device)
