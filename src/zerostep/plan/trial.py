"""Trial runs of an optimizer on small CPU tensors: does an update depend on where parameters are cut or held?

A trial compares replicas of the same elements: in one, a single instance of the optimizer holds whole parameters; in
the other, several instances hold the same elements as several ranks would. Equal means equal in every bit, so an
optimizer whose kernels round differently at the end of a tensor counts as coupling its elements.

Besides the parameters a trial compares what the instances remember: state, options that a step changes and numbers kept
in attributes. A rule over all parameters shows there at once, even while its effect on the parameters is still too
small to see or has not begun, such as a step size that grows with the distance from the start.

A trial cannot see what its few steps do not do, such as a change of rule after a hundred of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerostep.plan.groups import options
from zerostep.plan.modes import EVALUATION, TRAINING, switch

Build = Callable[[Sequence[Tensor]], Optimizer]
"""Makes an instance of the optimizer under trial that holds these leaves."""

COUPLES_PARAMETERS = "couples parameters"
EVALUATES_ELSEWHERE = "evaluates its closure at other values than the parameters had before the step"
TOGETHER = (COUPLES_PARAMETERS, EVALUATES_ELSEWHERE)
"""Why an optimizer must have all parameters in one instance."""
_DRAWS = "draws random numbers"

_Division = Sequence[Sequence[tuple[int, ...]]]
"""For each instance of an optimizer, the shapes of its leaves; the elements lie in this order."""

_State = list[tuple[Tensor, Mapping[Any, Any]]]
"""Every leaf with its state."""

_SMALL = ((6, 8), (7,), (4, 3, 3, 3), (8, 8), (3,))
_MATRICES = tuple(shape for shape in _SMALL if len(shape) == 2)
# The last is for rules that hold from a certain size on: factored moments (128 rows and columns), quantised state (4096
# elements, in blocks of 256).
_SHAPES = (*_SMALL, (128, 160))
_PIECES: _Division = (((29,), (1,)), ((140,), (5003,)), ((8009,), (7528,)))
_SECOND = slice(48, 55)  # all of the second shape

PARAMETER_TRIALS = ((_SMALL, False), (_MATRICES, False), (_MATRICES, True))
"""Shapes, and whether `step` gets a closure: to be tried in turn, since not every optimizer takes all shapes."""

# For each step: the size of the gradients, by how many powers of ten they grow from the first element to the last, and
# the learning rate. The first has the user's, which may be too small to show anything, as at the start of a warm-up.
# Large gradients come late, because the updates after them are too small to show in the parameters.
_SCHEDULE = (
    (1.0, 0, None),
    (1e-3, 0, 0.1),
    (1e-2, 10, 0.02),
    (1e-7, 0, 0.5),
    (1e-2, -10, 0.03),
    (10.0, 0, 0.3),
    (1e4, 0, 0.01),
)


# Afterwards, from the start again: the same gradient at every step, for rules that measure how far parameters have
# come. Only with a large learning rate do a few steps go far, and only in parameters that are zero do tiny ones show.
_DRIFT_RATES = (None, *[1.0] * 7)

_MODES = (EVALUATION, TRAINING)


@contextmanager
def _isolated() -> Iterator[None]:
    """Run on the CPU whatever the default device, without compiling, and restore torch's random state."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.compiler.set_stance("force_eager"):
        yield


@_isolated()
def element_coupling(build: Build) -> str | None:
    """Why parameters may not be cut under this optimizer; `None` if every element is updated by itself.

    Raises whatever the optimizer raises.
    """
    before = torch.get_rng_state()
    for course in (_varied_and_overflow, _drifting):
        zeros = course is _drifting
        whole, pieces = _Replica(build, [_SHAPES], zeros=zeros), _Replica(build, _PIECES, zeros=zeros)
        for step in course(whole.memory):
            whole.step(step)
            pieces.step(step)
            if reason := _element_difference(whole, pieces):
                return reason
        for mode in _MODES:
            whole.switch(mode)
            pieces.switch(mode)
            if reason := _element_difference(whole, pieces):
                return reason
    _run_bfloat16(build)
    return _DRAWS if _has_drawn(before) else None


def _element_difference(whole: _Replica, pieces: _Replica) -> str | None:
    # Compare with the memory, not the leaves, of the pieces: leaves are to share the parameters' memory, so an
    # optimizer that binds them to other memory would update nothing.
    if not _same(whole.values(), pieces.memory):
        return "updates parameters differently when they are cut"
    if not _same_state(whole.state(), pieces.state()):
        return "keeps state that depends on where parameters are cut"
    return None


