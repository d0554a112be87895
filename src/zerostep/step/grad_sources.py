"""How gradients come to the engine: from autograd for a bare module, from DDP for a wrapped one."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from zerostep.step.ddp_hook import after_backward, as_stored, never_raising
from zerostep.step.engine import Engine

__all__ = ["AutogradSource", "DdpSource", "GradSource", "NoSource"]

Future = torch.futures.Future


class GradSource(Protocol):
    """Somebody who tells the engine of gradients."""

    def extend(self, params: Sequence[Tensor]) -> None:
        """Watch all of `params` that are trainable and not watched yet."""


class NoSource:
    """DDP reduces, and the gradients are taken from `.grad`."""

    def extend(self, params: Sequence[Tensor]) -> None:
        """Nothing to watch."""


class AutogradSource:
    """A hook on every parameter."""

    def __init__(self, engine: Engine) -> None:
        self._engine = ref(engine)
        self._hooked: set[int] = set()

    def extend(self, params: Sequence[Tensor]) -> None:
        """Hook parameters that have become trainable."""
        for index, param in enumerate(params):
            if param.requires_grad and index not in self._hooked:
                self._hooked.add(index)
                handle = param.register_post_accumulate_grad_hook(partial(_arrived, self._engine, index))
                finalize(self._engine(), handle.remove)


def _arrived(engine: ref[Engine], index: int, param: Tensor) -> None:
    found = engine()
    if found is not None:
        found.arrived(index)


class DdpSource:
    """DDP's communication hook: DDP says when, the layout says where."""

    def __init__(self, ddp: DistributedDataParallel, engine: Engine) -> None:
        self._engine, self._ddp = ref(engine), ref(ddp)
        self._hooked: set[int] = set()
        self._index_of: dict[Tensor, int] = {}
        self._absent: list[Tensor] = []
        # The module keeps this object, the object keeps nobody.
        ddp.register_comm_hook(None, self._hook)

    def extend(self, params: Sequence[Tensor]) -> None:
        """Watch parameters that DDP knows; it does not know those that became trainable later."""
        for index, param in enumerate(params):
            self._index_of[param] = index
            if param.requires_grad and index not in self._hooked:
                self._hooked.add(index)
                finalize(self._engine(), param.register_hook(partial(_coming, self._engine, index)).remove)

    def _hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return never_raising(lambda: self._take(bucket))

    def _take(self, bucket: GradBucket) -> Future[Tensor]:
        engine = self._engine()
        done: Future[Tensor] = Future()
        if engine is None:
            raise RuntimeError("the optimizer of this DDP module is gone: wrap the module anew")
        for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if not param.requires_grad:
                continue  # frozen since; DDP does not know
            grad = as_stored(view, param) if self._is_used(param) else None
            if grad is None:
                self._absent.append(param)
            engine.arrived_in_ddp(self._index_of[param], grad)
        engine.reduction.copy_waiting()  # DDP reuses the memory of its buckets
        if bucket.is_last():
            absent, self._absent = self._absent, []
            if _in_backward():
                after_backward(partial(_placed, engine, absent))
            else:
                engine.after_ddp_backward()
        done.set_result(bucket.buffer())
        return done

    def _is_used(self, param: Tensor) -> bool:
        """Whether this rank has a gradient for a parameter."""
        ddp = self._ddp()
        if not (getattr(ddp, "find_unused_parameters", False) or getattr(ddp, "static_graph", False)):
            return True
        # Outside of backward a joined rank shadows the others, and has used nothing.
        return _in_backward() and param.grad is not None


def _placed(engine: Engine, absent: Sequence[Tensor]) -> None:
    """Where other ranks alone have a gradient, DDP has put this rank's zeros: nobody may take them for a sum."""
    for param in absent:
        param.grad = None
    engine.after_ddp_backward()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _coming(engine: ref[Engine], index: int, grad: Tensor) -> None:
    found = engine()
    if found is not None:
        found.before_ddp_accumulates(index)
