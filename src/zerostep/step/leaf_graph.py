"""The update of one leaf as a graph: a class's own `step()`, traced over one tensor and taken apart.

A graph has two halves. *Numbers* computes what depends on numbers alone, such as bias corrections from a step counter
and a learning rate, in double precision, and new values of the numbers in the state. *Elements* is the rest: it takes
those results in one small tensor, and updates the leaf, its state and the rounded parameter in place.
"""

from __future__ import annotations

import operator
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from zerostep.plan.groups import Group
from zerostep.step.leaf_arguments import Arguments

Path = tuple[str, int | None]
"""A number among the options of a group: the option's name, and its position if the option is a tuple."""

Decision = tuple[Path, str, float]
"""A comparison of an option with a number, by which a step decides what to do: the option, the operator, the number."""

_OPERATORS = {"ne": operator.ne, "eq": operator.eq, "__eq__": operator.eq, "gt": operator.gt, "ge": operator.ge}
_OPERATORS |= {"lt": operator.lt, "le": operator.le}
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_aten = torch.ops.aten
# Element-wise, though torch does not mark them so.
_ALSO_POINTWISE = {_aten.clone.default, _aten._to_copy.default, _aten.copy_.default}
_ALSO_POINTWISE |= {_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.detach.default}


class NotTraceableError(Exception):
    """A class's step cannot become a graph; the text says why."""


class StateAddedError(NotTraceableError):
    """A step makes state that is not there yet, as a class's own first step does."""


