"""Compiled updates, `ShardedOptimizer(compile=True)`: all that happens to a leaf in a step, as one kernel.

The step of a class is traced once for each kind of leaf, and the graph compiled: flat leaves of any length share one,
other leaves share one with all of their shape. A class whose step cannot be traced or compiled is updated as without
`compile`, and a warning says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerostep.dtensors import is_dtensor
from zerostep.memory.leaf import Leaf
from zerostep.plan.groups import Group, own_options
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.step.leaf_arguments import Arguments, is_aligned
from zerostep.step.leaf_graph import (
    Decision,
    LeafGraph,
    MeasuredNumbersError,
    NotTraceableError,
    Path,
    StateAddedError,
    TracedLeaf,
    first_line,
    hidden_attributes,
    outcome,
    plain_values,
    trace,
)
from zerostep.step.leaf_program import LeafProgram, ReadyLeaf, is_of_any_length
from zerostep.tensors import flat_alias

logger = logging.getLogger("zerostep")

# Options are constants of a graph. A group may change them so often before its class is compiled no more.
_MOST_CONSTANTS = 8
_MOST_ATTEMPTS = 6

_Kind = tuple[Any, ...]


@dataclass(frozen=True)
class Update:
    """One leaf with its gradient and the numbers of this step, ready to be updated."""

    programs: _OptimizerPrograms
    leaf: ReadyLeaf
    grad: Tensor
    options: tuple[Tensor, ...]


def run_updates(updates: Iterable[tuple[Update, Tensor | None]]) -> None:
    """Update leaves, each with the factor that its gradient is to be multiplied by; those of one kind together."""
    alike: dict[tuple[int, ...], list[tuple[Update, Tensor | None]]] = {}
    for update, factor in updates:
        key = id(update.leaf.program), id(update.options), id(factor)
        alike.setdefault(key, []).append((update, factor))
    for together in alike.values():
        first, factor = together[0]
        first.programs.run([(update.leaf, update.grad) for update, _ in together], first.options, factor)


class CompiledUpdates:
    """The compiled updates of all inner optimizers."""

    def __init__(self) -> None:
        self._optimizers: dict[int, _OptimizerPrograms] = {}

    @property
    def seconds(self) -> float:
        """The time that tracing and compiling have taken."""
        return sum(programs.all_seconds for programs in self._optimizers.values())

    @property
    def graphs(self) -> int:
        """How many graphs were compiled."""
        return sum(programs.all_graphs for programs in self._optimizers.values())

    def forget_state(self) -> None:
        """A state is loaded: keep nothing of the old one alive."""
        for programs in self._optimizers.values():
            programs.forget_state()

    def begin(self, inners: InnerOptimizers) -> PreparedUpdates:
        """The updates of a step, or of a part of one, with the options that the groups have now."""
        return PreparedUpdates(self._programs_of, inners)

    def _programs_of(self, optimizer: Optimizer) -> _OptimizerPrograms:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = _OptimizerPrograms(optimizer)
        return self._optimizers[id(optimizer)]


class PreparedUpdates:
    """Finds or makes the compiled update of each leaf of a step. Nothing is updated by that."""

    def __init__(self, programs_of: Callable[[Optimizer], _OptimizerPrograms], inners: InnerOptimizers) -> None:
        self._programs_of, self._inners = programs_of, inners
        self._groups: dict[int, _GroupOptions] = {}

    def of(self, leaf: Leaf, part: Tensor, rounded: Tensor | None) -> Update | None:
        """The update of a leaf by its elements of `part`, to be rounded into those of `rounded`; `None` if it has none.

        It has none in its first step, which makes its state.
        """
        programs = self._programs_of(self._inners.of(leaf.group))
        if programs.refused or not leaf.tensor.numel():
            return None
        try:
            return self._prepared(programs, leaf, part, rounded)
        except StateAddedError:
            return None  # an ordinary step makes it
        except NotTraceableError as error:
            programs.refuse(str(error))
        except Exception as error:  # whatever a class, the tracer or a compiler raises: the ordinary update is there
            programs.refuse(first_line(error))
        return None

    def _prepared(
        self, programs: _OptimizerPrograms, leaf: Leaf, part: Tensor, rounded: Tensor | None
    ) -> Update | None:
        grad, low = leaf.view(part), None if rounded is None else leaf.view(rounded)
        for _ in range(_MOST_ATTEMPTS):
            if leaf.group not in self._groups:
                self._groups[leaf.group] = programs.options_of(leaf.group, self._inners.group(leaf.group))
            try:
                return programs.prepare(leaf, grad, low, self._groups[leaf.group])
            except _OtherKindError:
                del self._groups[leaf.group]
        raise NotTraceableError(f"{_MOST_ATTEMPTS} traces of its step led to other graphs each")


class _OtherKindError(Exception):
    """A trace has shown that leaves of this kind are to be traced in another way, which is noted."""


@dataclass(frozen=True)
class _GroupOptions:
    """The options of a group in one step: inputs of a graph with their values, and constants.

    `stateless` if no leaf of the group has state.
    """

    options: Group
    inputs: tuple[Path, ...]
    values: tuple[Tensor, ...]
    constants: tuple[Any, ...]
    stateless: bool


class _OptimizerPrograms:
    """The programs of one inner optimizer, by kind of leaf."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._programs: dict[_Kind, LeafProgram] = {}
        self._ready: WeakKeyDictionary[Leaf, _Known] = WeakKeyDictionary()
        self._by_code: dict[_Kind, LeafProgram] = {}
        self._of_one_length: set[_Kind] = set()
        self._stepped: WeakSet[Leaf] = WeakSet()
        self._last: dict[int, dict[Path, Any]] = {}
        self._known: dict[int, set[tuple[Any, ...]]] = {}
        self._changing: set[Path] = set()
        self._fixed: set[Path] = set()
        self._decisions: set[Decision] = set()
        self._measured: frozenset[str] = frozenset()
        self._factors = _Factors()
        self.refused = self._told_of_dtensors = False
        self.seconds, self.graphs = 0.0, 0

    @property
    def all_seconds(self) -> float:
        """The time of all graphs, those of several leaves included, which programs compile when they first run."""
        return self.seconds + sum(program.seconds for program in self._by_code.values())

    @property
    def all_graphs(self) -> int:
        """The number of all graphs."""
        return self.graphs + sum(program.graphs for program in self._by_code.values())

    def forget_state(self) -> None:
        """A state is loaded: keep nothing of the old one alive."""
        self._ready.clear()

    def refuse(self, reason: str) -> None:
        """Compile no more for this optimizer."""
        self.refused = True
        self._programs.clear()
        self._ready.clear()
        self._by_code.clear()
        name = type(self._optimizer).__name__
        logger.warning("compile=True: %s is updated by its own step(), without compilation: %s", name, reason)

    # ------------------------------------------------------------------ options

    def options_of(self, index: int, group: Group) -> _GroupOptions:
        """Which options of a group are inputs now, and which are constants; notices those that change."""
        options = own_options(group)
        numbers = _numbers(options)
        last = self._last.get(index, numbers)
        self._changing |= {path for path in numbers if path in last and _differs(last[path], numbers[path])}
        self._last[index] = numbers
        return self._divided(index, options, numbers, group)

    def _divided(self, index: int, options: Group, numbers: Mapping[Path, Any], group: Group) -> _GroupOptions:
        wanted = {("lr", None), *self._changing} - self._fixed
        inputs = tuple(path for path, value in numbers.items() if path in wanted or isinstance(value, Tensor))
        others = {path: value for path, value in _flat(options).items() if path not in inputs}
        for (name, _), value in others.items():
            if isinstance(value, Tensor):
                raise NotTraceableError(f"its option {name!r} is a tensor that is not one floating-point number")
        attributes = repr(plain_values(self._optimizer))
        decided = tuple(outcome(each, options) for each in sorted(self._decisions) if each[0] in inputs)
        constants = *((path, repr(value)) for path, value in others.items()), attributes, decided
        known = self._known.setdefault(index, set())
        known.add(constants)
        if len(known) > _MOST_CONSTANTS:
            names = ", ".join(sorted({name for name, _ in self._changing & self._fixed})) or "options of its groups"
            raise NotTraceableError(f"{names} would be constants of a graph, and change from step to step")
        state: Mapping[Any, Any] = self._optimizer.state
        values = tuple(_as_tensor(numbers[path]) for path in inputs)
        return _GroupOptions(
            options, inputs, values, constants, not any(state.get(tensor) for tensor in group["params"])
        )

    # ------------------------------------------------------------------ programs

    def prepare(self, leaf: Leaf, grad: Tensor, rounded: Tensor | None, group: _GroupOptions) -> Update | None:
        """The update of a leaf, compiled now if none of its kind was before."""
        if is_dtensor(leaf.tensor):
            self._tell_of_dtensors()
            return None
        state: Mapping[Any, Any] = self._optimizer.state
        entry: dict[str, Any] = state.get(leaf.tensor) or {}
        if not entry and (leaf not in self._stepped or not group.stateless):
            self._stepped.add(leaf)
            return None
        known = self._ready.get(leaf)
        if known is None or not known.fits(leaf, grad, rounded, entry, group):
            known = self._ready[leaf] = self._made_ready(leaf, grad, rounded, entry, group)
        return Update(self, known.ready, flat_alias(grad) if known.ready.flattened else grad, group.values)

    def _tell_of_dtensors(self) -> None:
        if not self._told_of_dtensors:
            self._told_of_dtensors = True
            name = type(self._optimizer).__name__
            logger.warning("compile=True: %s updates parameters that a mesh divides by its own step()", name)

    def _made_ready(
        self, leaf: Leaf, grad: Tensor, rounded: Tensor | None, entry: dict[str, Any], group: _GroupOptions
    ) -> _Known:
        family = group.inputs, group.constants, tuple(entry)
        arguments = Arguments(grad, leaf.tensor.detach(), rounded, entry, measured=self._measured)
        any_length = is_of_any_length(arguments.leaf) and family not in self._of_one_length
        arguments = replace(arguments, any_length=any_length)
        where = _device_of_numbers(arguments, group.values)
        if any(value.device != where for value in arguments.numbers.values()):
            # Beside others on an accelerator, as a learning rate is that the user has put there.
            entry.update({key: value.to(where, non_blocking=True) for key, value in arguments.numbers.items()})
            arguments = replace(arguments, state={**arguments.state, **{key: entry[key] for key in arguments.numbers}})
        kind = *family, where, *arguments.kind()
        self._check(arguments)
        if kind not in self._programs:
            self._programs[kind] = self._compiled(family, arguments, group)
        ready = self._programs[kind].ready(arguments)
        return _Known(ready, *_Known.of(leaf, grad, rounded, entry, group), dict(entry))

    def _compiled(self, family: _Kind, arguments: Arguments, group: _GroupOptions) -> LeafProgram:
        start = time.perf_counter()
        example = arguments.examples()
        graph = self._traced(example, group)
        if not graph.decisions <= self._decisions:
            self._decisions |= graph.decisions
            raise _OtherKindError
        if graph.depends_on_length:
            self._of_one_length.add(family)
            raise _OtherKindError
        shown = arguments.flattened() if graph.pointwise and arguments.is_flattenable else arguments
        shown = replace(
            shown, any_length=arguments.any_length or (shown is not arguments and is_of_any_length(shown.leaf))
        )
        # Leaves of other shapes may have led to the same graph.
        code = graph.code or family, *shown.kind(), _device_of_numbers(arguments, group.values)
        if code not in self._by_code:
            self._by_code[code] = self._made(graph, shown, group)
            self._note(shown, time.perf_counter() - start)
        return self._by_code[code]

    def _made(self, graph: LeafGraph, arguments: Arguments, group: _GroupOptions) -> LeafProgram:
        example = arguments.examples()
        program = LeafProgram(graph, example, _device_of_numbers(arguments, group.values))
        program.compile(example, group.values, self._factors.of(None, program))
        return program

    def _check(self, arguments: Arguments) -> None:
        state: Mapping[Any, Any] = self._optimizer.state
        if any(not isinstance(key, Tensor) for key in state):
            raise NotTraceableError("it keeps state that belongs to no parameter")
        hidden = hidden_attributes(self._optimizer)
        if hidden:
            raise NotTraceableError(f"it keeps a tensor or an object in the attribute {hidden[0]!r}")
        obstacle = arguments.obstacle()
        if obstacle is not None:
            raise NotTraceableError(obstacle)

    def _traced(self, example: Arguments, group: _GroupOptions) -> LeafGraph:
        try:
            return trace(TracedLeaf(self._optimizer, group.options, group.inputs, example))
        except MeasuredNumbersError as error:
            self._measured |= frozenset(error.names)
            raise _OtherKindError from None
        except NotTraceableError:
            # It may take no tensors for some of its numbers: those are constants, then.
            numbers = _numbers(group.options)
            of_user = {path for path in group.inputs if isinstance(numbers[path], Tensor)}
            for fewer in ({*of_user, ("lr", None)}.intersection(group.inputs), of_user):
                if len(fewer) < len(group.inputs) and self._is_traceable(example, group, fewer):
                    self._fixed |= {*group.inputs} - fewer
                    raise _OtherKindError from None
            raise

    def _is_traceable(self, example: Arguments, group: _GroupOptions, inputs: Collection[Path]) -> bool:
        try:
            trace(TracedLeaf(self._optimizer, group.options, sorted(inputs), example))
        except NotTraceableError:
            return False
        except MeasuredNumbersError:
            return True
        return True

    def _note(self, arguments: Arguments, seconds: float) -> None:
        self.seconds += seconds
        self.graphs += 1
        shape = "flat parts of parameters" if arguments.any_length else f"shape {tuple(arguments.leaf.shape)}"
        name, dtype = type(self._optimizer).__name__, str(arguments.leaf.dtype).removeprefix("torch.")
        logger.info("compiled the update of %s for %s in %s in %.1f s", name, shape, dtype, seconds)

    def run(self, leaves: Sequence[tuple[ReadyLeaf, Tensor]], options: Sequence[Tensor], factor: Tensor | None) -> None:
        """Update leaves of one kind, each with its gradient."""
        leaves[0][0].program.run(leaves, options, self._factors.of(factor, leaves[0][0].program))


