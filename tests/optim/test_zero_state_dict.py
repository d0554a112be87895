"""Consolidation, state dicts and loading, compared with the plain optimizer; and values sent from one rank to all."""

import copy
import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from tests.helpers.pool import OFFSET, Pool
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
from zerostep.optim.zero import _broadcast_object

World = int | tuple[int, ...]
StateDict = dict[str, Any]

WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4, OFFSET], ids=str)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with different options."""
    params = list(model.parameters())
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]


def _pair(group: dist.ProcessGroup, name: str = "adamw", seed: int = 0) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    case = OPTIMIZERS[name]
    model = build(case.model, seed)
    zero = ZeroRedundancyOptimizer(_groups(model), case.kind, process_group=group, **case.options)
    return model, zero


def _plain_pair(name: str = "adamw", seed: int = 0) -> tuple[nn.Module, Optimizer]:
    case = OPTIMIZERS[name]
    model = build(case.model, seed)
    return model, case.optimizer(_groups(model))


def _same_data(steps: int, name: str = "adamw", start: int = 0) -> list[Batch]:
    """The same batches on all ranks: then nobody needs to reduce a gradient."""
    return batches(1, 0, start + steps, OPTIMIZERS[name].model)[start:]


def _full(zero: ZeroRedundancyOptimizer) -> StateDict:
    """The full state dict on every rank, each its own consolidation; a copy, for nothing may depend on the original."""
    for rank in range(zero.world_size):
        zero.consolidate_state_dict(to=rank)
        if rank == zero.rank:
            found = copy.deepcopy(zero.state_dict())
    return found


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


# Who holds what.


def _recipients(group: dist.ProcessGroup) -> list[list[bool]]:
    model, zero = _pair(group)
    train(model, zero, _same_data(1))
    rows = []
    for to in [*range(zero.world_size), 0]:
        assert zero.consolidate_state_dict(to=to) is None  # type: ignore[func-returns-value]
        rows.append([_has_state_dict(zero), len(zero._all_state_dicts) == zero.world_size])
        if not rows[-1][0]:
            with pytest.raises(RuntimeError, match=rf"not been consolidated.*to={zero.rank}\)"):
                zero.state_dict()
            assert zero._all_state_dicts == []
    return rows


def _has_state_dict(zero: ZeroRedundancyOptimizer) -> bool:
    try:
        return bool(zero.state_dict()["state"])
    except RuntimeError:
        return False


@WORLDS
def test_statement_57_only_the_latest_recipient_has_it(pool: Pool, world: World) -> None:
    size = world if isinstance(world, int) else len(world)
    for rank, rows in enumerate(pool.run(_recipients, world)):
        assert rows == [[rank == to] * 2 for to in [*range(size), 0]]


def _plain_dicts(group: dist.ProcessGroup, name: str) -> None:
    """The merged dict is plain's, through a file, and on into either optimizer."""
    model, zero = _pair(group, name)
    twin, plain = _plain_pair(name)
    train(model, zero, _same_data(3, name))
    train(twin, plain, _same_data(3, name))
    found = _full(zero)
    assert_same_state_dict(found, plain.state_dict())
    assert list(found) == ["state", "param_groups"] and list(found["state"]) == sorted(found["state"])
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same_state_dict(loaded, plain.state_dict())

    into_plain = _plain_pair(name, seed=1)
    into_zero = _pair(group, name, seed=1)
    into_plain[0].load_state_dict(model.state_dict())
    into_zero[0].load_state_dict(model.state_dict())
    into_plain[1].load_state_dict(loaded)
    into_zero[1].load_state_dict(plain.state_dict())
    for other, optimizer in ((twin, plain), into_plain, into_zero):
        train(other, optimizer, _same_data(3, name, start=3))
    assert_same_bits(into_plain[0].named_parameters(), twin.named_parameters())
    assert_same_bits(into_zero[0].named_parameters(), twin.named_parameters())
    assert_same_state_dict(_full(into_zero[1]), plain.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_statement_58_the_merged_dict_is_plains(pool: Pool, name: str) -> None:
    pool.run(_plain_dicts, 2, name)


@pytest.mark.parametrize("world", [1, 3, 4, OFFSET], ids=str)
@pytest.mark.parametrize("name", ["adam_amsgrad", "sgd_momentum", "adafactor"])
def test_statement_58_the_merged_dict_is_plains_in_every_world(pool: Pool, world: World, name: str) -> None:
    pool.run(_plain_dicts, world, name)


def _with_ddp(group: dist.ProcessGroup) -> None:
    case, rank = OPTIMIZERS["adamw"], dist.get_rank(group)
    twin, ddp = DDP(build(), process_group=group), DDP(build(), process_group=group)
    plain = case.optimizer(twin.parameters())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), case.kind, process_group=group, **case.options)
    for model, optimizer in ((twin, plain), (ddp, zero)):
        train(model, optimizer, batches(4, rank, 3))
    assert_same_state_dict(_full(zero), plain.state_dict())


