"""Who may be cut: whether an optimizer treats every element by itself, every parameter by itself, or neither.

Parameters under an *element-wise* optimizer are splittable, under any other one atomic; and an optimizer that is not
even *separable*, because one parameter's update depends on another parameter, gives other numbers as soon as the
parameters are divided among ranks. The classes of `torch.optim` are known. Any other is tried once, on the CPU: one
instance that holds a few whole parameters, beside instances that hold the same elements as several ranks would. Equal
means equal in every bit, so an optimizer whose kernels round differently at the end of a tensor is not element-wise.

What a probe cannot see is what its few steps do not do, such as a change of rule after a hundred of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

__all__ = ["PARAM_SHAPED", "is_elementwise", "is_separable"]

logger = logging.getLogger("zerostep")

Factory = Callable[..., Optimizer]
_Division = Sequence[Sequence[tuple[int, ...]]]
"""For each instance of an optimizer, the shapes of its leaves; the elements lie in this order."""

_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.Adagrad,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
_ATOMIC: tuple[type[Optimizer], ...] = tuple(
    getattr(optim, name) for name in ("Muon", "Adafactor", "LBFGS", "SparseAdam") if hasattr(optim, name)
)

PARAM_SHAPED: tuple[type[Optimizer], ...] = (*_ELEMENTWISE, *(kind for kind in _ATOMIC if kind.__name__ == "Muon"))
"""Known classes whose state holds scalars and tensors of the parameter's shape, and nothing else."""

_SMALL = ((6, 8), (7,), (4, 3, 3, 3), (8, 8), (3,))
_MATRICES = tuple(shape for shape in _SMALL if len(shape) == 2)
# The last is for rules that hold from a certain size on: factored moments (128 rows and columns), quantised state (4096
# elements, in blocks of 256).
_SHAPES = (*_SMALL, (128, 160))
_PIECES: _Division = (((29,), (1,)), ((140,), (5003,)), ((8009,), (7528,)))
_WITHOUT_GRADIENT = slice(48, 55)  # all of the second shape

# For each step: the size of the gradients, by how many powers of ten they grow from the first element to the last, and
# the learning rate. The first has the user's, which may be too small to show anything, as at the start of a warm-up.
# What is large comes late, because it drowns everything after it.
_COURSE = (
    (1.0, 0, None),
    (1e-3, 0, 0.1),
    (1e-2, 10, 0.02),
    (1e-7, 0, 0.5),
    (1e-2, -10, 0.03),
    (10.0, 0, 0.3),
    (1e4, 0, 0.01),
)

_answers: dict[tuple[object, ...], bool] = {}


def is_elementwise(
    optimizer_class: Factory, options: Mapping[str, Any], group: Mapping[str, Any] | None = None
) -> bool:
    """Whether every element is updated by itself, so that parameters may be cut anywhere.

    `options` are the constructor's keyword arguments, `group` what a parameter group says beside its parameters. An
    optimizer that cannot be tried is not element-wise.
    """
    candidate = _unwrap(optimizer_class, options, group or {})
    if _is_among(candidate.build, _ELEMENTWISE + _ATOMIC):
        return _is_among(candidate.build, _ELEMENTWISE)
    return _ask_once(_probe_elements, candidate)


def is_separable(optimizer_class: Factory, options: Mapping[str, Any], group: Mapping[str, Any] | None = None) -> bool:
    """Whether every parameter is updated by itself, so that ranks may own whole parameters.

    False only if parameters were seen to depend on each other: an optimizer that cannot be tried, or that draws random
    numbers, is taken to be separable.
    """
    candidate = _unwrap(optimizer_class, options, group or {})
    if _is_among(candidate.build, _ELEMENTWISE + _ATOMIC):
        return candidate.build is not optim.LBFGS
    return _ask_once(_probe_parameters, candidate)


