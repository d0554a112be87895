"""Steps, options, schedulers, closures and scalers on one rank, compared with the plain optimizer."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from tests.helpers.pool import Pool
from tests.helpers.reference import (
    OPTIMIZERS,
    Batch,
    Case,
    assert_same_bits,
    assert_same_state_dict,
    batches,
    build,
    train,
)
from tests.helpers.single_rank import leaf_tensor, make_pair, make_zero

# Statement 1.


def _one_step(group: ProcessGroup) -> None:
    x, y = leaf_tensor(1.0, -2.0), leaf_tensor(1.0, -2.0)
    zero, plain = make_zero(group, [x], lr=0.1, momentum=0.9), optim.SGD([y], lr=0.1, momentum=0.9)
    for param, optimizer in ((x, zero), (y, plain)):
        (param**2).sum().backward()
        optimizer.step()
    assert_same_bits({"x": x}, {"x": y})
    assert x.tolist() != [1.0, -2.0]
    (key,) = zero.optim.state
    assert key is x and "momentum_buffer" in zero.optim.state[x]
    assert zero.state is zero.optim.state


def test_statement_01_one_step_moves_a_parameter_as_plain_does(pool: Pool) -> None:
    pool.run(_one_step, 1)


def _many_steps(group: ProcessGroup, name: str, as_views: bool) -> None:
    case = OPTIMIZERS[name]
    one, plain, other, zero = make_pair(group, case, parameters_as_bucket_view=as_views)
    series = batches(0, 0, 8, case.model)
    assert train(one, plain, series) == train(other, zero, series)
    assert_same_bits(one.named_parameters(), other.named_parameters())
    zero.consolidate_state_dict()
    assert_same_state_dict(plain.state_dict(), zero.state_dict())


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_statement_01_holds_for_every_optimizer(pool: Pool, name: str, as_views: bool) -> None:
    pool.run(_many_steps, 1, name, as_views)


# Statement 2.


def _options_after_construction(group: ProcessGroup) -> None:
    x, y = leaf_tensor(1.0), leaf_tensor(2.0)
    lr = torch.tensor(0.1)
    zero = make_zero(group, [{"params": [x]}, {"params": [y], "momentum": 0.5}], lr=lr)
    assert isinstance(zero.optim, optim.SGD)
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 2
    for outer, inner in zip(zero.param_groups, zero.optim.param_groups, strict=True):
        assert outer is not inner and outer["params"] is not inner["params"]
        assert {"momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "fused"} <= set(outer)
        assert {key: outer[key] for key in inner if key != "params"} == {k: inner[k] for k in inner if k != "params"}
        assert outer["lr"] is inner["lr"] is lr
    assert [group["momentum"] for group in zero.param_groups] == [0, 0.5]
    assert zero.initialized and zero.world_size == 1 and zero.rank == 0


def test_statement_02_every_option_is_in_both_groups(pool: Pool) -> None:
    pool.run(_options_after_construction, 1)


# Statement 3.


def _follow_options(group: ProcessGroup) -> None:
    x = leaf_tensor(1.0)
    zero = make_zero(group, [x], lr=0.5)
    x.grad = torch.ones(1)
    zero.param_groups[0]["lr"] = 0.25
    zero.step()
    assert x.item() == 0.75 and zero.optim.param_groups[0]["lr"] == 0.25
    zero.optim.param_groups[0]["lr"] = 100.0
    zero.step()
    assert x.item() == 0.5
    assert zero.param_groups[0]["lr"] == zero.optim.param_groups[0]["lr"] == 0.25
    zero.param_groups[0]["mine"] = "kept"
    zero.step()
    assert zero.optim.param_groups[0]["mine"] == "kept"


def test_statement_03_options_follow_the_wrapper(pool: Pool) -> None:
    pool.run(_follow_options, 1)


# Statement 4.


def _factor(epoch: int) -> float:
    return 0.9**epoch


def _sequential(optimizer: optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [LambdaLR(optimizer, _factor), StepLR(optimizer, 1)], milestones=[2])


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "step": lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 5),
    "lambda": lambda optimizer: LambdaLR(optimizer, _factor),
    "sequential": _sequential,
}


def _schedule(group: ProcessGroup, name: str, with_gradients: bool) -> None:
    one, plain, other, zero = make_pair(group, OPTIMIZERS["adamw"])
    first, second = SCHEDULERS[name](plain), SCHEDULERS[name](zero)
    rates = set()
    for batch in batches(0, 0, 6):
        if with_gradients:
            train(one, plain, [batch])
            train(other, zero, [batch])
        else:
            plain.step()
            zero.step()
        first.step()
        second.step()
        assert first.get_last_lr() == second.get_last_lr()
        assert plain.param_groups[0]["lr"] == zero.param_groups[0]["lr"]
        rates.add(zero.param_groups[0]["lr"])
    assert len(rates) > 1
    assert_same_bits(one.named_parameters(), other.named_parameters())


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_statement_04_schedulers_follow_plain(pool: Pool, name: str, with_gradients: bool) -> None:
    pool.run(_schedule, 1, name, with_gradients)


def _plateau(group: ProcessGroup) -> None:
    one, plain, other, zero = make_pair(group, OPTIMIZERS["sgd_momentum"])
    first, second = ReduceLROnPlateau(plain, patience=0), ReduceLROnPlateau(zero, patience=0)
    for batch, metric in zip(batches(0, 0, 4), [1.0, 2.0, 0.5, 3.0], strict=True):
        train(one, plain, [batch])
        train(other, zero, [batch])
        first.step(metric)
        second.step(metric)
    assert zero.param_groups[0]["lr"] == plain.param_groups[0]["lr"] < 0.05
    assert_same_bits(one.named_parameters(), other.named_parameters())


def test_statement_04_a_scheduler_that_waits_for_a_plateau(pool: Pool) -> None:
    pool.run(_plateau, 1)


# Statement 5.


def _one_cycle(group: ProcessGroup) -> None:
    one, plain, other, zero = make_pair(group, Case(optim.Adam, {"lr": 0.01}))
    first, second = (OneCycleLR(each, max_lr=0.1, total_steps=7, cycle_momentum=True) for each in (plain, zero))
    betas = set()
    for batch in batches(0, 0, 6):
        train(one, plain, [batch])
        train(other, zero, [batch])
        first.step()
        second.step()
        assert zero.param_groups[0]["betas"] == plain.param_groups[0]["betas"]
        betas.add(zero.param_groups[0]["betas"])
    assert len(betas) > 1
    assert_same_bits(one.named_parameters(), other.named_parameters())


def test_statement_05_one_cycle_cycles_the_momentum_of_adam(pool: Pool) -> None:
    pool.run(_one_cycle, 1)


# Statement 6.


def _closures(group: ProcessGroup, name: str, options: dict[str, Any]) -> None:
    one, other = build(), build()
    # The largest first, as the inner optimizer holds them: LBFGS sums over all parameters, in their order.
    first, second = (sorted(model.parameters(), key=Tensor.numel, reverse=True) for model in (one, other))
    kind = getattr(optim, name)
    plain, zero = kind(first, **options), make_zero(group, second, kind, **options)
    calls = {"plain": 0, "zero": 0}

    def closure(who: str, model: nn.Module, batch: Batch) -> Tensor:
        calls[who] += 1
        model.zero_grad()
        loss = mse_loss(model(batch[0]), batch[1])
        loss.backward()
        return loss

    for batch in batches(0, 0, 3):
        expected = plain.step(functools.partial(closure, "plain", one, batch))
        found = zero.step(functools.partial(closure, "zero", other, batch))
        assert_same_bits({"loss": expected}, {"loss": found})
    assert calls["zero"] == calls["plain"] >= (3 if name == "SGD" else 6)
    assert_same_bits(one.named_parameters(), other.named_parameters())


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"lr": 0.1, "momentum": 0.9}), ("LBFGS", {"max_iter": 5, "line_search_fn": "strong_wolfe"})],
)
def test_statement_06_the_inner_optimizer_evaluates_the_closure(pool: Pool, name: str, options: dict[str, Any]) -> None:
    pool.run(_closures, 1, name, options)


class _Answering(optim.SGD):
    """Returns what no optimizer would."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return "an answer"