@dataclass(frozen=True)
class _Known:
    """A leaf that was made ready in an earlier step, and what that depends on. `state` keeps what it names alive."""

    ready: ReadyLeaf
    memory: tuple[Any, ...]
    inputs: tuple[Path, ...]
    constants: tuple[Any, ...]
    state: dict[str, Any]

    @staticmethod
    def of(
        leaf: Leaf, grad: Tensor, rounded: Tensor | None, entry: Mapping[str, Any], group: _GroupOptions
    ) -> tuple[tuple[Any, ...], tuple[Path, ...], tuple[Any, ...]]:
        pointers = leaf.tensor.data_ptr(), None if rounded is None else rounded.data_ptr()
        devices = {value.device for value in group.values}
        # A tensor may be the same and have other memory, after `tensor.data = ...`.
        state = tuple(
            (key, id(value), value.data_ptr() if isinstance(value, Tensor) else None) for key, value in entry.items()
        )
        return (*pointers, grad.dtype, is_aligned(grad), devices, state), group.inputs, group.constants

    def fits(
        self, leaf: Leaf, grad: Tensor, rounded: Tensor | None, entry: Mapping[str, Any], group: _GroupOptions
    ) -> bool:
        return (self.memory, self.inputs, self.constants) == self.of(leaf, grad, rounded, entry, group)


