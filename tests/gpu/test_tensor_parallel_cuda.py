"""DTensor parameters on CUDA devices: the dp and the tp dimension each have an NCCL communicator, in one backward."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, AdamW

from tests.helpers.cuda_training import DEADLINE, LATE
from tests.helpers.mesh_contest import contest, plain_optimizer, sharded
from tests.helpers.meshes import Place, batches, build, loss_of, sequence_parallel, tensor_parallel, train_plain
from tests.helpers.pool import Pool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STYLES = {"tp": tensor_parallel, "sp": sequence_parallel}
MODES: dict[str, dict[str, Any]] = {
    "step": {},
    "forward": {"gather": "forward"},
    "backward": {"update": "backward", "gather": "forward"},
    "all": {"reduction": "all"},
    "compiled": {"compile": True},
}


def _group(ranks: list[int], backend: str) -> ProcessGroup:
    found = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    assert found is not None
    return found


def _place(dp: int, tp: int, backend: str) -> Place:
    """NCCL refuses several ranks on one GPU of one host, so each says that it is a host of its own."""
    os.environ.setdefault("NCCL_HOSTID", f"rank-{dist.get_rank()}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    grid = torch.arange(dp * tp).view(dp, tp)
    row, column = divmod(dist.get_rank(), tp)
    groups = [_group(grid[:, column].tolist(), backend), _group(grid[row].tolist(), backend)]
    return Place(DeviceMesh.from_group(groups, "cuda", mesh=grid, mesh_dim_names=("dp", "tp")))


def _contest(
    group: ProcessGroup, shape: tuple[int, int], backend: str, kind: Any, styles: str, mode: str, most: float | None
) -> None:
    close = 1e-5 if most is not None or mode == "compiled" else 0.0
    contest(_place(*shape, backend), kind, STYLES[styles], MODES[mode], close, most)
    torch.cuda.synchronize()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
def test_equal_to_torch_on_nccl(pool: Pool, shape: tuple[int, int], mode: str) -> None:
    for styles in STYLES:
        pool.run(_contest, 2, shape, "nccl", AdamW, styles, mode, None, deadline=DEADLINE)


def test_muon_gathers_its_matrices_on_nccl(pool: Pool) -> None:
    pool.run(_contest, 2, (1, 2), "nccl", "muon", "tp", "forward", None, deadline=DEADLINE)


def test_clipping_over_the_mesh_on_nccl(pool: Pool) -> None:
    pool.run(_contest, 2, (1, 2), "nccl", SGD, "sp", "forward", 0.05, deadline=DEADLINE)


@pytest.mark.parametrize("styles", STYLES)
def test_four_ranks_on_gloo(pool: Pool, styles: str) -> None:
    pool.run(_contest, 4, (2, 2), "gloo", SGD, styles, "forward", 0.05, deadline=DEADLINE)


def _late_kernels(group: ProcessGroup) -> None:
    """Kernels that begin late: every wait that is missing shows, and no host waits for a norm over the mesh."""
    here = _place(2, 2, "nccl")
    model, plain = build(here, sequence_parallel), build(here, sequence_parallel)
    data = batches(here, 3)
    train_plain(here, plain, plain_optimizer(SGD, plain), data, most=1e9)
    optimizer = sharded(SGD, model, here, gather="forward")
    for batch in data:
        optimizer.zero_grad()
        torch.cuda._sleep(LATE)
        loss_of(model, batch).backward()
        torch.cuda._sleep(LATE)
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()
    optimizer.synchronize()
    torch.cuda.synchronize()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        gap = (ours._local_tensor if hasattr(ours, "_local_tensor") else ours) - (
            theirs._local_tensor if hasattr(theirs, "_local_tensor") else theirs
        )
        assert float(gap.detach().abs().max()) <= 1e-6


def test_late_kernels_on_two_communicators(pool: Pool) -> None:
    pool.run(_late_kernels, 4, deadline=DEADLINE)


def _state(group: ProcessGroup) -> None:
    here = _place(2, 1, "nccl")
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