def _returns(group: ProcessGroup) -> None:
    x = leaf_tensor(1.0)
    assert make_zero(group, [x], _Answering, lr=0.1).step() == "an answer"
    assert make_zero(group, [x], lr=0.1).step() is None


def test_statement_06_step_returns_what_the_inner_step_returns(pool: Pool) -> None:
    pool.run(_returns, 1)


# Statement 7.


class _Recording(optim.SGD):
    """Remembers how its `step` was called."""

    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.calls = [*getattr(self, "calls", []), (args, kwargs)]


class _WithoutClosure(optim.SGD):
    """Its `step` takes no argument at all."""

    def step(self) -> None:  # type: ignore[override]
        super().step()


class _Falsy:
    def __bool__(self) -> bool:
        raise AssertionError("the closure was looked at")


def _forwarded(group: ProcessGroup) -> None:
    zero = make_zero(group, [leaf_tensor(1.0)], _Recording, lr=0.1)
    odd = _Falsy()
    for closure in (0, "", odd):
        zero.step(closure)
    zero.step(closure=odd, scale=3, other=[4])
    zero.step(extra=5)
    zero.step(None)
    zero.step()
    calls = zero.optim.calls  # type: ignore[attr-defined]
    assert [args for args, _ in calls] == [()] * 7
    keywords = [kwargs for _, kwargs in calls]
    assert keywords == [
        {"closure": 0},
        {"closure": ""},
        {"closure": odd},
        {"closure": odd, "scale": 3, "other": [4]},
        {"extra": 5},
        {},
        {},
    ]


