"""DTensor parameters on CUDA devices: the dp and the tp dimension each have an NCCL communicator, in one backward."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, AdamW

from tests.helpers.cuda_training import DEADLINE, LATE
from tests.helpers.mesh_contest import contest, plain_optimizer, sharded
from tests.helpers.meshes import Place, batches, build, loss_of, sequence_parallel, tensor_parallel, train_plain
from tests.helpers.pool import Pool
from zerostep import ShardedOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STYLES = {"tp": tensor_parallel, "sp": sequence_parallel}
MODES: dict[str, dict[str, Any]] = {
    "step": {},
    "forward": {"gather": "forward"},
    "backward": {"update": "backward", "gather": "forward"},
    "all": {"reduction": "all"},
    "compiled": {"compile": True},
}


def _group(ranks: list[int]) -> ProcessGroup:
    found = dist.new_group(ranks, backend="nccl", use_local_synchronization=True)
    assert found is not None
    return found


def _place(dp: int, tp: int) -> Place:
    """NCCL refuses several ranks on one GPU of one host, so each says that it is a host of its own."""
    os.environ.setdefault("NCCL_HOSTID", f"rank-{dist.get_rank()}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    grid = torch.arange(dp * tp).view(dp, tp)
    row, column = divmod(dist.get_rank(), tp)
    groups = [_group(grid[:, column].tolist()), _group(grid[row].tolist())]
    return Place(DeviceMesh.from_group(groups, "cuda", mesh=grid, mesh_dim_names=("dp", "tp")))


def _contest(
    group: ProcessGroup, shape: tuple[int, int], kind: Any, styles: str, mode: str, most: float | None
) -> None:
    close = 1e-5 if most is not None or mode == "compiled" else 0.0
    contest(_place(*shape), kind, STYLES[styles], MODES[mode], close, most)
    torch.cuda.synchronize()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
def test_equal_to_torch_on_nccl(pool: Pool, shape: tuple[int, int], mode: str) -> None:
    for styles in STYLES:
        pool.run(_contest, 2, shape, AdamW, styles, mode, None, deadline=DEADLINE)


def test_muon_gathers_its_matrices_on_nccl(pool: Pool) -> None:
    pool.run(_contest, 2, (1, 2), "muon", "tp", "forward", None, deadline=DEADLINE)


def test_clipping_over_the_mesh_on_nccl(pool: Pool) -> None:
    pool.run(_contest, 2, (1, 2), SGD, "sp", "forward", 0.05, deadline=DEADLINE)


class _SummedBackwards(torch.autograd.Function):
    """Nothing forwards; backwards the gradients of the ranks of a group are summed, as between layers of a mesh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Mixed(nn.Module):
    """Layers with a sum over another communicator between them, in backward alone."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.layers, self.group = nn.ModuleList(nn.Linear(64, 64) for _ in range(6)), group

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _SummedBackwards.apply(torch.tanh(layer(x)), self.group)
        return x


def _two_communicators(group: ProcessGroup, gather: Any) -> None:
    """Reduce-scatters of the optimizer and sums of the model in one backward, with kernels that begin late."""
    os.environ.setdefault("NCCL_HOSTID", f"rank-{dist.get_rank()}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    ours, other = (_group([0, 1]) for _ in range(2))
    torch.manual_seed(0)
    model = _Mixed(other).cuda()
    plain = _Mixed(other).cuda()
    plain.load_state_dict(model.state_dict())
    optimizer = ShardedOptimizer(model, SGD, process_group=ours, bucket_mb=0.02, gather=gather, lr=0.01, momentum=0.9)
    theirs = SGD(plain.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    for x in torch.randn(5, 16, 64, device="cuda"):
        optimizer.zero_grad()
        torch.cuda._sleep(LATE)
        model(x).square().sum().backward()
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()
        theirs.zero_grad()
        plain(x).square().sum().backward()
        for param in plain.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)
            dist.all_reduce(param.grad, group=ours)
        theirs.step()
    optimizer.synchronize()
    for mine, their in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, their, rtol=0, atol=1e-6)


@pytest.mark.parametrize("gather", ["step", "forward"])
def test_two_communicators_in_one_backward(pool: Pool, gather: str) -> None:
    pool.run(_two_communicators, 2, gather, deadline=DEADLINE)


def _state(group: ProcessGroup) -> None:
    here = _place(2, 1)
    model, plain = build(here), build(here)
    data = batches(here, 2)
    optimizer, theirs = sharded(AdamW, model, here), plain_optimizer(AdamW, plain)
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    train_plain(here, plain, theirs, data)
    optimizer.consolidate_state_dict(to=0)
    if here.replica == 0:
        found, expected = optimizer.state_dict()["state"], theirs.state_dict()["state"]
        for index, entry in expected.items():
            mine, other = found[index]["exp_avg"], entry["exp_avg"]
            assert type(mine) is type(other)
            local = [each.to_local() if hasattr(each, "to_local") else each for each in (mine, other)]
            assert torch.equal(local[0].cpu(), local[1].cpu())


def test_consolidated_state_of_dtensors(pool: Pool) -> None:
    pool.run(_state, 2, deadline=DEADLINE)
