"""Checkpoints of experts: groups with their own ranks, saved by one set of ranks and loaded by others."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Module, Parameter
from torch.optim import AdamW

import zerostep
from tests.helpers.experts import ALONE, PAIRS, Mixture, loss, ours, own_group
from tests.helpers.pool import Pool
from zerostep import ShardedOptimizer
from zerostep.comm.model_ranks import ModelRanks
from zerostep.comm.transport import NullTransport

LR: dict[str, Any] = {"lr": 0.01}
STEPS = 3

State = dict[str, dict[str, Tensor]]


def _train(model: Mixture, optimizer: ShardedOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, dist.get_rank(), (True, True)).backward()
        optimizer.step()


def _state(optimizer: ShardedOptimizer, group: ProcessGroup) -> State:
    """The whole state of what each rank has, by name, on every rank."""
    mine: State = {}
    for rank in range(dist.get_world_size(group)):
        optimizer.consolidate_state_dict(to=rank)
        if rank == dist.get_rank(group):
            found = optimizer.state_dict()
            names = [name for group in found["param_groups"] for name in group["param_names"]]
            mine = {names[number]: dict(entry) for number, entry in found["state"].items()}
    return mine


def _assert_same(found: State, expected: State) -> None:
    assert list(found) == list(expected)
    for name, entry in expected.items():
        for key, value in entry.items():
            assert torch.equal(found[name][key], value), f"{name}.{key}"


def _saved_and_loaded(group: ProcessGroup, path: Path, wait: bool) -> None:
    own, number = own_group(PAIRS)
    model = Mixture(number, seed=number)
    optimizer = ours(group, own, model, AdamW, LR, gather="forward")
    _train(model, optimizer, range(STEPS))
    pending = zerostep.save(path, optimizer, model, wait=wait)
    expected, weights = _state(optimizer, group), {name: p.detach().clone() for name, p in model.named_parameters()}
    if pending is not None:
        pending.wait()
    _train(model, optimizer, range(STEPS, 2 * STEPS))
    other = Mixture(number, seed=50 + dist.get_rank())
    fresh = ours(group, own, other, AdamW, LR)
    assert zerostep.load(path, fresh, other).step == STEPS
    _assert_same(_state(fresh, group), expected)
    for name, param in other.named_parameters():
        assert torch.equal(param, weights[name]), name
    _train(other, fresh, range(STEPS, 2 * STEPS))
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "in the background"])
def test_experts_go_on_where_they_were(pool: Pool, tmp_path: Path, wait: bool) -> None:
    pool.run(_saved_and_loaded, 4, tmp_path / "saved", wait)


class _All(Module):
    """The same layers, and all experts on every rank."""

    def __init__(self) -> None:
        super().__init__()
        one, two = Mixture(0, seed=0), Mixture(1, seed=1)
        self.first, self.middle, self.last = one.first, one.middle, one.last
        self.experts = one.experts
        self.experts.update(dict(two.experts.items()))


def _on_other_ranks(group: ProcessGroup, path: Path) -> None:
    own, number = own_group(PAIRS)
    model = Mixture(number, seed=number)
    optimizer = ours(group, own, model, AdamW, LR)
    _train(model, optimizer, range(STEPS))
    zerostep.save(path, optimizer, model)
    expected = _state(optimizer, group)
    whole = _All()
    shared = [each for each in whole.named_parameters() if "experts" not in each[0]]
    experts = [each for each in whole.named_parameters() if "experts" in each[0]]
    fresh = ShardedOptimizer(whole, AdamW, [{"params": shared}, {"params": experts}], process_group=group, **LR)
    zerostep.load(path, fresh, whole)
    found = _state(fresh, group)
    for name, entry in expected.items():
        for key, value in entry.items():
            assert torch.equal(found[name][key], value), f"{name}.{key}"
    own_weights = dict(model.named_parameters())
    for name, param in whole.named_parameters():
        assert name not in own_weights or torch.equal(param, own_weights[name])


def test_experts_saved_by_pairs_are_loaded_by_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(_on_other_ranks, 4, tmp_path / "saved")


def _missed(group: ProcessGroup, path: Path) -> None:
    own, number = own_group(PAIRS)
    optimizer = ours(group, own, model := Mixture(number, seed=number), AdamW, LR)
    _train(model, optimizer, range(1))
    zerostep.save(path, optimizer, model)
    few = Mixture(0, seed=0)
    groups = [{"params": few.shared}, {"params": few.own}]
    fresh = ShardedOptimizer(few, AdamW, groups, process_group=group, **LR)
    with pytest.raises(zerostep.CheckpointError, match=r"the checkpoint has parameter 'experts\.early1"):
        zerostep.load(path, fresh, few)


def test_an_expert_that_no_rank_has_is_missed(pool: Pool, tmp_path: Path) -> None:
    pool.run(_missed, 4, tmp_path / "saved")


def test_a_world_of_one_needs_no_messages() -> None:
    control = NullTransport()
    assert ModelRanks(control).transport([torch.ones(2)]) is control


def _equal_names(group: ProcessGroup, path: Path) -> None:
    """Experts of different values under one name: whichever was kept, the others would be lost."""
    own, number = own_group(ALONE)
    model = Mixture(0, seed=number)
    optimizer = ours(group, own, model, AdamW, LR)
    _train(model, optimizer, range(1))
    with pytest.raises(zerostep.CheckpointError, match="give every expert a name"):
        zerostep.save(path, optimizer, model)
    assert not path.exists()
    _train(model, optimizer, range(1, 2))  # nothing is broken


def test_experts_with_equal_names_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(_equal_names, 4, tmp_path / "saved")


class _Stacked(Module):
    """All experts as one DTensor, divided over the ep dimension."""

    def __init__(self, ep: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.shared = Parameter(torch.randn(4, 4))
        self.experts = Parameter(distribute_tensor(torch.randn(4, 4, 4), ep, [Shard(0)]))

    def forward(self, inputs: Tensor) -> Tensor:
        experts: Any = self.experts
        return (inputs @ self.shared).tanh() @ experts.to_local().sum(0)


def _stacked(group: ProcessGroup, path: Path) -> None:
    def built(edp: int, ep: int) -> tuple[_Stacked, ShardedOptimizer]:
        mesh = init_device_mesh("cpu", (edp, ep), mesh_dim_names=("edp", "ep"))
        model = _Stacked(mesh["ep"])
        groups = [
            {"params": [("shared", model.shared)]},
            {"params": [("experts", model.experts)], "process_group": mesh["edp"]},
        ]
        return model, ShardedOptimizer(model, AdamW, groups, process_group=group, **LR)

    model, optimizer = built(2, 2)
    for step in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(3, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    zerostep.save(path, optimizer, model)
    for shape in ((4, 1), (1, 4), (2, 2)):
        other, fresh = built(*shape)
        zerostep.load(path, fresh, other)
        pairs = [(model.experts, other.experts), (model.shared, other.shared)]
        for old, new in pairs:
            assert torch.equal(*(each.full_tensor() if isinstance(each, DTensor) else each for each in (old, new)))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(_moment(optimizer, key, group), _moment(fresh, key, group)), (shape, key)


def _moment(optimizer: ShardedOptimizer, key: str, group: ProcessGroup) -> Tensor:
    """A value of the experts' state, whole."""
    for rank in range(dist.get_world_size(group)):
        optimizer.consolidate_state_dict(to=rank)
        if rank == dist.get_rank(group):
            found = optimizer.state_dict()["state"][1][key]
    return found.full_tensor()


def test_stacked_experts_cross_meshes(pool: Pool, tmp_path: Path) -> None:
    pool.run(_stacked, 4, tmp_path / "saved")
