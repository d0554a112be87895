"""Norms, clipping and loss scaling of gradients under `ShardedOptimizer`."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import SGD

from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, build
from tests.helpers.sharding import MOMENTUM, SCATTERED, WAYS, Contest, backward, in_ddp, series, sharded
from zerostep import ShardedOptimizer

# Norms and clipping.


def _same_number(found: Tensor, expected: Tensor) -> None:
    assert math.isclose(found.item(), expected.item(), rel_tol=1e-6), f"{found.item()} and {expected.item()}"
    assert found.dtype == expected.dtype


def _norms(group: ProcessGroup, way: str, gather: str) -> None:
    model, optimizer = Contest(ours={"gather": gather}).sharded(group, way)
    twin = in_ddp(group, build())
    for batch in series(group, 2):
        for each in (model, twin):
            each.zero_grad()
            backward(each, batch)
        full = [param.grad for param in twin.parameters() if param.grad is not None]
        for norm_type in (1, 2.0, math.inf, 3.0, 0.0, -1.0, -math.inf):
            _same_number(optimizer.grad_norm(norm_type), get_total_norm(full, norm_type))
            mine = [param.grad for param in model.parameters() if param.grad is not None]
            _same_number(get_total_norm(mine, norm_type), get_total_norm(full, norm_type))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_norms_are_those_of_whole_gradients(pool: Pool, way: str, world: int) -> None:
    pool.run(_norms, world, way, "step")


class _Unused(nn.Module):
    """Gradients without zeros, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.unused, self.last = nn.Linear(9, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(inputs))
        return found


def _norms_with_unused(group: ProcessGroup, reduction: str) -> None:
    model, twin = _Unused(), in_ddp(group, _Unused(), find_unused_parameters=True)
    optimizer = sharded(group, model, reduction=reduction, bucket_mb=1.0)
    for each in (model, twin):
        backward(each, series(group, 1, "matrices")[0])
    full = [param.grad for param in twin.parameters() if param.grad is not None]
    assert len(full) == 4
    for norm_type in (2.0, 0.0, -1.0, -2.0, -math.inf):
        assert get_total_norm(full, norm_type) > 0
        _same_number(optimizer.grad_norm(norm_type), get_total_norm(full, norm_type))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["scatter", "all"])
def test_parameters_without_a_gradient_do_not_count_in_a_norm(pool: Pool, reduction: str, world: int) -> None:
    pool.run(_norms_with_unused, world, reduction)


Clip = Callable[[nn.Module, Any], Tensor | None]


def _by_optimizer(norm_type: float, max_norm: float) -> Clip:
    def clip(model: nn.Module, optimizer: Any) -> Tensor:
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer.clip_grad_norm_(max_norm, norm_type)
        return clip_grad_norm_(model.parameters(), max_norm, norm_type)

    return clip


def _by_torch(norm_type: float, max_norm: float, foreach: bool | None) -> Clip:
    return lambda model, optimizer: clip_grad_norm_(model.parameters(), max_norm, norm_type, foreach=foreach)


def _by_value(foreach: bool | None) -> Clip:
    return lambda model, optimizer: clip_grad_value_(model.parameters(), 0.01, foreach=foreach)


