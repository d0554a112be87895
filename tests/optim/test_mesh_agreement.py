"""Meshes beside the ranks of an optimizer: what is counted once, what all ranks must agree on, what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD, AdamW, Muon

from tests.helpers.meshes import Place, batches, build, loss_of, place, train_plain
from tests.helpers.pool import Pool
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer


class _Experts(nn.Module):
    """An ordinary parameter, and experts on a mesh; all gradients are ones."""

    def __init__(self, mesh: Any, placements: list[Any]) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.zeros(4))
        self.experts = nn.Parameter(distribute_tensor(torch.zeros(8), mesh, placements))

    def forward(self) -> Tensor:
        experts: Any = self.experts
        return self.shared.sum() + 4.0 * experts.to_local().sum()  # one loss on each of four ranks


def _counted(group: ProcessGroup, placement: Any, orders: dict[float, float]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    model = _Experts(mesh["ep"], [placement])
    groups = [
        {"params": [("shared", model.shared)]},
        {"params": [("experts", model.experts)], "process_group": mesh["edp"]},
    ]
    optimizer = ShardedOptimizer(model, SGD, groups, process_group=group, lr=1.0)
    model().backward()
    for order, expected in orders.items():
        assert float(optimizer.grad_norm(order)) == pytest.approx(expected), order
    with pytest.raises(ValueError, match="use a positive order"):
        optimizer.grad_norm(0.0)


# Four elements with a gradient of 1 each, and eight with the sum of two ranks, 4 each, over 4 losses: 2.
SHARDED = {1.0: 20.0, 2.0: 6.0, float("inf"): 2.0, float("-inf"): 1.0}


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_experts_on_a_mesh_inside_the_ranks_count_once(pool: Pool, placement: Any) -> None:
    pool.run(_counted, 4, placement, SHARDED)


def _partly(group: ProcessGroup) -> None:
    here = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ep", "one"))
    model = _Experts(alone["ep"], [Shard(0)])
    groups = [
        {"params": [("shared", model.shared)]},
        {"params": [("experts", model.experts)], "process_group": alone["one"]},
    ]
    with pytest.raises(ValueError, match="some of which belong to this optimizer and some do not"):
        ShardedOptimizer(model, SGD, groups, process_group=here["dp"], lr=1.0)


def test_a_mesh_that_lies_partly_inside_the_ranks_is_refused(pool: Pool) -> None:
    pool.run(_partly, 4)


def _own_sizes(group: ProcessGroup) -> None:
    here = place(2, 2)
    rank = here.tp.get_local_rank()
    local = torch.ones(1 if rank == 0 else 3)
    model = nn.Module()
    model.odd = nn.Parameter(
        DTensor.from_local(local, here.tp, [Shard(0)], run_check=False, shape=torch.Size((4,)), stride=(1,))
    )
    with pytest.raises(ValueError, match="where torch would divide it into"):
        ShardedOptimizer(model, SGD, process_group=here.dp, lr=1.0)


def test_parts_that_torch_would_not_make_are_refused(pool: Pool) -> None:
    pool.run(_own_sizes, 4)


def _added(group: ProcessGroup) -> None:
    """One rank adds another group than its peers: the ranks that hold other blocks raise with them, and all go on."""
    here = place(2, 2)
    model = build(here)
    later = nn.Linear(4, 4)
    later.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), here.tp, [Shard(0)]))
    optimizer = ShardedOptimizer(model, SGD, process_group=here.dp, lr=0.1)
    model.later = later
    wrong = here.replica == 1 and here.tp.get_local_rank() == 1
    with pytest.raises(ValueError, match=r"the options of group 1|no rank goes on"):
        optimizer.add_param_group({"params": list(later.named_parameters()), "lr": 0.5 if wrong else 0.2})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": list(later.named_parameters()), "lr": 0.2})
    loss_of(model, batches(here, 1)[0]).backward()
    optimizer.step()


def test_a_further_group_is_agreed_on_by_the_whole_mesh(pool: Pool) -> None:
    pool.run(_added, 4)


def _whole_matrices(group: ProcessGroup) -> None:
    here = place(2, 2)
    model = nn.Module()
    model.even = nn.Parameter(distribute_tensor(torch.ones(4, 4), here.tp, [Shard(0)]))
    model.odd = nn.Parameter(distribute_tensor(torch.ones(3, 4), here.tp, [Shard(0)]))
    with pytest.raises(ValueError, match="let it divide such parameters evenly"):
        ShardedOptimizer(model, Muon, process_group=here.dp, lr=0.1)
    optimizer = ShardedOptimizer(model, Muon, [("even", model.even)], process_group=here.dp, lr=0.1)
    with pytest.raises(ValueError, match="let it divide such parameters evenly"):
        optimizer.add_param_group({"params": [("odd", model.odd)]})
    other = nn.Module()
    other.even = nn.Parameter(distribute_tensor(torch.ones(4, 4), here.tp, [Shard(0)]))
    with pytest.raises(ValueError, match="that its model does not hold"):
        ShardedOptimizer(other, Muon, [("odd", model.odd)], process_group=here.dp, lr=0.1)


def test_matrices_that_are_updated_whole_are_divided_evenly(pool: Pool) -> None:
    pool.run(_whole_matrices, 4)


def _other_ranks(group: ProcessGroup) -> None:
    """Ranks of one column give an expert other ranks than each other: all ranks raise."""
    here = place(2, 2)
    pairs, alone = here.dp, init_device_mesh("cpu", (4, 1), mesh_dim_names=("all", "one"))["one"]
    model = build(here)
    experts = nn.Linear(2, 2)
    model.experts = experts
    own = alone if dist.get_rank() == 3 else pairs
    named = [each for each in model.named_parameters() if "experts" not in each[0]]
    groups = [{"params": named}, {"params": list(experts.named_parameters()), "process_group": own}]
    with pytest.raises(ValueError, match=r"process_group|no rank goes on"):
        ShardedOptimizer(model, SGD, groups, process_group=here.dp, lr=0.1)


def test_experts_with_other_ranks_in_one_column_are_refused_by_all(pool: Pool) -> None:
    pool.run(_other_ranks, 4)


def _drop_in(group: ProcessGroup) -> None:
    here: Place = place(2, 2)
    model = build(here)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, process_group=here.dp, lr=0.1)
    train_plain(here, model, optimizer, batches(here, 2))
    assert optimizer.world_size == 2
    with pytest.raises(ValueError, match="pass the submesh of one"):
        ZeroRedundancyOptimizer(model.parameters(), AdamW, process_group=here.mesh, lr=0.1)


def test_the_drop_in_takes_a_mesh_of_one_dimension(pool: Pool) -> None:
    pool.run(_drop_in, 4)
