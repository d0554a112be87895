"""A compiled update of leaves of one kind."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, fx

from zerostep.step.leaf_arguments import Arguments
from zerostep.step.leaf_graph import LeafGraph, on_device

# How a flat leaf of any length is shown to a graph on an accelerator: "flat", as it is; "rows", as a matrix of rows of
# a fixed length, because kernels read several elements at once only where they know that all rows are aligned, and what
# is left of the leaf by itself; "static", with a graph for each length.
PRESENTATION: Literal["flat", "rows", "static"] = "rows"
ROW = 16
FLAT_DEVICES = frozenset(("cpu",))  # on which rows are of no use
BACKEND = "inductor"
_FEW = 16
# So many leaves are updated by one call, and the rows of examples for it.
TOGETHER = 8
_ROWS = 1 << 14

_Call = tuple[Tensor, ...]
_Vectors = dict[tuple[Any, ...], tuple[Tensor, Sequence[Tensor]]]

logger = logging.getLogger("zerostep")


@dataclass(frozen=True)
class _Part:
    """A part of a leaf as a graph takes it: where it lies, as rows or flat, and all its tensors but the gradient."""

    start: int
    stop: int
    in_rows: bool
    others: Sequence[Tensor]

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor of the leaf's shape."""
        part = tensor if tensor.dim() != 1 else tensor[self.start : self.stop]
        return part.view(-1, ROW) if self.in_rows else part


@dataclass(frozen=True, eq=False)
class ReadyLeaf:
    """What a program takes of a leaf, but for its gradient: the same memory in every step."""

    program: LeafProgram
    parts: Sequence[_Part]
    numbers: Sequence[Tensor]
    flattened: bool


