"""Optimizers with methods that torch's have not: training and evaluation modes, and others."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Averaging(Optimizer):
    """As schedule-free optimizers: in evaluation mode, parameters are averages of what they were in training mode."""

    def __init__(self, params: Iterable[Any], lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "train_mode": False, "k": 0, "weight_sum": 0.0})

    def train(self) -> None:
        self._move(1 - self.defaults["beta"], True)

    def eval(self) -> None:
        self._move(1 - 1 / self.defaults["beta"], False)

    @torch.no_grad()
    def _move(self, weight: float, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)
                group["train_mode"] = train_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("not in train mode")
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        z = self.state[param].setdefault("z", param.clone())
        share = group["lr"] ** 2 / group["weight_sum"]
        param.lerp_(z, share).add_(gradient, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
        z.sub_(gradient, alpha=group["lr"])


class MatrixAveraging(Averaging):
    """The same, with a look at the whole parameter."""

    def _update(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        super()._update(param, gradient / (1 + gradient.norm()), group)


class Methods(Optimizer):
    """Gradient descent with methods of its own."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "factor": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self._owned():
            if param.grad is not None:
                param.sub_(param.grad, alpha=self.param_groups[0]["lr"])

    def _owned(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def size(self) -> int:
        """No method."""
        return len(self._owned())

    @torch.no_grad()
    def multiply(self, factor: float, *, note: float | None = None) -> float:
        """Change all parameters, and an option; twice the factor."""
        for param in self._owned():
            param.mul_(factor)
        for group in self.param_groups:
            group["factor"] = factor if note is None else note
        return 2 * factor

    def fail(self, here: bool) -> None:
        """Fail on some rank."""
        if here:
            raise ArithmeticError("no luck")
