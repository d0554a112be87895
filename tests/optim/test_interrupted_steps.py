"""Steps of `ShardedOptimizer` that were interrupted, abandoned or disturbed, and the numbers after them."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.helpers.late_gathers import late_gathers
from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, assert_same_bits
from tests.helpers.sharding import (
    MOMENTUM,
    WAYS,
    Contest,
    in_ddp,
    no_sync,
    seeded,
    series,
    sharded,
    values,
    whole_state,
)
from tests.optim.test_training_programs import Heads
from zerostep import CheckpointError, ShardedOptimizer, TransportError
from zerostep.comm.exchange import HostExchange
from zerostep.comm.transport import Transport

DEADLINE = 30.0
BARE = ("bare scatter", "bare all")


def _chain(layers: int = 6, width: int = 9) -> nn.Module:
    return seeded(lambda: nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]))


def _backward(model: nn.Module, batch: Batch) -> None:
    model(batch[0]).square().mean().backward()


def _train(model: nn.Module, optimizer: Any, data: Sequence[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        _backward(model, batch)
        optimizer.step()


class Twin:
    """Plain DDP with a plain optimizer, over the same chain of layers."""

    def __init__(self, group: ProcessGroup, layers: int = 6, width: int = 9) -> None:
        self.model = in_ddp(group, _chain(layers, width))
        self.optimizer = SGD(self.model.module.named_parameters(), **MOMENTUM)

    def train(self, data: Sequence[Batch]) -> "Twin":
        """Some undisturbed steps."""
        _train(self.model, self.optimizer, data)
        return self


# A backward pass that failed half-way on one rank.


class Fails(torch.autograd.Function):
    """A function whose backward raises."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("a bad day")


def _fail_half_way(group: ProcessGroup, model: Any, batch: Batch) -> None:
    hidden = batch[0]
    for number, layer in enumerate(model):
        hidden = layer(hidden)
        if dist.get_rank(group) == 0 and number == 2:
            hidden = Fails.apply(hidden)
    hidden.square().mean().backward()


def _load_after_a_failed_pass(group: ProcessGroup) -> None:
    data = series(group, 5, "matrices")
    model = _chain()
    optimizer = sharded(group, model, SGD, **MOMENTUM)
    _train(model, optimizer, data[:2])
    saved = whole_state(optimizer)
    optimizer.zero_grad()
    if dist.get_rank(group) == 0:
        with pytest.raises(ArithmeticError, match="a bad day"):
            _fail_half_way(group, model, data[4])
    else:
        _fail_half_way(group, model, data[4])
    optimizer.load_state_dict(saved)
    _train(model, optimizer, data[2:4])
    assert_same_bits(values(model), values(Twin(group).train(data[:4]).model))


def test_a_state_can_be_loaded_after_a_failed_backward_pass(pool: Pool) -> None:
    pool.run(_load_after_a_failed_pass, 2, deadline=DEADLINE)


# A pass whose gradients were dropped, and then a rank without one.


