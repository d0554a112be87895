"""Parameters on their way to everyone, and the moments at which they must have come.

With `gather="forward"` the new parameters travel while the next forward pass has begun: each module waits for its own
before it runs. For a module that is not called, because another one reads its parameters, the nearest module around it
that is called waits instead. Who is called is learnt in the first pass; until then everything is waited for at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from zerostep.comm.exchange import PendingGather
from zerostep.step.labels import PhaseTimer

__all__ = ["ForwardHooks", "PendingGathers"]


class PendingGathers:
    """Buckets of parameters that are in flight."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer = timer
        self._in_flight: dict[int, PendingGather] = {}

    def add(self, bucket: int, gather: PendingGather) -> None:
        """Remember a bucket that was launched."""
        self._in_flight[bucket] = gather

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """Return when these buckets are in place; all of them if none is named."""
        if not self._in_flight:
            return
        for bucket in list(self._in_flight) if buckets is None else buckets:
            gather = self._in_flight.pop(bucket, None)
            if gather is not None:
                with self._timer.waiting("gather", bucket):
                    gather.wait()


class ForwardHooks:
    """Hooks that make each module wait for its parameters."""

    def __init__(self, root: nn.Module, bucket_of: Mapping[Tensor, int], wait: Callable[..., None]) -> None:
        self._root, self._wait, self._bucket_of = root, wait, bucket_of
        self._called: set[nn.Module] = set()
        self._waits: dict[nn.Module, list[int]] | None = None
        self._before_handles: dict[nn.Module, Any] = {}
        self._handles: list[Any] = []
        before, after, whole = WeakMethod(self._before), WeakMethod(self._after), WeakMethod(self._whole)
        for module in root.modules():
            # First of all hooks: others may read the parameters.
            self._before_handles[module] = module.register_forward_pre_hook(_weakly(before), prepend=True)
            self._handles.append(module.register_state_dict_pre_hook(_weakly(whole)))
            self._handles.append(module.register_load_state_dict_pre_hook(_weakly(whole)))
        self._handles.append(root.register_forward_hook(_weakly(after)))

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in [*self._handles, *self._before_handles.values()]:
            handle.remove()

    @torch._dynamo.disable
    def _before(self, module: nn.Module, *args: Any) -> None:
        if self._waits is None:
            self._called.add(module)
            self._wait()
        else:
            self._wait(self._waits.get(module, ()))

    @torch._dynamo.disable
    def _after(self, module: nn.Module, *args: Any) -> None:
        if self._waits is None:
            self._waits = self._learn()
            for module, handle in self._before_handles.items():
                if module not in self._waits:
                    handle.remove()

    def _learn(self) -> dict[nn.Module, list[int]]:
        """Which buckets each called module waits for; the root also for parameters that no module has."""
        found: defaultdict[nn.Module, set[int]] = defaultdict(set)
        named = dict(self._root.named_modules())
        for name, module in named.items():
            own = _buckets(module.parameters(recurse=False), self._bucket_of)
            if own:
                found[self._caller(name, named)] |= own
        found[self._root] |= set(self._bucket_of.values()) - _buckets(self._root.parameters(), self._bucket_of)
        return {module: sorted(buckets, reverse=True) for module, buckets in found.items()}

    def _caller(self, name: str, named: Mapping[str, nn.Module]) -> nn.Module:
        """The module itself if it was called, else the nearest around it that was."""
        while name and named[name] not in self._called:
            name = name.rpartition(".")[0]
        return named[name]

    def _whole(self, module: nn.Module, *args: Any) -> None:
        self._wait()


def _weakly(method: WeakMethod[Any]) -> Callable[..., None]:
    """A hook that does not keep the optimizer alive."""

    def hook(*args: Any) -> None:
        found = method()
        if found is not None:
            found(*args)

    return hook


def _buckets(params: Iterable[Tensor], bucket_of: Mapping[Tensor, int]) -> set[int]:
    return {bucket_of[param] for param in params if param in bucket_of}
