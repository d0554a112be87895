"""All-gathers of parameters that are in flight, and the hooks that wait for them in the forward pass.

With `gather="forward"` new parameters are sent while the next forward pass runs, and each module waits for its own
before it runs. If a module is never called, because another one reads its parameters, the nearest enclosing module that
is called waits instead. The first forward pass records which modules are called, and waits for everything at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerostep.comm.exchange import PendingGather
from zerostep.step.labels import PhaseTimer
from zerostep.step.weak import weakly


class PendingGathers:
    """Buckets of parameters that are in flight."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer = timer
        self._in_flight: dict[int, PendingGather] = {}

    def add(self, bucket: int, gather: PendingGather) -> None:
        """Keep a launched gather, and with it the memory that it writes, until `wait`."""
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
        before, wait_all = weakly(self._before), weakly(self._wait_all)
        for module in root.modules():
            # In front of the user's hooks, which may read the parameters.
            self._before_handles[module] = module.register_forward_pre_hook(before, prepend=True)
            self._handles.append(module.register_state_dict_pre_hook(wait_all))
            self._handles.append(module.register_load_state_dict_pre_hook(wait_all))
        self._handles.append(root.register_forward_hook(weakly(self._after)))

    def remove(self) -> None:
        """Remove the hooks."""
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
        waits: defaultdict[nn.Module, set[int]] = defaultdict(set)
        named = dict(self._root.named_modules())
        for name, module in named.items():
            own = self._buckets(module.parameters(recurse=False))
            if own:
                waits[self._caller(name, named)] |= own
        waits[self._root] |= set(self._bucket_of.values()) - self._buckets(self._root.parameters())
        # The order in which `Updater.launch_late` launches the gathers.
        return {module: sorted(buckets, reverse=True) for module, buckets in waits.items()}

    def _buckets(self, params: Iterable[Tensor]) -> set[int]:
        return {self._bucket_of[param] for param in params if param in self._bucket_of}

    def _caller(self, name: str, named: Mapping[str, nn.Module]) -> nn.Module:
        """The module itself if it was called, else the nearest enclosing one that was."""
        while name and named[name] not in self._called:
            name = name.rpartition(".")[0]
        return named[name]

    def _wait_all(self, *args: Any) -> None:
        self._wait()
