"""Notices `DistributedDataParallel` around a model that was passed bare: trainers wrap it before or afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zerostep.step.weak import weakly

_REASON = "the optimizer becomes part of DDP before its first pass"


class DdpWatch:
    """Calls `action` before the forward pass of a DDP module that trains one of `params`, until `stop`.

    DDP modules that exist already are found among Python's objects, later ones by torch's hook for registered modules.
    One that is never called changes nothing. `action` is held weakly.
    """

    def __init__(self, params: Callable[[], Iterable[Tensor]], action: Callable[..., None]) -> None:
        self._params, self._action = params, weakly(action)
        self._modules: WeakSet[DistributedDataParallel] = WeakSet()
        self._removers: list[Callable[[], Any]] = []
        self._remove_later(register_module_module_registration_hook(weakly(self._registered)))
        for ddp in _existing():
            self._registered(ddp, "module", ddp.module)

    @property
    def modules(self) -> list[DistributedDataParallel]:
        """The DDP modules that were found."""
        return list(self._modules)

    def stop(self) -> None:
        """Remove all hooks."""
        removers, self._removers = self._removers, []
        for remove in removers:
            remove()
        self._modules.clear()

    def _registered(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        """A module gets a child; DDP has not done more than that in its constructor by now."""
        if not isinstance(module, DistributedDataParallel) or submodule is None or module in self._modules:
            return
        if not {id(param) for param in submodule.parameters()}.isdisjoint(map(id, self._params())):
            self._modules.add(module)
            before = torch._dynamo.disable(weakly(self._before_forward), reason=_REASON)
            self._remove_later(module.register_forward_pre_hook(before, prepend=True))

    def _before_forward(self, ddp: DistributedDataParallel, args: Any) -> None:
        if torch.is_grad_enabled():
            self._action(ddp)

    def _remove_later(self, handle: RemovableHandle) -> None:
        self._removers.append(finalize(self, handle.remove))


def _existing() -> Iterator[DistributedDataParallel]:
    # By their types: asking proxies for their class may run code of theirs.
    objects = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return (ddp for ddp in objects if "module" in ddp._modules)  # one whose constructor failed has none