@pytest.mark.parametrize("world", [2, 3, OFFSET], ids=str)
def test_statement_58_with_gradients_from_ddp(pool: Pool, world: World) -> None:
    pool.run(_with_ddp, world)


def _exchange_with_torch(group: dist.ProcessGroup, name: str) -> None:
    case, rank = OPTIMIZERS[name], dist.get_rank(group)
    theirs_model = build(case.model)
    theirs = TorchZeroRedundancyOptimizer(theirs_model.parameters(), case.kind, process_group=group, **case.options)
    train(theirs_model, theirs, _same_data(3, name))
    theirs.consolidate_state_dict(to=0)
    saved = _broadcast_object(theirs.state_dict() if rank == 0 else None, dist.get_global_rank(group, 0), group)

    model = build(case.model, seed=1)
    model.load_state_dict(theirs_model.state_dict())
    zero = ZeroRedundancyOptimizer(model.parameters(), case.kind, process_group=group, **case.options)
    zero.load_state_dict(copy.deepcopy(saved))
    assert_same_state_dict(_full(zero), saved)
    train(model, zero, _same_data(2, name, start=3))

    ours = ZeroRedundancyOptimizer(theirs_model.parameters(), case.kind, process_group=group, **case.options)
    ours.load_state_dict(saved)
    back = TorchZeroRedundancyOptimizer(theirs_model.parameters(), case.kind, process_group=group, **case.options)
    back.load_state_dict(_full(ours))
    train(theirs_model, back, _same_data(2, name, start=3))
    assert_same_bits(model.named_parameters(), theirs_model.named_parameters())


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum"])
@pytest.mark.parametrize("world", [2, 3], ids=str)
def test_statement_58_exchange_with_torchs_own(pool: Pool, name: str, world: int) -> None:
    pool.run(_exchange_with_torch, world, name)


def _saved(group: dist.ProcessGroup, name: str) -> tuple[dict[str, Tensor], StateDict]:
    model, zero = _pair(group, name)
    train(model, zero, _same_data(3, name))
    return dict(model.state_dict()), _full(zero)


def _continued(
    group: dist.ProcessGroup, name: str, weights: dict[str, Tensor], saved: StateDict
) -> tuple[dict[str, Tensor], StateDict]:
    model, zero = _pair(group, name, seed=2)
    model.load_state_dict(weights)
    zero.load_state_dict(saved)
    train(model, zero, _same_data(3, name, start=3))
    return dict(model.state_dict()), _full(zero)


def _uninterrupted(group: dist.ProcessGroup, name: str) -> tuple[dict[str, Tensor], StateDict]:
    model, plain = _plain_pair(name)
    train(model, plain, _same_data(6, name))
    return dict(model.state_dict()), plain.state_dict()


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "adafactor"])
def test_statement_59_saved_at_two_ranks_continued_at_any_number(pool: Pool, name: str) -> None:
    weights, saved = pool.run(_saved, 2, name)[0]
    ((whole, whole_state),) = pool.run(_uninterrupted, 1, name)
    for world in (1, 2, 3, 4, OFFSET):
        for model, state in pool.run(_continued, world, name, weights, saved):
            assert_same_bits(model, whole)
            assert_same_state_dict(state, whole_state)


def _option_values(group: dist.ProcessGroup, saved: StateDict) -> None:
    model, zero = _pair(group)
    zero.param_groups[1]["lr"] = 77.0
    zero.param_groups[0]["mine"] = "kept"
    zero.load_state_dict(saved)
    for groups in (zero.param_groups, zero.optim.param_groups):
        for found, expected in zip(groups, saved["param_groups"], strict=True):
            for key, value in expected.items():
                assert key == "params" or found[key] == value, key
    assert zero.param_groups[0]["mine"] == "kept"
    assert all(here is there for here, there in zip(zero._all_params, model.parameters(), strict=True))