class _Factors:
    """The factors of gradients in the precision that graphs take; all leaves of a step have one."""

    def __init__(self) -> None:
        self._ones: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._latest: tuple[Tensor, Tensor] | None = None

    def of(self, factor: Tensor | None, program: LeafProgram) -> Tensor:
        device, dtype = program.device, program.number_dtype
        if factor is None:
            if (device, dtype) not in self._ones:
                self._ones[device, dtype] = torch.ones((), dtype=dtype, device=device)
            return self._ones[device, dtype]
        if self._latest is None or self._latest[0] is not factor or self._latest[1].dtype != dtype:
            self._latest = factor, factor.to(dtype)
        return self._latest[1]


def _differs(before: Any, now: Any) -> bool:
    """Whether an option has changed; tensors, which are inputs in any case, are not read: the host would wait."""
    return not isinstance(before, Tensor) and not isinstance(now, Tensor) and repr(before) != repr(now)


def _as_tensor(value: Any) -> Tensor:
    """A number without dimensions in double precision: on the device of the user's tensor, or in host memory."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).double()
    return torch.tensor(float(value), dtype=torch.float64)


def _device_of_numbers(arguments: Arguments, options: Sequence[Tensor]) -> torch.device:
    """Where the numbers are computed: in host memory, unless some of them are on the leaf's accelerator."""
    devices = {each.device for each in (*options, *arguments.numbers.values())}
    on_host = all(device.type == "cpu" for device in devices)
    return torch.device("cpu") if on_host else arguments.leaf.device


def _flat(options: Group) -> dict[Path, Any]:
    """The options by path, those in tuples one by one."""
    found = dict[Path, Any]()
    for name, value in options.items():
        if isinstance(value, (tuple, list)):
            found |= {(name, position): each for position, each in enumerate(value)}
        else:
            found[name, None] = value
    return found


def _numbers(options: Group) -> dict[Path, Any]:
    """The options that are numbers: floats, and tensors of one element."""
    return {
        path: value
        for path, value in _flat(options).items()
        if isinstance(value, float) or (path[0] == "lr" and type(value) is int) or _is_number(value)
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
