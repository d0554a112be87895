"""Helpers for DDP communication hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from zerostep.tensors import is_dense

Future = torch.futures.Future

logger = logging.getLogger("zerostep")


def never_raising(launch: Callable[[], Future[Tensor]]) -> Future[Tensor]:
    """Return the future of `launch`, or a failed one: DDP cannot recover from an exception in a hook."""
    try:
        return launch()
    except Exception as error:
        return failed(error)


def failed(error: Exception) -> Future[Tensor]:
    """A future that carries an error."""
    future: Future[Tensor] = Future()
    future.set_exception(error)  # type: ignore[arg-type]
    return future


def completed(memory: Tensor) -> Future[Tensor]:
    """A future that carries a result."""
    future: Future[Tensor] = Future() if memory.device.type == "cpu" else Future(devices=[memory.device])
    future.set_result(memory)
    return future


def in_backward_pass() -> bool:
    """Whether this thread runs a backward pass. DDP also calls hooks outside of one: in a joined rank's shadow pass."""
    return torch._C._current_graph_task_id() != -1


def may_be_unused(ddp: DistributedDataParallel | None) -> bool:
    """Whether DDP allows parameters without a gradient. Not to be cached: a static graph may be declared late."""
    return bool(getattr(ddp, "find_unused_parameters", False) or getattr(ddp, "static_graph", False))


def after_backward(action: Callable[[], None]) -> None:
    """Run `action` when DDP has finished with this backward pass; not at all in a joined rank's shadow pass."""
    engine: Any = Variable._execution_engine
    try:
        # DDP's own callback is queued after this one; a callback that this one queues comes after DDP's.
        engine.queue_callback(lambda: engine.queue_callback(action))
    except RuntimeError:
        logger.debug("no backward pass is running")


def as_stored(view: Tensor, param: Tensor) -> Tensor:
    """A gradient from a DDP bucket with the dtype, shape and strides of its parameter.

    DDP stores it in the memory order of the parameter, but shows it as if it were contiguous and real.
    """
    if param.is_complex() and not view.is_complex():
        view = view.reshape(-1).view(param.dtype)
    return view.as_strided(param.shape, param.stride()) if is_dense(param) else view
