"""Where the engine's gradients come from: autograd's hooks for a bare module, DDP's hook for a wrapped one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.compiler import is_compiling
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from zerostep.plan.layout import ParamSpec
from zerostep.step.ddp_hook import after_backward, as_stored, completed, in_backward_pass, may_be_unused, never_raising
from zerostep.step.engine import Engine

Future = torch.futures.Future


class GradSource(Protocol):
    """Passes gradients to the engine as they are made."""

    def extend(self, params: Sequence[Tensor]) -> None:
        """Hook all of `params` that are trainable and not hooked yet."""

    def check(self, params: Sequence[Tensor], specs: Sequence[ParamSpec]) -> None:
        """Raise if a gradient no longer comes; before parameters in other memory are bound back."""

    def remove(self) -> None:
        """Pass no further gradients."""


class _HookedByDdp(NamedTuple):
    """Where a parameter was, its dtype and device, and the node of autograd that DDP's hook is on."""

    address: int
    kind: tuple[torch.dtype, torch.device]
    node: Any

    def is_lost(self, param: Tensor) -> bool:
        same_kind = (param.dtype, param.device) == self.kind  # a cast that is not undone is refused elsewhere
        return same_kind and param.requires_grad and get_gradient_edge(param).node is not self.node


class NoSource:
    """DDP reduces, and the gradients are taken from `.grad`.

    A cast makes autograd forget the node that DDP's hook is on, and it stays forgotten when the cast is undone.
    """

    def __init__(self) -> None:
        self._hooked: dict[int, _HookedByDdp] = {}

    def extend(self, params: Sequence[Tensor]) -> None:
        """Nothing to hook; notes what DDP has hooked."""
        # Called in each step, when nearly always all are noted.
        for index, param in enumerate(params) if len(self._hooked) < len(params) else ():
            if param.requires_grad and index not in self._hooked:
                kind, node = (param.dtype, param.device), get_gradient_edge(param).node
                self._hooked[index] = _HookedByDdp(param.data_ptr(), kind, node)

    def check(self, params: Sequence[Tensor], specs: Sequence[ParamSpec]) -> None:
        """Raise if DDP has lost a parameter by a cast that was undone."""
        for index, hooked in self._hooked.items():
            # In this order: what is in the same memory was not cast, and to look up a node is slow.
            if params[index].data_ptr() != hooked.address and hooked.is_lost(params[index]):
                raise RuntimeError(
                    f"parameter {specs[index].name!r} was cast or moved, and put back, since the optimizer was built: "
                    "DistributedDataParallel no longer sums its gradient. Cast a copy of the model, or build the DDP "
                    "module and the optimizer anew"
                )

    def remove(self) -> None:
        """Nothing was hooked."""


class _ParamHooks:
    """One hook per trainable parameter, removed when the engine goes. Autograd's threads call them."""

    def __init__(self, engine: Engine, register: str, call: Callable[[Engine, int], None]) -> None:
        self._engine, self._register, self._call = ref(engine), register, call
        self._hooked: set[int] = set()
        self._removers: list[Callable[[], Any]] = []

    def extend(self, params: Sequence[Tensor]) -> None:
        # Called in each step, when nearly always all are hooked.
        for index, param in enumerate(params) if len(self._hooked) < len(params) else ():
            if param.requires_grad and index not in self._hooked:
                self._hooked.add(index)
                handle = getattr(param, self._register)(self._hook(index))
                self._removers.append(finalize(self._engine(), handle.remove))

    def check(self, params: Sequence[Tensor], specs: Sequence[ParamSpec]) -> None:
        """Nothing to check: a hook on a parameter outlives a cast."""

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        reference, call = self._engine, self._call

        def hook(tensor: Tensor) -> None:  # called for each gradient: no detours
            if is_compiling():  # compiled autograd traces this hook, and must not trace what it does
                _call_untraced(call, reference, index)
            elif (engine := reference()) is not None:
                call(engine, index)

        return hook

    def remove(self) -> None:
        """Remove all hooks."""
        removers, self._removers = self._removers, []
        for remove in removers:
            remove()


@torch._dynamo.disable
def _call_untraced(call: Callable[[Engine, int], None], reference: ref[Engine], index: int) -> None:
    if (engine := reference()) is not None:
        call(engine, index)


def _raise(error: Exception) -> None:
    raise error


class AutogradSource(_ParamHooks):
    """A hook on every parameter, called when its gradient is complete."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "register_post_accumulate_grad_hook", Engine.arrived)


class DdpSource:
    """DDP's communication hook. It says when a gradient is ready; DDP's own buckets have no other meaning here."""

    def __init__(self, ddp: DistributedDataParallel, engine: Engine) -> None:
        self._engine, self._ddp = ref(engine), ref(ddp)
        self._param_hooks = _ParamHooks(engine, "register_hook", Engine.before_ddp_accumulates)
        self._index_of: dict[Tensor, int] = {}
        # The module keeps this object alive; this object keeps neither the module nor the engine alive.
        ddp.register_comm_hook(None, self._hook)

    def extend(self, params: Sequence[Tensor]) -> None:
        """Hook trainable parameters; DDP itself ignores those that became trainable after its construction."""
        self._index_of.update({param: index for index, param in enumerate(params)})
        self._param_hooks.extend(params)

    def check(self, params: Sequence[Tensor], specs: Sequence[ParamSpec]) -> None:
        """Nothing to check: gradients that DDP has lost are found in `.grad`, and reduced in `step()`."""

    def remove(self) -> None:
        """Remove the hooks of parameters; a hook of DDP stays for good."""
        self._param_hooks.remove()

    def _hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not in_backward_pass():
            return never_raising(lambda: self._take(bucket))
        try:
            return self._take(bucket)
        except Exception as error:
            # At the end of backward: DDP would hide an error in a future behind one of its own.
            after_backward(partial(_raise, error))
            return completed(bucket.buffer())

    def _take(self, bucket: GradBucket) -> Future[Tensor]:
        engine = self._engine()
        if engine is None:
            raise RuntimeError("the optimizer of this DDP module is gone: wrap the module anew")
        for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if param.requires_grad:  # otherwise frozen since; DDP does not know
                engine.arrived_in_ddp(self._index_of[param], as_stored(view, param) if self._is_used(param) else None)
        engine.reduction.copy_held_back()  # DDP reuses the memory of its buckets
        if bucket.is_last() and not in_backward_pass():
            engine.end_pass(read=False)
        return completed(bucket.buffer())

    def _is_used(self, param: Tensor) -> bool:
        """Whether this rank has a gradient for a parameter; in the shadow pass of a joined rank it has none."""
        return not may_be_unused(self._ddp()) or (in_backward_pass() and param.grad is not None)