def _no_closure(group: ProcessGroup) -> None:
    x = leaf_tensor(1.0)
    zero = make_zero(group, [x], _WithoutClosure, lr=0.5)
    x.grad = torch.ones(1)
    zero.step()
    assert x.item() == 0.5


@pytest.mark.parametrize("job", [_forwarded, _no_closure])
def test_statement_07_arguments_reach_the_inner_step_untouched(pool: Pool, job: Callable[..., None]) -> None:
    pool.run(job, 1)


# Statement 8.


class _Counting(optim.SGD):
    """Writes a new option and changes an old one in every step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] /= 2
        return super().step(closure)


def _written_options(group: ProcessGroup) -> None:
    zero = make_zero(group, [leaf_tensor(1.0)], _Counting, lr=1.0)
    for count in (1, 2):
        zero.step()
        assert zero.param_groups[0]["count"] == count and zero.param_groups[0]["lr"] == 0.5**count


def test_statement_08_options_written_by_the_inner_step_are_visible(pool: Pool) -> None:
    pool.run(_written_options, 1)


# Statement 14.


def _scaled(group: ProcessGroup) -> list[list[float]]:
    params = [leaf_tensor(1.0), leaf_tensor(2.0)]
    zero = make_zero(group, params, lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    found = []
    for value in (1.0, float("inf"), float("nan"), 2.0):
        zero.zero_grad()
        for param in params:
            param.grad = torch.full_like(param, value) * scaler.get_scale()
        scaler.step(zero)
        scaler.update()
        found.append([param.item() for param in params] + [scaler.get_scale()])
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_statement_14_a_scaler_steps_on_finite_gradients_only(pool: Pool, world: int) -> None:
    expected = [[0.5, 1.5, 8.0], [0.5, 1.5, 4.0], [0.5, 1.5, 2.0], [-0.5, 0.5, 2.0]]
    assert pool.run(_scaled, world) == [expected] * world


def _unscaled(group: ProcessGroup) -> None:
    one, plain, other, zero = make_pair(group, OPTIMIZERS["adamw"])
    scalers = [torch.amp.GradScaler("cpu") for _ in range(2)]
    for inputs, targets in batches(0, 0, 4):
        for model, optimizer, scaler in ((one, plain, scalers[0]), (other, zero, scalers[1])):
            optimizer.zero_grad()
            scaler.scale(mse_loss(model(inputs), targets)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    assert_same_bits(one.named_parameters(), other.named_parameters())


def test_statement_14_gradients_may_be_unscaled_and_clipped_first(pool: Pool) -> None:
    pool.run(_unscaled, 1)
