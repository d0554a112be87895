"""Gradients under `ShardedOptimizer` over several passes: adding up, dropping, setting by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, AdamW

from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, assert_same_bits, build
from tests.helpers.sharding import (
    MOMENTUM,
    SCATTERED,
    Contest,
    backward,
    no_sync,
    series,
    sharded,
    sum_in_rank_order,
    values,
    whole_state,
)
from zerostep import StepMismatchError


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
    """A rank calls step() without a backward pass, for which plain DDP would wait for ever."""
    model = build()
    optimizer = sharded(group, model, gather=gather)
    first, second = series(group, 2)
    backward(model, first)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank(group) != absent:
        backward(model, second)
    with pytest.raises(StepMismatchError, match=f"rank {absent} has called step\\(\\) without any gradient"):
        optimizer.step()
        optimizer.synchronize()
        optimizer.step()  # with gather="forward" other ranks are told of a step in the next one


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("gather", ["step", "forward"])
def test_a_rank_without_a_backward_pass_is_named_on_all_ranks(pool: Pool, gather: str, world: int) -> None:
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