def test_statement_60_options_come_from_the_dict(pool: Pool) -> None:
    model = build()
    params = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": params[:2], "extra": "from the dict"},
        {"params": params[2:], "betas": (0.5, 0.6)},
    ]
    plain = torch.optim.AdamW(groups, lr=0.25, weight_decay=0.75, amsgrad=True)
    train(model, plain, _same_data(2))
    pool.run(_option_values, 3, plain.state_dict())


# Isolation.


def _isolated(group: dist.ProcessGroup) -> None:
    model, zero = _pair(group)
    train(model, zero, _same_data(2))
    zero.consolidate_state_dict(to=0)
    found = zero.state_dict() if zero.rank == 0 else None
    before = copy.deepcopy(found)
    zero.param_groups[0]["lr"] = 0.5
    train(model, zero, _same_data(2, start=2))
    zero.consolidate_state_dict(to=zero.world_size - 1)
    if found is not None and before is not None:
        assert_same_state_dict(found, before)


@WORLDS
def test_statement_61_a_returned_dict_does_not_change(pool: Pool, world: World) -> None:
    pool.run(_isolated, world)


def _not_aliased(group: dist.ProcessGroup, saved: StateDict, twice: bool) -> None:
    before = copy.deepcopy(saved)
    pairs = [_pair(group), _pair(group)]
    for model, zero in pairs:
        for _ in range(1 + twice):
            zero.load_state_dict(saved)
        assert_same_state_dict(saved, before)
        mine = {tensor.untyped_storage().data_ptr() for tensor in _tensors(list(zero.optim.state.values()))}
        theirs = {tensor.untyped_storage().data_ptr() for tensor in _tensors(saved)}
        assert mine and mine.isdisjoint(theirs)
        train(model, zero, _same_data(2))
        assert_same_state_dict(saved, before)
    assert_same_bits(pairs[0][0].named_parameters(), pairs[1][0].named_parameters())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


@WORLDS
@pytest.mark.parametrize("twice", [False, True])
def test_statement_61_loading_neither_changes_nor_shares_the_argument(pool: Pool, world: World, twice: bool) -> None:
    model, plain = _plain_pair()
    train(model, plain, _same_data(2))
    pool.run(_not_aliased, world, plain.state_dict(), twice)


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
    model, zero = _pair(group)
    twin, twin_zero = _pair(group)
    train(model, zero, _same_data(0 if fresh else 2))
    train(twin, twin_zero, _same_data(0 if fresh else 2))
    other, plain = _plain_pair(seed=5)
    plain.param_groups[0]["lr"] = 0.125
    train(other, plain, _same_data(3))
    saved = copy.deepcopy(plain.state_dict())
    spoil(saved)
    before, state = _all_memory(zero), zero.optim.state
    with pytest.raises(ValueError):
        zero.load_state_dict(saved)
    assert zero.optim.state is state is zero.state
    assert_same_state_dict(_all_memory(zero), before)
    train(model, zero, _same_data(2, start=2))
    train(twin, twin_zero, _same_data(2, start=2))
    assert_same_bits(model.named_parameters(), twin.named_parameters())


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__.strip("_"))
def test_statement_62_a_wrong_dict_changes_nothing(pool: Pool, spoil: Callable[[StateDict], None]) -> None:
    for fresh in (False, True):
        pool.run(_refused, 2, spoil, fresh)


def test_statement_62_state_without_one_of_its_keys(pool: Pool) -> None:
    pool.run(_refused, 2, _missing_state_key, False)


