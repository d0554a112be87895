"""Training loops in which ranks use different parts of a model, against plain DDP: dropping, adding up, waiting."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.helpers.pool import Pool
from tests.helpers.reference import Batch
from tests.helpers.sharding import MOMENTUM, SCATTERED, WAYS, Contest, gap, in_ddp, no_sync, seeded, series, values
from zerostep import ShardedOptimizer

DEADLINE = 40.0


class Heads(nn.Module):
    """A trunk and four heads, each of which has buckets of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(9, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 3) for _ in range(4)])
        self.wide = nn.Linear(9, 3).double()

    def forward(self, inputs: Tensor, heads: Sequence[int]) -> Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        found = torch.stack([self.heads[head](hidden) for head in heads if head < 4]).sum(0)
        return found + self.wide(inputs.double()).float() if 4 in heads else found


def _backward(model: nn.Module, batch: Batch, *heads: int) -> Tensor:
    """A backward pass over the heads that this rank uses."""
    loss = mse_loss(model(batch[0], heads), batch[1])
    loss.backward()
    return loss


def _mine(*heads: Sequence[int]) -> Sequence[int]:
    return heads[dist.get_rank() % len(heads)]


def _bare(model: nn.Module) -> Heads:
    inner = model if isinstance(model, Heads) else model.module
    assert isinstance(inner, Heads)
    return inner


def _group(model: nn.Module, optimizer: Any) -> ProcessGroup:
    holder: Any = optimizer if isinstance(optimizer, ShardedOptimizer) else model
    group: ProcessGroup = holder.process_group
    return group


# Loops.