def _skip(model: nn.Module, optimizer: Any, data: list[Batch], drop: str) -> None:
    for skipped, batch in zip(data[::2], data[1::2], strict=True):
        _backward(model, skipped)
        (model if drop == "model" else optimizer).zero_grad()
        if dist.get_rank() == 0 or not isinstance(optimizer, ShardedOptimizer):
            # DDP needs a pass on each rank: of zeros, where ours has none.
            (model(batch[0]).square().mean() * float(dist.get_rank() == 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _skip_then_one_rank_alone(group: ProcessGroup, drop: str) -> None:
    contest = Contest(build=_chain, kind=SGD, options=MOMENTUM, batches="matrices", ways=BARE)
    contest.run(group, lambda model, optimizer, data: _skip(model, optimizer, data, drop))


@pytest.mark.parametrize("drop", ["model", "optimizer"])
def test_a_rank_without_a_pass_counts_as_zeros_after_gradients_were_dropped(pool: Pool, drop: str) -> None:
    pool.run(_skip_then_one_rank_alone, 2, drop, deadline=DEADLINE)


# A group that is added between backward and step.


def _add_between(model: nn.Module, optimizer: Any, data: list[Batch]) -> list[float]:
    extra = nn.Parameter(torch.ones(3))
    _backward(model, data[0])
    optimizer.add_param_group({"params": [("extra", extra)]})
    optimizer.step()
    for batch in data[1:]:
        optimizer.zero_grad()
        (model(batch[0]).square().mean() + extra.square().sum()).backward()
        optimizer.step()
    found: list[float] = extra.tolist()
    return found


def _add_a_group(group: ProcessGroup) -> None:
    contest = Contest(build=lambda: _chain(31), kind=SGD, options=MOMENTUM, batches="matrices", ways=BARE)
    assert len(list(contest.build().parameters())) == 62
    contest.run(group, _add_between)


def test_a_group_can_be_added_between_backward_and_step(pool: Pool) -> None:
    pool.run(_add_a_group, 2, deadline=DEADLINE)


# KeyboardInterrupt inside of an update.


def _interrupt(optimizer: ShardedOptimizer) -> Callable[[], None]:
    """Interrupt the second partial step from now on; returns what ends that."""
    inner, calls = optimizer._inners.all[0], list[int]()
    real = inner.step

    def step(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    inner.step = step  # type: ignore[method-assign, assignment]
    return lambda: delattr(inner, "step")


def _interrupted(group: ProcessGroup, update: str, ranks: Sequence[int]) -> None:
    data, model = series(group, 4, "matrices"), _chain()
    optimizer = sharded(group, model, SGD, update=update, **MOMENTUM)
    _train(model, optimizer, data[:2])
    weights, saved = values(model), whole_state(optimizer)
    interrupts = dist.get_rank(group) in ranks
    repair = _interrupt(optimizer) if interrupts else lambda: None
    with pytest.raises(KeyboardInterrupt if interrupts else RuntimeError):
        _train(model, optimizer, data[2:3])
    for attempt in (optimizer.step, lambda: optimizer.consolidate_state_dict(to=0)):
        with pytest.raises(RuntimeError, match="load the last checkpoint"):
            attempt()
    repair()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    _train(model, optimizer, data[2:])
    assert_same_bits(values(model), values(Twin(group).train(data).model))


@pytest.mark.parametrize("ranks", [(0, 1), (0,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_an_interrupted_update_needs_a_state_to_be_loaded(pool: Pool, update: str, ranks: Sequence[int]) -> None:
    pool.run(_interrupted, 2, update, ranks, deadline=DEADLINE)


# One buffer for all gradients.


class Passes(nn.Module):
    """A parameter whose gradient is the very tensor that backward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum of both."""
        return inputs + self.bias


def _refill(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    buffer, scale = torch.empty(4), 1.0 + dist.get_rank()
    for _ in data:
        optimizer.zero_grad()
        model(torch.zeros(4)).backward(buffer.fill_(scale))
        with no_sync(model, optimizer):
            for own in (10.0, 100.0):
                model(torch.zeros(4)).backward(buffer.fill_(own * scale))
        model(torch.zeros(4)).backward(buffer.fill_(1000.0 * scale))
        buffer.fill_(torch.nan)
        optimizer.step()


def _one_buffer(group: ProcessGroup) -> None:
    Contest(build=Passes, kind=SGD, options={"lr": 1.0, "momentum": 0.5}, batches="matrices").run(group, _refill)


@pytest.mark.parametrize("world", [1, 2])
def test_the_buffer_of_a_gradient_may_be_refilled_between_passes(pool: Pool, world: int) -> None:
    pool.run(_one_buffer, world, deadline=DEADLINE)


# Updates inside backward, while hooks and frozen layers use parameters.


def _classes(model: nn.Module, optimizer: Any) -> list[str]:
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.synchronize()
    return [type(param).__name__ for param in model.parameters()]


def _synchronize_in_a_hook(model: Any, optimizer: Any, data: list[Batch]) -> list[str]:
    if isinstance(optimizer, ShardedOptimizer):
        model[0].weight.register_hook(lambda _: optimizer.synchronize())
    _train(model, optimizer, data)
    return _classes(model, optimizer)


def _waited_for_in_backward(group: ProcessGroup) -> None:
    ours = {"update": "backward", "gather": "forward"}
    with late_gathers() as waits:
        contest = Contest(build=_chain, kind=SGD, options=MOMENTUM, ours=ours, batches="matrices", ways=BARE[:1])
        contest.run(group, _synchronize_in_a_hook)
    assert waits


def test_a_hook_may_wait_for_parameters_that_were_updated_inside_backward(pool: Pool) -> None:
    pool.run(_waited_for_in_backward, 2, deadline=DEADLINE)


class Projected(nn.Module):
    """A layer that is registered last, in one bucket with others, and used first; frozen by `freeze`."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.first = nn.Linear(9, 9)
        self.body = nn.ModuleList([nn.Linear(9, 9) for _ in range(6)])
        self.projection = nn.Linear(9, 9)

    def freeze(self) -> None:
        """Train all other layers alone."""
        self.projection.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """One layer after the other."""
        hidden = self.first(inputs)
        if self.recomputes:
            hidden = checkpoint(self.projection, hidden, use_reentrant=False)
        else:
            hidden = self.projection(hidden)
        for layer in self.body:
            hidden = layer(hidden)
        return torch.as_tensor(hidden)


def _train_frozen(model: Any, optimizer: Any, data: list[Batch]) -> list[str]:
    (model if isinstance(model, Projected) else model.module).freeze()
    _train(model, optimizer, data)
    return _classes(model, optimizer)


def _frozen(group: ProcessGroup, gather: str, recomputes: bool) -> None:
    Contest(
        build=lambda: seeded(lambda: Projected(recomputes)),
        kind=SGD,
        options=MOMENTUM,
        ddp={"find_unused_parameters": True},
        ours={"update": "backward", "gather": gather, "bucket_mb": 0.0006},
        batches="matrices",
        ways=BARE[:1],
    ).run(group, _train_frozen)


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("gather", ["step", "forward"])
def test_a_frozen_layer_may_share_a_bucket_that_is_updated_inside_backward(
    pool: Pool, gather: str, recomputes: bool
) -> None:
    pool.run(_frozen, 2, gather, recomputes, deadline=DEADLINE)


# A background save that failed.


def _fail_to_write(transport: Transport) -> None:
    if dist.get_rank() == 1:
        raise OSError("disk full")


def _after_a_failed_save(group: ProcessGroup, update: str, drops: bool) -> None:
    data, model = series(group, 3, "matrices"), _chain()
    optimizer = sharded(group, model, SGD, update=update, **MOMENTUM)
    _train(model, optimizer, data[:1])
    optimizer.zero_grad()
    optimizer._saves.begin(_fail_to_write).wait_until_done()
    dist.barrier(group)  # the save is over on all ranks
    with pytest.raises(CheckpointError, match=r"disk full|rank 1 failed"):
        _backward(model, data[1])
        optimizer.step()
    if drops:
        optimizer.zero_grad()
    if drops or update == "backward":
        _backward(model, data[1])  # none of the first attempt is left
    optimizer.step()
    _train(model, optimizer, data[2:])
    assert_same_bits(values(model), values(Twin(group).train(data).model))


@pytest.mark.parametrize("drops", [True, False], ids=["dropped", "as it is"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_training_goes_on_after_the_error_of_a_background_save(pool: Pool, update: str, drops: bool) -> None:
    pool.run(_after_a_failed_save, 2, update, drops, deadline=DEADLINE)


# Verification of gradients that are added up, or dropped in part.


def _heads(model: nn.Module, batch: Batch, *heads: int) -> None:
    mse_loss(model(batch[0], heads), batch[1]).backward()


def _two_passes(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        _heads(model, first, *range(5))
        _heads(model, second, *range(5))
        optimizer.step()


def _alternating(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        model.zero_grad()
        _heads(model, batch, 0, 1 + (number + dist.get_rank()) % 2)
        optimizer.step()


def _some_dropped(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        for name, param in model.named_parameters():
            if not name.endswith("heads.0.bias"):  # this one's gradients add up over the steps
                param.grad = None
        _heads(model, batch, 0, *(range(1, 5) if number == 0 else [1 + (number + dist.get_rank()) % 2]))
        optimizer.step()


def _verified(group: ProcessGroup, loop: Callable[..., None]) -> None:
    Contest(
        build=lambda: seeded(Heads),
        kind=SGD,
        options=MOMENTUM,
        ddp={"find_unused_parameters": True},
        ours={"verify": 10},
        batches="matrices",
        close=2e-6,
        ways=WAYS,
    ).run(group, loop, steps=6)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("loop", [_two_passes, _alternating, _some_dropped])
def test_verification_reports_nothing_where_gradients_add_up_or_are_dropped(
    pool: Pool, loop: Callable[..., None], world: int
) -> None:
    pool.run(_verified, world, loop, deadline=DEADLINE)


# A gather that failed.


class Broken:
    """A gather that is complete, but says that it is not."""

    def __init__(self, in_flight: Any, error: BaseException) -> None:
        self._in_flight, self._error = in_flight, error

    def wait(self) -> None:
        """Raise."""
        self._in_flight.wait()
        raise self._error


def _failed_gather(group: ProcessGroup, error: BaseException, directly: bool) -> None:
    data, model = series(group, 4, "matrices"), _chain()
    optimizer = sharded(group, model, SGD, gather="forward", bucket_mb=1.0, **MOMENTUM)
    _train(model, optimizer, data[:2])
    weights, saved = values(model), whole_state(optimizer)
    real: Any = HostExchange.gather
    with patch.object(HostExchange, "gather", lambda *args: Broken(real(*args), error)):
        _train(model, optimizer, data[2:3])
    for number, read in enumerate(_readers(model, optimizer, data[3], directly)):
        # Methods of the optimizer say more: that it is broken, and what to do.
        with pytest.raises((type(error), RuntimeError), match=str(error)):
            read()
            raise AssertionError(f"reader {number} got values")
    with pytest.raises(RuntimeError, match="load the last checkpoint"):
        optimizer.consolidate_state_dict(to=0)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    _train(model, optimizer, data[2:])
    assert_same_bits(values(model), values(Twin(group).train(data).model))


def _readers(model: Any, optimizer: ShardedOptimizer, batch: Batch, directly: bool) -> list[Callable[[], Any]]:
    direct = [param.sum for param in model.parameters()] if directly else []
    return [
        model[0].weight.sum,
        *direct,
        lambda: model(batch[0]),
        optimizer.synchronize,
        optimizer.step,
    ]


@pytest.mark.parametrize("error", [TransportError("rank 1 is gone"), KeyboardInterrupt("stop")], ids=repr)
@pytest.mark.parametrize("directly", [False, True], ids=["by a module", "directly"])
def test_every_reader_gets_the_error_of_a_failed_gather_until_a_state_is_loaded(
    pool: Pool, error: BaseException, directly: bool
) -> None:
    pool.run(_failed_gather, 2, error, directly, deadline=DEADLINE)