@dataclass(frozen=True)
class _Candidate:
    """How to build an optimizer of one group."""

    build: Factory
    options: Mapping[str, Any]
    group: Mapping[str, Any] = field(default_factory=dict)

    def make(self, leaves: Sequence[Tensor]) -> Optimizer:
        """An instance with options of its own: optimizers may change them in place."""
        group = {**_copies(self.group), "params": list(leaves)}
        return self.build([group] if self.group else list(leaves), **_copies(self.options))

    @property
    def name(self) -> str:
        return getattr(self.build, "__qualname__", repr(self.build))

    @property
    def key(self) -> tuple[object, ...] | None:
        """What tells this recipe from all others; none if it holds something whose content may change."""
        values = [*self.options.values(), *self.group.values()]
        if isinstance(self.build, (type, FunctionType)) and all(map(_is_plain, values)):
            return self.build, repr(sorted(self.options.items())), repr(sorted(self.group.items()))
        return None


def _unwrap(build: Factory, options: Mapping[str, Any], group: Mapping[str, Any]) -> _Candidate:
    while isinstance(build, partial) and not build.args:
        options = {**build.keywords, **options}
        build = build.func
    return _Candidate(build, options, group)


def _is_among(build: Factory, known: Sequence[Factory]) -> bool:
    """By identity: a subclass may have changed the step."""
    return any(build is one for one in known)


def _copies(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) for name, value in options.items()}


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else deepcopy(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (NoneType, bool, int, float, complex, str, torch.dtype, torch.device))


def _ask_once(probe: Callable[[_Candidate], bool], candidate: _Candidate) -> bool:
    if candidate.key is None:
        return probe(candidate)
    key = (probe, *candidate.key)
    if key not in _answers:
        _answers[key] = probe(candidate)
    return _answers[key]


def _probe_elements(candidate: _Candidate) -> bool:
    try:
        with _apart_from_training():
            coupling = _coupling_of_elements(candidate)
    except Exception as error:
        logger.warning(
            "%s could not be tried on small CPU tensors without a closure (%s: %s), so its parameters stay whole. If "
            'it treats every element by itself, say so: partition="elements"',
            candidate.name,
            type(error).__name__,
            error,
        )
        return False
    logger.debug("%s %s", candidate.name, coupling or "treats every element by itself")
    return coupling is None


def _coupling_of_elements(candidate: _Candidate) -> str | None:
    before = torch.get_rng_state()
    whole, pieces = _Replica(candidate, [_SHAPES]), _Replica(candidate, _PIECES)
    for step in [*_steps(whole.memory), _overflow(whole.memory)]:
        whole.step(step)
        pieces.step(step)
        # Leaves share the parameters' memory: an optimizer that gives them other memory updates nothing.
        if not _same(whole.values(), pieces.memory):
            return "updates parameters differently when they are cut"
        if not _same_state(whole, pieces):
            return "keeps state that depends on where parameters are cut"
    _run_narrow(candidate)
    return "draws random numbers" if _have_drawn(before) else None


def _run_narrow(candidate: _Candidate) -> None:
    """A few steps on bfloat16, for optimizers that round at random where numbers are narrow."""
    with suppress(Exception):  # not every optimizer takes every dtype
        whole = _Replica(candidate, [_SMALL], torch.bfloat16)
        for step in _steps(whole.memory):
            whole.step(step)


def _have_drawn(before: Tensor) -> bool:
    return not torch.equal(before, torch.get_rng_state())


def _probe_parameters(candidate: _Candidate) -> bool:
    reasons = []
    for shapes, with_closure in ((_SMALL, False), (_MATRICES, False), (_MATRICES, True)):
        try:
            with _apart_from_training():
                return _is_separable(candidate, shapes, with_closure)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
    logger.debug("whether %s couples parameters is not known: it could not be tried (%s)", candidate.name, reasons)
    return True


def _is_separable(candidate: _Candidate, shapes: Sequence[tuple[int, ...]], with_closure: bool) -> bool:
    before = torch.get_rng_state()
    together, apart = _Replica(candidate, [shapes]), _Replica(candidate, [[shape] for shape in shapes])
    for step in _steps(together.memory):
        together.step(step, with_closure)
        apart.step(step, with_closure)
        if not _same(together.values(), apart.values()):
            drawn = _have_drawn(before)
            logger.debug("%s %s", candidate.name, "draws random numbers" if drawn else "couples parameters")
            return drawn
    return True


