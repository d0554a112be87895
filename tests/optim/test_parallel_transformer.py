"""A transformer with tensor and sequence parallelism and experts learns as the same model on one process."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from tests.helpers.parallel_transformer import DIMENSIONS, batches, build, named, parallelize
from tests.helpers.pool import Pool
from zerostep import ShardedOptimizer

STEPS = 50
FEW = 10  # are enough to show that the model itself is right
OPTIONS: dict[str, Any] = {"lr": 0.01}
BUCKETS = 0.01  # megabytes: several buckets
Shape = tuple[int, int, int]


@cache
def on_one_process(replicas: int, steps: int) -> list[float]:
    """The losses of the whole model with the batches of all data-parallel ranks."""
    model, losses = build(), list[float]()
    optimizer = AdamW(model.parameters(), **OPTIONS)
    for words in batches(range(replicas), steps):
        optimizer.zero_grad()
        loss = model(words)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Ranks:
    """The groups of a mesh of `(copies, experts, tp)`."""

    def __init__(self, shape: Shape) -> None:
        self.mesh: DeviceMesh = init_device_mesh("cpu", shape, mesh_dim_names=DIMENSIONS)
        self.data = self.mesh["copies", "experts"]._flatten("dp").get_group()
        self.copies: ProcessGroup = self.mesh["copies"].get_group()

    def losses(self, steps: int, step: Callable[[Tensor], Tensor]) -> list[float]:
        """Train on this rank's batches; the mean of the losses of all data-parallel ranks in each step."""
        losses = list[float]()
        for words in batches([dist.get_rank(self.data)], steps):
            loss = step(words).detach()
            dist.all_reduce(loss, group=self.data)
            losses.append(loss.item() / dist.get_world_size(self.data))
        return losses


# Gradients averaged by hand.


def average(params: list[tuple[str, nn.Parameter]], group: ProcessGroup, divisor: int) -> None:
    """Sum gradients over the replicas of their parameters, in the placements of those, and divide."""
    for _, param in params:
        grad: Any = param.grad
        if isinstance(param, DTensor):
            grad = grad.redistribute(placements=param.placements)
            param.grad = grad
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        dist.all_reduce(local, group=group)
        local.div_(divisor)


def _by_hand(group: ProcessGroup, shape: Shape, steps: int) -> list[float]:
    ranks = Ranks(shape)
    model = parallelize(build(), ranks.mesh)
    optimizer, divisor = AdamW(model.parameters(), foreach=False, **OPTIONS), dist.get_world_size(ranks.data)

    def step(words: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(words)
        loss.backward()
        average(named(model, experts=False), ranks.data, divisor)
        average(named(model, experts=True), ranks.copies, divisor)
        optimizer.step()
        return loss

    return ranks.losses(steps, step)


def _assert_as_on_one_process(found: list[list[float]], replicas: int, steps: int) -> None:
    expected = on_one_process(replicas, steps)
    assert expected[0] > (2 if steps == STEPS else 1.2) * expected[-1], "nothing was learnt"
    for losses in found:
        assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2), (2, 2, 1)], ids=str)
def test_the_model_learns_as_on_one_process_with_plain_optimizers(pool: Pool, shape: Shape) -> None:
    _assert_as_on_one_process(pool.run(_by_hand, 4, shape, FEW), shape[0] * shape[1], FEW)


# With optimizers that divide state.


def _divided(group: ProcessGroup, shape: Shape, options: dict[str, Any]) -> list[float]:
    ranks = Ranks(shape)
    model = parallelize(build(), ranks.mesh)
    optimizer = ShardedOptimizer(
        model, AdamW, groups(model, ranks), process_group=ranks.data, bucket_mb=BUCKETS, **OPTIONS, **options
    )

    def step(words: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(words)
        loss.backward()
        optimizer.step()
        return loss

    return ranks.losses(STEPS, step)


def groups(model: nn.Module, ranks: Ranks) -> list[dict[str, Any]]:
    """Experts with the group of their replicas, where that is not the group of all others."""
    if ranks.mesh["experts"].size() == 1:
        return [{"params": list(model.named_parameters())}]
    own = {"params": named(model, experts=True), "process_group": ranks.copies}
    return [{"params": named(model, experts=False)}, own]


MODES: list[dict[str, Any]] = [{}, {"gather": "forward"}, {"update": "backward"}]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_parallel_transformer_learns_as_on_one_process(pool: Pool, options: dict[str, Any]) -> None:
    found = pool.run(_divided, 4, (2, 1, 2), options, deadline=150)
    _assert_as_on_one_process(found, 2, STEPS)


def test_experts_with_replicas_of_their_own_learn_as_on_one_process(pool: Pool) -> None:
    found = pool.run(_divided, 4, (2, 2, 1), {}, deadline=150)
    _assert_as_on_one_process(found, 4, STEPS)