class MeasuredNumbersError(Exception):
    """Some state is one number, but its new value depends on elements: it is no input of the numbers' half."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


@dataclass(frozen=True)
class TracedLeaf:
    """What a trace begins with: examples, whose values do not matter, and everything that becomes a constant.

    `inputs` are the numbers among the options that are inputs of the graph; all other options are constants, and so is
    state that is not a tensor.
    """

    optimizer: Optimizer
    options: Group
    inputs: Sequence[Path]
    example: Arguments


@dataclass(frozen=True)
class LeafGraph:
    """`numbers(*options, *state)` returns a vector and new numbers of the state; `elements` takes that vector last.

    Its other arguments are the gradient, a factor, the leaf, the rounded parameter if there is one, and the tensors of
    the state. `pointwise` says that each element of the leaf depends on nothing but the elements at its own place.
    It is right as long as its `decisions` have the outcomes that they had when it was traced.
    """

    numbers: fx.GraphModule
    elements: fx.GraphModule
    pointwise: bool
    depends_on_length: bool
    decisions: frozenset[Decision]

    @property
    def code(self) -> tuple[str, str] | None:
        """The text of both halves, if it is all that they depend on."""
        halves = self.numbers, self.elements
        if any(node.op == "get_attr" for half in halves for node in half.graph.nodes):
            return None
        return _text(self.numbers.graph), _text(self.elements.graph)


def _text(graph: fx.Graph) -> str:
    """A graph in words, without the names of its nodes."""
    places = {node: f"%{place}" for place, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        given = map_arg((node.args, node.kwargs), lambda each: places[each])
        lines.append(f"{'' if node.op == 'placeholder' else node.target} {given}")
    return "\n".join(lines)


def trace(traced: TracedLeaf) -> LeafGraph:
    """Trace the step of a class over one leaf, or raise `NotTraceableError`; nothing real is read or changed."""
    refused: Exception | None = None
    # The ordinary formulas first: those for CUDA graphs divide by the learning rate, which may be zero.
    for capturable in (False, True) if "capturable" in traced.options else (None,):
        try:
            return _trace(traced, capturable)
        except (NotTraceableError, MeasuredNumbersError):
            raise
        except Exception as error:
            refused = refused or error
    assert refused is not None
    raise NotTraceableError(_explained(refused)) from refused


def _trace(traced: TracedLeaf, capturable: bool | None) -> LeafGraph:
    example, device = traced.example, traced.example.leaf.device
    tensors, numbers, low = example.tensors, example.numbers, example.rounded is not None
    factor = torch.ones((), dtype=example.number_dtype, device=device)
    given = [torch.zeros((), dtype=torch.float64, device=device) for _ in traced.inputs]
    counted = [torch.zeros_like(each, device=device) for each in numbers.values()]
    stand_in = _StandIn(traced, capturable)

    def update(grad: Tensor, factor: Tensor, leaf: Tensor, *others: Tensor) -> list[Tensor]:
        rest = iter(others[low:])
        state = {key: next(rest).clone() for key in tensors}
        options = [next(rest) for _ in given]
        state |= {key: next(rest).clone() for key in numbers}
        # In the leaf's precision, not in that of the gradient: nothing is rounded in between.
        own = (grad.to(leaf.dtype) * factor).to(leaf.dtype)
        new, *after = stand_in.step(leaf.clone(), own, state, options)
        return [new, *([new.to(others[0].dtype)] if low else []), *after]

    grad, *elements = example.elements
    functional: Callable[..., Any] = torch.func.functionalize(update)
    tracer = make_fx(functional, tracing_mode="symbolic" if example.any_length else "fake")
    whole = tracer(grad, factor, *elements, *given, *counted)
    return _Halves(whole, 2 + len(elements), example).split(stand_in.decisions)


class _StandIn:
    """Takes the place of an inner optimizer for one step over stand-ins of tensors, and notices what a graph misses."""

    def __init__(self, traced: TracedLeaf, capturable: bool | None) -> None:
        self._traced = traced
        self.decisions: set[Decision] = set()
        how = {"foreach": False, "fused": None, "capturable": capturable}
        known = {key: value for key, value in how.items() if key in traced.options and value is not None}
        self._options = {**traced.options, **known, **({"fused": None} if "fused" in traced.options else {})}

    def step(self, leaf: Tensor, grad: Tensor, named: Mapping[str, Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        """The new leaf and the new state, tensors first; `NotTraceableError` if anything else has changed."""
        traced = self._traced
        options = with_inputs(self._options, traced.inputs, given)
        example = traced.example
        entry = {**example.state, **named, **{key: _widened(named[key]) for key in example.numbers}}
        group, state = {**options, "params": [leaf]}, defaultdict(dict, {leaf: entry})
        optimizer = _copied(traced.optimizer, [group], state)
        before = plain_values(optimizer)
        leaf.grad = grad
        setattr(leaf, "_is_param", True)  # what isinstance(leaf, nn.Parameter) asks for  # noqa: B010
        inputs = dict(zip(map(id, given), traced.inputs, strict=True))
        mode = _TensorNumbers(leaf, inputs, traced.options, self.decisions)
        drawn = random.getstate()
        with _as_if_compiled(), mode, torch.no_grad():
            optimizer.step()
        if random.getstate() != drawn:
            random.setstate(drawn)
            raise NotTraceableError("its step draws Python's random numbers")
        self._check_options(options, group)
        if plain_values(optimizer) != before:
            raise NotTraceableError("its step changes attributes of the optimizer")
        if list(optimizer.state) != [leaf]:
            raise NotTraceableError("its step makes state that belongs to no parameter")
        after = optimizer.state[leaf]
        self._check_state(after, named)
        return [leaf, *[after[key].to(named[key].dtype) for key in [*example.tensors, *example.numbers]]]

    def _check_options(self, before: Group, after: Group) -> None:
        for key in {*before, *after} - {"params"}:
            if key not in after or key not in before or not _is_same(before[key], after[key]):
                raise NotTraceableError(f"its step changes the option {key!r} of the group")

    def _check_state(self, after: Mapping[str, Any], named: Mapping[str, Tensor]) -> None:
        before = self._traced.example.state
        for key in sorted({*before, *after}):
            if key not in before or key not in after:
                kind = StateAddedError if not before else NotTraceableError
                raise kind(f"its step adds or removes the state {key!r}")
            if key not in named and not _is_same(before[key], after[key]):
                raise NotTraceableError(f"its step changes the state {key!r}, which is not a tensor")
            if key in named and (not isinstance(after[key], Tensor) or after[key].shape != named[key].shape):
                raise NotTraceableError(f"its step replaces the state {key!r} by something of another shape or kind")


def _copied(optimizer: Optimizer, groups: list[Group], state: Any) -> Optimizer:
    """The same optimizer over other groups and other state; containers among its attributes are copies."""
    found = object.__new__(type(optimizer))
    attributes = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    vars(found).update(_copy_containers(attributes), param_groups=groups, state=state)
    return found


def _copy_containers(value: Any) -> Any:
    if not isinstance(value, (dict, list, set)):
        return value
    found: Any = copy(value)
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found[key] = _copy_containers(each)
    return found


def plain_values(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that a graph would take for constants: numbers, texts and lists of them."""
    found = {key: _plain(value) for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    return {key: value for key, value in found.items() if value is not None}


def hidden_attributes(optimizer: Optimizer) -> list[str]:
    """The attributes of an optimizer whose changes a trace would not notice, or would make: tensors and objects."""
    others = {"state", "param_groups", "defaults"}
    return [key for key, value in vars(optimizer).items() if key not in others and not _is_seen(value)]


def _is_seen(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple, set)):
        return all(map(_is_seen, value.values() if isinstance(value, dict) else value))
    if isinstance(value, Tensor):
        return False
    return value is None or callable(value) or isinstance(value, _PLAIN)


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return repr(value)  # NaN is equal to itself then
    if isinstance(value, (list, tuple, set)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {repr(key): _plain(each) for key, each in value.items() if isinstance(key, (str, int))}
    return None


def with_inputs(options: Group, paths: Sequence[Path], values: Sequence[Any]) -> Group:
    """The options with other values for some of their numbers."""
    found = dict(options)
    for (name, position), value in zip(paths, values, strict=True):
        if position is None:
            found[name] = value
        else:
            found[name] = tuple(value if at == position else each for at, each in enumerate(found[name]))
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or (not isinstance(one, Tensor) and type(one) is type(other) and repr(one) == repr(other))


def _widened(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its text, with the second where the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _explained(error: Exception) -> str:
    by_value = "DataDependent" in type(error).__name__
    return f"its step decides by the values of tensors ({first_line(error)})" if by_value else first_line(error)


@contextmanager
def _as_if_compiled() -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` be true, so that torch's classes leave step counters on their device."""
    # The switch that torch.export sets while it traces; there is no public one.
    compiler: Any = torch.compiler
    before, compiler._is_compiling_flag = compiler._is_compiling_flag, True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


class _TensorNumbers(TorchFunctionMode):
    """Lets tensors stand for numbers where torch's functions would read them on the host.

    `inputs` has the paths of options that are tensors here, by identity. Where a step compares one with a number, the
    value that it has in `options` decides, and that is noted.
    """

    def __init__(self, leaf: Tensor, inputs: Mapping[int, Path], options: Group, decisions: set[Decision]) -> None:
        super().__init__()
        self._leaf = leaf
        self._inputs, self._options, self._decisions = inputs, options, decisions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace some calls by others with the same result."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func == _REQUIRES_GRAD and args[0] is self._leaf:
            return True
        if id(args[0] if args else None) in self._inputs and self._is_decision(name, args):
            return self._decide(self._inputs[id(args[0])], name.strip("_"), *args[1:])
        if isinstance(kwargs.get("alpha"), Tensor) and name in ("add", "add_", "sub", "sub_"):
            alpha = kwargs.pop("alpha")
            return func(args[0], args[1] * alpha, **kwargs)
        if isinstance(kwargs.get("value"), Tensor) and name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_"):
            first = args[1] * kwargs.pop("value")
            term = first * args[2] if "mul" in name else first / args[2]
            return args[0].add_(term) if name.endswith("_") else torch.add(args[0], term, **kwargs)
        if name in ("lerp", "lerp_") and len(args) == 3 and isinstance(args[2], Tensor) and not args[2].dim():
            return func(*args[:2], args[2].to(args[0].dtype))
        return func(*args, **kwargs)

    def _is_decision(self, name: str, args: Sequence[Any]) -> bool:
        compared = name in _OPERATORS and len(args) == 2 and isinstance(args[1], (int, float))
        known = not isinstance(value_at(self._options, self._inputs[id(args[0])]), Tensor)
        return known and (compared or name == "__bool__")

    def _decide(self, path: Path, name: str, number: float = 0.0) -> bool:
        decision = path, "ne" if name == "bool" else name, float(number)
        self._decisions.add(decision)
        return outcome(decision, self._options)


def value_at(options: Group, path: Path) -> Any:
    """The option, or the number inside of one, at a path."""
    name, position = path
    return options[name] if position is None else options[name][position]


def outcome(decision: Decision, options: Group) -> bool:
    """What a step decides with these options."""
    path, name, number = decision
    return bool(_OPERATORS[name](value_at(options, path), number))


# ------------------------------------------------------------------------------------- numbers apart from elements


class _Halves:
    """Takes a graph apart: what depends on numbers alone, and the rest.

    The first inputs are tensors of elements, the others numbers. Outputs are in the order of the inputs that they
    replace: the leaf, the rounded parameter, tensors, numbers.
    """

    def __init__(self, whole: fx.GraphModule, elements: int, example: Arguments) -> None:
        self._whole, self._example = whole, example
        _drop_profiling(whole.graph)
        placeholders = [node for node in whole.graph.nodes if node.op == "placeholder"]
        self._element_inputs, self._number_inputs = placeholders[:elements], placeholders[elements:]
        self._outputs: list[fx.Node] = list(next(node for node in whole.graph.nodes if node.op == "output").args[0])
        self._is_number = self._find_numbers()
        used = (
            each
            for node in whole.graph.nodes
            if node.op == "call_function" and node not in self._is_number
            for each in node.all_input_nodes
        )
        kept = self._outputs[: elements - 2]
        self._passed = list(dict.fromkeys(node for node in [*used, *kept] if node in self._is_number))
        self._dtype = example.number_dtype

    def split(self, decisions: Iterable[Decision]) -> LeafGraph:
        """The two halves."""
        if any(node.target is _aten._local_scalar_dense.default for node in self._whole.graph.nodes):
            raise NotTraceableError("its step reads a tensor on the host, as item() does")
        if any(map(_is_foreign, self._whole.graph.nodes)):
            raise NotTraceableError("its step reads tensors that are not of its state")
        if _is_unchanged(self._outputs[0], self._element_inputs[2]):
            raise NotTraceableError("its step does not change the parameter")
        after = self._outputs[len(self._element_inputs) - 2 :]
        measured = [key for key, node in zip(self._example.numbers, after, strict=True) if node not in self._is_number]
        if measured:
            raise MeasuredNumbersError(measured)
        elements = self._elements()
        # Noted where Python code, as `if tensor.numel() > 100`, has asked for a length.
        guards = getattr(getattr(self._whole, "shape_env", None), "guards", ())
        pointwise = _is_pointwise(elements, self._example)
        return LeafGraph(self._numbers(), elements, pointwise, bool(guards), frozenset(decisions))

    def _find_numbers(self) -> set[fx.Node]:
        found = set(self._number_inputs)
        for node in self._whole.graph.nodes:
            value = node.meta.get("val")
            several = value if isinstance(value, (list, tuple)) else [value]
            small = all(isinstance(each, Tensor) and each.dim() == 0 for each in several)
            if node.op == "get_attr":
                constant = getattr(self._whole, str(node.target))
                small = isinstance(constant, Tensor) and constant.dim() == 0
            if node.op in ("call_function", "get_attr") and small and found.issuperset(node.all_input_nodes):
                found.add(node)
        return found

    def _numbers(self) -> fx.GraphModule:
        graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._number_inputs:
            known[node] = graph.placeholder(node.name)
        for node in self._whole.graph.nodes:
            if node in self._is_number and node not in known:
                known[node] = graph.node_copy(node, lambda each: known[each])
        passed = [
            graph.call_function(_aten._to_copy.default, (known[node],), {"dtype": self._dtype}) for node in self._passed
        ]
        vector = graph.call_function(_aten.stack.default, (passed,)) if passed else None
        graph.output((vector, *[known[node] for node in self._outputs[len(self._element_inputs) - 2 :]]))
        return fx.GraphModule(self._whole, graph)

    def _elements(self) -> fx.GraphModule:
        graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self._element_inputs:
            known[node] = graph.placeholder(node.name)
            known[node].meta = node.meta
        vector = graph.placeholder("numbers")
        for position, node in enumerate(self._passed):
            known[node] = self._select(graph, vector, position, node.meta["val"].dtype)
        for node in self._whole.graph.nodes:
            if node.op in ("call_function", "get_attr") and node not in self._is_number:
                known[node] = graph.node_copy(node, lambda each: known[each])
        replaced = [self._element_inputs[2], *self._element_inputs[3:]]
        for node, value in zip(replaced, self._outputs, strict=False):
            if not _is_unchanged(value, node):
                graph.call_function(_aten.copy_.default, (known[node], known[value]))
        graph.output(())
        return fx.GraphModule(self._whole, graph)

    def _select(self, graph: fx.Graph, vector: fx.Node, position: int, dtype: torch.dtype) -> fx.Node:
        found = graph.call_function(_aten.select.int, (vector, 0, position))
        return (
            found
            if dtype.is_floating_point
            else graph.call_function(_aten._to_copy.default, (found,), {"dtype": dtype})
        )


def _drop_profiling(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)


def _is_foreign(node: fx.Node) -> bool:
    """Whether a node reads a tensor that was there before; one that the step has made of numbers is a constant."""
    return node.op == "get_attr" and any(user.target is not _aten.lift_fresh_copy.default for user in node.users)


def _is_unchanged(value: fx.Node, before: fx.Node) -> bool:
    return value.target is _aten.clone.default and value.args[0] is before


def _is_pointwise(elements: fx.GraphModule, example: Arguments) -> bool:
    """Whether a graph works on tensors of elements of any shape, each element by itself."""
    if any(each.shape != example.leaf.shape for each in example.tensors.values()):
        return False
    for node in elements.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and not _is_elementwise_call(node)):
            return False
    return True


def _is_elementwise_call(node: fx.Node) -> bool:
    target: Any = node.target
    if target is _aten.select.int:
        return True
    return target in _ALSO_POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ())


def on_device(numbers: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """The same computation of numbers for another device than that of the trace."""
    for node in numbers.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    numbers.recompile()
    return numbers
