"""Forward passes under `ShardedOptimizer`: checkpointing, and parameters that users set."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, train
from tests.helpers.sharding import MOMENTUM, Contest, Ordered, backward, gap, seeded, series, sharded, values

# How a model runs.


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in backward; one matrix may be used in two of them."""

    def __init__(self, reentrant: bool, tied: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(9, 9)
        self.second = nn.Linear(9, 9)
        self.last = nn.Linear(9, 3)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.requires_grad_()
        for layer in (self.first, self.second):
            hidden = torch.tanh(checkpoint(layer, hidden, use_reentrant=self.reentrant))
        result: Tensor = self.last(hidden)
        return result


def _checkpointed(group: ProcessGroup, reentrant: bool, gather: str) -> None:
    Contest(build=lambda: seeded(lambda: Checkpointed(reentrant)), ours={"gather": gather}, batches="matrices").run(
        group, lambda *args: train(*args), steps=6
    )


@pytest.mark.parametrize("gather", ["step", "forward"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_activation_checkpointing_equals_plain(pool: Pool, reentrant: bool, gather: str) -> None:
    pool.run(_checkpointed, 2, reentrant, gather)


def _checkpointed_twice(group: ProcessGroup, reentrant: bool, reduction: str) -> None:
    """A tied matrix gets its gradient in two parts, in two backward passes of which one runs inside the other."""
    model = seeded(lambda: Checkpointed(reentrant, tied=True))
    twin = Ordered(group, seeded(lambda: Checkpointed(False, tied=True)), lambda named: SGD(named, **MOMENTUM))
    optimizer = sharded(group, model, SGD, reduction=reduction, **MOMENTUM)
    for batch in series(group, 5, "matrices"):
        train(model, optimizer, [batch])
        twin.train(batch)
    assert gap(values(model), values(twin.model)) < 1e-6


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["scatter", "all"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_checkpointing_around_tied_weights(pool: Pool, reentrant: bool, reduction: str, world: int) -> None:
    pool.run(_checkpointed_twice, world, reentrant, reduction)


# What users do to parameters.


def _rebound(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        if number % 2:
            for param in model.parameters():
                param.data = param.data.clone() * 0.5
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def _set_in_place(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        if number % 2:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def _changed_by_users(group: ProcessGroup, loop: Callable[..., None], gather: str) -> None:
    Contest(ours={"gather": gather}).run(group, loop)


@pytest.mark.parametrize("gather", ["step", "forward"])
def test_parameters_that_users_set_in_place_are_followed(pool: Pool, gather: str) -> None:
    pool.run(_changed_by_users, 2, _set_in_place, gather)


def test_parameters_that_users_bind_to_other_memory_are_followed(pool: Pool) -> None:
    pool.run(_changed_by_users, 2, _rebound, "step")


def _moved(group: ProcessGroup, way: str) -> None:
    model, optimizer = Contest().sharded(group, way)
    train(model, optimizer, series(group, 1))
    optimizer.zero_grad()
    model.double()
    with pytest.raises(ValueError, match=r"\.weight.*float32.*float64.*build the optimizer after"):
        optimizer.step()


@pytest.mark.parametrize("way", ["bare scatter", "bare all"])
def test_a_model_that_changes_its_dtype_is_refused(pool: Pool, way: str) -> None:
    pool.run(_moved, 2, way)


def _trains_through_views(group: ProcessGroup) -> None:
    """A graph that saved a parameter notices that a step has changed it, as with any optimizer."""
    model: Any = seeded(lambda: nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)))
    optimizer = sharded(group, model)
    batch = series(group, 1, "matrices")[0]
    loss = mse_loss(model(batch[0]), batch[1])
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_from_before_the_step_is_refused(pool: Pool) -> None:
    pool.run(_trains_through_views, 1)
