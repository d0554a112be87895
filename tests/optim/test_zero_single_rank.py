"""The first fifteen acceptance statements: one rank, compared with the plain optimizer bit for bit."""

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
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
from zerostep import ZeroRedundancyOptimizer

Pair = tuple[nn.Module, optim.Optimizer, nn.Module, ZeroRedundancyOptimizer]


def _pair(group: ProcessGroup, case: Case, **more: Any) -> Pair:
    """Twice the same model, one with the plain optimizer and one with the sharded."""
    one, other = build(case.model), build(case.model)
    zero = ZeroRedundancyOptimizer(other.parameters(), case.kind, process_group=group, **more, **case.options)
    return one, case.optimizer(one.parameters()), other, zero


def _tensor(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def _zero(group: ProcessGroup, params: Any, kind: Any = optim.SGD, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, kind, process_group=group, **options)


# Statement 1.


def _one_step(group: ProcessGroup) -> None:
    x, y = _tensor(1.0, -2.0), _tensor(1.0, -2.0)
    zero, plain = _zero(group, [x], lr=0.1, momentum=0.9), optim.SGD([y], lr=0.1, momentum=0.9)
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
    one, plain, other, zero = _pair(group, case, parameters_as_bucket_view=as_views)
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
    x, y = _tensor(1.0), _tensor(2.0)
    lr = torch.tensor(0.1)
    zero = _zero(group, [{"params": [x]}, {"params": [y], "momentum": 0.5}], lr=lr)
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
    x = _tensor(1.0)
    zero = _zero(group, [x], lr=0.5)
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
    one, plain, other, zero = _pair(group, OPTIMIZERS["adamw"])
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
    one, plain, other, zero = _pair(group, OPTIMIZERS["sgd_momentum"])
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
    one, plain, other, zero = _pair(group, Case(optim.Adam, {"lr": 0.01}))
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
    plain, zero = kind(first, **options), _zero(group, second, kind, **options)
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
    x = _tensor(1.0)
    assert _zero(group, [x], _Answering, lr=0.1).step() == "an answer"
    assert _zero(group, [x], lr=0.1).step() is None


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
    zero = _zero(group, [_tensor(1.0)], _Recording, lr=0.1)
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
    x = _tensor(1.0)
    zero = _zero(group, [x], _WithoutClosure, lr=0.5)
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
    zero = _zero(group, [_tensor(1.0)], _Counting, lr=1.0)
    for count in (1, 2):
        zero.step()
        assert zero.param_groups[0]["count"] == count and zero.param_groups[0]["lr"] == 0.5**count


def test_statement_08_options_written_by_the_inner_step_are_visible(pool: Pool) -> None:
    pool.run(_written_options, 1)


# Statement 9.


def _zero_grad(group: ProcessGroup) -> None:
    params = [_tensor(1.0), _tensor(2.0, 3.0)]
    zero = _zero(group, params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    kept = [param.grad for param in params]
    zero.zero_grad(set_to_none=False)
    assert [param.grad is old for param, old in zip(params, kept, strict=True)] == [True] * 2
    assert all(grad is not None and not grad.any() for grad in kept)
    zero.zero_grad()
    assert [param.grad for param in params] == [None, None]


def test_statement_09_zero_grad_drops_or_fills_every_gradient(pool: Pool) -> None:
    pool.run(_zero_grad, 1)


def _zero_grad_everywhere(group: ProcessGroup) -> list[bool]:
    params = [_tensor(1.0), _tensor(2.0), _tensor(3.0)]
    zero = _zero(group, params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    zero.zero_grad()
    return [param.grad is None for param in params]


def test_statement_09_holds_for_parameters_of_other_ranks(pool: Pool) -> None:
    assert pool.run(_zero_grad_everywhere, 2) == [[True] * 3] * 2


# Statement 10.


def _twins() -> tuple[list[Tensor], list[Tensor]]:
    return [_tensor(1.0), _tensor(2.0, 3.0)], [_tensor(1.0), _tensor(2.0, 3.0)]


def _all_ones(params: list[Tensor]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)


SHAPES: dict[str, Callable[[list[Tensor]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "groups": lambda params: [{"params": params[:1]}, {"params": params[1:], "lr": 0.25, "momentum": 0.5}],
    "tuple of groups": lambda params: ({"params": tuple(params)},),
    "generator of groups": lambda params: ({"params": [param], "lr": 0.5} for param in params),
    "generator in a group": lambda params: [{"params": (each for each in params), "lr": 0.5}],
    "tensor in a group": lambda params: [{"params": params[0]}, {"params": params[1], "lr": 0.5}],
    "pairs": lambda params: [("first", params[0]), ("second", params[1])],
    "generator of pairs": lambda params: iter([("first", params[0]), ("second", params[1])]),
    "pairs in a group": lambda params: [{"params": [("first", params[0])], "lr": 0.5}, {"params": [("b", params[1])]}],
}


def _accepted(group: ProcessGroup, shape: str) -> None:
    one, other = _twins()
    plain, zero = optim.SGD(SHAPES[shape](one), lr=0.1), _zero(group, SHAPES[shape](other), lr=0.1)
    for _ in range(2):
        _all_ones(one)
        _all_ones(other)
        plain.step()
        zero.step()
    assert other[1].tolist() != [2.0, 3.0]
    assert_same_bits(dict(zip("ab", one, strict=True)), dict(zip("ab", other, strict=True)))
    zero.consolidate_state_dict()
    assert_same_state_dict(plain.state_dict(), zero.state_dict())


@pytest.mark.parametrize("shape", [name for name in SHAPES if "in a group" not in name and "pairs" not in name])
def test_statement_10_parameters_come_in_any_iterable(pool: Pool, shape: str) -> None:
    pool.run(_accepted, 1, shape)


def _any_callable(group: ProcessGroup) -> None:
    zero = _zero(group, [_tensor(1.0)], functools.partial(optim.SGD, momentum=0.5), lr=0.1)
    assert isinstance(zero.optim, optim.SGD) and zero.param_groups[0]["momentum"] == 0.5
    assert zero.defaults["momentum"] == 0.5


def test_statement_10_the_class_may_be_any_callable(pool: Pool) -> None:
    pool.run(_any_callable, 1)


# Statement 11.


@pytest.mark.parametrize("shape", ["generator in a group", "tensor in a group"])
def test_statement_11_a_group_trains_exactly_what_plain_would(pool: Pool, shape: str) -> None:
    pool.run(_accepted, 1, shape)


# Statement 12.


@pytest.mark.parametrize("shape", ["pairs", "generator of pairs", "pairs in a group"])
def test_statement_12_named_parameters_are_accepted(pool: Pool, shape: str) -> None:
    pool.run(_accepted, 1, shape)


def _saved_names(group: ProcessGroup) -> tuple[list[str], list[str]]:
    model = build()
    zero = _zero(group, model.named_parameters(), lr=0.1)
    zero.consolidate_state_dict()
    return zero.state_dict()["param_groups"][0]["param_names"], [name for name, _ in model.named_parameters()]


def test_statement_12_names_are_in_the_saved_groups(pool: Pool) -> None:
    ((found, expected),) = pool.run(_saved_names, 1)
    assert found == expected and "words.weight" in found


# Statement 13.


def _hooks(group: ProcessGroup) -> list[str]:
    x = _tensor(1.0)
    zero = _zero(group, [x], lr=0.1, momentum=0.9)
    x.grad = torch.ones(1)
    calls: list[str] = []
    zero.register_step_pre_hook(lambda *_: calls.append("before step"))
    zero.register_step_post_hook(lambda *_: calls.append("after step"))
    zero.optim.register_step_pre_hook(lambda *_: calls.append("before inner step"))
    zero.optim.register_step_post_hook(lambda *_: calls.append("after inner step"))
    zero.register_load_state_dict_pre_hook(lambda *_: calls.append("before load"))
    zero.register_load_state_dict_post_hook(lambda *_: calls.append("after load"))
    zero.register_state_dict_pre_hook(lambda *_: calls.append("before save"))
    zero.register_state_dict_post_hook(lambda _, found: calls.append(f"after save of {len(found['state'])}"))
    zero.step()
    zero.consolidate_state_dict()
    zero.load_state_dict(zero.state_dict())
    return calls


def test_statement_13_hooks_fire_once_and_see_the_merged_state(pool: Pool) -> None:
    assert pool.run(_hooks, 1) == [
        [
            "before step",
            "before inner step",
            "after inner step",
            "after step",
            "before save",
            "after save of 1",
            "before load",
            "after load",
        ]
    ]


def _hooked_state(group: ProcessGroup) -> list[int]:
    params = [_tensor(1.0), _tensor(2.0), _tensor(3.0)]
    zero = _zero(group, params, lr=0.1, momentum=0.9)
    _all_ones(params)
    zero.step()
    zero.consolidate_state_dict(to=0)
    seen: list[int] = []
    zero.register_state_dict_post_hook(lambda _, found: seen.extend(found["state"]))
    if zero.rank == 0:
        zero.state_dict()
    return seen


def test_statement_13_state_dict_hooks_see_the_state_of_all_ranks(pool: Pool) -> None:
    assert pool.run(_hooked_state, 2) == [[0, 1, 2], []]


def _replacing_hooks(group: ProcessGroup) -> None:
    x = _tensor(1.0)
    zero = _zero(group, [x], lr=0.1)

    def rename(_: optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        return {"wrapped": found}

    def unwrap(_: optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
        return {**found["wrapped"], "param_groups": [{**found["wrapped"]["param_groups"][0], "lr": 7.0}]}

    zero.register_state_dict_post_hook(rename)
    zero.register_load_state_dict_pre_hook(unwrap)
    saved = zero.state_dict()
    assert list(saved) == ["wrapped"]
    zero.load_state_dict(saved)
    assert zero.param_groups[0]["lr"] == zero.optim.param_groups[0]["lr"] == 7.0


def test_statement_13_hooks_may_replace_the_state_dict(pool: Pool) -> None:
    pool.run(_replacing_hooks, 1)


# Statement 14.


def _scaled(group: ProcessGroup) -> list[list[float]]:
    params = [_tensor(1.0), _tensor(2.0)]
    zero = _zero(group, params, lr=0.5)
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
    one, plain, other, zero = _pair(group, OPTIMIZERS["adamw"])
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


# Statement 15.

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda zero: torch.save(zero, io.BytesIO()),
    "deepcopy inside": lambda zero: copy.deepcopy({"optimizer": [zero]}),
}


def _copied(group: ProcessGroup, how: str) -> str:
    x = _tensor(1.0)
    zero = _zero(group, [x], lr=0.5)
    try:
        COPIES[how](zero)
    except TypeError as error:
        x.grad = torch.ones(1)
        zero.step()
        assert x.item() == 0.5
        return str(error)
    raise AssertionError(f"{how} raised nothing")


@pytest.mark.parametrize("how", COPIES)
def test_statement_15_copies_are_refused_with_the_reason_and_the_remedy(pool: Pool, how: str) -> None:
    (message,) = pool.run(_copied, 1, how)
    assert "cannot be copied or pickled: it belongs to a process group" in message
    assert "Build a new one and pass state_dict() to its load_state_dict()" in message


def _copied_model(group: ProcessGroup, as_views: bool) -> None:
    model = build()
    zero = _zero(group, model.parameters(), parameters_as_bucket_view=as_views, lr=0.1)
    twin = copy.deepcopy(model)
    assert_same_bits(model.named_parameters(), twin.named_parameters())
    before = {name: param.detach().clone() for name, param in twin.named_parameters()}
    train(model, zero, batches(0, 0, 1))
    assert_same_bits(before, twin.named_parameters())
    ours = {param.untyped_storage().data_ptr() for param in model.parameters()}
    assert ours.isdisjoint(param.untyped_storage().data_ptr() for param in twin.parameters())


@pytest.mark.parametrize("as_views", [False, True])
def test_statement_15_a_model_can_still_be_copied(pool: Pool, as_views: bool) -> None:
    pool.run(_copied_model, 1, as_views)


# The rest of what holds after construction.


def _attributes(group: ProcessGroup) -> None:
    def params() -> Iterator[Tensor]:
        yield from (_tensor(1.0), _tensor(2.0))

    zero = ZeroRedundancyOptimizer(params=params(), optimizer_class=optim.Adam, process_group=group, lr=0.5)
    assert isinstance(zero, optim.Optimizer) and len(zero._all_params) == 2
    assert zero.process_group is zero.join_process_group is group
    assert (zero.world_size, zero.rank, zero.global_rank) == (1, 0, 0)
    assert zero.join_device == torch.device("cpu")
    assert zero.parameters_as_bucket_view is False and zero._overlap_with_ddp is False
    assert zero.defaults["lr"] == 0.5 and zero.defaults["betas"] == (0.9, 0.999)
    assert zero.state == {} and zero._all_state_dicts == []
    zero.anything = "may be stored"  # type: ignore[attr-defined]
    assert zero._sync_param_groups([{"params": [1], "lr": 3}], groups := [{"params": [2], "lr": 4}]) is None
    assert groups == [{"params": [2], "lr": 3}]


def test_attributes_that_outside_code_touches(pool: Pool) -> None:
    pool.run(_attributes, 1)


def _early_state_dict(group: ProcessGroup) -> None:
    one, plain, _, zero = _pair(group, OPTIMIZERS["adamw"])
    assert_same_state_dict(plain.state_dict(), zero.state_dict())
    assert one is not None and zero.state_dict()["state"] == {}


def test_state_dict_before_the_first_step_is_the_empty_state_with_full_groups(pool: Pool) -> None:
    pool.run(_early_state_dict, 1)
