"""What users do with gradients under `ShardedOptimizer`: adding up, dropping, clipping, scaling, looking at them."""

import gc
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
from torch.optim import SGD, AdamW

from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, assert_same_bits, build
from tests.helpers.sharding import (
    WAYS,
    Contest,
    backward,
    gap,
    in_ddp,
    no_sync,
    series,
    sharded,
    sum_in_rank_order,
    values,
    whole_state,
)
from zerostep import ShardedOptimizer
from zerostep.step.sharded_grad import ShardedGradient

MOMENTUM = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
SCATTERED = [way for way in WAYS if "scatter" in way]


# Adding up, and dropping.


def _with_no_sync(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second, third in zip(data[::3], data[1::3], data[2::3], strict=True):
        optimizer.zero_grad()
        with no_sync(model, optimizer):
            backward(model, first)
            backward(model, second)
        backward(model, third)
        optimizer.step()


def _accumulation_with_no_sync(group: ProcessGroup) -> None:
    Contest().run(group, _with_no_sync, steps=12)


@pytest.mark.parametrize("world", [1, 2])
def test_accumulation_with_no_sync_equals_plain(pool: Pool, world: int) -> None:
    pool.run(_accumulation_with_no_sync, world)


def _without_no_sync(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        backward(model, first)
        backward(model, second)
        optimizer.step()


def _never_dropped(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        backward(model, batch)
        optimizer.step()


def _adding_up(group: ProcessGroup, loop: Callable[..., None]) -> None:
    # DDP adds the second gradient to the sum of the first ones, and averages both again; we average each once.
    Contest(kind=SGD, options=MOMENTUM, ways=SCATTERED, close=1e-6).run(group, loop, steps=6)
    whole = ["bare all", "wrapped all"] if dist.get_world_size(group) < 3 else ["wrapped all"]
    Contest(ways=whole).run(group, loop, steps=6)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("loop", [_without_no_sync, _never_dropped], ids=["twice a step", "never dropped"])
def test_gradients_of_several_backward_passes_add_up(pool: Pool, loop: Callable[..., None], world: int) -> None:
    pool.run(_adding_up, world, loop)


class Half(nn.Module):
    """Uses one of its two layers; the gradients of a backward pass are never complete."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.used, self.spare = nn.Linear(9, 3), nn.Linear(9, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.used(inputs)
        return result


def _adding_up_with_a_spare(group: ProcessGroup) -> None:
    Contest(
        build=Half,
        kind=SGD,
        options=MOMENTUM,
        ddp={"find_unused_parameters": True},
        batches="matrices",
        close=1e-6,
    ).run(group, _without_no_sync, steps=6)


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_add_up_where_some_parameters_are_unused(pool: Pool, world: int) -> None:
    pool.run(_adding_up_with_a_spare, world)


def _dropped_by_the_model(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        model.zero_grad()
        backward(model, batch)
        optimizer.step()


def _dropped_one_by_one(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        for param in model.parameters():
            param.grad = None
        backward(model, batch)
        optimizer.step()


def _dropped_after_a_pass_that_does_not_count(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for unwanted, batch in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        backward(model, unwanted)
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def _dropped_by_the_model_after_a_pass_that_does_not_count(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for unwanted, batch in zip(data[::2], data[1::2], strict=True):
        model.zero_grad()
        backward(model, unwanted)
        model.zero_grad()
        backward(model, batch)
        optimizer.step()


def _only_some_dropped(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """Some parameters keep the gradients of a first pass, which the second adds to; the others forget them."""
    for number, (first, second) in enumerate(zip(data[::2], data[1::2], strict=True)):
        optimizer.zero_grad()
        backward(model, first)
        for param in list(model.parameters())[number % 3 :: 3]:
            param.grad = None
        backward(model, second)
        optimizer.step()


def _set_to_zero(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()  # gradients of zero count: weight decay and momentum go on


def _set_to_zero_by_the_model(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        backward(model, batch)
        optimizer.step()
        model.zero_grad(set_to_none=False)
    optimizer.step()


def _no_backward(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    optimizer.step()  # no gradients, no state
    assert not whole_state(optimizer)["state"]
    backward(model, data[0])
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # nothing happens, not even weight decay
    backward(model, data[1])
    optimizer.step()


def _twice_with_the_same(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        optimizer.step()


EXACT = [
    _dropped_by_the_model,
    _dropped_one_by_one,
    _dropped_after_a_pass_that_does_not_count,
    _dropped_by_the_model_after_a_pass_that_does_not_count,
    _set_to_zero,
    _set_to_zero_by_the_model,
    _no_backward,
    _twice_with_the_same,
]


def _exactly(group: ProcessGroup, loop: Callable[..., None]) -> None:
    Contest().run(group, loop)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("loop", EXACT)
def test_gradients_are_dropped_and_kept_as_under_ddp(pool: Pool, loop: Callable[..., None], world: int) -> None:
    pool.run(_exactly, world, loop)


def _some_dropped(group: ProcessGroup) -> None:
    Contest(kind=SGD, options=MOMENTUM, close=1e-6).run(group, _only_some_dropped, steps=6)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_gradient_that_was_dropped_between_two_passes_begins_anew(pool: Pool, world: int) -> None:
    pool.run(_some_dropped, world)


def _dropped_after_backward(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """A parameter whose gradient is dropped sits out the step, and what it had does not come back."""
    for number, batch in enumerate(data):
        if number % 2 == 0:
            optimizer.zero_grad()
        backward(model, batch)
        list(model.parameters())[number % 2].grad = None
        optimizer.step()


def _dropped_in_an_open_round(group: ProcessGroup) -> None:
    halves = Contest(
        build=Half,
        kind=SGD,
        options=MOMENTUM,
        ddp={"find_unused_parameters": True},
        batches="matrices",
        close=1e-6,
    )
    halves.run(group, _dropped_after_backward, steps=8)
    Contest(kind=SGD, options=MOMENTUM, close=1e-6).run(group, _dropped_after_backward, steps=8)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_gradient_that_is_dropped_before_the_step_does_not_count(pool: Pool, world: int) -> None:
    pool.run(_dropped_in_an_open_round, world)


def _no_sync_left_open(group: ProcessGroup, way: str) -> None:
    """Local sums that no pass has sent go out with the step."""
    data = series(group, 2)
    model, optimizer = Contest(ways=(way,)).sharded(group, way)
    twin = build()
    plain = AdamW(twin.parameters(), lr=0.01, weight_decay=0.1)
    for batch in data:
        with optimizer.no_sync():
            backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        backward(twin, batch)
        sum_in_rank_order(group, twin.parameters())
        plain.step()
        plain.zero_grad()
    assert_same_bits(values(model), values(twin))


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_right_after_no_sync_sends_what_is_there(pool: Pool, world: int) -> None:
    pool.run(_no_sync_left_open, world, "bare scatter")


def _one_rank_has_nothing(group: ProcessGroup, gather: str, absent: int) -> None:
    """A rank without a backward pass contributes zeros."""
    model, twin = build(), build()
    optimizer = sharded(group, model, gather=gather)
    plain = AdamW(twin.parameters(), lr=0.01, weight_decay=0.1)
    for number, batch in enumerate(series(group, 4)):
        away = number % 2 == 1 and dist.get_rank(group) == absent
        backward(twin, batch)
        if away:
            twin.zero_grad(set_to_none=False)
        sum_in_rank_order(group, twin.parameters())
        if not away:
            backward(model, batch)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    optimizer.synchronize()
    assert_same_bits(values(model), values(twin))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("gather", ["step", "forward"])
def test_a_rank_without_a_backward_pass_counts_as_zeros(pool: Pool, gather: str, world: int) -> None:
    pool.run(_one_rank_has_nothing, world, gather, 1, deadline=20.0)


def _set_by_hand(group: ProcessGroup, way: str) -> None:
    model, optimizer = Contest().sharded(group, way)
    twin = build()
    plain = AdamW(twin.parameters(), lr=0.01, weight_decay=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    for _ in range(3):
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            param.grad = torch.randn(param.shape, generator=generator)
            other.grad = param.grad.clone()
        sum_in_rank_order(group, twin.parameters())
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    assert_same_bits(values(model), values(twin))


@pytest.mark.parametrize("way", SCATTERED)
def test_gradients_that_were_set_by_hand_are_summed_in_the_step(pool: Pool, way: str) -> None:
    pool.run(_set_by_hand, 2, way)


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
        for norm_type in (1, 2.0, math.inf, 3.0):
            _same_number(optimizer.grad_norm(norm_type), get_total_norm(full, norm_type))
            mine = [param.grad for param in model.parameters() if param.grad is not None]
            _same_number(get_total_norm(mine, norm_type), get_total_norm(full, norm_type))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_norms_are_those_of_whole_gradients(pool: Pool, way: str, world: int) -> None:
    pool.run(_norms, world, way, "step")


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


REFUSED: dict[str, Callable[[nn.Module], object]] = {
    "by torch": lambda model: clip_grad_norm_(model.parameters(), 0.1),
    "by torch, one by one": lambda model: clip_grad_norm_(model.parameters(), 0.1, foreach=False),
    "by value": lambda model: clip_grad_value_(model.parameters(), 0.01),
    "by value, one by one": lambda model: clip_grad_value_(model.parameters(), 0.01, foreach=False),
}


def _clipped_after_a_refusal(clip: Callable[[nn.Module], object]) -> Callable[..., None]:
    def loop(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
        for batch in data:
            optimizer.zero_grad()
            backward(model, batch)
            if isinstance(optimizer, ShardedOptimizer):
                with pytest.raises(RuntimeError, match=r"ranks have used different parameters.*own clip_grad_norm_"):
                    clip(model)
                optimizer.clip_grad_norm_(0.1)
            else:
                clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    return loop


def _refusing(group: ProcessGroup, kind: type[nn.Module], name: str) -> None:
    _apart(kind).run(group, _clipped_after_a_refusal(REFUSED[name]))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", [Either, Fewer])
@pytest.mark.parametrize("name", REFUSED)
def test_clipping_by_torch_is_refused_by_all_ranks_if_one_lacks_a_gradient(
    pool: Pool, name: str, kind: type[nn.Module], world: int
) -> None:
    pool.run(_refusing, world, kind, name, deadline=20.0)


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


# Looking at gradients.


READINGS: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda grad: grad.sum(),
    "plus": lambda grad: grad + 1,
    "reflected plus": lambda grad: 1 + grad,
    "times": lambda grad: grad * 2,
    "add in place": lambda grad: grad.add_(1.0),
    "plus in place": lambda grad: grad.__iadd__(torch.ones(grad.shape)),
    "norm": lambda grad: grad.norm(),
    "vector norm along a dimension": lambda grad: torch.linalg.vector_norm(grad, dim=0),
    "clone": lambda grad: grad.clone(),
    "item": lambda grad: grad[0],
    "list": lambda grad: grad.tolist(),
    "comparison": lambda grad: grad == 0,
    "not a number": lambda grad: torch.isnan(grad).any(),
    "largest": lambda grad: grad.abs().max(),
    "double": lambda grad: grad.double(),
    "data": lambda grad: grad.data,
    "multiplication by a tensor of its shape": lambda grad: grad.mul_(torch.ones(grad.shape)),
    "copy": lambda grad: torch.zeros(grad.shape).copy_(grad),
    "addition to another": lambda grad: torch.zeros(grad.shape).add_(grad),
    "stack": lambda grad: torch.stack([grad, grad]),
    "flat": lambda grad: grad.view(-1),
}


def _looking(group: ProcessGroup, way: str) -> None:
    model, optimizer = Contest().sharded(group, way)
    backward(model, series(group, 1)[0])
    before = optimizer.grad_norm().item()
    for name, param in model.named_parameters():
        grad = param.grad
        assert isinstance(grad, ShardedGradient), name
        assert grad.shape == param.shape and grad.dtype == param.dtype and grad.device == param.device
        assert "ShardedGradient" in f"{grad} {grad!r}" and str(tuple(param.shape)) in str(grad)
        assert not grad.requires_grad and grad.grad_fn is None and not grad.is_sparse
        for reading, read in READINGS.items():
            with pytest.raises(RuntimeError, match=r'clip_grad_norm_.*reduction="all"'):
                print(f"{name}: {reading} gave {read(grad)!r}")
        with pytest.raises((RuntimeError, TypeError)):
            grad.numpy()
    assert optimizer.grad_norm().item() == before  # nothing was changed by trying
    optimizer.step()


@pytest.mark.parametrize("way", SCATTERED)
def test_a_gradient_that_went_to_its_owners_cannot_be_read(pool: Pool, way: str) -> None:
    pool.run(_looking, 2, way)


def _whole(group: ProcessGroup, way: str) -> None:
    model, _kept = Contest().sharded(group, way)
    twin = in_ddp(group, build())
    for batch in series(group, 2):
        for each in (model, twin):
            each.zero_grad()
            backward(each, batch)
        found = {str(number): param.grad for number, param in enumerate(model.parameters()) if param.grad is not None}
        wanted = {str(number): param.grad for number, param in enumerate(twin.parameters()) if param.grad is not None}
        if dist.get_world_size(group) < 3 or way == "wrapped all":
            assert_same_bits(found, wanted)
        assert gap(found, wanted) < 1e-6
        assert all(type(grad) is Tensor for grad in found.values())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("way", ["bare all", "wrapped all"])
def test_whole_gradients_are_there_for_everyone_after_backward(pool: Pool, way: str, world: int) -> None:
    pool.run(_whole, world, way)


def _edited(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        backward(model, batch)
        for number, param in enumerate(model.parameters()):
            assert param.grad is not None
            if number % 3 == 0:
                param.grad.mul_(0.5)
            elif number % 3 == 1:
                param.grad.div_(2)
            else:
                param.grad.clamp_(-0.05, 0.05)
        optimizer.step()


def _editing(group: ProcessGroup) -> None:
    Contest().run(group, _edited)


@pytest.mark.parametrize("world", [1, 2])
def test_changing_gradients_element_by_element_equals_plain(pool: Pool, world: int) -> None:
    pool.run(_editing, world)


# Memory.


class Tower(nn.Module):
    """Layers of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(12)])

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


def _live_bytes() -> int:
    """The memory of all tensors that Python knows, each storage once."""
    gc.collect()
    with torch._C._DisableTorchDispatch():
        tensors = [found for found in gc.get_objects() if isinstance(found, Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if _has_memory(t)}
    return sum(storages.values())


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def _gradient_memory(group: ProcessGroup) -> tuple[int, int, int]:
    model = Tower()
    optimizer = sharded(group, model, bucket_mb=32 * 33 * 4 / 2**20)
    inputs = torch.randn(2, 32)
    before, held = _live_bytes(), 0
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        held = max(held, _live_bytes() - before - _state_bytes(optimizer))
        optimizer.step()
    return held, sum(part.nbytes for part in optimizer._running.reduction.sums.values()), optimizer.stats().buckets


def _state_bytes(optimizer: ShardedOptimizer) -> int:
    tensors = [x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_take_their_share_of_memory_and_a_few_buckets(pool: Pool, world: int) -> None:
    whole, bucket = 12 * 32 * 33 * 4, 32 * 33 * 4
    for held, settled, buckets in pool.run(_gradient_memory, world):
        assert buckets >= 12
        assert whole / world <= settled <= 1.02 * whole / world + 64
        assert settled <= held <= whole / world + 3 * bucket + 64
