"""Parameters on their way to everyone, and the moments at which they must have come.

With `gather="forward"` the new parameters travel while the next forward pass has begun: each module waits for its own
before it runs. Parameters of modules that are not called, because somebody else reads them, are waited for before the
model runs at all; which those are is learnt in the first pass, and until then everything is waited for at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from zerostep.exchange import Gathering
from zerostep.stats import Clock

__all__ = ["ForwardHooks", "Gathers"]


class Gathers:
    """What is under way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._flying: dict[int, Gathering] = {}

    def launched(self, bucket: int, gathering: Gathering) -> None:
        """Take note of a bucket that is on its way."""
        self._flying[bucket] = gathering

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """Return when these buckets are in place; all of them if none is named."""
        if not self._flying:
            return
        for bucket in list(self._flying) if buckets is None else buckets:
            flight = self._flying.pop(bucket, None)
            if flight is not None:
                with self._clock.waiting("gather", bucket):
                    flight.wait()


class ForwardHooks:
    """Hooks that make each module wait for its parameters."""

    def __init__(self, root: nn.Module, bucket_of: Mapping[Tensor, int], wait: Callable[..., None]) -> None:
        self._wait, self._bucket_of = wait, bucket_of
        self._called: set[nn.Module] = set()
        self._learnt = False
        self._early: list[int] = []
        self._handles: list[Any] = []
        own = {module: _buckets(module, bucket_of) for module in root.modules()}
        self._own = {module: buckets for module, buckets in own.items() if buckets}
        before, after, whole = WeakMethod(self._before), WeakMethod(self._after), WeakMethod(self._whole)
        for module in root.modules():
            if module in self._own or module is root:
                # First of all hooks: others may read the parameters.
                self._handles.append(module.register_forward_pre_hook(_weakly(before), prepend=True))
            self._handles.append(module.register_state_dict_pre_hook(_weakly(whole)))
            self._handles.append(module.register_load_state_dict_pre_hook(_weakly(whole)))
        self._root = root
        self._handles.append(root.register_forward_hook(_weakly(after)))

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()

    @torch._dynamo.disable
    def _before(self, module: nn.Module, *args: Any) -> None:
        if not self._learnt:
            self._called.add(module)
            self._wait()
        elif module is self._root:
            self._wait([*self._early, *self._own.get(module, ())])
        else:
            self._wait(self._own[module])

    @torch._dynamo.disable
    def _after(self, module: nn.Module, *args: Any) -> None:
        if not self._learnt:
            silent = [buckets for module, buckets in self._own.items() if module not in self._called]
            outside = set(self._bucket_of.values()) - {b for buckets in self._own.values() for b in buckets}
            self._early = sorted({bucket for buckets in silent for bucket in buckets} | outside)
            self._learnt = True

    def _whole(self, module: nn.Module, *args: Any) -> None:
        self._wait()


def _weakly(method: WeakMethod[Any]) -> Callable[..., None]:
    """A hook that does not keep the optimizer alive."""

    def hook(*args: Any) -> None:
        found = method()
        if found is not None:
            found(*args)

    return hook


def _buckets(module: nn.Module, bucket_of: Mapping[Tensor, int]) -> list[int]:
    """The buckets of a module's own parameters."""
    return sorted({bucket_of[param] for param in module.parameters(recurse=False) if param in bucket_of})
