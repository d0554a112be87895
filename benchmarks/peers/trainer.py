"""What every adapter offers: a model and its optimizer that take training steps, and can be looked into afterwards."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Factory = Callable[[], nn.Module]
Options = Mapping[str, Any]


class Trainer(Protocol):
    """One way to train a model whose forward pass returns the loss."""

    def step(self, batch: Tensor) -> None:
        """Train on one batch; work may go on behind the next step."""

    def settle(self) -> None:
        """Wait for what the last step left under way."""

    def full_parameters(self) -> list[Tensor]:
        """All parameters, whole, in the model's order; collective."""

    def state_bytes(self) -> int:
        """What this rank's optimizer keeps besides the model's parameters."""


Build = Callable[[Factory, type[Optimizer], Options], Trainer]


class Loop:
    """The usual loop: ``wrapped`` reduces the gradients of ``model``, ``optimizer`` steps."""

    clips = True  # whether gradients can be clipped

    def __init__(self, model: nn.Module, wrapped: nn.Module, optimizer: Any) -> None:
        self._model = model
        self._wrapped = wrapped
        self._optimizer = optimizer

    def step(self, batch: Tensor) -> None:
        """Zero, forward, backward, step."""
        self._optimizer.zero_grad()
        self._wrapped(batch).backward()
        self._optimizer.step()

    def clipped_step(self, batch: Tensor, max_norm: float) -> None:
        """The same, with the norm of all gradients clipped before the step."""
        self._optimizer.zero_grad()
        self._wrapped(batch).backward()
        self._clip(max_norm)
        self._optimizer.step()

    def _clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def settle(self) -> None:
        """Nothing is left under way."""

    def full_parameters(self) -> list[Tensor]:
        """Return the model's own parameters: every rank has them whole."""
        return [parameter.detach() for parameter in self._model.parameters()]

    def state_bytes(self) -> int:
        """Return the size of the state; a wrapper's inner optimizer is its ``optim``."""
        return size_of_state(getattr(self._optimizer, "optim", self._optimizer))


class Inside(Loop):
    """The optimizer steps inside backward."""

    clips = False

    def step(self, batch: Tensor) -> None:
        """Zero, forward, backward."""
        self._optimizer.zero_grad()
        self._wrapped(batch).backward()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters an optimizer is given: no peer pays for frozen ones."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def size_of_state(optimizer: Optimizer) -> int:
    """Return the bytes of all tensors in the optimizer's state on this rank."""
    return size_of(value for entry in optimizer.state.values() for value in entry.values())


def size_of(values: Iterable[object]) -> int:
    """Return the bytes that the tensors among ``values`` take on this rank."""
    tensors = (value for value in values if isinstance(value, Tensor))
    return sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in tensors)


def share(total: int) -> int:
    """Return the largest rank's part of ``total`` things dealt out evenly."""
    return -(-total // dist.get_world_size())
