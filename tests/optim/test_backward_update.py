"""`ShardedOptimizer(update="backward")`: the same numbers as plain DDP, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

from tests.helpers.late_gathers import late_gathers
from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, assert_same_bits, assert_same_state_dict, build, train
from tests.helpers.sharding import (
    MOMENTUM,
    OPTIONS,
    Contest,
    Ordered,
    backward,
    in_ddp,
    no_sync,
    seeded,
    series,
    sharded,
    values,
    whole_state,
)
from tests.optim.test_training_programs import Heads
from zerostep import ShardedOptimizer

BARE = ["bare scatter"]


def _plain_loop(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    train(model, optimizer, data)


def _scheduled(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    for batch in data:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        scheduler.step()


def _accumulated(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        with no_sync(model, optimizer):
            backward(model, first)
        backward(model, second)
        optimizer.step()
        model.zero_grad()


def _in_a_closure(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:

        def closure(batch: Batch = batch) -> float:
            optimizer.zero_grad()
            loss = mse_loss(model(batch[0]), batch[1])
            loss.backward()
            return loss.item()

        optimizer.step(closure)


def _exactly(group: ProcessGroup, loop: Callable[..., None], settings: dict[str, Any]) -> None:
    Contest(ways=BARE, ours={"update": "backward", **settings}).run(group, loop)


SETTINGS: dict[str, dict[str, Any]] = {
    "step": {},
    "forward": {"gather": "forward"},
    "whole parameters": {"partition": "parameters", "gather": "forward"},
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("loop", [_plain_loop, _scheduled, _accumulated, _in_a_closure])
def test_a_loop_equals_plain_ddp(pool: Pool, loop: Callable[..., None], settings: str, world: int) -> None:
    pool.run(_exactly, world, loop, SETTINGS[settings])


def _in_rank_order(group: ProcessGroup, gather: str) -> None:
    twin, model = Ordered(group), build()
    optimizer = sharded(group, model, update="backward", gather=gather)
    for batch in series(group, 5):
        twin.train(batch)
        train(model, optimizer, [batch])
    optimizer.synchronize()
    assert_same_bits(values(model), values(twin.model))


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("gather", ["step", "forward"])
def test_sums_are_in_the_order_of_the_ranks(pool: Pool, gather: str, world: int) -> None:
    pool.run(_in_rank_order, world, gather)


def _apart(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """Ranks use different heads; one head is used by no rank in every second step."""
    for number, (inputs, targets) in enumerate(data):
        optimizer.zero_grad()
        heads = [[0, 1], [0, 2, 4], [1]][dist.get_rank() % 3] if number % 2 else [3, dist.get_rank() % 2]
        mse_loss(model(inputs, heads), targets).backward()
        optimizer.step()


def _used_apart(group: ProcessGroup, settings: dict[str, Any]) -> None:
    Contest(
        build=lambda: seeded(Heads),
        kind=SGD,
        options=MOMENTUM,
        ddp={"find_unused_parameters": True},
        ways=BARE,
        ours={"update": "backward", **settings},
        batches="matrices",
        close=2e-6,
    ).run(group, _apart, steps=6)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("settings", SETTINGS)
def test_ranks_may_use_different_parameters(pool: Pool, settings: str, world: int) -> None:
    pool.run(_used_apart, world, SETTINGS[settings], deadline=30.0)


def _with_muon(group: ProcessGroup) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": [(name, param)], "lr": 0.01 * (1 + number)}
            for number, (name, param) in enumerate(model.named_parameters())
        ]

    Contest(
        build=lambda: build("matrices"),
        kind=Muon,
        options={"lr": 0.02, "weight_decay": 0.1},
        groups=groups,
        ways=BARE,
        ours={"update": "backward", "gather": "forward"},
        batches="matrices",
    ).run(group, _plain_loop)


@pytest.mark.parametrize("world", [1, 2])
def test_matrices_are_updated_whole(pool: Pool, world: int) -> None:
    pool.run(_with_muon, world)


def _masters(group: ProcessGroup) -> None:
    options: dict[str, Any] = {"master_dtype": torch.float32, "reduce_dtype": torch.float32}
    models = [build().bfloat16(), build().bfloat16()]
    updates = [
        sharded(group, model, update=way, **options) for model, way in zip(models, ("step", "backward"), strict=True)
    ]
    for inputs, targets in series(group, 4):
        for model, optimizer in zip(models, updates, strict=True):
            train(model, optimizer, [(inputs, targets.bfloat16())])
    assert_same_bits(values(models[1]), values(models[0]))
    first, second = (whole_state(each)["state"] for each in updates)
    assert_same_state_dict({"state": second}, {"state": first})


def test_masters_are_updated_as_in_a_step(pool: Pool) -> None:
    pool.run(_masters, 2)


def _on_a_mesh(group: ProcessGroup) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    models = [build(), build()]
    for model, way in zip(models, ("step", "backward"), strict=True):
        options = {"process_group": mesh, "update": way, "bucket_mb": 0.0003, **OPTIONS}
        optimizer = ShardedOptimizer(model, AdamW, **options)
        train(model, optimizer, series(group, 4))
    assert_same_bits(values(models[1]), values(models[0]))


def test_replicas_agree_on_a_mesh(pool: Pool) -> None:
    pool.run(_on_a_mesh, 4)


def _state_goes_over(group: ProcessGroup) -> None:
    """A state dict of the one is a state dict of the other, and a group can be added in between."""
    models = [build(), build()]
    first, second = (sharded(group, model, update=way) for model, way in zip(models, ("step", "backward"), strict=True))
    data = series(group, 4)
    train(models[0], first, data[:2])
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(whole_state(first))
    extra = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))]
    for each, param in zip((first, second), extra, strict=True):
        each.add_param_group({"params": [("extra", param)]})
    for inputs, targets in data[2:]:
        for model, optimizer, param in zip(models, (first, second), extra, strict=True):
            optimizer.zero_grad()
            (mse_loss(model(inputs), targets) + param.square().sum()).backward()
            optimizer.step()
    assert_same_bits(
        {**values(models[0]), "extra": extra[0].detach()}, {**values(models[1]), "extra": extra[1].detach()}
    )
    assert (first.stats().steps, second.stats().steps) == (4, 2)


def test_state_dicts_and_added_groups(pool: Pool) -> None:
    pool.run(_state_goes_over, 2)


def _read_before_the_step(group: ProcessGroup, gather: str) -> None:
    """Between backward and step(), a parameter has its new value for whoever reads it."""
    model, twin = build(), Ordered(group)
    optimizer = sharded(group, model, update="backward", gather=gather)
    with late_gathers() as waits:
        for batch in series(group, 3):
            backward(model, batch)
            twin.train(batch)
            before = len(waits)
            assert_same_bits(values(model), values(twin.model))
            assert len(waits) > before, "nothing was late"
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("gather", ["step", "forward"])
def test_parameters_are_new_as_soon_as_backward_is_over(pool: Pool, gather: str) -> None:
    pool.run(_read_before_the_step, 2, gather)


# Memory and traffic.


class Tower(nn.Sequential):
    """Twelve equal layers."""

    def __init__(self) -> None:
        super().__init__(*[nn.Linear(32, 32) for _ in range(12)])


def _costs(group: ProcessGroup) -> tuple[int, int, int]:
    model = Tower()
    optimizer = sharded(group, model, update="backward", bucket_mb=32 * 33 * 4 / 2**20)
    train(model, optimizer, [(torch.randn(2, 32), torch.randn(2, 32))])
    before = optimizer.stats().bytes_sent
    train(model, optimizer, [(torch.randn(2, 32), torch.randn(2, 32))])
    stats = optimizer.stats()
    return stats.gradient_bytes, stats.bytes_sent - before, stats.elements * 4


@pytest.mark.parametrize("world", [2, 4])
def test_no_gradient_is_kept_and_traffic_is_that_of_an_all_reduce(pool: Pool, world: int) -> None:
    for kept, sent, size in pool.run(_costs, world):
        assert kept == 0
        assert 2 * (world - 1) / world * size <= sent <= 2 * (world - 1) / world * size + 20_000 * world


# Refusals.


def _refusals(group: ProcessGroup) -> None:
    model = build()
    optimizer = sharded(group, model, update="backward")
    data = series(group, 3)
    backward(model, data[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    late: list[Callable[[], object]] = [
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.grad_norm(),
        lambda: clip_grad_norm_(model.parameters(), 1.0),
        lambda: clip_grad_norm_(model.parameters(), 1.0, foreach=False),
        lambda: clip_grad_value_(model.parameters(), 1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: model.zero_grad(set_to_none=False),
        lambda: optimizer.zero_grad(set_to_none=False),
    ]
    for each in late:
        with pytest.raises(RuntimeError, match="updated inside backward"):
            each()
    with pytest.raises(RuntimeError, match=r"second one has begun before step\(\)"):
        backward(model, data[1])
    optimizer.step()
    model.zero_grad()
    backward(model, data[1])
    optimizer.step()
    with pytest.raises(RuntimeError, match="was not dropped since the last step"):
        backward(model, data[2])
    optimizer.zero_grad()
    backward(model, data[2])
    optimizer.step()
    twin = Ordered(group)
    for batch in data:
        twin.train(batch)
    assert_same_bits(values(model), values(twin.model))


@pytest.mark.parametrize("world", [1, 2])
def test_what_comes_too_late_is_refused_and_training_goes_on(pool: Pool, world: int) -> None:
    pool.run(_refusals, world)


class Shared(nn.Module):
    """Two reentrant segments that use one layer: it gets a gradient in each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 9)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.layer, inputs.clone().requires_grad_(), use_reentrant=True)
        result: Tensor = checkpoint(self.layer, hidden, use_reentrant=True)
        return result