@_isolated()
def parameter_coupling(build: Build, shapes: Sequence[tuple[int, ...]], with_closure: bool) -> str | None:
    """Why instances with one parameter each differ from one instance with all; `None` if they do not.

    Raises whatever the optimizer raises.
    """
    before = torch.get_rng_state()
    for course in (_varied, _drifting):
        # Whatever differs between two equal replicas, such as the time of a step, shows no dependence.
        divisions: Sequence[_Division] = ([shapes], [shapes], [[shape] for shape in shapes])
        together, again, apart = (_Replica(build, each, zeros=course is _drifting) for each in divisions)
        further: list[_Step | str] = [*course(together.memory), *_MODES]
        for step in further:
            for replica in (together, again, apart):
                replica.switch(step) if isinstance(step, str) else replica.step(step, with_closure)
            if not _same(together.values(), apart.values()):
                unlike = not _same(together.values(), again.values())
                return _DRAWS if unlike or _has_drawn(before) else COUPLES_PARAMETERS
        if together.evaluated_elsewhere:
            # With its own parameters moved and the others' not, a rank would evaluate the model at a point of no step.
            return EVALUATES_ELSEWHERE
        if not _has_drawn(before) and not _remember_the_same(together, again, apart):
            return COUPLES_PARAMETERS
    return None


def _remember_the_same(together: _Replica, again: _Replica, apart: _Replica) -> bool:
    """Whether no number and no state differs between one instance with all parameters and one for each."""
    (ours,), (twins,) = together.changed_numbers(), again.changed_numbers()
    stable = [name for name, value in ours.items() if _same(value, twins.get(name))]
    if any(not _same(ours[name], theirs.get(name)) for theirs in apart.changed_numbers() for name in stable):
        return False
    states = zip(together.state(), again.state(), apart.state(), strict=True)
    return all(_same_floats(*(entry for _, entry in entries)) for entries in states)


