"""Whether an optimizer updates every element by itself, every parameter by itself, or neither.

Parameters under an *element-wise* optimizer are splittable, under any other one atomic. An optimizer that is not even
*separable*, because one parameter's update depends on another parameter, gives other results as soon as the parameters
are divided among ranks. The classes of `torch.optim` are known; any other is tried once, see `trial`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from zerostep.plan.groups import OptimizerClass
from zerostep.plan.trial import PARAMETER_TRIALS, TOGETHER, element_coupling, parameter_coupling

logger = logging.getLogger("zerostep")


def _known(*names: str) -> tuple[OptimizerClass, ...]:
    """Those classes of `torch.optim` that this version of torch has."""
    return tuple(getattr(optim, name) for name in names if hasattr(optim, name))


_ELEMENTWISE = _known(
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD")
)
_ATOMIC = _known("Muon", "Adafactor", "LBFGS", "SparseAdam")

PARAM_SHAPED = _ELEMENTWISE + _known("Muon")
"""Known classes whose state holds scalars and tensors of the parameter's shape, and nothing else."""

_results: dict[tuple[object, ...], bool] = {}


def is_elementwise(
    optimizer_class: OptimizerClass, options: Mapping[str, Any], group: Mapping[str, Any] | None = None
) -> bool:
    """Whether every element is updated by itself, so that parameters may be cut anywhere.

    `options` are the constructor's keyword arguments, `group` the options of a parameter group. An optimizer that
    cannot be tried is not element-wise.
    """
    candidate = _unwrap(optimizer_class, options, group or {})
    if _is_among(candidate.build, _ELEMENTWISE + _ATOMIC):
        return _is_among(candidate.build, _ELEMENTWISE)
    return _probe_once(_probe_elements, candidate)


def is_separable(
    optimizer_class: OptimizerClass, options: Mapping[str, Any], group: Mapping[str, Any] | None = None
) -> bool:
    """Whether every parameter is updated by itself, so that ranks may own whole parameters.

    False only if a trial shows that parameters depend on each other: an optimizer that cannot be tried, or that draws
    random numbers, is taken to be separable.
    """
    candidate = _unwrap(optimizer_class, options, group or {})
    if _is_among(candidate.build, _ELEMENTWISE + _ATOMIC):
        return candidate.build is not optim.LBFGS
    return _probe_once(_probe_parameters, candidate)


def refuse_coupled(optimizer_class: OptimizerClass, options: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an optimizer class that is not separable."""
    if not is_separable(optimizer_class, options, group):
        name = getattr(optimizer_class, "__name__", optimizer_class)
        raise ValueError(
            f"{name} looks at all parameters at once, so its work cannot be divided among ranks with the same "
            "result: use it without sharding"
        )


@dataclass(frozen=True)
class _Candidate:
    """How to build an optimizer of one group."""

    build: OptimizerClass
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
        """The key for results to be kept; `None` if an option has content that may change."""
        values = [*self.options.values(), *self.group.values()]
        if isinstance(self.build, (type, FunctionType)) and all(map(_is_plain, values)):
            return self.build, repr(sorted(self.options.items())), repr(sorted(self.group.items()))
        return None


def _unwrap(build: OptimizerClass, options: Mapping[str, Any], group: Mapping[str, Any]) -> _Candidate:
    while isinstance(build, partial) and not build.args:
        options = {**build.keywords, **options}
        build = build.func
    return _Candidate(build, options, group)


def _is_among(build: OptimizerClass, known: Sequence[OptimizerClass]) -> bool:
    """By identity: a subclass may have changed the step."""
    return any(build is one for one in known)


def _copies(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else deepcopy(value)
        for name, value in options.items()
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (NoneType, bool, int, float, complex, str, torch.dtype, torch.device))


def _probe_once(probe: Callable[[_Candidate], bool], candidate: _Candidate) -> bool:
    if candidate.key is None:
        return probe(candidate)
    key = (probe, *candidate.key)
    if key not in _results:
        _results[key] = probe(candidate)
    return _results[key]


def _probe_elements(candidate: _Candidate) -> bool:
    try:
        coupling = element_coupling(candidate.make)
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


def _probe_parameters(candidate: _Candidate) -> bool:
    reasons = []
    for shapes, with_closure in PARAMETER_TRIALS:
        try:
            coupling = parameter_coupling(candidate.make, shapes, with_closure)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if coupling is not None:
            logger.debug("%s %s", candidate.name, coupling)
        return coupling not in TOGETHER
    logger.debug("whether %s couples parameters is not known: it could not be tried (%s)", candidate.name, reasons)
    return True