def _second_gradient(group: ProcessGroup) -> None:
    model = seeded(Shared)
    optimizer = sharded(group, model, update="backward")
    with pytest.raises(RuntimeError, match="got two gradients in one backward pass"):
        model(torch.ones(2, 9)).sum().backward()
    with pytest.raises(RuntimeError, match="the backward pass of step 1 failed on rank"):
        optimizer.step()


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_gradient_in_one_pass_is_refused(pool: Pool, world: int) -> None:
    pool.run(_second_gradient, world, deadline=20.0)


def _bad_settings(group: ProcessGroup) -> None:
    model = build()
    with pytest.raises(ValueError, match="without DistributedDataParallel"):
        sharded(group, in_ddp(group, model), update="backward")
    with pytest.raises(ValueError, match="keeps no gradients"):
        sharded(group, model, update="backward", reduction="all")
    with pytest.raises(ValueError, match="verify needs the gradients"):
        sharded(group, model, update="backward", verify=True)
    with pytest.raises(ValueError, match="update must be one of"):
        sharded(group, model, update="forward")
    optimizer = sharded(group, model, update="backward")
    with pytest.raises(RuntimeError, match="cannot be used inside Join"), Join([optimizer]):
        pass


def test_settings_that_do_not_go_together_are_refused(pool: Pool) -> None:
    pool.run(_bad_settings, 2)


class Failing(SGD):
    """Fails in its third partial step, on one rank."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        Failing.count += 1
        if Failing.count == 3 and dist.get_rank() == 1:
            raise FloatingPointError("on purpose")
        return super().step(closure)


def _fails_on_one_rank(group: ProcessGroup) -> str:
    model = build()
    optimizer = sharded(group, model, Failing, lr=0.1, update="backward")
    Failing.count = 0  # the class was tried out before
    with pytest.raises(Exception, match=r"on purpose|failed on rank 1") as failure:
        for batch in series(group, 3):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
    with pytest.raises(RuntimeError, match=r"of step \d failed on rank 1|rank 1 failed in its local update of step \d"):
        optimizer.step()
    return str(failure.value)


def test_an_update_that_fails_on_one_rank_ends_the_step_of_all(pool: Pool) -> None:
    first, second = pool.run(_fails_on_one_rank, 2, deadline=20.0)
    assert "rank 1 failed in its local update of step 1: FloatingPointError: on purpose" in first
    assert "on purpose" in second