def _refused_value(group: dist.ProcessGroup, value: Any) -> str:
    _, zero = _pair(group)
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
    train(model, zero, _same_data(1))
    saved = _full(zero)
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
    model, zero = _pair(group)
    train(model, zero, _same_data(2))
    saved = _full(zero)
    kept = {index: entry for index, entry in saved["state"].items() if index % 3 == 0}
    zero.load_state_dict({**saved, "state": kept})
    index_of = zero._param_to_index
    assert {index_of[param] for param in zero.state} == {
        i for i in kept if zero._param_to_rank[_param(zero, i)] == zero.rank
    }
    assert zero.state is zero.optim.state
    assert all(param is _param(zero, index_of[param]) for param in zero.state)
    assert_same_state_dict(_full(zero)["state"], kept)
    train(model, zero, _same_data(1, start=2))
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
    train(source, first, _same_data(2, kind))
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
    assert_same_state_dict(_full(zero), plain.state_dict())


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
    train(model, zero, _same_data(2))
    train(twin, plain, _same_data(2))
    saved = _full(zero)
    assert_same_state_dict(saved, plain.state_dict())
    for entry in saved["state"].values():
        entry["step"] = entry["step"].double()
    zero.load_state_dict(copy.deepcopy(saved))
    plain.load_state_dict(copy.deepcopy(saved))
    assert_same_state_dict(_full(zero), plain.state_dict())
    train(model, zero, _same_data(2, start=2))
    train(twin, plain, _same_data(2, start=2))
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
    train(source, first, _same_data(1))
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


# Names, hooks, keywords.


def _named_ids(group: dist.ProcessGroup) -> None:
    """Ids of any kind stand for positions in the groups, not for parameters in the order of the state."""
    model, zero = _pair(group)
    train(model, zero, _same_data(2))
    saved = _full(zero)
    names = [name for name, _ in model.named_parameters()]
    named = {
        "state": {names[index]: entry for index, entry in reversed(saved["state"].items())},
        "param_groups": [{**found, "params": [names[i] for i in found["params"]]} for found in saved["param_groups"]],
    }
    _, other = _pair(group)
    other.load_state_dict(state_dict=named)
    assert_same_state_dict(_full(other), saved)


def test_names_as_ids_are_matched_by_position(pool: Pool) -> None:
    pool.run(_named_ids, 3)


def _named_parameters(group: dist.ProcessGroup) -> None:
    model, twin = build(), build()
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.Adam, process_group=group)
    plain = torch.optim.Adam(twin.named_parameters())
    train(model, zero, _same_data(2))
    train(twin, plain, _same_data(2))
    saved = _full(zero)
    assert_same_state_dict(saved, plain.state_dict())
    saved["param_groups"][0]["param_names"].clear()
    assert len(zero.param_groups[0]["param_names"]) == len(list(model.parameters()))


def test_statement_58_named_parameters(pool: Pool) -> None:
    pool.run(_named_parameters, 2)


def _before_the_first_step(group: dist.ProcessGroup) -> None:
    """What a launcher does before training, on every rank."""
    model, zero = _pair(group)
    twin, plain = _plain_pair()
    found = zero.state_dict()
    assert_same_state_dict(found, plain.state_dict())
    zero.load_state_dict(found)
    assert_same_state_dict(zero.state_dict(), plain.state_dict())
    train(model, zero, _same_data(2))
    train(twin, plain, _same_data(2))
    assert_same_bits(model.named_parameters(), twin.named_parameters())
    with pytest.raises(RuntimeError, match="consolidate"):
        zero.state_dict()
    zero.consolidate_state_dict()
    zero.load_state_dict(found)  # back to the start
    assert not zero.state and not zero.optim.state
    assert_same_state_dict(zero.state_dict(), found)


@WORLDS
def test_empty_dicts_before_the_first_step(pool: Pool, world: World) -> None:
    pool.run(_before_the_first_step, world)


def _hooks(group: dist.ProcessGroup) -> None:
    model, zero = _pair(group)
    train(model, zero, _same_data(1))
    calls: list[str] = []

    def before_state_dict(optimizer: Optimizer) -> None:
        calls.append("pre state_dict")

    def after_state_dict(optimizer: Optimizer, found: StateDict) -> StateDict:
        calls.append(f"post state_dict {len(found['state'])}")
        return {**found, "note": "added"}

    def before_load(optimizer: Optimizer, found: StateDict) -> StateDict:
        calls.append("pre load")
        assert found.pop("note") == "added"
        return {**found, "state": {}}

    def after_load(optimizer: Optimizer) -> None:
        calls.append(f"post load {len(optimizer.state)}")

    zero.register_state_dict_pre_hook(before_state_dict)
    zero.register_state_dict_post_hook(after_state_dict)
    zero.register_load_state_dict_pre_hook(before_load)
    zero.register_load_state_dict_post_hook(after_load)
    found = _full(zero)
    assert found["note"] == "added" and len(found["state"]) == len(zero._all_params)
    zero.load_state_dict(found)
    assert found["note"] == "added" and found["state"]
    assert calls == ["pre state_dict", f"post state_dict {len(zero._all_params)}", "pre load", "post load 0"]


