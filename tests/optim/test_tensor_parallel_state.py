"""State of DTensor parameters: what torch.optim on the same DTensors has, loaded from anywhere, of both classes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Muon

from tests.helpers.meshes import (
    Net,
    Place,
    average,
    batches,
    build,
    local_of,
    loss_of,
    place,
    sequence_parallel,
    tensor_parallel,
    train_plain,
    whole,
)
from tests.helpers.pool import Pool
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer

STEPS = 3
OPTIONS: dict[Any, dict[str, Any]] = {
    AdamW: {"lr": 0.01, "weight_decay": 0.1},
    SGD: {"lr": 0.05, "momentum": 0.9},
    Muon: {"lr": 0.02},
}
STYLES = {"tp": tensor_parallel, "sp": sequence_parallel}


def _params(model: nn.Module, kind: Any) -> list[Tensor]:
    return [param for param in model.parameters() if kind is not Muon or param.dim() == 2]


def _ours(way: str, model: nn.Module, kind: Any, here: Place) -> Any:
    if way == "sharded":
        return ShardedOptimizer(model, kind, _params(model, kind), process_group=here.dp, **OPTIONS[kind])
    return ZeroRedundancyOptimizer(
        _params(model, kind),
        kind,
        process_group=here.dp.get_group(),
        parameters_as_bucket_view=way == "views",
        **OPTIONS[kind],
    )


def _train(here: Place, model: nn.Module, optimizer: Any, data: Any) -> None:
    if isinstance(optimizer, ShardedOptimizer):
        for batch in data:
            model.zero_grad()
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    else:
        train_plain(here, model, optimizer, data)


def _assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    assert type(ours) is type(theirs), where
    if isinstance(ours, DTensor):
        assert (ours.placements, ours.device_mesh, ours.shape) == (theirs.placements, theirs.device_mesh, theirs.shape)
    if isinstance(ours, Tensor):
        assert torch.equal(local_of(ours), local_of(theirs)), where
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        for key, value in ours.items():
            _assert_same(value, theirs[key], f"{where}.{key}")
    else:
        assert ours == theirs, where


def _consolidated(here: Place, optimizer: Any) -> dict[str, Any]:
    """The whole state, on the ranks of the last replica."""
    optimizer.consolidate_state_dict(to=here.dp.size() - 1)
    return optimizer.state_dict() if here.replica == here.dp.size() - 1 else {}


def _all_as_torch(group: ProcessGroup, way: str, kinds: list[Any]) -> None:
    here = place(2, 2)
    for kind in kinds:
        for styles in STYLES:
            _as_torch(here, way, kind, styles)


def _as_torch(here: Place, way: str, kind: Any, styles: str) -> None:
    model, plain = build(here, STYLES[styles]), build(here, STYLES[styles])
    optimizer, theirs = _ours(way, model, kind, here), kind(_params(plain, kind), **OPTIONS[kind])
    data = batches(here, STEPS)
    _train(here, model, optimizer, data)
    train_plain(here, plain, theirs, data)
    for mine, their in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local_of(mine), local_of(their))
    found = _consolidated(here, optimizer)
    if found:
        expected = theirs.state_dict()["state"]
        assert list(found["state"]) == list(expected)
        for index, entry in expected.items():
            for key, value in entry.items():
                _assert_same(found["state"][index][key], value, f"{index}.{key}")


WAYS = ["sharded", "drop-in", "views"]


@pytest.mark.parametrize("way", WAYS)
def test_numbers_and_state_are_those_of_torch(pool: Pool, way: str) -> None:
    pool.run(_all_as_torch, 4, way, [AdamW, SGD, Muon])


def _all_reloaded(group: ProcessGroup, way: str, source: str) -> None:
    here = place(2, 2)
    for kind in (AdamW, Muon):
        _reloaded(here, way, source, kind)


def _reloaded(here: Place, way: str, source: str, kind: Any) -> None:
    """Train, save, load into a new optimizer, and go on as if nothing had happened."""
    data = batches(here, 2 * STEPS)
    model, plain = build(here), build(here)
    theirs = kind(_params(plain, kind), **OPTIONS[kind])
    train_plain(here, plain, theirs, data[:STEPS])
    for mine, their in zip(model.parameters(), plain.parameters(), strict=True):
        local_of(mine).copy_(local_of(their))
    optimizer = _ours(way, model, kind, here)
    if source == "dtensors":
        state = theirs.state_dict()
    elif source == "whole":
        state = theirs.state_dict()
        entries = {
            index: {key: whole(value) for key, value in entry.items()} for index, entry in state["state"].items()
        }
        state = {**state, "state": entries}
    else:
        other = build(here)
        saved = _ours("drop-in" if way == "sharded" else "sharded", other, kind, here)
        _train(here, other, saved, data[:STEPS])
        saved.consolidate_state_dict(to=0)
        # Each tp coordinate has blocks of its own, which the other replicas get over the dp dimension.
        state = _sent(here, saved.state_dict() if here.replica == 0 else None)
    optimizer.load_state_dict(state)
    _train(here, model, optimizer, data[STEPS:])
    train_plain(here, plain, theirs, data[STEPS:])
    for mine, their in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(local_of(mine), local_of(their))


def _sent(here: Place, state: Any) -> Any:
    """A state dict from the first replica to the others, without its meshes."""
    wholes = None
    if state is not None:
        entries = {i: {key: whole(value) for key, value in entry.items()} for i, entry in state["state"].items()}
        wholes = {**state, "state": entries}
    box = [wholes]
    dist.broadcast_object_list(box, group_src=0, group=here.dp.get_group())
    return box[0]


@pytest.mark.parametrize("source", ["dtensors", "whole", "ours"])
@pytest.mark.parametrize("way", ["sharded", "drop-in"])
def test_a_state_dict_is_loaded_whatever_it_comes_from(pool: Pool, way: str, source: str) -> None:
    pool.run(_all_reloaded, 4, way, source)


def _into_plain(group: ProcessGroup, way: str) -> None:
    """State with DTensors, loaded where parameters are ordinary tensors."""
    here, alone = place(2, 2), place(4, 1)
    data = batches(here, STEPS)
    model = build(here)
    optimizer = _ours("sharded", model, AdamW, here)
    _train(here, model, optimizer, data)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if here.replica == 0 else None
    state = _sent(here, state)
    torch.manual_seed(0)
    other = Net()
    fresh = _ours(way, other, AdamW, alone)
    fresh.load_state_dict(state)
    fresh.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        for index, entry in fresh.state_dict()["state"].items():
            assert torch.equal(entry["exp_avg"], state["state"][index]["exp_avg"])


@pytest.mark.parametrize("way", ["sharded", "drop-in"])
def test_state_of_dtensors_is_loaded_into_ordinary_parameters(pool: Pool, way: str) -> None:
    pool.run(_into_plain, 4, way)


def _audited(group: ProcessGroup, way: str) -> None:
    here = place(2, 2)
    model = build(here)
    optimizer = _ours(way, model, AdamW, here)
    _train(here, model, optimizer, batches(here, 1))
    optimizer.audit()
    if here.replica == 1 and here.tp.get_local_rank() == 1:
        local_of(model.up.weight)[0, 0] += 1.0
    if here.tp.get_local_rank() == 1:
        with pytest.raises(RuntimeError, match=r"param\.3"):
            optimizer.audit()
    else:
        optimizer.audit()


@pytest.mark.parametrize("way", ["sharded", "drop-in"])
def test_an_audit_compares_what_each_rank_holds(pool: Pool, way: str) -> None:
    pool.run(_audited, 4, way)


def _refused(group: ProcessGroup) -> None:
    here = place(2, 2)
    model = build(here)
    with pytest.raises(ValueError, match="overlap_with_ddp=True cannot be used with"):
        ZeroRedundancyOptimizer(
            model.parameters(), AdamW, process_group=here.dp.get_group(), overlap_with_ddp=True, lr=0.1
        )
    with pytest.raises(ValueError, match="among which this optimizer divides its state, too"):
        ZeroRedundancyOptimizer(model.parameters(), AdamW, process_group=here.tp.get_group(), lr=0.1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, process_group=here.dp.get_group(), lr=0.1)
    average(here, list(model.parameters()))
    assert optimizer.world_size == 2


def test_the_drop_in_refuses_what_it_cannot_do(pool: Pool) -> None:
    pool.run(_refused, 4)
