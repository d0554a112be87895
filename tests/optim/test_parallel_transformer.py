"""A transformer with tensor and sequence parallelism and experts learns as the same model on one process."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from tests.helpers.parallel_transformer import DIMENSIONS, batches, build, named, parallelize
from tests.helpers.pool import Pool, run_fresh
from zerostep import ShardedOptimizer

STEPS, FEWER = 50, 15
FEW = 10  # are enough to show that the model itself is right
OPTIONS: dict[str, Any] = {"lr": 0.01}
CLOSE = 1e-9  # relative, in double precision: sums have other orders
MOST_NORM = 0.1
BUCKETS = 0.01  # megabytes: several buckets
Shape = tuple[int, int, int]


class Curve(NamedTuple):
    """A loss for each step, and the norm of all gradients before it was clipped."""

    losses: list[float]
    norms: list[float]


@cache
def on_one_process(replicas: int, steps: int, clip: bool = False) -> Curve:
    """The whole model with the batches of all data-parallel ranks."""
    model, curve = build(), Curve([], [])
    optimizer = AdamW(model.parameters(), **OPTIONS)
    for words in batches(range(replicas), steps):
        optimizer.zero_grad()
        loss = model(words)
        loss.backward()
        if clip:
            curve.norms.append(clip_grad_norm_(model.parameters(), MOST_NORM).item())
        optimizer.step()
        curve.losses.append(loss.item())
    return curve


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


def _assert_learnt(losses: list[float]) -> None:
    assert losses[0] > (2 if len(losses) == STEPS else 1.2) * losses[-1], "nothing was learnt"


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2), (2, 2, 1)], ids=str)
def test_the_model_learns_as_on_one_process_with_plain_optimizers(pool: Pool, shape: Shape) -> None:
    expected = on_one_process(shape[0] * shape[1], FEW).losses
    _assert_learnt(expected)
    for losses in pool.run(_by_hand, 4, shape, FEW):
        assert losses == pytest.approx(expected, rel=CLOSE)


# With optimizers that divide state.


def _divided(group: ProcessGroup, shape: Shape, clip: bool, options: dict[str, Any], steps: int = STEPS) -> Curve:
    ranks, norms = Ranks(shape), list[float]()
    model = parallelize(build(), ranks.mesh)
    optimizer = ShardedOptimizer(
        model, AdamW, groups(model, ranks), process_group=ranks.data, bucket_mb=BUCKETS, **OPTIONS, **options
    )

    def step(words: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(words)
        loss.backward()
        if clip:
            norms.append(optimizer.clip_grad_norm_(MOST_NORM).item())
        optimizer.step()
        return loss

    return Curve(ranks.losses(steps, step), norms)


def groups(model: nn.Module, ranks: Ranks) -> list[dict[str, Any]]:
    """Experts with the group of their replicas, where that is not the group of all others."""
    if ranks.mesh["experts"].size() == 1:
        return [{"params": list(model.named_parameters())}]
    own = {"params": named(model, experts=True), "process_group": ranks.copies}
    return [{"params": named(model, experts=False)}, own]


def _assert_as_on_one_process(found: list[Curve], shape: Shape, clip: bool) -> None:
    expected = on_one_process(shape[0] * shape[1], len(found[0].losses), clip)
    _assert_learnt(expected.losses)
    for curve in found:
        assert curve.losses == pytest.approx(expected.losses, rel=CLOSE)
        assert curve.norms == pytest.approx(expected.norms, rel=1e-6)  # told in the default dtype
    assert not clip or min(expected.norms) > MOST_NORM, "not all steps were clipped"


MODES: list[dict[str, Any]] = [{}, {"gather": "forward"}, {"update": "backward"}]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_parallel_transformer_learns_as_on_one_process(pool: Pool, options: dict[str, Any]) -> None:
    clip = "update" not in options
    found = pool.run(_divided, 4, (2, 1, 2), clip, options, FEWER, deadline=150)
    _assert_as_on_one_process(found, (2, 1, 2), clip)


@pytest.mark.parametrize(("shape", "options"), [((2, 2, 1), {}), ((2, 2, 1), MODES[2]), ((1, 2, 2), {})], ids=str)
def test_experts_with_replicas_of_their_own_learn_as_on_one_process(
    pool: Pool, shape: Shape, options: dict[str, Any]
) -> None:
    clip = "update" not in options
    _assert_as_on_one_process(pool.run(_divided, 4, shape, clip, options, FEWER, deadline=150), shape, clip)


def test_a_transformer_with_all_of_it_learns_as_on_one_process() -> None:
    outcomes = run_fresh(_divided, 8, (2, 2, 2), True, {"gather": "forward"}, deadline=280)
    assert [outcome.error for outcome in outcomes] == [None] * 8
    _assert_as_on_one_process([outcome.result for outcome in outcomes], (2, 2, 2), clip=True)