def _first_half(model: nn.Module, optimizer: Any) -> Tensor:
    params = list(model.parameters())
    return clip_grad_norm_(params[: len(params) // 2], 0.05)


CLIPS: dict[str, Clip] = {
    "by the optimizer": _by_optimizer(2.0, 0.1),
    "by the optimizer, sums": _by_optimizer(1.0, 1.0),
    "by the optimizer, largest": _by_optimizer(math.inf, 0.01),
    "by the optimizer, within bounds": _by_optimizer(2.0, 1e6),
    "by torch": _by_torch(2.0, 0.1, None),
    "by torch, one by one": _by_torch(2.0, 0.1, False),
    "by torch, together": _by_torch(2.0, 0.1, True),
    "by torch, largest": _by_torch(math.inf, 0.01, None),
    "by torch, within bounds": _by_torch(2.0, 1e6, None),
    "by torch, some": _first_half,
    "by value": _by_value(None),
    "by value, one by one": _by_value(False),
    "by value, together": _by_value(True),
}


def _clipping(group: ProcessGroup, world_names: list[str]) -> None:
    for name in world_names:
        norms: list[float] = []

        def loop(model: nn.Module, optimizer: Any, data: list[Batch], clip: Clip = CLIPS[name]) -> None:
            for batch in data:
                optimizer.zero_grad()
                backward(model, batch)
                before = clip(model, optimizer)
                norms.append(0.0 if before is None else before.item())  # noqa: B023
                optimizer.step()

        Contest(kind=SGD, options=MOMENTUM, close=2e-6).run(group, loop)
        expected = norms[:4]
        for start in range(4, 20, 4):
            for ours, plain in zip(norms[start : start + 4], expected, strict=True):
                assert math.isclose(ours, plain, rel_tol=1e-5), f"{name}: {ours} and {plain}"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_clipping_of_every_kind_equals_plain(pool: Pool, world: int) -> None:
    pool.run(_clipping, world, list(CLIPS))


def _not_finite(group: ProcessGroup, way: str) -> None:
    model, optimizer = Contest().sharded(group, way)
    batch = series(group, 1)[0]
    loss = mse_loss(model(batch[0]), batch[1])
    (loss * (math.inf if dist.get_rank(group) == 1 else 1.0)).backward()
    assert not math.isfinite(optimizer.grad_norm().item())
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_norm_that_is_not_finite_is_known_to_all_ranks(pool: Pool, way: str) -> None:
    pool.run(_not_finite, 2, way)


# Loss scaling.


def _spoilt(grad: Tensor) -> Tensor:
    """One element overflows, so only its owner can see it."""
    found = grad.clone()
    found[0, 0] = math.inf
    return found


def _scaled(unscale: bool, with_inf: bool, norms: list[float]) -> Callable[..., list[float]]:
    def loop(model: nn.Module, optimizer: Any, data: list[Batch]) -> list[float]:
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        scales = []
        for number, batch in enumerate(data):
            optimizer.zero_grad()
            spoiling = with_inf and number == 2 and dist.get_rank() == 1
            spoiler = next(model.parameters()).register_hook(_spoilt) if spoiling else None
            scaler.scale(mse_loss(model(batch[0]), batch[1])).backward()
            if spoiler is not None:
                spoiler.remove()
            if unscale:
                scaler.unscale_(optimizer)
                norms.append(clip_grad_norm_(model.parameters(), 1e6).item())
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    return loop


def _scaling(group: ProcessGroup, with_inf: bool, unscale: bool) -> list[float]:
    norms: list[float] = []
    found: list[float] = []
    loop = _scaled(unscale, with_inf, norms)

    def noting(model: nn.Module, optimizer: Any, data: list[Batch]) -> list[float]:
        scales = loop(model, optimizer, data)
        found.extend(scales)
        return scales

    Contest().run(group, noting, steps=7)
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("unscale", [False, True], ids=["in the step", "before the step"])
@pytest.mark.parametrize("with_inf", [False, True], ids=["finite", "infinite on one rank"])
def test_loss_scaling_equals_plain(pool: Pool, with_inf: bool, unscale: bool, world: int) -> None:
    results = pool.run(_scaling, world, with_inf, unscale)
    assert all(found == results[0] for found in results)
    lowered = any(after < before for before, after in zip(results[0][:7], results[0][1:7], strict=False))
    assert lowered == (with_inf and world > 1)


# Ranks that have used different parameters.


class Either(nn.Module):
    """A shared layer, and one for each rank."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.shared = nn.Linear(9, 5)
            self.own = nn.ModuleList([nn.Linear(5, 3) for _ in range(3)])

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.own[dist.get_rank()](torch.tanh(self.shared(inputs)))
        return result


class Fewer(Either):
    """Like it, but the first rank uses all layers, and knows at once that all count."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.shared(inputs))
        used = range(3) if dist.get_rank() == 0 else range(2)
        return torch.stack([self.own[number](hidden) for number in used]).sum(0)


def _apart(model: type[nn.Module]) -> Contest:
    return Contest(
        build=model,
        kind=SGD,
        options=MOMENTUM,
        ways=SCATTERED,
        ddp={"find_unused_parameters": True},
        batches="matrices",
        close=2e-6,
    )


BY_TORCH: dict[str, Callable[[nn.Module], object]] = {
    "by torch": lambda model: clip_grad_norm_(model.parameters(), 0.1),
    "by torch, one by one": lambda model: clip_grad_norm_(model.parameters(), 0.1, foreach=False),
    "by value": lambda model: clip_grad_value_(model.parameters(), 0.01),
    "by value, one by one": lambda model: clip_grad_value_(model.parameters(), 0.01, foreach=False),
}


def _clipped_by(clip: Callable[[nn.Module], object]) -> Callable[..., None]:
    def loop(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
        for batch in data:
            optimizer.zero_grad()
            backward(model, batch)
            clip(model)
            optimizer.step()

    return loop


def _clipping_apart(group: ProcessGroup, kind: type[nn.Module], name: str) -> None:
    _apart(kind).run(group, _clipped_by(BY_TORCH[name]))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", [Either, Fewer])
@pytest.mark.parametrize("name", BY_TORCH)
def test_clipping_by_torch_sees_gradients_that_only_others_have(
    pool: Pool, name: str, kind: type[nn.Module], world: int
) -> None:
    pool.run(_clipping_apart, world, kind, name, deadline=20.0)


def _scaled_apart(group: ProcessGroup, kind: type[nn.Module], unscale: bool) -> None:
    _apart(kind).run(group, _scaled(unscale, False, []), steps=5)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("unscale", [False, True], ids=["in the step", "before the step"])
@pytest.mark.parametrize("kind", [Either, Fewer])
def test_loss_scales_are_taken_from_gradients_that_only_others_have(
    pool: Pool, kind: type[nn.Module], unscale: bool, world: int
) -> None:
    pool.run(_scaled_apart, world, kind, unscale, deadline=20.0)


def _backward_after(change: Callable[[nn.Module, Any], object]) -> Callable[..., None]:
    def loop(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
        for first, second in zip(data[::2], data[1::2], strict=True):
            optimizer.zero_grad()
            backward(model, first)
            change(model, optimizer)
            backward(model, second)
            optimizer.step()

    return loop


def _added_to_clipped_ones(group: ProcessGroup, name: str) -> None:
    Contest(kind=SGD, options=MOMENTUM, close=1e-6).run(group, _backward_after(CLIPS[name]), steps=6)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", ["by the optimizer", "by torch", "by value"])
def test_a_pass_after_clipping_adds_to_what_was_clipped(pool: Pool, name: str, world: int) -> None:
    pool.run(_added_to_clipped_ones, world, name)


def _scaled_in_two_passes(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    scaler = GradScaler("cpu", init_scale=1024.0)
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        for batch in (first, second):
            scaler.scale(mse_loss(model(batch[0]), batch[1])).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def _scaling_two_passes(group: ProcessGroup) -> None:
    Contest(kind=SGD, options=MOMENTUM, close=2e-6).run(group, _scaled_in_two_passes, steps=6)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_loss_scale_is_taken_from_all_passes(pool: Pool, world: int) -> None:
    pool.run(_scaling_two_passes, world)
