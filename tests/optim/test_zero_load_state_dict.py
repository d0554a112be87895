"""What `load_state_dict` of `ZeroRedundancyOptimizer` refuses, replaces and converts."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from tests.helpers.pool import Pool
from tests.helpers.reference import OPTIMIZERS, Case, assert_same_bits, assert_same_state_dict, build, train
from tests.helpers.zero_state_dicts import WORLDS, StateDict, World, full_state_dict, plain_pair, same_data, zero_pair
from zerostep import ZeroRedundancyOptimizer


def _all_memory(zero: ZeroRedundancyOptimizer) -> StateDict:
    """Everything that a refused load must not touch."""
    state = [(zero._param_to_index[param], copy.deepcopy(dict(entry))) for param, entry in zero.optim.state.items()]
    return {
        "state": dict(state),
        "groups": [_options(group) for group in zero.param_groups],
        "inner groups": [_options(group) for group in zero.optim.param_groups],
    }


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


# Wrong dicts.


def _one_group_less(saved: StateDict) -> None:
    del saved["param_groups"][1]


def _one_group_more(saved: StateDict) -> None:
    saved["param_groups"].append({**saved["param_groups"][0], "params": []})


def _one_parameter_less(saved: StateDict) -> None:
    del saved["state"][saved["param_groups"][1]["params"].pop()]


def _one_parameter_moved(saved: StateDict) -> None:
    saved["param_groups"][0]["params"].append(saved["param_groups"][1]["params"].pop(0))


def _unknown_index(saved: StateDict) -> None:
    saved["state"][99] = saved["state"][0]


def _without_state(saved: StateDict) -> None:
    del saved["state"]


def _without_groups(saved: StateDict) -> None:
    del saved["param_groups"]


def _group_without_params(saved: StateDict) -> None:
    del saved["param_groups"][0]["params"]


def _group_not_a_dict(saved: StateDict) -> None:
    saved["param_groups"][0] = [0, 1]


def _wrong_shape(saved: StateDict) -> None:
    saved["state"][4]["exp_avg"] = torch.zeros(3, 3)


def _transposed(saved: StateDict) -> None:
    saved["state"][1]["exp_avg_sq"] = saved["state"][1]["exp_avg_sq"].t().contiguous()


def _none_entry(saved: StateDict) -> None:
    saved["state"][2] = None


def _missing_state_key(saved: StateDict) -> None:
    del saved["state"][3]["exp_avg_sq"]


def _state_is_a_list(saved: StateDict) -> None:
    saved["state"] = list(saved["state"].values())


def _groups_are_none(saved: StateDict) -> None:
    saved["param_groups"] = None


WRONG: list[Callable[[StateDict], None]] = [
    _one_group_less,
    _one_group_more,
    _one_parameter_less,
    _one_parameter_moved,
    _unknown_index,
    _without_state,
    _without_groups,
    _group_without_params,
    _group_not_a_dict,
    _wrong_shape,
    _transposed,
    _none_entry,
    _state_is_a_list,
    _groups_are_none,
]


def _refused(group: dist.ProcessGroup, spoil: Callable[[StateDict], None], fresh: bool) -> None:
    model, zero = zero_pair(group)
    twin, twin_zero = zero_pair(group)
    train(model, zero, same_data(0 if fresh else 2))
    train(twin, twin_zero, same_data(0 if fresh else 2))
    other, plain = plain_pair(seed=5)
    plain.param_groups[0]["lr"] = 0.125
    train(other, plain, same_data(3))
    saved = copy.deepcopy(plain.state_dict())
    spoil(saved)
    before, state = _all_memory(zero), zero.optim.state
    with pytest.raises(ValueError):
        zero.load_state_dict(saved)
    assert zero.optim.state is state is zero.state
    assert_same_state_dict(_all_memory(zero), before)
    train(model, zero, same_data(2, start=2))
    train(twin, twin_zero, same_data(2, start=2))
    assert_same_bits(model.named_parameters(), twin.named_parameters())


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__.strip("_"))
def test_statement_62_a_wrong_dict_changes_nothing(pool: Pool, spoil: Callable[[StateDict], None]) -> None:
    for fresh in (False, True):
        pool.run(_refused, 2, spoil, fresh)


def test_statement_62_state_without_one_of_its_keys(pool: Pool) -> None:
    pool.run(_refused, 2, _missing_state_key, False)


def _refused_value(group: dist.ProcessGroup, value: Any) -> str:
    _, zero = zero_pair(group)
    before = _all_memory(zero)
    with pytest.raises(ValueError) as caught:
        zero.load_state_dict(value)
    assert_same_state_dict(_all_memory(zero), before)
    return str(caught.value)


@pytest.mark.parametrize("value", [None, [], "state", {}, 3, {"state": {}}, [("state", {})]], ids=repr)
def test_statement_62_what_is_not_a_state_dict(pool: Pool, value: Any) -> None:
    for message in pool.run(_refused_value, 2, value):
        assert "state dict" in message


def _refused_by_the_inner(group: dist.ProcessGroup) -> None:
    """A dict that only the inner optimizer finds wrong, after it has begun."""

    class Picky(torch.optim.SGD):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            if "param_groups" in state and any(group["lr"] == 13 for group in state["param_groups"]):
                raise ArithmeticError("unlucky")

    model = build()
    zero = ZeroRedundancyOptimizer(model.parameters(), Picky, process_group=group, lr=0.1, momentum=0.9)
    train(model, zero, same_data(1))
    saved = full_state_dict(zero)
    saved["param_groups"][0]["lr"] = 13
    before, state = _all_memory(zero), zero.optim.state
    with pytest.raises(ArithmeticError, match="unlucky"):
        zero.load_state_dict(saved)
    assert zero.optim.state is state
    assert_same_state_dict(_all_memory(zero), before)


def test_statement_62_an_error_of_the_inner_optimizer_changes_nothing(pool: Pool) -> None:
    pool.run(_refused_by_the_inner, 2)


# What loading does to the state that was there.


def _replaced(group: dist.ProcessGroup) -> None:
    model, zero = zero_pair(group)
    train(model, zero, same_data(2))
    saved = full_state_dict(zero)
    kept = {index: entry for index, entry in saved["state"].items() if index % 3 == 0}
    zero.load_state_dict({**saved, "state": kept}, allow_missing=True)
    index_of = zero._param_to_index
    assert {index_of[param] for param in zero.state} == {
        i for i in kept if zero._param_to_rank[_param(zero, i)] == zero.rank
    }
    assert zero.state is zero.optim.state
    assert all(param is _param(zero, index_of[param]) for param in zero.state)
    assert_same_state_dict(full_state_dict(zero)["state"], kept)
    train(model, zero, same_data(1, start=2))
    assert zero.state is zero.optim.state and set(map(id, zero.state)) == {
        id(param) for param, owner in zero._param_to_rank.items() if owner == zero.rank
    }


def _param(zero: ZeroRedundancyOptimizer, index: int) -> Tensor:
    return zero._index_to_param[index]


@WORLDS
def test_statement_63_loading_replaces_all_state(pool: Pool, world: World) -> None:
    pool.run(_replaced, world)


def _cast(group: dist.ProcessGroup, kind: str, saved_dtype: torch.dtype, dtype: torch.dtype) -> None:
    case = OPTIMIZERS[kind]
    source = build(case.model)
    first = case.optimizer(source.parameters())
    train(source, first, same_data(2, kind))
    saved = first.state_dict()
    for entry in saved["state"].values():
        for key, value in entry.items():
            if isinstance(value, Tensor) and key != "step":
                entry[key] = value.to(saved_dtype)
    model, twin = build(case.model).to(dtype), build(case.model).to(dtype)
    zero = ZeroRedundancyOptimizer(model.parameters(), case.kind, process_group=group, **case.options)
    plain = case.optimizer(twin.parameters())
    zero.load_state_dict(copy.deepcopy(saved))
    plain.load_state_dict(copy.deepcopy(saved))
    assert_same_state_dict(full_state_dict(zero), plain.state_dict())


@pytest.mark.parametrize("kind", ["adamw", "sgd_momentum", "adagrad", "asgd", "rprop"])
def test_statement_63_floating_state_follows_the_parameter(pool: Pool, kind: str) -> None:
    for saved, dtype in [
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
    ]:
        pool.run(_cast, 2, kind, saved, dtype)


def _reduced_flags(group: dist.ProcessGroup, options: dict[str, Any]) -> None:
    """Where `step` lies and in which dtype is decided by flags of the group, as plain decides it."""
    model, twin = build(), build()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, **options)
    plain = torch.optim.Adam(twin.parameters(), **options)
    train(model, zero, same_data(2))
    train(twin, plain, same_data(2))
    saved = full_state_dict(zero)
    assert_same_state_dict(saved, plain.state_dict())
    for entry in saved["state"].values():
        entry["step"] = entry["step"].double()
    zero.load_state_dict(copy.deepcopy(saved))
    plain.load_state_dict(copy.deepcopy(saved))
    assert_same_state_dict(full_state_dict(zero), plain.state_dict())
    train(model, zero, same_data(2, start=2))
    train(twin, plain, same_data(2, start=2))
    assert_same_bits(model.named_parameters(), twin.named_parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"fused": True},
        {"foreach": True},
        {"foreach": False},
        {"lr": torch.tensor(0.01), "fused": True},
        {"lr": torch.tensor(0.01), "foreach": False},
    ],
    ids=str,
)
def test_statement_63_steps_are_placed_as_plain_places_them(pool: Pool, options: dict[str, Any]) -> None:
    pool.run(_reduced_flags, 2, options)


def _placement(group: dist.ProcessGroup, flags: dict[str, Any]) -> None:
    """Loading alone: a CPU cannot step with `capturable`."""
    source = build()
    first = torch.optim.Adam(source.parameters())
    train(source, first, same_data(1))
    saved = first.state_dict()
    saved["param_groups"][0].update(flags)
    for entry in saved["state"].values():
        entry["step"] = entry["step"].double()
    model, twin = build(), build()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group)
    plain = torch.optim.Adam(twin.parameters())
    zero.load_state_dict(saved)
    plain.load_state_dict(saved)
    expected = next(iter(plain.state.values()))["step"]
    for entry in zero.state.values():
        assert (entry["step"].dtype, entry["step"].device) == (expected.dtype, expected.device)
    assert zero.state and [zero.optim.param_groups[0][key] for key in flags] == list(flags.values())


@pytest.mark.parametrize("flags", [{"capturable": True}, {"fused": True}, {"capturable": False}], ids=str)
def test_statement_63_steps_of_fused_and_capturable(pool: Pool, flags: dict[str, Any]) -> None:
    pool.run(_placement, 2, flags)


# Odd state.


def _lbfgs(group: dist.ProcessGroup) -> None:
    """Each rank solves over its shard; its state has lists of tensors of odd shapes, and must survive the journey."""

    def run(model: nn.Module, zero: ZeroRedundancyOptimizer, steps: int) -> None:
        inputs, targets = same_data(1)[0]
        for _ in range(steps):
            zero.step(lambda: _loss(model, zero, inputs, targets))

    pairs = []
    for seed in (0, 1):
        model = build(seed=seed)
        kind: Any = torch.optim.LBFGS
        pairs.append(
            (model, ZeroRedundancyOptimizer(model.parameters(), kind, process_group=group, max_iter=3, lr=0.5))
        )
    (model, zero), (copied, loaded) = pairs
    run(model, zero, 3)
    saved = full_state_dict(zero)
    assert any(isinstance(value, list) and value for entry in saved["state"].values() for value in entry.values())
    loaded.load_state_dict(saved)
    copied.load_state_dict(model.state_dict())
    assert_same_state_dict(full_state_dict(loaded), saved)
    run(model, zero, 2)
    run(copied, loaded, 2)
    assert_same_bits(model.named_parameters(), copied.named_parameters())
    assert_same_state_dict(full_state_dict(loaded), full_state_dict(zero))


def _loss(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = mse_loss(model(inputs), targets)
    loss.backward()
    return loss


@pytest.mark.parametrize("world", [1, 2, 3], ids=str)
def test_statement_58_state_with_lists_of_tensors(pool: Pool, world: int) -> None:
    pool.run(_lbfgs, world)


def _odd_shapes(group: dist.ProcessGroup) -> None:
    case = OPTIMIZERS["adafactor"]
    model, zero = zero_pair(group, "adafactor")
    train(model, zero, same_data(2, "adafactor"))
    saved = full_state_dict(zero)
    shapes = {tuple(value.shape) for entry in saved["state"].values() for value in entry.values()}
    assert shapes - {tuple(param.shape) for param in model.parameters()} - {()}, "all shaped like parameters"
    spoiled = copy.deepcopy(saved)
    for entry in spoiled["state"].values():
        entry["row_var"] = torch.zeros(2, 2, 2)
    before = _all_memory(zero)
    with pytest.raises(ValueError, match="row_var"):
        zero.load_state_dict(spoiled)
    assert_same_state_dict(_all_memory(zero), before)
    assert isinstance(zero.optim, case.kind)


def test_statement_62_state_that_is_not_shaped_like_its_parameter(pool: Pool) -> None:
    pool.run(_odd_shapes, 2)


def _channels_last(group: dist.ProcessGroup) -> None:
    case: Case = OPTIMIZERS["adamw_convolutions"]
    model = build(case.model)
    zero = ZeroRedundancyOptimizer(model.parameters(), case.kind, process_group=group, **case.options)
    train(model, zero, same_data(2, "adamw_convolutions"))
    saved = full_state_dict(zero)
    for index, param in enumerate(model.parameters()):
        assert saved["state"][index]["exp_avg"].stride() == param.stride()


def test_state_keeps_its_memory_format(pool: Pool) -> None:
    pool.run(_channels_last, 2)