@contextmanager
def _apart_from_training() -> Iterator[None]:
    """On the CPU whatever the default device, nothing compiled, and torch's random numbers as they were."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.compiler.set_stance("force_eager"):
        yield


class _Step(NamedTuple):
    """What happens in one step: a gradient for all elements, and the learning rate unless it is the user's."""

    gradient: Tensor
    rate: float | None = None


def _steps(elements: Tensor) -> list[_Step]:
    generator, along = torch.Generator().manual_seed(1), torch.linspace(-0.5, 0.5, elements.numel())
    steps = []
    for size, growth, rate in _COURSE:
        gradient = size * 10 ** (growth * along) * _noise(elements, generator)
        steps.append(_Step(gradient.to(elements.dtype), rate))
    steps[1].gradient[_WITHOUT_GRADIENT] = 0
    return steps


def _overflow(elements: Tensor) -> _Step:
    gradient = _noise(elements, torch.Generator().manual_seed(2))
    gradient[3], gradient[600] = math.inf, math.nan
    return _Step(gradient)


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers of both signs and of very different size."""
    normal, size = torch.randn(2, like.numel(), generator=generator)
    return (normal * torch.exp(2 * size)).to(like.dtype)


class _Replica:
    """The same elements in one of several divisions, each instance of the optimizer with its leaves."""

    def __init__(self, candidate: _Candidate, division: _Division, dtype: torch.dtype = torch.float32) -> None:
        self._division = division
        count = sum(math.prod(shape) for shapes in division for shape in shapes)
        self.memory = _noise(torch.empty(count, dtype=dtype), torch.Generator().manual_seed(0))
        self._leaves = [[nn.Parameter(part) for part in parts] for parts in _cut(self.memory, division)]
        self._optimizers = [candidate.make(leaves) for leaves in self._leaves]

    def step(self, step: _Step, with_closure: bool = False) -> None:
        """One step of every instance."""
        gradients = _cut(step.gradient.clone(), self._division)
        for optimizer, leaves, parts in zip(self._optimizers, self._leaves, gradients, strict=True):
            for leaf, part in zip(leaves, parts, strict=True):
                leaf.grad = part
            _set_rate(optimizer, step.rate)
            closure = [partial(_evaluate, leaves, parts)] if with_closure else []
            optimizer.step(*closure)

    def values(self) -> Tensor:
        """All elements, as the leaves have them."""
        return torch.cat([leaf.detach().reshape(-1) for leaves in self._leaves for leaf in leaves])

    def state(self) -> list[tuple[Tensor, Mapping[Any, Any]]]:
        """Every leaf with its state."""
        pairs = zip(self._optimizers, self._leaves, strict=True)
        return [(leaf, optimizer.state.get(leaf, {})) for optimizer, leaves in pairs for leaf in leaves]


def _cut(memory: Tensor, division: _Division) -> list[list[Tensor]]:
    parts = iter(memory.split([math.prod(shape) for shapes in division for shape in shapes]))
    return [[next(parts).view(shape) for shape in shapes] for shapes in division]


def _evaluate(leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> Any:
    """A closure. The gradients depend on the parameters, or those who call it at two points would see no difference."""
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient + 0.1 * leaf.detach()
    return torch.tensor(1.0)


def _set_rate(optimizer: Optimizer, rate: float | None) -> None:
    for group in optimizer.param_groups:
        present = group.get("lr")
        if rate is not None and present is not None:
            group["lr"] = torch.full_like(present, rate) if isinstance(present, Tensor) else rate


def _same_state(whole: _Replica, pieces: _Replica) -> bool:
    """Whether every entry is either one value per element, or one and the same value for all leaves."""
    first, second = whole.state(), pieces.state()
    names = set(first[0][1])
    if any(set(entry) != names for _, entry in first + second):
        return False
    return all(_same_entry(name, first, second) for name in names)


def _same_entry(
    name: Any, first: list[tuple[Tensor, Mapping[Any, Any]]], second: list[tuple[Tensor, Mapping[Any, Any]]]
) -> bool:
    if all(_is_like(entry[name], leaf) for leaf, entry in first + second):
        a, b = (torch.cat([entry[name].reshape(-1) for _, entry in pairs]) for pairs in (first, second))
        return _same(a, b)
    return all(_same(first[0][1][name], entry[name]) for _, entry in first + second)


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