@pytest.mark.parametrize("world", [1, 2, 3], ids=str)
def test_statement_13_hooks_see_the_merged_state(pool: Pool, world: int) -> None:
    pool.run(_hooks, world)


# Odd state.


def _lbfgs(group: dist.ProcessGroup) -> None:
    """Each rank solves over its shard; its state has lists of tensors of odd shapes, and must survive the journey."""

    def run(model: nn.Module, zero: ZeroRedundancyOptimizer, steps: int) -> None:
        inputs, targets = _same_data(1)[0]
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
    saved = _full(zero)
    assert any(isinstance(value, list) and value for entry in saved["state"].values() for value in entry.values())
    loaded.load_state_dict(saved)
    copied.load_state_dict(model.state_dict())
    assert_same_state_dict(_full(loaded), saved)
    run(model, zero, 2)
    run(copied, loaded, 2)
    assert_same_bits(model.named_parameters(), copied.named_parameters())
    assert_same_state_dict(_full(loaded), _full(zero))


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
    model, zero = _pair(group, "adafactor")
    train(model, zero, _same_data(2, "adafactor"))
    saved = _full(zero)
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
    train(model, zero, _same_data(2, "adamw_convolutions"))
    saved = _full(zero)
    for index, param in enumerate(model.parameters()):
        assert saved["state"][index]["exp_avg"].stride() == param.stride()


def test_state_keeps_its_memory_format(pool: Pool) -> None:
    pool.run(_channels_last, 2)


# Releasing the copy.


def _released(group: dist.ProcessGroup, how: str) -> None:
    model, zero = _pair(group)
    train(model, zero, _same_data(1))
    for _ in range(2):
        zero.consolidate_state_dict(to=1)
        assert bool(zero._all_state_dicts) == (zero.rank == 1)
        if how == "release":
            zero.release_state_dict()
        elif how == "clear":
            zero._all_state_dicts.clear()
        else:
            zero._all_state_dicts = []
        assert isinstance(zero._all_state_dicts, list) and len(zero._all_state_dicts) == 0
        with pytest.raises(RuntimeError, match="consolidate"):
            zero.state_dict()
    assert len(_full(zero)["state"]) == len(zero._all_params)


@pytest.mark.parametrize("how", ["release", "clear", "assign"])
def test_statement_66_the_copy_can_be_released(pool: Pool, how: str) -> None:
    pool.run(_released, 2, how)


def _outside(group: dist.ProcessGroup, to: Any) -> None:
    model, zero = _pair(group)
    train(model, zero, _same_data(1))
    zero.consolidate_state_dict(to=0)
    rank, kept = zero.rank, list(zero._all_state_dicts)
    if rank == 0:  # alone: nobody needs to answer
        with pytest.raises(ValueError, match="rank of the group"):
            zero.consolidate_state_dict(to=to)
    assert len(zero._all_state_dicts) == len(kept)
    with pytest.raises(ValueError, match="rank of the group"):
        zero.consolidate_state_dict(to=to)


@pytest.mark.parametrize("to", [-1, 2, 99, "0", None, 0.0], ids=repr)
def test_statement_70_a_recipient_outside_the_group(pool: Pool, to: Any) -> None:
    pool.run(_outside, 2, to)


def _different_recipients(group: dist.ProcessGroup) -> str:
    model, zero = _pair(group)
    train(model, zero, _same_data(1))
    with pytest.raises(ValueError) as caught:
        zero.consolidate_state_dict(to=zero.rank)
    zero.consolidate_state_dict(to=0)
    return str(caught.value)


def test_statement_72_ranks_that_disagree_on_the_recipient(pool: Pool) -> None:
    for message in pool.run(_different_recipients, 3):
        assert "rank 0" in message and "rank 1" in message


# Values from one rank to all.


