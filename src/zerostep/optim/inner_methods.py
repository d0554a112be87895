"""Methods of the inner optimizer's class that torch's optimizers do not have, called on all ranks together.

Such a method may change parameters and options: `eval()` of a schedule-free optimizer puts averages in place of the
weights. On each rank it sees only what this rank owns, so the parameters are sent to everyone afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from zerostep.comm.agreement import Fact, agreed
from zerostep.comm.transport import Transport, calling
from zerostep.plan.groups import Group
from zerostep.step.group_options import GroupOptions
from zerostep.step.health import Health

_REMEDY = "call it on all ranks, with the same arguments, and with the same options in the parameter groups"

Calls = Callable[[Callable[[Optimizer], Any]], Any]
"""Applies a function to every optimizer that holds parameters of this rank; what it returned for the first."""


@dataclass(frozen=True)
class InnerMethods:
    """What a call needs of its optimizer.

    `begin` waits for parameters and gives the inner optimizers the options of the groups, `run` calls a function for
    each of them and takes the options back to `groups`, and `send` sends all parameters. Changed options and `facts`
    must be equal on all ranks.
    """

    optimizers: Sequence[Optimizer]
    control: Transport
    health: Health
    groups: Sequence[Group]
    begin: Callable[[], None]
    run: Calls
    facts: Callable[[], list[Fact]]
    send: Callable[[], None]

    def has(self, name: str) -> bool:
        """Whether the class of some inner optimizer has a public method of this name."""
        return not name.startswith("_") and any(_has_method(optimizer, name) for optimizer in self.optimizers)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method on every rank's inner optimizers; a collective. Returns what it returned on this rank."""
        with calling(name):
            self.begin()
            result = self._run_together(name, args, kwargs)
            self.send()
        return result

    def _run_together(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        options = GroupOptions()
        options.end_step(self.groups)
        try:
            with agreed(self.control) as agreement:
                result = self.run(lambda optimizer: _call(optimizer, name, args, kwargs))
                facts = [*self.facts(), *options.changes(self.groups)]
                agreement.compare([Fact("the method that is called", name), *facts], _REMEDY)
        except Exception as error:
            # Some ranks may have changed their parameters.
            self.health.mark_broken(f"{name}() of the inner optimizer failed: {error}")
            raise
        return result


def _has_method(optimizer: Optimizer, name: str) -> bool:
    return inspect.isroutine(getattr(type(optimizer), name, None))


def _call(optimizer: Optimizer, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return getattr(optimizer, name)(*args, **kwargs) if _has_method(optimizer, name) else None
