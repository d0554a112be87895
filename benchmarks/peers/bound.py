"""What no data-parallel step can beat: the computing alone, and the network alone."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.peers.trainer import Factory, Loop, Options, Trainer, share, trainable


class _Alone(Loop):
    """Each rank trains for itself; the share is one flat tensor with a gradient of its own."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__(model, model, optimizer)

    def step(self, batch: Tensor) -> None:
        """Forward, backward, and the update of a share that is not the model's."""
        self._model.zero_grad()
        self._model(batch).backward()
        self._optimizer.step()


class _Compute(Loop):
    """Each rank computes gradients and forgets them."""

    clips = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, model, None)

    def step(self, batch: Tensor) -> None:
        """Forward and backward."""
        self._model.zero_grad()
        self._model(batch).backward()

    def state_bytes(self) -> int:
        """There is none."""
        return 0


class _Wire:
    """As many bytes as the trained parameters have, in one all-reduce by the backend's own rules."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def step(self, batch: Tensor) -> None:
        dist.all_reduce(self._memory)

    def settle(self) -> None:
        pass

    def full_parameters(self) -> list[Tensor]:
        return [self._memory]

    def state_bytes(self) -> int:
        return 0


def build(factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Build the model and a share of as many elements as one rank would own."""
    model = factory()
    flat = nn.Parameter(torch.zeros(share(sum(parameter.numel() for parameter in trainable(model)))))
    flat.grad = torch.full_like(flat, 1e-3)
    return _Alone(model, optimizer_class([flat], **options))


def build_compute(factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Build the model alone."""
    return _Compute(factory())


def build_wire(factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Build memory of the size of all trained parameters; zeros, whose sums stay what they are."""
    return _Wire(torch.zeros(sum(parameter.numel() for parameter in trainable(factory()))))
