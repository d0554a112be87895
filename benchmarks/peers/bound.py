"""What no data-parallel step can beat: forward, backward and the update of one share, with nothing to wait for."""

from typing import Any

import torch
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


def build(factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Build the model and a share of as many elements as one rank would own."""
    model = factory()
    flat = nn.Parameter(torch.zeros(share(sum(parameter.numel() for parameter in trainable(model)))))
    flat.grad = torch.full_like(flat, 1e-3)
    return _Alone(model, optimizer_class([flat], **options))
