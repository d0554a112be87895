"""`ZeroRedundancyOptimizer` on one rank, compared with the plain optimizer: construction, gradients, hooks, copies."""

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.distributed import ProcessGroup

from tests.helpers.pool import Pool
from tests.helpers.reference import OPTIMIZERS, assert_same_bits, assert_same_state_dict, batches, build, train
from tests.helpers.single_rank import leaf_tensor, make_pair, make_zero
from zerostep import ZeroRedundancyOptimizer

# Statement 9.


def _zero_grad(group: ProcessGroup) -> None:
    params = [leaf_tensor(1.0), leaf_tensor(2.0, 3.0)]
    zero = make_zero(group, params, lr=0.1)
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
    params = [leaf_tensor(1.0), leaf_tensor(2.0), leaf_tensor(3.0)]
    zero = make_zero(group, params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    zero.zero_grad()
    return [param.grad is None for param in params]


def test_statement_09_holds_for_parameters_of_other_ranks(pool: Pool) -> None:
    assert pool.run(_zero_grad_everywhere, 2) == [[True] * 3] * 2


# Statement 10.


def _twins() -> tuple[list[Tensor], list[Tensor]]:
    return [leaf_tensor(1.0), leaf_tensor(2.0, 3.0)], [leaf_tensor(1.0), leaf_tensor(2.0, 3.0)]


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
    plain, zero = optim.SGD(SHAPES[shape](one), lr=0.1), make_zero(group, SHAPES[shape](other), lr=0.1)
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
    zero = make_zero(group, [leaf_tensor(1.0)], functools.partial(optim.SGD, momentum=0.5), lr=0.1)
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
    zero = make_zero(group, model.named_parameters(), lr=0.1)
    zero.consolidate_state_dict()
    return zero.state_dict()["param_groups"][0]["param_names"], [name for name, _ in model.named_parameters()]


def test_statement_12_names_are_in_the_saved_groups(pool: Pool) -> None:
    ((found, expected),) = pool.run(_saved_names, 1)
    assert found == expected and "words.weight" in found


# Statement 13.


def _hooks(group: ProcessGroup) -> list[str]:
    x = leaf_tensor(1.0)
    zero = make_zero(group, [x], lr=0.1, momentum=0.9)
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
    params = [leaf_tensor(1.0), leaf_tensor(2.0), leaf_tensor(3.0)]
    zero = make_zero(group, params, lr=0.1, momentum=0.9)
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
    x = leaf_tensor(1.0)
    zero = make_zero(group, [x], lr=0.1)

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


# Statement 15.


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda zero: torch.save(zero, io.BytesIO()),
    "deepcopy inside": lambda zero: copy.deepcopy({"optimizer": [zero]}),
}


def _copied(group: ProcessGroup, how: str) -> str:
    x = leaf_tensor(1.0)
    zero = make_zero(group, [x], lr=0.5)
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
    zero = make_zero(group, model.parameters(), parameters_as_bucket_view=as_views, lr=0.1)
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
        yield from (leaf_tensor(1.0), leaf_tensor(2.0))

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
    one, plain, _, zero = make_pair(group, OPTIMIZERS["adamw"])
    assert_same_state_dict(plain.state_dict(), zero.state_dict())
    assert one is not None and zero.state_dict()["state"] == {}


def test_state_dict_before_the_first_step_is_the_empty_state_with_full_groups(pool: Pool) -> None:
    pool.run(_early_state_dict, 1)
