"""What a DDP module needs of whoever sits in its hook."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from zerostep.tensors import is_dense

__all__ = ["after_backward", "as_stored", "never_raising"]

Future = torch.futures.Future

logger = logging.getLogger("zerostep")


def never_raising(launch: Callable[[], Future[Tensor]]) -> Future[Tensor]:
    """DDP cannot recover from an exception in a hook, but it can from one in a future."""
    try:
        return launch()
    except Exception as error:
        failed: Future[Tensor] = Future()
        failed.set_exception(error)  # type: ignore[arg-type]
        return failed


def after_backward(action: Callable[[], None]) -> None:
    """Run `action` when DDP has finished with this backward pass; not at all in a joined rank's shadow pass."""
    engine: Any = Variable._execution_engine
    try:
        # DDP's own callback is queued after this one; a callback that this one queues comes after DDP's.
        engine.queue_callback(lambda: engine.queue_callback(action))
    except RuntimeError:
        logger.debug("no backward pass is running")


def as_stored(view: Tensor, param: Tensor) -> Tensor:
    """DDP keeps a gradient in the memory order of its parameter, but shows it as if it were contiguous and real."""
    if param.is_complex() and not view.is_complex():
        view = view.reshape(-1).view(param.dtype)
    return view.as_strided(param.shape, param.stride()) if is_dense(param) else view
