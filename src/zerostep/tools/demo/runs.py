"""The ways of training that the demo compares, each with its memory, bytes sent and waiting time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer
from zerostep.tools.demo.report import Sizes
from zerostep.tools.planner.recipe import Recipe, Rule

GATHER: Literal["forward"] = "forward"


class DdpRun:
    """DDP with plain optimizers or, `sharded`, with the drop-in."""

    def __init__(self, model: nn.Module, recipe: Recipe, sharded: bool) -> None:
        self.name = "drop-in" if sharded else "plain DDP"
        # Gradients are views of DDP's buckets, so that they are in memory once.
        self.model: nn.Module = DDP(model, gradient_as_bucket_view=True)
        self._optimizers = [_optimizer(*part, sharded) for part in recipe.parts(model.named_parameters())]
        self._last_gradient = self._update_seconds = self._waited = 0.0
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self._note_gradient)
        for optimizer in self._inners:
            optimizer.register_step_pre_hook(self._begin_update)
            optimizer.register_step_post_hook(self._end_update)

    def step(self, window: Tensor) -> Tensor:
        """Make one training step and return the loss.

        Waiting is the time from the last gradient to the end of backward and, of the drop-in's step, all but updates.
        """
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss: Tensor = self.model(window)
        loss.backward()
        backward_end = time.perf_counter()
        self._update_seconds = 0.0
        for optimizer in self._optimizers:
            optimizer.step()
        self._waited += backward_end - self._last_gradient
        if self._optimizers != self._inners:
            self._waited += time.perf_counter() - backward_end - self._update_seconds
        return loss

    @property
    def _inners(self) -> list[Optimizer]:
        return [o.optim if isinstance(o, ZeroRedundancyOptimizer) else o for o in self._optimizers]

    # Autograd's threads call this on GPUs; only the time of the last call matters.
    def _note_gradient(self, _: Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def _begin_update(self, *_: Any) -> None:
        self._update_seconds -= time.perf_counter()

    def _end_update(self, *_: Any) -> None:
        self._update_seconds += time.perf_counter()

    def settle(self) -> None:
        """Nothing to wait for: DDP and the drop-in end a step with nothing under way."""

    def waited(self) -> float:
        """Return the seconds waited so far."""
        return self._waited

    def sizes(self) -> Sizes:
        """Return the bytes on this rank; gradients stay until the next step drops them."""
        params = list(self.model.parameters())
        return Sizes(_memory(params), _memory(p.grad for p in params), _state_bytes(self._inners))

    def wire_bytes(self, steps: int) -> int:
        """Compute the bytes of a ring all-reduce of gradients and, with the drop-in, of sending owned parameters."""
        world, params = dist.get_world_size(), list(self.model.parameters())
        reduced = 2 * (world - 1) * sum(param.nbytes for param in params) // world
        owned = sum(p.nbytes for o in self._inners for group in o.param_groups for p in group["params"])
        return reduced + (owned * (world - 1) if self._optimizers != self._inners else 0)


class ShardedRun:
    """A bare module with `ShardedOptimizer`, updated in `step()` or inside backward."""

    def __init__(self, model: nn.Module, recipe: Recipe, update: Literal["step", "backward"]) -> None:
        self.name = "ShardedOptimizer" if update == "step" else "in backward"
        self.model, common, groups = model, recipe.common, recipe.groups(model.named_parameters())
        self._optimizer = ShardedOptimizer(model, common.build, groups, gather=GATHER, update=update, **common.options)
        self._sent_before = self._optimizer.stats().bytes_sent
        self._gradient_bytes = 0

    def step(self, window: Tensor) -> Tensor:
        """One training step; the new parameters are still on their way at the end."""
        self._optimizer.zero_grad()
        loss: Tensor = self.model(window)
        loss.backward()
        if not self._gradient_bytes:
            self._gradient_bytes = self._optimizer.stats().gradient_bytes
        self._optimizer.step()
        return loss

    def settle(self) -> None:
        """Wait for all parameters."""
        self._optimizer.synchronize()

    def waited(self) -> float:
        """Return the seconds waited so far."""
        return sum(self._optimizer.stats().wait_seconds.values())

    def sizes(self) -> Sizes:
        """Gradients of the first pass, before the step uses them up."""
        return Sizes(_memory(self.model.parameters()), self._gradient_bytes, self._optimizer.stats().state_bytes)

    def wire_bytes(self, steps: int) -> int:
        """Return what the optimizer has counted, per step."""
        return (self._optimizer.stats().bytes_sent - self._sent_before) // steps


def _optimizer(rule: Rule, named: Sequence[tuple[str, nn.Parameter]], sharded: bool) -> Optimizer:
    params = [param for _, param in named]
    return (
        ZeroRedundancyOptimizer(params, rule.build, **rule.options) if sharded else rule.build(params, **rule.options)
    )


def _state_bytes(optimizers: Sequence[Optimizer]) -> int:
    values = [value for optimizer in optimizers for entry in optimizer.state.values() for value in entry.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _memory(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the tensors' storages; a shared storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def synchronise(device: torch.device) -> None:
    """Wait for the accelerator, so that the host's clock measures its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
