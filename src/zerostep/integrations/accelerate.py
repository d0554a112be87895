"""`enable`: train with Accelerate and a sharded optimizer; `save_state` and `load_state` save and load both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar
from weakref import ref

from torch import nn
from torch.nn.utils import get_total_norm

from zerostep.integrations.optimizer_files import OptimizerFiles, is_partitioned, replaced
from zerostep.optim.sharded import ShardedOptimizer
from zerostep.optim.view import unwrapped
from zerostep.optim.zero import ZeroRedundancyOptimizer

A = TypeVar("A")

_PREPARED = "_optimizers"  # where an accelerator has the optimizers that it saves and loads
_NO_SYNC = "no_sync"  # what frameworks look for on a model that accumulates gradients
_METHODS = ("prepare", "prepare_model", "prepare_optimizer", "clip_grad_norm_", "save_state", "load_state")


def enable(accelerator: A, *, torch_format: bool = False) -> A:
    """Let an `accelerate.Accelerator` prepare, save and load sharded optimizers. Returns the same accelerator.

    Call it on all ranks, before `accelerator.prepare(model, optimizer)`. `save_state` writes a directory
    `optimizer.zerostep`, as `zerostep.save` does, and `load_state` reads it at any number of ranks. A module that a
    `ShardedOptimizer` trains is not wrapped in DDP.

    Arguments:
        accelerator: the `Accelerator`.
        torch_format: write the whole state into Accelerate's own `optimizer.bin`, in the format of the unsharded
            optimizer; rank 0 collects it in host memory. Both forms are loaded, whatever this says.
    """
    if not isinstance(getattr(accelerator, "prepare", None), _Enabled):
        _Preparing(accelerator, torch_format).install()
    return accelerator


class _Enabled:
    """A method that took the place of the accelerator's own."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _Preparing:
    """The methods of an accelerator that know about sharded optimizers, each around the accelerator's own."""

    def __init__(self, accelerator: Any, torch_format: bool) -> None:
        self._accelerator, self._torch_format = accelerator, torch_format
        self._own = {name: getattr(accelerator, name) for name in _METHODS}
        self._trained = dict[int, ShardedOptimizer]()  # by the id of the bare module, while `prepare` runs
        self._files: list[OptimizerFiles] = []

    def install(self) -> None:
        """Take the places of the accelerator's methods."""
        for name in _METHODS:
            setattr(self._accelerator, name, _Enabled(getattr(self, name)))
        self._accelerator.register_save_state_pre_hook(self._before_save)
        self._accelerator.register_load_state_pre_hook(self._before_load)

    # ------------------------------------------------------------------ training

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """`Accelerator.prepare`; modules that a `ShardedOptimizer` among the objects trains stay bare."""
        optimizers = [each for each in map(unwrapped, objects) if isinstance(each, ShardedOptimizer)]
        trained = {id(each.bare_model): each for each in optimizers if each.bare_model is not None}
        with replaced(self, "_trained", trained):
            return self._own["prepare"](*objects, **kwargs)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.prepare_model`; without DDP, which would sum once more what the optimizer sums."""
        optimizer = self._trained.get(id(getattr(model, "_orig_mod", model)))
        if optimizer is None:
            return self._own["prepare_model"](model, *args, **kwargs)
        prepared = self._own["prepare_model"](model, *args, **{**kwargs, "evaluation_mode": True})
        setattr(prepared, _NO_SYNC, NoSync(optimizer))
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """`Accelerator.prepare_optimizer`; the state of ours is where the parameters are, from the start."""
        placement = False if is_partitioned(optimizer) else device_placement
        return self._own["prepare_optimizer"](optimizer, device_placement=placement)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """`Accelerator.clip_grad_norm_`; a norm for the log, with `max_norm` infinite, does not edit whole gradients.

        Trainer asks for that in every step, and a step inside backward must refuse gradients that were edited after it.
        """
        optimizers = [unwrapped(each) for each in getattr(self._accelerator, _PREPARED)]
        if max_norm != math.inf or not any(isinstance(each, ZeroRedundancyOptimizer) for each in optimizers):
            return self._own["clip_grad_norm_"](parameters, max_norm, norm_type=norm_type)
        self._accelerator.unscale_gradients()
        return get_total_norm([param.grad for param in parameters if param.grad is not None], norm_type)

    # ------------------------------------------------------------------ checkpoints

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.save_state`, with the files of sharded optimizers."""
        with self._standing_in(is_partitioned):
            return self._own["save_state"](*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """`Accelerator.load_state`, with the files of sharded optimizers, which plain ones may load too."""
        with self._standing_in(lambda optimizer: True):
            return self._own["load_state"](*args, **kwargs)

    @contextmanager
    def _standing_in(self, chosen: Callable[[Any], bool]) -> Iterator[None]:
        """Inside, Accelerate finds an `OptimizerFiles` in place of each optimizer that is chosen."""
        optimizers = list(getattr(self._accelerator, _PREPARED))
        files = {
            number: OptimizerFiles(optimizer, number, self._torch_format)
            for number, optimizer in enumerate(optimizers)
            if chosen(optimizer)
        }
        seen = [files.get(number, optimizer) for number, optimizer in enumerate(optimizers)]
        try:
            with replaced(self, "_files", list(files.values())), replaced(self._accelerator, _PREPARED, seen):
                yield
        finally:
            for each in files.values():
                each.release()

    def _before_save(self, models: Any, weights: Any, output_dir: Any) -> None:
        for each in self._files:
            each.use(output_dir)
            each.write()

    def _before_load(self, models: Any, input_dir: Any) -> None:
        for each in self._files:
            each.use(input_dir)


class NoSync:
    """The `no_sync` of a bare module, which frameworks look for as they do on DDP: that of its optimizer.

    A copy of the module has no optimizer, so there it does nothing.
    """

    def __init__(self, optimizer: ShardedOptimizer | None = None) -> None:
        self._optimizer = None if optimizer is None else ref(optimizer)

    def __call__(self) -> AbstractContextManager[None]:
        """Return a context in which gradients of this rank alone add up."""
        optimizer = None if self._optimizer is None else self._optimizer()
        return nullcontext() if optimizer is None else optimizer.no_sync()

    def __reduce__(self) -> Any:
        return NoSync, ()
