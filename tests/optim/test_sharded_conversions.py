"""`model.to(...)` after `ShardedOptimizer` was built: what moves nothing is allowed, the rest is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, assert_same_state_dict, build, train
from tests.helpers.sharding import OPTIONS, WAYS, Contest, backward, in_ddp, series, values, whole_state
from zerostep import ShardedOptimizer

Convert = Callable[[nn.Module], nn.Module]

NOTHING_MOVES: dict[str, Convert] = {
    "float": lambda model: model.float(),
    "cpu": lambda model: model.cpu(),
    "to device": lambda model: model.to("cpu"),
    "to dtype": lambda model: model.to(torch.float32),
    "to both": lambda model: model.to(device=torch.device("cpu"), dtype=torch.float32, non_blocking=True),
    "type": lambda model: model.type(torch.float32),
}
MOVES: dict[str, tuple[Convert, str]] = {
    "bfloat16": (lambda model: model.to(torch.bfloat16), "torch.bfloat16"),
    "half": (lambda model: model.half(), "torch.float16"),
    "double": (lambda model: model.double(), "torch.float64"),
    "type": (lambda model: model.type(torch.float64), "torch.float64"),
}
SENTENCE = r"was torch\.float32 .* on cpu, and is now {} .*: build the optimizer after the model has its final shapes"
MODES: list[tuple[str, dict[str, Any]]] = [
    *((way, ours) for way in WAYS for ours in ({}, {"gather": "forward"})),
    ("bare scatter", {"update": "backward"}),
    ("bare scatter", {"update": "backward", "gather": "forward"}),
]
EACH_MODE = pytest.mark.parametrize(("way", "ours"), MODES, ids=str)


def _nothing_moves(group: ProcessGroup, way: str, ours: dict[str, Any]) -> None:
    """Converting after each step, while gradients stand in `.grad`, and between backward and step."""
    (model, optimizer), (twin, other) = (Contest(ours=ours).sharded(group, way) for _ in range(2))
    for number, batch in enumerate(series(group, 2 * len(NOTHING_MOVES))):
        convert = list(NOTHING_MOVES.values())[number // 2]
        for each, its in ((model, optimizer), (twin, other)):
            its.zero_grad()
            backward(each, batch)
            if each is model and number % 2:
                convert(model)
            its.step()
        if not number % 2:
            grads = [param.grad for param in model.parameters()]
            assert convert(model) is model
            assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    assert_same_bits(values(model), values(twin))
    assert_same_state_dict(whole_state(optimizer), whole_state(other))


@EACH_MODE
def test_a_conversion_that_moves_nothing_changes_nothing(pool: Pool, way: str, ours: dict[str, Any]) -> None:
    pool.run(_nothing_moves, 2, way, ours)


def _cast(batch: Any, model: nn.Module) -> Any:
    kind = next(model.parameters()).dtype
    return tuple(part.to(kind) if part.is_floating_point() else part for part in batch)


def _moves(group: ProcessGroup, way: str, ours: dict[str, Any], name: str) -> None:
    convert, dtype = MOVES[name]
    model, optimizer = Contest(ours=ours).sharded(group, way)
    data = series(group, 3)
    train(model, optimizer, data[:2])
    convert(model)  # gradients stand in .grad
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=SENTENCE.format(dtype)):
        backward(model, _cast(data[2], model))
        optimizer.step()


@pytest.mark.parametrize("name", MOVES)
@EACH_MODE
def test_a_cast_is_refused_in_the_next_pass_or_step(pool: Pool, way: str, ours: dict[str, Any], name: str) -> None:
    pool.run(_moves, 2, way, ours, name)


def _moves_before_step(group: ProcessGroup, way: str) -> None:
    model, optimizer = Contest().sharded(group, way)
    data = series(group, 3)
    train(model, optimizer, data[:1])
    optimizer.zero_grad()
    backward(model, data[1])
    model.double()
    with pytest.raises(ValueError, match=SENTENCE.format("torch.float64")):
        optimizer.step()
    model.float()  # as it was: float32 goes to float64 and back without loss
    optimizer.step()
    train(model, optimizer, data[2:])
    twin = build()
    plain = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    train(in_ddp(group, twin), plain, data)
    assert_same_bits(values(model), values(twin))


# Not inside DDP with whole gradients: a cast takes DDP's own hooks away for good.
@pytest.mark.parametrize("way", [way for way in WAYS if way != "wrapped all"])
def test_a_cast_between_backward_and_step_is_refused_until_it_is_undone(pool: Pool, way: str) -> None:
    pool.run(_moves_before_step, 2, way)


def _teardown(group: ProcessGroup, way: str) -> None:
    """What a framework does at the end: the model goes elsewhere, gradients or not, and the optimizer is dropped."""
    model, optimizer = Contest().sharded(group, way)
    train(model, optimizer, series(group, 2))
    trained = values(model)
    model.cpu()
    assert_same_bits(values(model), trained)
    model.to(torch.float64)
    assert_same_bits(values(model), {name: value.double() for name, value in trained.items()})


@pytest.mark.parametrize("way", WAYS)
def test_a_trained_model_may_be_taken_elsewhere(pool: Pool, way: str) -> None:
    pool.run(_teardown, 2, way)


def _gradients_stay_closed(group: ProcessGroup) -> None:
    model = build()
    optimizer = ShardedOptimizer(model, torch.optim.AdamW, process_group=group)
    train(model, optimizer, series(group, 1))
    for param in model.parameters():
        assert param.grad is not None
        for read in (
            lambda grad: grad.cpu().norm(),
            lambda grad: grad.float().sum(),
            lambda grad: grad.to(torch.float64).tolist(),
            lambda grad: grad.to("meta"),
        ):
            with pytest.raises(RuntimeError, match="each rank kept only the part it owns"):
                read(param.grad)
        with pytest.raises(RuntimeError, match="tried: __set__"):
            param.grad.data = torch.zeros_like(param)


def test_a_converted_gradient_can_be_read_no_more_than_before(pool: Pool) -> None:
    pool.run(_gradients_stay_closed, 2)


# A cast that is undone before anyone looks. DDP loses its hooks by it.


@torch.no_grad()
def _rounded(model: nn.Module) -> None:
    for param in model.parameters():
        param.copy_(param.bfloat16())


def _undone(group: ProcessGroup, way: str, ours: dict[str, Any]) -> None:
    (model, optimizer), (twin, other) = (Contest(ours=ours).sharded(group, way) for _ in range(2))
    for number, batch in enumerate(series(group, 4)):
        if number == 2:
            model.bfloat16()
            model.float()
            _rounded(twin)
        for each, its in ((model, optimizer), (twin, other)):
            its.zero_grad()
            backward(each, batch)
            its.step()
    assert_same_bits(values(model), values(twin))
    assert_same_state_dict(whole_state(optimizer), whole_state(other))


def _lost_by_ddp(group: ProcessGroup, way: str, ours: dict[str, Any]) -> None:
    for _ in range(2):  # the error changes nothing, and comes again
        with pytest.raises(RuntimeError, match=r"'\S+' was cast or moved, and put back.* no longer sums its gradient"):
            _undone(group, way, ours)


def _sums_by_ddp(way: str) -> bool:
    return way.endswith("all") and not way.startswith("bare")


@pytest.mark.parametrize(("way", "ours"), [each for each in MODES if not _sums_by_ddp(each[0])], ids=str)
def test_a_cast_that_is_undone_rounds_the_parameters(pool: Pool, way: str, ours: dict[str, Any]) -> None:
    pool.run(_undone, 2, way, ours)


@pytest.mark.parametrize(("way", "ours"), [each for each in MODES if _sums_by_ddp(each[0])], ids=str)
def test_a_cast_that_is_undone_is_refused_where_ddp_sums(pool: Pool, way: str, ours: dict[str, Any]) -> None:
    pool.run(_lost_by_ddp, 2, way, ours)
