"""Compiled updates on a CUDA device: against the classes' own kernels, without waits of the host, at odd addresses."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import AdamW

from tests.helpers.cuda_training import (
    ADAMW,
    DEADLINE,
    DEVICE,
    LATE,
    RECIPES,
    Recipe,
    Way,
    backward,
    inputs_of,
    nccl_group,
    train,
    values_of,
)
from tests.helpers.pool import Pool
from zerostep import ShardedOptimizer
from zerostep.step import leaf_program
from zerostep.step.leaf_arguments import Arguments

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
VERY_LATE = 20 * LATE
LONG = 5 * DEADLINE  # kernels are compiled
WAYS = [Way(), Way(gather="forward"), Way(wrapped=True), Way(wrapped=True, reduction="all")]
COMPILED = {
    **{name: RECIPES[name] for name in ("sgd", "adamw", "adamw fused", "adamw of odd sizes", "muon", "muon and adamw")},
    "nadam": Recipe(torch.optim.NAdam, {"lr": 0.01}),
    "adamw, capturable": Recipe(AdamW, {"lr": 0.01, "capturable": True}),
    "gain": Recipe(AdamW, {"lr": 0.01}, "gain"),
}


@contextmanager
def _presented(how: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaf_program, "PRESENTATION", how)
        yield


def _close(ours: nn.Module, plain: nn.Module, rounding: float) -> None:
    expected = values_of(plain)
    for name, value in values_of(ours).items():
        gap, size = (value - expected[name]).float().abs().max(), expected[name].float().abs().max()
        assert value.dtype == expected[name].dtype and gap <= rounding * size, f"{name}: off by {gap} of {size}"


def _compiled(group: ProcessGroup, recipe: str, how: str) -> None:
    chosen = COMPILED[recipe]
    with _presented(how):
        for way in WAYS:
            (model, ours), (twin, plain) = (way.ours(group, chosen, compile=flag) for flag in (True, False))
            for inputs in inputs_of(group):
                for each, optimizer in ((model, ours), (twin, plain)):
                    train(each, [optimizer], inputs)
            for optimizer in (ours, plain):
                optimizer.synchronize()
            assert ours.stats().compiled_graphs > 0
            # Muon orthogonalises in bfloat16, which makes more of another rounding.
            _close(model, twin, 0.1 if "muon" in recipe else 1e-4)


@pytest.mark.parametrize("recipe", COMPILED)
@pytest.mark.parametrize("world", [1, 2])
def test_compiled_updates_equal_those_of_the_class(pool: Pool, world: int, recipe: str) -> None:
    pool.run(_compiled, world, recipe, "rows", deadline=LONG)


@pytest.mark.parametrize("how", ["flat", "static"])
def test_other_ways_to_show_a_leaf(pool: Pool, how: str) -> None:
    pool.run(_compiled, 1, "adamw of odd sizes", how, deadline=LONG)


def _masters(group: ProcessGroup, fused: bool) -> None:
    found: list[tuple[nn.Module, ShardedOptimizer]] = []
    for compiled in (True, False):
        model = ADAMW.build().bfloat16()
        options: dict[str, Any] = {"master_dtype": torch.float32, "compile": compiled, "fused": fused}
        found.append((model, ShardedOptimizer(model, AdamW, process_group=group, bucket_mb=0.02, lr=0.01, **options)))
    for inputs in inputs_of(group):
        for model, optimizer in found:
            optimizer.zero_grad()
            backward(model, inputs.bfloat16())
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
    assert found[0][1].stats().compiled_graphs > 0
    _close(found[0][0], found[1][0], 0.02)


@pytest.mark.parametrize("fused", [False, True], ids=["counters on the host", "counters on the device"])
@pytest.mark.parametrize("world", [1, 2])
def test_masters_in_one_kernel(pool: Pool, world: int, fused: bool) -> None:
    pool.run(_masters, world, fused, deadline=LONG)


# ------------------------------------------------------------------------------------------------- addresses


class _Odd(nn.Module):
    """Lengths that leave the next parameter at an address that is not aligned."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        lengths = (5001, 3, 70_003, 1, 2049, 2050, 1025)
        self.all = nn.ParameterList(torch.randn(length, generator=generator).to(DEVICE) for length in lengths)


def _misaligned(group: ProcessGroup, dtype: torch.dtype) -> None:
    """Each parameter in a group of its own is a leaf of its own, wherever it begins."""
    found = []
    for compiled in (True, False):
        model = _Odd().to(dtype)
        groups = [{"params": [param], "weight_decay": 0.1 * (index % 2)} for index, param in enumerate(model.all)]
        master = torch.float32 if dtype != torch.float32 else None
        optimizer = ShardedOptimizer(
            model, AdamW, groups, process_group=group, compile=compiled, master_dtype=master, lr=0.01
        )
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).to(DEVICE, dtype)
            optimizer.step()
            optimizer.zero_grad()
        found.append(model)
        shards = optimizer._training.engine.buckets.shards.values()
        addresses = [leaf.tensor.data_ptr() % 16 for shard in shards for leaf in shard.leaves]
        assert any(addresses), "all leaves are aligned"
    _close(found[0], found[1], 1e-4 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_leaves_at_odd_addresses(pool: Pool, world: int, dtype: torch.dtype) -> None:
    pool.run(_misaligned, world, dtype, deadline=LONG)


def test_examples_are_aligned_as_what_they_stand_for() -> None:
    memory = torch.zeros(4096, device=DEVICE)
    for start in (0, 1):
        leaf = memory[start : start + 2000]
        given = Arguments(leaf, leaf, None, {"mean": leaf}, any_length=True)
        examples: list[Tensor] = given.examples().elements
        assert all((each.data_ptr() % 16 == 0) == (start == 0) for each in examples)


# --------------------------------------------------------------------------------------------- hosts that never wait


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _never_waits(group: ProcessGroup, recipe: str, scaled: bool) -> None:
    model, optimizer = Way().ours(nccl_group(group), COMPILED[recipe], compile=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=scaled)
    series = inputs_of(group, 6)
    for number, inputs in enumerate(series):
        for options in optimizer.param_groups:
            options["lr"] = 0.01 / (number + 1)
        optimizer.zero_grad()
        scaler.scale(model(inputs).square().sum()).backward()
        if number < len(series) - 1:  # with all kernels of the last step: compiling and loading them wait
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1e-3)
            optimizer.step()
            scaler.update()
            continue
        torch.cuda.synchronize()
        torch.cuda._sleep(VERY_LATE)
        done = torch.cuda.Event()
        done.record()
        with _waiting_forbidden():
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(1e-3)
            optimizer.step()  # the scaler's own step() reads on the host whether to skip
        assert not done.query(), "the host has waited for the device"
    torch.cuda.synchronize()
    assert optimizer.stats().compiled_graphs > 0


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("recipe", ["sgd", "adamw", "adamw fused", "muon and adamw"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_host_does_not_wait_for_the_device_in_a_step(pool: Pool, world: int, recipe: str, scaled: bool) -> None:
    pool.run(_never_waits, world, recipe, scaled, deadline=LONG)