class LeafProgram:
    """A compiled graph for leaves of one kind, whose example it is made with."""

    def __init__(self, graph: LeafGraph, example: Arguments, numbers_on: torch.device) -> None:
        self._numbers_on, self._graph = numbers_on, graph.elements
        self.device, self.number_dtype = example.leaf.device, example.number_dtype
        numbers = on_device(graph.numbers, numbers_on)
        # A few operations on numbers in host memory need no compiler.
        self._numbers: Callable[..., Any] = numbers if numbers_on.type == "cpu" else _compile(numbers)
        self._elements = _compile(graph.elements)
        self._several: Callable[..., Any] | Literal[False] | None = None
        self.seconds, self.graphs = 0.0, 0
        self._takes_flat = example.leaf.dim() == 1
        as_rows = PRESENTATION == "rows" and self.device.type not in FLAT_DEVICES
        self._in_rows = example.any_length and graph.pointwise and as_rows
        self._dtypes = [each.dtype for each in example.elements]

    def compile(self, example: Arguments, options: Sequence[Tensor], factor: Tensor) -> None:
        """Compile by running over an example, so that an error leaves everything real as it was."""
        vector, _ = self._vector([*example.numbers.values()], options, factor, {})
        for part in self._parts(example.elements):
            # Behind others in memory, a part would make a graph for parts that are behind others.
            shown = [part.of(example.grad), *part.others]
            elements = [each if each.storage_offset() < _FEW else each.clone() for each in shown]
            for each in elements if example.any_length else ():
                if each.shape == elements[1].shape:
                    torch._dynamo.mark_dynamic(each, 0)
            self._elements(elements[0], factor, *elements[1:], vector)

    def ready(self, arguments: Arguments) -> ReadyLeaf:
        """A leaf of this kind, ready for steps."""
        flatten = self._takes_flat and arguments.leaf.dim() > 1
        shown = arguments.flattened() if flatten else arguments
        return ReadyLeaf(self, self._parts(shown.elements), [*shown.numbers.values()], flatten)

    def run(self, leaves: Sequence[tuple[ReadyLeaf, Tensor]], options: Sequence[Tensor], factor: Tensor) -> None:
        """Update leaves, each with its gradient. `options` are the numbers that are inputs, without dimensions."""
        vectors, states, values = _Vectors(), list[Tensor](), list[Tensor]()
        in_rows, others = dict[int, list[_Call]](), list[_Call]()
        for leaf, grad in leaves:
            vector, numbers = self._vector(leaf.numbers, options, factor, vectors)
            for part in leaf.parts:
                calls = in_rows.setdefault(id(vector), []) if part.in_rows else others
                calls.append((part.of(grad), factor, *part.others, vector))
            states += leaf.numbers
            values += numbers
        for calls in in_rows.values():
            others += self._run_together(calls)
        for call in others:
            self._elements(*call)
        # Last: a kernel that could not be compiled for these leaves has changed nothing then.
        if states:
            torch._foreach_copy_(states, values)

    def _run_together(self, calls: Sequence[_Call]) -> Sequence[_Call]:
        """Run as many calls as fill groups, each group at once: a call costs the host more than a kernel the device.

        All have the same numbers: compiled code depends on which of its inputs are the same. Returns the others.
        """
        whole = len(calls) // TOGETHER * TOGETHER
        if whole and self._several is None:
            self._several = self._compiled_together(calls[0])
        if self._several is None or self._several is False:
            return calls
        for start in range(0, whole, TOGETHER):
            self._several(*chain.from_iterable(calls[start : start + TOGETHER]))
        return calls[whole:]

    def _compiled_together(self, like: _Call) -> Callable[..., Any] | Literal[False]:
        """The graph several times, compiled by running it over examples, which have other lengths each.

        False if that fails: leaves are then updated one by one.
        """
        start = time.perf_counter()
        compiled = _compile(_repeated(self._graph))
        arguments = list[Tensor]()
        for extra in range(TOGETHER):
            grad, *others = (torch.zeros(_ROWS + extra, ROW, dtype=each, device=self.device) for each in self._dtypes)
            for each in (grad, *others):
                torch._dynamo.mark_dynamic(each, 0)
            arguments += [grad, like[1], *others, like[-1]]
        try:
            compiled(*arguments)
        except Exception as error:  # whatever a compiler raises; nothing real was touched
            logger.info("%d leaves at once cannot be compiled, so each is updated by itself: %s", TOGETHER, error)
            return False
        self.seconds += time.perf_counter() - start
        self.graphs += 1
        return compiled

    def _vector(
        self, numbers: Sequence[Tensor], options: Sequence[Tensor], factor: Tensor, known: _Vectors
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """What the elements need of the numbers, on their device, and the new numbers of the state.

        Most leaves have the same numbers in a step: `known` has what was made for others.
        """
        given = [_on(each, self._numbers_on) for each in (*options, *numbers)]
        if self._numbers_on.type != "cpu":
            vector, *new = self._numbers(*given)
            return factor if vector is None else vector, new
        key = tuple(each.item() for each in given)
        if key not in known:
            vector, *new = self._numbers(*given)
            known[key] = factor if vector is None else self._on_device(vector), new
        return known[key]

    def _on_device(self, vector: Tensor) -> Tensor:
        # From pinned memory, whose allocator knows of copies that are under way: the host does not wait for the device.
        return vector if self.device.type == "cpu" else vector.pin_memory().to(self.device, non_blocking=True)

    def _parts(self, elements: Sequence[Tensor]) -> list[_Part]:
        """A leaf as the graph takes it, in one part or in two."""
        length = elements[1].numel()
        rows = length // ROW
        # Compilers take a length of one for a constant.
        rows -= length % ROW == 1
        if not self._in_rows or rows < 2:
            return [_Part(0, length, False, elements[1:])]
        split = rows * ROW
        head = _Part(0, split, True, [each[:split].view(rows, ROW) for each in elements[1:]])
        tail = _Part(split, length, False, [each[split:] for each in elements[1:]])
        return [head, tail] if split < length else [head]


def _repeated(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph with the inputs of several."""
    count = sum(node.op == "placeholder" for node in graph.graph.nodes)
    outer = fx.Graph()
    inputs = [outer.placeholder(f"input_{number}") for number in range(count * TOGETHER)]
    for start in range(0, len(inputs), count):
        outer.call_module("elements", tuple(inputs[start : start + count]))
    outer.output(())
    return fx.GraphModule({"elements": graph}, outer)


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
