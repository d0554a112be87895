"""Consolidation and state dicts of `ZeroRedundancyOptimizer`, compared with the plain optimizer."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from tests.helpers.pool import OFFSET, Pool
from tests.helpers.reference import OPTIMIZERS, assert_same_bits, assert_same_state_dict, batches, build, train
from tests.helpers.zero_state_dicts import (
    WORLDS,
    StateDict,
    World,
    full_state_dict,
    plain_pair,
    same_data,
    tensors_in,
    zero_pair,
)
from zerostep import ZeroRedundancyOptimizer
from zerostep.optim.zero import _broadcast_object

# Who holds what.


def _recipients(group: dist.ProcessGroup) -> list[list[bool]]:
    model, zero = zero_pair(group)
    train(model, zero, same_data(1))
    rows = []
    for to in [*range(zero.world_size), 0]:
        assert zero.consolidate_state_dict(to=to) is None
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
    model, zero = zero_pair(group, name)
    twin, plain = plain_pair(name)
    train(model, zero, same_data(3, name))
    train(twin, plain, same_data(3, name))
    found = full_state_dict(zero)
    assert_same_state_dict(found, plain.state_dict())
    assert list(found) == ["state", "param_groups"] and list(found["state"]) == sorted(found["state"])
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same_state_dict(loaded, plain.state_dict())

    into_plain = plain_pair(name, seed=1)
    into_zero = zero_pair(group, name, seed=1)
    into_plain[0].load_state_dict(model.state_dict())
    into_zero[0].load_state_dict(model.state_dict())
    into_plain[1].load_state_dict(loaded)
    into_zero[1].load_state_dict(plain.state_dict())
    for other, optimizer in ((twin, plain), into_plain, into_zero):
        train(other, optimizer, same_data(3, name, start=3))
    assert_same_bits(into_plain[0].named_parameters(), twin.named_parameters())
    assert_same_bits(into_zero[0].named_parameters(), twin.named_parameters())
    assert_same_state_dict(full_state_dict(into_zero[1]), plain.state_dict())


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
    assert_same_state_dict(full_state_dict(zero), plain.state_dict())


@pytest.mark.parametrize("world", [2, 3, OFFSET], ids=str)
def test_statement_58_with_gradients_from_ddp(pool: Pool, world: World) -> None:
    pool.run(_with_ddp, world)


def _exchange_with_torch(group: dist.ProcessGroup, name: str) -> None:
    case, rank = OPTIMIZERS[name], dist.get_rank(group)
    theirs_model = build(case.model)
    theirs = TorchZeroRedundancyOptimizer(theirs_model.parameters(), case.kind, process_group=group, **case.options)
    train(theirs_model, theirs, same_data(3, name))
    theirs.consolidate_state_dict(to=0)
    saved = _broadcast_object(theirs.state_dict() if rank == 0 else None, dist.get_global_rank(group, 0), group)

    model = build(case.model, seed=1)
    model.load_state_dict(theirs_model.state_dict())
    zero = ZeroRedundancyOptimizer(model.parameters(), case.kind, process_group=group, **case.options)
    zero.load_state_dict(copy.deepcopy(saved))
    assert_same_state_dict(full_state_dict(zero), saved)
    train(model, zero, same_data(2, name, start=3))

    ours = ZeroRedundancyOptimizer(theirs_model.parameters(), case.kind, process_group=group, **case.options)
    ours.load_state_dict(saved)
    back = TorchZeroRedundancyOptimizer(theirs_model.parameters(), case.kind, process_group=group, **case.options)
    back.load_state_dict(full_state_dict(ours))
    train(theirs_model, back, same_data(2, name, start=3))
    assert_same_bits(model.named_parameters(), theirs_model.named_parameters())


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum"])
@pytest.mark.parametrize("world", [2, 3], ids=str)
def test_statement_58_exchange_with_torchs_own(pool: Pool, name: str, world: int) -> None:
    pool.run(_exchange_with_torch, world, name)


def _saved(group: dist.ProcessGroup, name: str) -> tuple[dict[str, Tensor], StateDict]:
    model, zero = zero_pair(group, name)
    train(model, zero, same_data(3, name))
    return dict(model.state_dict()), full_state_dict(zero)


def _continued(
    group: dist.ProcessGroup, name: str, weights: dict[str, Tensor], saved: StateDict
) -> tuple[dict[str, Tensor], StateDict]:
    model, zero = zero_pair(group, name, seed=2)
    model.load_state_dict(weights)
    zero.load_state_dict(saved)
    train(model, zero, same_data(3, name, start=3))
    return dict(model.state_dict()), full_state_dict(zero)


def _uninterrupted(group: dist.ProcessGroup, name: str) -> tuple[dict[str, Tensor], StateDict]:
    model, plain = plain_pair(name)
    train(model, plain, same_data(6, name))
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
    model, zero = zero_pair(group)
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
    train(model, plain, same_data(2))
    pool.run(_option_values, 3, plain.state_dict())


# Isolation.


def _isolated(group: dist.ProcessGroup) -> None:
    model, zero = zero_pair(group)
    train(model, zero, same_data(2))
    zero.consolidate_state_dict(to=0)
    found = zero.state_dict() if zero.rank == 0 else None
    before = copy.deepcopy(found)
    zero.param_groups[0]["lr"] = 0.5
    train(model, zero, same_data(2, start=2))
    zero.consolidate_state_dict(to=zero.world_size - 1)
    if found is not None and before is not None:
        assert_same_state_dict(found, before)


@WORLDS
def test_statement_61_a_returned_dict_does_not_change(pool: Pool, world: World) -> None:
    pool.run(_isolated, world)


def _not_aliased(group: dist.ProcessGroup, saved: StateDict, twice: bool) -> None:
    before = copy.deepcopy(saved)
    pairs = [zero_pair(group), zero_pair(group)]
    for model, zero in pairs:
        for _ in range(1 + twice):
            zero.load_state_dict(saved)
        assert_same_state_dict(saved, before)
        mine = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(list(zero.optim.state.values()))}
        theirs = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(saved)}
        assert mine and mine.isdisjoint(theirs)
        train(model, zero, same_data(2))
        assert_same_state_dict(saved, before)
    assert_same_bits(pairs[0][0].named_parameters(), pairs[1][0].named_parameters())


@WORLDS
@pytest.mark.parametrize("twice", [False, True])
def test_statement_61_loading_neither_changes_nor_shares_the_argument(pool: Pool, world: World, twice: bool) -> None:
    model, plain = plain_pair()
    train(model, plain, same_data(2))
    pool.run(_not_aliased, world, plain.state_dict(), twice)


# Names, hooks, keywords.


def _named_ids(group: dist.ProcessGroup) -> None:
    """Ids of any kind stand for positions in the groups, not for parameters in the order of the state."""
    model, zero = zero_pair(group)
    train(model, zero, same_data(2))
    saved = full_state_dict(zero)
    names = [name for name, _ in model.named_parameters()]
    named = {
        "state": {names[index]: entry for index, entry in reversed(saved["state"].items())},
        "param_groups": [{**found, "params": [names[i] for i in found["params"]]} for found in saved["param_groups"]],
    }
    _, other = zero_pair(group)
    other.load_state_dict(state_dict=named)
    assert_same_state_dict(full_state_dict(other), saved)


def test_names_as_ids_are_matched_by_position(pool: Pool) -> None:
    pool.run(_named_ids, 3)


def _named_parameters(group: dist.ProcessGroup) -> None:
    model, twin = build(), build()
    zero = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.Adam, process_group=group)
    plain = torch.optim.Adam(twin.named_parameters())
    train(model, zero, same_data(2))
    train(twin, plain, same_data(2))
    saved = full_state_dict(zero)
    assert_same_state_dict(saved, plain.state_dict())
    saved["param_groups"][0]["param_names"].clear()
    assert len(zero.param_groups[0]["param_names"]) == len(list(model.parameters()))


def test_statement_58_named_parameters(pool: Pool) -> None:
    pool.run(_named_parameters, 2)


def _before_the_first_step(group: dist.ProcessGroup) -> None:
    """What a launcher does before training, on every rank."""
    model, zero = zero_pair(group)
    twin, plain = plain_pair()
    found = zero.state_dict()
    assert_same_state_dict(found, plain.state_dict())
    zero.load_state_dict(found)
    assert_same_state_dict(zero.state_dict(), plain.state_dict())
    train(model, zero, same_data(2))
    train(twin, plain, same_data(2))
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
    model, zero = zero_pair(group)
    train(model, zero, same_data(1))
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
    found = full_state_dict(zero)
    assert found["note"] == "added" and len(found["state"]) == len(zero._all_params)
    zero.load_state_dict(found)
    assert found["note"] == "added" and found["state"]
    assert calls == ["pre state_dict", f"post state_dict {len(zero._all_params)}", "pre load", "post load 0"]


@pytest.mark.parametrize("world", [1, 2, 3], ids=str)
def test_statement_13_hooks_see_the_merged_state(pool: Pool, world: int) -> None:
    pool.run(_hooks, world)


# Releasing the copy.


def _released(group: dist.ProcessGroup, how: str) -> None:
    model, zero = zero_pair(group)
    train(model, zero, same_data(1))
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
    assert len(full_state_dict(zero)["state"]) == len(zero._all_params)


@pytest.mark.parametrize("how", ["release", "clear", "assign"])
def test_statement_66_the_copy_can_be_released(pool: Pool, how: str) -> None:
    pool.run(_released, 2, how)


def _outside(group: dist.ProcessGroup, to: Any) -> None:
    model, zero = zero_pair(group)
    train(model, zero, same_data(1))
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
    model, zero = zero_pair(group)
    train(model, zero, same_data(1))
    with pytest.raises(ValueError) as caught:
        zero.consolidate_state_dict(to=zero.rank)
    zero.consolidate_state_dict(to=0)
    return str(caught.value)


def test_statement_72_ranks_that_disagree_on_the_recipient(pool: Pool) -> None:
    for message in pool.run(_different_recipients, 3):
        assert "rank 0" in message and "rank 1" in message