def _value() -> Any:
    return {
        "tensors": [torch.arange(6.0).view(2, 3), (torch.tensor(3, dtype=torch.int64), torch.zeros(0, 4))],
        "strange": {3: torch.ones(3, 4).t(), (1, "a"): torch.tensor([True, False]), None: 1 + 2j},
        "plain": [1, -(2**70), 0.1, float("inf"), "text \u2603", None, True, (), [], {}],
        "low": torch.randn(5, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "dtype": torch.float16,
        "strided": torch.arange(20)[::3],
        "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last) * 0 + 7,
    }


def _broadcast(group: dist.ProcessGroup, value: Any, source: int) -> None:
    here = dist.get_rank(group) == source
    world_rank = dist.get_global_rank(group, source)
    found = _broadcast_object(value if here else "ignored", world_rank, group, torch.device("cpu"))
    if here:
        assert found is value
    _assert_equal(found, value)
    assert all(tensor.device.type == "cpu" and not tensor.requires_grad for tensor in _tensors(found) if not here)


def _assert_equal(a: Any, b: Any) -> None:
    if isinstance(b, float) and math.isnan(b):
        assert math.isnan(a)
    elif isinstance(b, dict):
        assert type(a) is dict and list(a) == list(b)
        for key in b:
            _assert_equal(a[key], b[key])
    else:
        assert_same_state_dict({"value": a}, {"value": b})


@pytest.mark.parametrize("world", [1, 2, 3, OFFSET], ids=str)
@pytest.mark.parametrize(
    "value",
    [{}, [], (), None, 5, "word", True, torch.tensor(2.5), [torch.zeros(0)], [{}, ({"a": [torch.ones(2)]},)], _value()],
    ids=["dict", "list", "tuple", "none", "int", "text", "bool", "scalar", "no elements", "nested", "everything"],
)
def test_statement_68_broadcast_object(pool: Pool, world: World, value: Any) -> None:
    size = world if isinstance(world, int) else len(world)
    for source in range(size):
        pool.run(_broadcast, world, value, source)


def _broadcast_meta(group: dist.ProcessGroup) -> None:
    here = dist.get_rank(group) == 0
    found = _broadcast_object({"a": nn.Parameter(torch.ones(3))} if here else None, 0, group, "cpu")
    assert torch.equal(found["a"].detach(), torch.ones(3)) and (here or type(found["a"]) is Tensor)


def test_statement_68_the_device_may_be_text(pool: Pool) -> None:
    pool.run(_broadcast_meta, 2)


class _Own:
    """A type of the user's."""


def _unsupported(group: dist.ProcessGroup, kind: str, source: int) -> str:
    values: dict[str, Callable[[], Any]] = {
        "own": lambda: {"x": [_Own()]},
        "set": lambda: {1, 2},
        "bytes": lambda: b"abc",
        "function": lambda: print,
        "sparse": lambda: torch.eye(3).to_sparse(),
        "subclass": lambda: nn.Buffer(torch.ones(2)).as_subclass(_Subclass),
        "key": lambda: {_Own(): 1},
        "device": lambda: torch.device("cpu"),
    }
    here = dist.get_rank(group) == source
    world_rank = dist.get_global_rank(group, source)
    with pytest.raises(TypeError) as caught:
        _broadcast_object(values[kind]() if here else None, world_rank, group)
    assert _broadcast_object("fine" if here else None, world_rank, group) == "fine"
    return str(caught.value)


class _Subclass(Tensor):
    """Carries what no other rank would know."""


@pytest.mark.parametrize("kind", ["own", "set", "bytes", "function", "sparse", "subclass", "key", "device"])
def test_statement_68_a_value_that_cannot_travel_is_an_error_everywhere(pool: Pool, kind: str) -> None:
    for world in (2, OFFSET):
        for message in pool.run(_unsupported, world, kind, 1):
            assert "cannot travel" in message


def _unsupported_state(group: dist.ProcessGroup) -> str:
    model, zero = _pair(group)
    train(model, zero, _same_data(1))
    if zero.rank == 1:
        next(iter(zero.optim.state.values()))["mine"] = _Own()
    with pytest.raises(TypeError) as caught:
        zero.consolidate_state_dict()
    return str(caught.value)


def test_statement_72_state_that_cannot_travel_is_an_error_everywhere(pool: Pool) -> None:
    for message in pool.run(_unsupported_state, 3):
        assert "_Own" in message and "mine" in message
