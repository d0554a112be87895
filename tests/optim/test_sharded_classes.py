"""`ShardedOptimizer` with optimizer classes that torch does not have, and with Muon."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Muon, Optimizer

from tests.helpers.pool import Pool
from tests.helpers.reference import build, train
from tests.helpers.sharding import Contest, seeded, series, sharded

# Classes that torch does not know.


class SignSGD(Optimizer):
    """Every element moves by the learning rate, towards the sign of its averaged gradient."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    average = state.setdefault("average", torch.zeros_like(param))
                    average.lerp_(param.grad, 1 - group["beta"])
                    param.add_(average.sign(), alpha=-group["lr"])


class Decaying(Optimizer):
    """Every step changes the options of its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / group["steps"])


class Lamb(Optimizer):
    """The step of a parameter depends on the norm of all its elements."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    average = state.setdefault("average", torch.zeros_like(param))
                    average.lerp_(param.grad, 1 - group["beta"])
                    trust = param.norm().clamp(0.1, 10.0) / (average.norm() + 1e-3)
                    param.add_(average * trust, alpha=-group["lr"])


class Optimistic(Optimizer):
    """Steps ahead by the last change of the gradient, which it keeps as it was given."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    last = self.state[param].get("last", param.grad)
                    param.add_(2 * param.grad - last, alpha=-group["lr"])
                    self.state[param]["last"] = self._kept(param.grad)

    def _kept(self, grad: Tensor) -> Tensor:
        return grad


class OptimisticView(Optimistic):
    """Keeps another tensor over the same memory."""

    def _kept(self, grad: Tensor) -> Tensor:
        return grad.detach().view(grad.shape)


def _user_class(group: ProcessGroup, kind: type[Optimizer]) -> bool:
    Contest(kind=kind, options={"lr": 0.02}).run(group, lambda *args: train(*args), steps=10)
    optimizer = sharded(group, build(), kind)
    (answer,) = {spec.splittable for spec in optimizer._layout.params}
    return answer


@pytest.mark.parametrize(
    ("kind", "split"), [(SignSGD, True), (Decaying, True), (Lamb, False), (Optimistic, True), (OptimisticView, True)]
)
def test_a_class_of_the_users_own_equals_plain_and_is_cut_if_it_may_be(
    pool: Pool, kind: type[Optimizer], split: bool
) -> None:
    assert pool.run(_user_class, 2, kind) == [split, split]


def _memory_of_gradients(group: ProcessGroup) -> tuple[int, int]:
    """How many parts of gradients there are, and how many of them still have the memory of the first step."""
    model = build()
    optimizer = sharded(group, model)
    train(model, optimizer, series(group, 1))
    parts = optimizer._training.engine.sums.parts.values()
    first = [StorageWeakRef(part.untyped_storage()) for part in parts]
    del parts
    train(model, optimizer, series(group, 3))
    return len(first), sum(not memory.expired() for memory in first)


def test_memory_of_gradients_is_used_again(pool: Pool) -> None:
    for count, again in pool.run(_memory_of_gradients, 2):
        assert again == count - 2 > 0  # the last two arrive when backward is over


# What users do to parameters.


def _muon_shares(group: ProcessGroup) -> tuple[int, int]:
    """Whole matrices and the elements of everything else, in one optimizer: bytes of state on this rank, and in all."""
    model = seeded(lambda: nn.Sequential(*[nn.Linear(24, 24) for _ in range(8)], nn.Linear(24, 3)))
    named = list(model.named_parameters())
    groups = [
        {"params": [n for n in named if n[1].dim() == 2], "optimizer_class": Muon, "lr": 0.02},
        {"params": [n for n in named if n[1].dim() != 2]},
    ]
    optimizer = sharded(group, model, params=groups, bucket_mb=0.01)
    model(torch.ones(1, 24)).sum().backward()
    optimizer.step()
    states = optimizer.state.values()
    mine = sum(value.nbytes for entry in states for value in entry.values() if value.dim())
    return mine, sum(param.nbytes * (1 if param.dim() == 2 else 2) for param in model.parameters())


def test_whole_matrices_are_shared_evenly_too(pool: Pool) -> None:
    results = pool.run(_muon_shares, 2)
    assert sum(mine for mine, _ in results) == results[0][1]
    assert max(mine for mine, _ in results) <= 1.02 * results[0][1] / 2
