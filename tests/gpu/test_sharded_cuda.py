"""`ShardedOptimizer` on a CUDA device: parity over Gloo and NCCL, late kernels, clipping, memory, several devices."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from tests.helpers.cuda_training import (
    DEADLINE,
    DEVICE,
    RECIPES,
    SMALL_BUCKETS,
    STEPS,
    WAYS,
    Group,
    Recipe,
    assert_same,
    backward,
    in_ddp,
    inputs_of,
    nccl_group,
    train,
    values_of,
)
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_state_dict
from zerostep import ShardedOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MAX_NORM = 0.01


# How it is compared.


def _assert_close(excerpt: object, ours: nn.Module, twin: nn.Module) -> None:
    expected = values_of(twin)
    for name, value in values_of(ours).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7, msg=lambda text: f"{excerpt}: {text}")


def _whole_state(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The state of plain optimizers in host memory, as if they were one."""
    state: dict[int, Any] = {}
    groups: list[Group] = []
    for optimizer in optimizers:
        found, first = optimizer.state_dict(), sum(len(group["params"]) for group in groups)
        for number, entry in found["state"].items():
            state[first + number] = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in entry.items()}
        groups += [{**each, "params": [first + number for number in each["params"]]} for each in found["param_groups"]]
    return {"state": state, "param_groups": groups}


# -------------------------------------------------------------------------------------- parity, several Gloo ranks


def _lockstep(group: ProcessGroup, recipe: str) -> None:
    chosen = RECIPES[recipe]
    twin = in_ddp(group, chosen.build())
    plain = chosen.plain(twin.module)
    replicas = {way: way.ours(group, chosen) for way in WAYS}
    for number, inputs in enumerate(inputs_of(group)):
        train(twin, plain, inputs)
        for way, (model, optimizer) in replicas.items():
            train(model, [optimizer], inputs)
            if number in (0, STEPS - 1):
                optimizer.synchronize()
                assert_same(f"{way}, step {number}", model, twin)
    for _, optimizer in replicas.values():
        optimizer.consolidate_state_dict(to=0)
        if optimizer.rank == 0:
            assert_same_state_dict(optimizer.state_dict(), _whole_state(plain))


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("world", [1, 2])
def test_equals_plain_ddp_with_several_ranks_on_one_gpu(pool: Pool, world: int, recipe: str) -> None:
    pool.run(_lockstep, world, recipe, deadline=DEADLINE)


def _lockstep_nccl(group: ProcessGroup, recipe: str) -> None:
    _lockstep(nccl_group(group), recipe)


@pytest.mark.parametrize("recipe", ["sgd", "adamw fused", "muon", "muon and adamw"])
@pytest.mark.parametrize("world", [1, 2])
def test_equals_plain_ddp_on_nccl(pool: Pool, world: int, recipe: str) -> None:
    pool.run(_lockstep_nccl, world, recipe, deadline=DEADLINE)


# ----------------------------------------------------------------------------------------------------- alignment


def _behind_a_number(group: ProcessGroup) -> None:
    recipe = Recipe(SGD, {"lr": 1e-4, "momentum": 0.9}, "gain")
    for way in WAYS:
        twin = in_ddp(group, recipe.build())
        plain = recipe.plain(twin.module)
        model, optimizer = way.ours(group, recipe, bucket_mb=5)
        for inputs in inputs_of(group):
            train(twin, plain, inputs)
            train(model, [optimizer], inputs)
        optimizer.synchronize()
        assert_same(way, model, twin)
        assert all(param.data_ptr() % 16 == 0 for param in model.parameters()), way


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_stay_where_fast_kernels_like_them(pool: Pool, world: int) -> None:
    """Misaligned, a norm sums in another order, and a matrix of low precision is multiplied many times more slowly."""
    pool.run(_behind_a_number, world, deadline=DEADLINE)


# ------------------------------------------------------------------------------------------------- late kernels


def _on_side_stream(group: ProcessGroup, step_there: bool) -> None:
    recipe = RECIPES["adamw, late"]
    for way in WAYS:
        model, optimizer = way.ours(group, recipe)
        twin = in_ddp(group, recipe.build())
        plain = recipe.plain(twin.module)
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        for inputs in inputs_of(group, 4):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                optimizer.zero_grad()
                backward(model, inputs)
                if step_there:
                    optimizer.step()
            main.wait_stream(side)
            if not step_there:
                optimizer.step()
            train(twin, plain, inputs)
        optimizer.synchronize()
        assert_same(way, model, twin)


@pytest.mark.parametrize("step_there", [True, False], ids=["step beside", "step on the main stream"])
@pytest.mark.parametrize("world", [1, 2])
def test_late_kernels_on_a_stream_beside_the_main_one(pool: Pool, world: int, step_there: bool) -> None:
    pool.run(_on_side_stream, world, step_there, deadline=DEADLINE)