def _model_drops_then_some_ranks_use(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        model.zero_grad()
        _backward(model, batch, *(_mine([0, 1], [0, 1, 4]) if number % 2 else range(5)))
        optimizer.step()


def _one_by_one_then_nobody_uses(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        for param in model.parameters():
            param.grad = None
        _backward(model, batch, *([2, 3] if number % 2 else range(5)))
        optimizer.step()


def _frozen_after_the_first_step(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        _bare(model).heads[1].requires_grad_(number == 0)
        model.zero_grad()
        _backward(model, batch, *range(5))
        optimizer.step()


def _collective_before_the_step(model: nn.Module, optimizer: Any, data: list[Batch]) -> list[float]:
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = _backward(model, batch, *_mine([0, 2], [1], [3])).detach()
        dist.all_reduce(loss, group=_group(model, optimizer))
        losses.append(round(loss.item(), 4))
        optimizer.step()
    return losses


def _collective_in_the_next_forward(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        for number, batch in enumerate((first, second)):
            mean = batch[0].mean(0)
            dist.all_reduce(mean, group=_group(model, optimizer))
            _backward(model, (batch[0] - mean, batch[1]), *_mine([number], [number + 1, 3]))
        optimizer.step()


def _heads_in_another_order(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        _backward(model, first, *_mine([0], [1], [2]))
        _backward(model, second, *_mine([1], [0], [3]))
        optimizer.step()


def _second_pass_leaves_some_unused(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        _backward(model, first, *range(5))
        _backward(model, second, 2, 4)
        optimizer.step()


def _set_to_zero_then_unused(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        optimizer.zero_grad(set_to_none=False)
        _backward(model, batch, *([0, 3] if number % 2 else range(5)))
        optimizer.step()


def _by_hand_after_a_norm(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        _backward(model, batch, *range(5))
        clip_grad_norm_(model.parameters(), 1e6)
        for param in _bare(model).heads[0].parameters():
            param.grad = torch.full_like(param, 0.25)
        optimizer.step()


def _grad_between_backward_and_clip(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        _backward(model, batch, *range(5))
        head = _bare(model).heads[0]
        torch.autograd.grad(head(torch.ones(2, 8)).sum(), list(head.parameters()))
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def _scaled_with_a_dtype_that_one_rank_lacks(model: nn.Module, optimizer: Any, data: list[Batch]) -> list[float]:
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2), []
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        loss = mse_loss(model(batch[0], _mine([0, 4], [0, 1])), batch[1])
        scaler.scale(loss * (torch.inf if number == 2 and dist.get_rank() == 0 else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def _used_inside_no_sync_alone(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        with no_sync(model, optimizer):
            _backward(model, first, *_mine([0, 1], [0], [2]))
        _backward(model, second, *_mine([0], [0, 3], [0]))
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def _dropped_where_ranks_used_different_ones(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        _backward(model, batch, *_mine([0, 1], [0, 2], [0, 3]))
        for param in _bare(model).heads[1].parameters():
            param.grad = None
        optimizer.step()


def _a_batch_is_skipped(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        _backward(model, batch, *(_mine([0, 1], [2]) if number % 2 else _mine([1, 3], [0, 4])))
        if number % 2:
            optimizer.step()
        model.zero_grad()


def _no_sync_on_top_of_a_sum(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        _backward(model, first, *_mine([0, 1], [0, 2]))
        with no_sync(model, optimizer):
            _backward(model, second, *_mine([1, 3], [0]))
        _backward(model, first, *_mine([0], [2]))
        optimizer.step()


def _a_full_pass_then_apart(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        _backward(model, first, *range(5))
        _backward(model, second, *_mine([0, 4], [1], [2, 3]))
        optimizer.step()


def _dropped_between_a_full_pass_and_another(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        _backward(model, first, *range(5))
        for param in _bare(model).heads[1].parameters():
            param.grad = None
        _backward(model, second, *_mine([0], [2], [3]))
        optimizer.step()


def _replaced_after_no_sync(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """On one rank, a gradient of its own is replaced together with the sum it would have added to."""
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        _backward(model, first, *_mine([1], [0, 1]))
        with no_sync(model, optimizer):
            _backward(model, second, *_mine([0, 1], [1]))
        for param in _bare(model).heads[0].parameters():
            param.grad = torch.full_like(param, 0.25)
        _backward(model, first, 0, 1)
        optimizer.step()


def _dropped_between_no_sync_passes(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        _backward(model, first, *_mine([1], [0, 1]))
        with no_sync(model, optimizer):
            _backward(model, second, *_mine([0], [0, 1]))
        model.zero_grad()
        with no_sync(model, optimizer):
            _backward(model, first, 1)
        _backward(model, second, 0, 1)
        optimizer.step()
        model.zero_grad()


def _unfrozen_before_two_passes(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """The parameters that were frozen when the optimizer was built have no hooks when the first pass begins."""
    for first, second in zip(data[::2], data[1::2], strict=True):
        _bare(model).heads[1].requires_grad_(True)
        _backward(model, first, *range(5))
        _backward(model, second, *range(5))
        optimizer.step()
        model.zero_grad()


def _partly_frozen() -> nn.Module:
    model = Heads()
    model.heads[1].requires_grad_(False)
    return model


def _unfrozen(group: ProcessGroup) -> None:
    contest = replace(_contest(["bare scatter", "bare all"]), build=lambda: seeded(_partly_frozen))
    model = seeded(Heads)
    plain = in_ddp(group, model, find_unused_parameters=True), SGD(model.parameters(), **MOMENTUM)
    data = series(group, 4, "matrices")
    _unfrozen_before_two_passes(*plain, data)
    for way in contest.ways:
        ours = contest.sharded(group, way)
        _unfrozen_before_two_passes(*ours, data)
        assert gap(values(ours[0]), values(model)) < 2e-6, way


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_that_are_unfrozen_before_two_passes(pool: Pool, world: int) -> None:
    pool.run(_unfrozen, world, deadline=DEADLINE)


def _in_reentrant_segments(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """All gradients of the bare model arrive in backward calls inside another one, and some parameters get none."""
    for batch in data:
        optimizer.zero_grad()
        heads = _mine([0, 1], [2, 3])
        if isinstance(model, Heads):
            hidden = torch.tanh(checkpoint(model.trunk, batch[0].clone().requires_grad_(), use_reentrant=True))
            found = torch.stack([checkpoint(model.heads[head], hidden, use_reentrant=True) for head in heads]).sum(0)
        else:
            found = model(batch[0], heads)
        mse_loss(found, batch[1]).backward()
        dist.barrier(_group(model, optimizer))
        optimizer.step()


EVERYWHERE: list[Callable[..., Any]] = [
    _model_drops_then_some_ranks_use,
    _one_by_one_then_nobody_uses,
    _frozen_after_the_first_step,
    _collective_before_the_step,
    _collective_in_the_next_forward,
    _heads_in_another_order,
    _second_pass_leaves_some_unused,
    _set_to_zero_then_unused,
    _by_hand_after_a_norm,
    _grad_between_backward_and_clip,
    _scaled_with_a_dtype_that_one_rank_lacks,
    _used_inside_no_sync_alone,
    _dropped_where_ranks_used_different_ones,
    _a_batch_is_skipped,
    _no_sync_on_top_of_a_sum,
    _a_full_pass_then_apart,
    _dropped_between_a_full_pass_and_another,
    _replaced_after_no_sync,
    _dropped_between_no_sync_passes,
]


def _contest(ways: Sequence[str]) -> Contest:
    return Contest(
        build=lambda: seeded(Heads),
        kind=SGD,
        options=MOMENTUM,
        ddp={"find_unused_parameters": True},
        batches="matrices",
        close=2e-6,
        ways=ways,
    )


def _run(group: ProcessGroup, loop: Callable[..., Any], ways: Sequence[str]) -> None:
    _contest(ways).run(group, loop, steps=6)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("loop", EVERYWHERE)
def test_a_loop_equals_plain_ddp_in_every_way(pool: Pool, loop: Callable[..., Any], world: int) -> None:
    pool.run(_run, world, loop, WAYS, deadline=DEADLINE)


def _on_a_mesh(group: ProcessGroup, loop: Callable[..., Any]) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    contest, data = _contest(SCATTERED), series(group, 6, "matrices")
    plain = contest.plain(group)
    loop(*plain, data)
    for way in SCATTERED:
        model = seeded(Heads)
        wrapped = in_ddp(group, model, find_unused_parameters=True) if way.startswith("wrapped") else model
        optimizer = ShardedOptimizer(wrapped, SGD, process_group=mesh, bucket_mb=0.0003, **MOMENTUM)
        loop(wrapped, optimizer, data)
        ours, theirs = values(model), values(plain[0])
        assert all(torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6) for name in theirs), way


@pytest.mark.parametrize(
    "loop", [_model_drops_then_some_ranks_use, _frozen_after_the_first_step, _heads_in_another_order]
)
def test_a_loop_equals_plain_ddp_on_a_mesh(pool: Pool, loop: Callable[..., Any]) -> None:
    pool.run(_on_a_mesh, 4, loop, deadline=DEADLINE)


@pytest.mark.parametrize("world", [2, 3])
def test_a_pass_that_is_all_reentrant_ends_before_backward_returns(pool: Pool, world: int) -> None:
    pool.run(_run, world, _in_reentrant_segments, ["bare scatter", "bare all"], deadline=DEADLINE)


def _dropped_inside_backward(group: ProcessGroup) -> None:
    """A hook drops the gradient of one parameter while the next pass has summed another one's."""
    first, second = (nn.Parameter(torch.ones(40)) for _ in range(2))
    module = nn.ParameterList([first, second])
    optimizer = ShardedOptimizer(module, SGD, lr=0.5, process_group=group, bucket_mb=0.0001)
    second.register_post_accumulate_grad_hook(lambda _: setattr(first, "grad", None))
    first.sum().backward()
    ((first * 2) * second).sum().backward()
    optimizer.step()
    assert torch.equal(first.detach(), torch.zeros(40))  # 1 - 0.5 * 2: the first pass does not count
    assert torch.equal(second.detach(), torch.zeros(40))


@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_can_be_dropped_inside_backward(pool: Pool, world: int) -> None:
    pool.run(_dropped_inside_backward, world, deadline=DEADLINE)


LARGE = 1 << 14  # elements from which on a gradient is copied when it arrives, and not when its bucket is full


def _changed_by_later_hooks(group: ProcessGroup, size: int) -> None:
    """Hooks behind the optimizer's own double some gradients, replace some, and drop some, in any place of a bucket."""
    params = [nn.Parameter(torch.ones(size)) for _ in range(8)]
    optimizer = ShardedOptimizer(nn.ParameterList(params), SGD, lr=0.5, process_group=group)
    factors = [2, 3, 0, 1, 1, 0, 3, 2]
    change: dict[int, Callable[[nn.Parameter], Any]] = {
        2: lambda param: None if param.grad is None else (param.grad.mul_(2), None)[1],
        3: lambda param: setattr(param, "grad", torch.full((size,), 3.0)),
        0: lambda param: setattr(param, "grad", None),
        1: lambda param: None,
    }
    for param, factor in zip(params, factors, strict=True):
        param.register_post_accumulate_grad_hook(change[factor])
    for _ in range(2):
        sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    assert [param.detach().unique().tolist() for param in params] == [[1.0 - factor] for factor in factors]


@pytest.mark.parametrize("size", [8, LARGE])
@pytest.mark.parametrize("world", [1, 2])
def test_later_hooks_may_change_gradients(pool: Pool, world: int, size: int) -> None:
    pool.run(_changed_by_later_hooks, world, size, deadline=DEADLINE)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient")


def _goes_on_after_a_failed_backward(group: ProcessGroup, size: int, reduction: Any, dropped: bool) -> None:
    params = [nn.Parameter(torch.zeros(size)) for _ in range(5)]
    model = nn.ParameterList(params)
    optimizer = ShardedOptimizer(model, SGD, lr=1.0, process_group=group, reduction=reduction)
    loss = _Fails.apply(params[0] * 1).sum()
    for param in params[1:]:
        loss = loss + (10 * param).sum()
    with pytest.raises(ValueError, match="no gradient"):
        loss.backward()
    if dropped:
        model.zero_grad()
    sum(param.sum() for param in params).backward()  # type: ignore[union-attr]
    optimizer.step()
    before = 0 if dropped else 10  # as in plain torch: what has arrived counts unless it is dropped
    assert [param.detach().unique().tolist() for param in params] == [[-1.0]] + [[-1.0 - before]] * 4


@pytest.mark.parametrize("size", [8, LARGE])
@pytest.mark.parametrize("reduction", ["scatter", "all"])
@pytest.mark.parametrize("dropped", [True, False], ids=["dropped", "kept"])
@pytest.mark.parametrize("world", [1, 2])
def test_training_goes_on_after_a_failed_backward(
    pool: Pool, world: int, dropped: bool, reduction: str, size: int
) -> None:
    pool.run(_goes_on_after_a_failed_backward, world, size, reduction, dropped, deadline=DEADLINE)


def _other_strides_after_construction(group: ProcessGroup, wanted: torch.memory_format) -> None:
    """Gradients come in the new order of elements, small ones and large ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 4, 3))
    twin = deepcopy(model)
    optimizer = ShardedOptimizer(model, SGD, lr=0.1, process_group=group)
    plain = SGD(twin.parameters(), lr=0.1)
    for number, inputs in enumerate(torch.randn(4, 2, 3, 8, 8)):
        if number == 1:
            model.to(memory_format=wanted)  # type: ignore[call-overload]
            twin.to(memory_format=wanted)  # type: ignore[call-overload]
        for each, its in ((model, optimizer), (twin, plain)):
            each(inputs).square().mean().backward()
            its.step()
            its.zero_grad()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert param.stride() == other.stride()
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_may_get_other_strides(pool: Pool, world: int) -> None:
    pool.run(_other_strides_after_construction, world, torch.channels_last, deadline=DEADLINE)