def _same_floats(ours: Mapping[Any, Any], twins: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> bool:
    stable = [name for name, value in ours.items() if _is_float(value) and _same(value, twins.get(name))]
    return all(_same(ours[name], theirs.get(name)) for name in stable)


def _run_bfloat16(build: Build) -> None:
    """Run a few steps on bfloat16, for optimizers that draw random numbers to round to narrow dtypes."""
    with suppress(Exception):  # not every optimizer takes every dtype
        whole = _Replica(build, [_SMALL], torch.bfloat16)
        for step in _varied(whole.memory):
            whole.step(step)


def _has_drawn(before: Tensor) -> bool:
    return not torch.equal(before, torch.get_rng_state())


class _Step(NamedTuple):
    """One step: a gradient for all elements, and the learning rate unless it is the user's."""

    gradient: Tensor
    rate: float | None = None


def _varied(elements: Tensor) -> list[_Step]:
    generator, along = torch.Generator().manual_seed(1), torch.linspace(-0.5, 0.5, elements.numel())
    steps = []
    for size, growth, rate in _SCHEDULE:
        gradient = size * 10 ** (growth * along) * _noise(elements, generator)
        steps.append(_Step(gradient.to(elements.dtype), rate))
    steps[1].gradient[_SECOND] = 0
    return steps


def _varied_and_overflow(elements: Tensor) -> list[_Step]:
    gradient = _noise(elements, torch.Generator().manual_seed(2))
    gradient[3], gradient[600] = math.inf, math.nan
    return [*_varied(elements), _Step(gradient)]


def _drifting(elements: Tensor) -> list[_Step]:
    gradient = 0.01 * _noise(elements, torch.Generator().manual_seed(3))
    return [_Step(gradient, rate) for rate in _DRIFT_RATES]


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers of both signs and of very different size."""
    normal, size = torch.randn(2, like.numel(), generator=generator)
    return (normal * torch.exp(2 * size)).to(like.dtype)


class _Replica:
    """The elements of a trial in one division, each instance of the optimizer with its leaves."""

    def __init__(
        self, build: Build, division: _Division, dtype: torch.dtype = torch.float32, zeros: bool = False
    ) -> None:
        self._division, self.evaluated_elsewhere = division, False
        count = sum(math.prod(shape) for shapes in division for shape in shapes)
        self.memory = _noise(torch.empty(count, dtype=dtype), torch.Generator().manual_seed(0))
        if zeros:
            self.memory[_SECOND] = 0
        self._leaves = [[nn.Parameter(part) for part in parts] for parts in _cut(self.memory, division)]
        self._optimizers = [build(leaves) for leaves in self._leaves]
        self.switch(TRAINING)
        self._numbers = [_numbers(optimizer) for optimizer in self._optimizers]

    def step(self, step: _Step, with_closure: bool = False) -> None:
        """One step of every instance."""
        # Optimizers may change gradients in place, so every replica has a copy.
        gradients = _cut(step.gradient.clone(), self._division)
        for optimizer, leaves, parts in zip(self._optimizers, self._leaves, gradients, strict=True):
            for leaf, part in zip(leaves, parts, strict=True):
                leaf.grad = part
            _set_rate(optimizer, step.rate)
            closure = [partial(self._evaluate, self.values(), leaves, parts)] if with_closure else []
            optimizer.step(*closure)

    def _evaluate(self, start: Tensor, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> Any:
        """A closure whose gradients depend on the parameters, so that calls at different points differ."""
        self.evaluated_elsewhere |= not _same(start, self.values())
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient + 0.1 * leaf.detach()
        return torch.tensor(1.0)

    def switch(self, mode: str) -> None:
        """Switch every instance that has modes: evaluation may show other values than training."""
        for optimizer in self._optimizers:
            switch(optimizer, mode)

    def values(self) -> Tensor:
        """All elements, as the leaves have them."""
        return torch.cat([leaf.detach().reshape(-1) for leaves in self._leaves for leaf in leaves])

    def state(self) -> _State:
        """Every leaf with its state."""
        pairs = zip(self._optimizers, self._leaves, strict=True)
        return [(leaf, optimizer.state.get(leaf, {})) for optimizer, leaves in pairs for leaf in leaves]

    def changed_numbers(self) -> list[dict[str, Any]]:
        """Of each instance: the numbers that it remembers for all its leaves, if steps have changed them."""
        return [
            {name: value for name, value in _numbers(optimizer).items() if not _same(value, before.get(name))}
            for optimizer, before in zip(self._optimizers, self._numbers, strict=True)
        ]


def _numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Copies of the floating-point numbers in options, in attributes and in state of no parameter.

    Integers may count what an instance holds.
    """
    shared = {key: entry for key, entry in optimizer.state.items() if not isinstance(key, Tensor)}
    group: Mapping[Any, Any] = options(optimizer.param_groups[0])
    kept = [group, vars(optimizer), shared, *filter(_is_mapping, shared.values())]
    return {
        f"{number} {name}": deepcopy(value)
        for number, values in enumerate(kept)
        for name, value in values.items()
        if _is_float(value) and _is_number(value)
    }


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad
    return isinstance(value, float)


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def _cut(memory: Tensor, division: _Division) -> list[list[Tensor]]:
    parts = iter(memory.split([math.prod(shape) for shapes in division for shape in shapes]))
    return [[next(parts).view(shape) for shape in shapes] for shapes in division]


def _set_rate(optimizer: Optimizer, rate: float | None) -> None:
    for group in optimizer.param_groups:
        present = group.get("lr")
        if rate is not None and present is not None:
            group["lr"] = torch.full_like(present, rate) if isinstance(present, Tensor) else rate


def _same_state(whole: _State, pieces: _State) -> bool:
    """Whether every entry is either one value per element, or one and the same value for all leaves."""
    names = set(whole[0][1])
    if any(set(entry) != names for _, entry in whole + pieces):
        return False
    return all(_same_entry(name, whole, pieces) for name in names)


def _same_entry(name: Any, whole: _State, pieces: _State) -> bool:
    if all(_is_like(entry[name], leaf) for leaf, entry in whole + pieces):
        a, b = (torch.cat([entry[name].reshape(-1) for _, entry in state]) for state in (whole, pieces))
        return _same(a, b)
    return all(_same(whole[0][1][name], entry[name]) for _, entry in whole + pieces)


def _is_like(value: Any, leaf: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == leaf.shape


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype is b.dtype and torch.equal(_bits(a), _bits(b))
    return repr(a) == repr(b)


def _bits(tensor: Tensor) -> Tensor:
    """One byte pattern per number: 0.0 and -0.0 differ, all NaNs are one."""
    flat = tensor.detach().reshape(-1)
    return (flat.masked_fill(flat.isnan(), math.nan) if flat.is_floating_point() else flat).view(torch.uint8)