# ------------------------------------------------------------------------------------------------------- clipping


def _clipped(group: ProcessGroup, norm_type: float, foreach: bool | None) -> None:
    recipe = RECIPES["sgd"]
    for way, by_torch in product(WAYS, (False, True)):
        twin = in_ddp(group, recipe.build())
        plain = recipe.plain(twin.module)[0]
        model, optimizer = way.ours(group, recipe)
        for inputs in inputs_of(group, 4):
            plain.zero_grad()
            backward(twin, inputs)
            expected = clip_grad_norm_(twin.parameters(), MAX_NORM, norm_type)
            plain.step()
            optimizer.zero_grad()
            backward(model, inputs)
            if by_torch:
                found = clip_grad_norm_(model.parameters(), MAX_NORM, norm_type, foreach=foreach)
            else:
                found = optimizer.clip_grad_norm_(MAX_NORM, norm_type)
            optimizer.step()
            assert expected > MAX_NORM, "nothing is clipped"
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
        optimizer.synchronize()
        _assert_close((way, by_torch), model, twin)


@pytest.mark.parametrize("foreach", [None, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("world", [1, 2])
def test_clipping_by_the_optimizer_and_by_torch(pool: Pool, world: int, norm_type: float, foreach: bool | None) -> None:
    pool.run(_clipped, world, norm_type, foreach, deadline=DEADLINE)


# --------------------------------------------------------------------------------------------------------- memory


def _gradient_memory(group: ProcessGroup, update: Any) -> tuple[int, int, int]:
    """Bytes of parameters, of one bucket, and of what a backward pass leaves behind."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(24))).to(DEVICE)
    optimizer = ShardedOptimizer(model, AdamW, process_group=group, bucket_mb=1, update=update)
    inputs = torch.randn(4, 512, device=DEVICE)
    for _ in range(3):  # libraries take their workspaces in the first passes
        optimizer.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        backward(model, inputs)
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated()
        optimizer.step()
    whole = sum(param.numel() * param.element_size() for param in model.parameters())
    return whole, 1 << 20, after - before


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_take_their_share_of_device_memory_and_a_few_buckets(pool: Pool, world: int) -> None:
    for whole, bucket, left in pool.run(_gradient_memory, world, "step", deadline=DEADLINE):
        assert whole // world <= left + 2 * bucket, "less than a share: what was measured?"
        assert left <= whole // world + 3 * bucket + (64 << 10), f"{left} bytes of {whole}"


@pytest.mark.parametrize("world", [2, 4])
def test_an_update_inside_backward_leaves_no_gradients_on_the_device(pool: Pool, world: int) -> None:
    for whole, _, left in pool.run(_gradient_memory, world, "backward", deadline=DEADLINE):
        assert left <= 64 << 10, f"{left} bytes of {whole}"


# ------------------------------------------------------------------------------------------------ several devices


class _TwoPlaces(nn.Module):
    """The first half in host memory, the second on the device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.here = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48))
        self.there = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4)).to(DEVICE)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.there(self.here(inputs.cpu()).to(DEVICE))
        return found


def _average(group: ProcessGroup, model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(1.0 / dist.get_world_size(group))
        dist.all_reduce(param.grad, group=group)


def _two_places(group: ProcessGroup, clip: str) -> None:
    # Left alone, torch picks the implementation by the kinds of device among the parameters of each optimizer.
    options: Group = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    for way in [way for way in WAYS if not way.wrapped]:
        model, twin = _TwoPlaces(), _TwoPlaces()
        plain = SGD(twin.parameters(), **options)
        settings: Group = {"reduction": way.reduction, "gather": way.gather, "bucket_mb": SMALL_BUCKETS}
        optimizer = ShardedOptimizer(model, SGD, process_group=group, **settings, **options)
        for inputs in inputs_of(group, 5):
            plain.zero_grad()
            backward(twin, inputs)
            _average(group, twin)
            optimizer.zero_grad()
            backward(model, inputs)
            if clip:
                clip_grad_norm_(twin.parameters(), MAX_NORM)
                _ = (
                    optimizer.clip_grad_norm_(MAX_NORM)
                    if clip == "ours"
                    else clip_grad_norm_(model.parameters(), MAX_NORM)
                )
            plain.step()
            optimizer.step()
        optimizer.synchronize()
        (_assert_close if clip else assert_same)(way, model, twin)
        optimizer.consolidate_state_dict(to=0)


@pytest.mark.parametrize("clip", ["", "ours", "torch"], ids=["as they are", "clipped", "clipped by torch"])
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_in_host_memory_and_on_the_device(pool: Pool, world: int, clip: str) -> None:
    pool.run(_two_places, world, clip, deadline=DEADLINE)
