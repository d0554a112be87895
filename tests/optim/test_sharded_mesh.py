"""Meshes whose ranks are in any order: training, clipping, state dicts, checkpoints and uneven inputs."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD

import zerostep
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, assert_same_state_dict, batches, build
from tests.helpers.sharding import MOMENTUM, WAYS, backward, gap, in_ddp, series, sharded, values, whole_state
from zerostep import ShardedOptimizer
from zerostep.comm.mesh import resolve

MESHES: dict[str, Any] = {
    "in order": [[0, 1], [2, 3]],
    "interleaved": [[0, 2], [1, 3]],
    "rows turned": [[3, 1], [2, 0]],
    "copies alone": [[2], [0], [3], [1]],
    "one row": [[2, 0, 3, 1]],
    "one dimension": [2, 0, 3, 1],
}
meshes = pytest.mark.parametrize("name", MESHES)
CLIP = 0.05


def _mesh(name: str) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(MESHES[name]))


def _pair(group: ProcessGroup, name: str, way: str = "bare scatter", seed: int = 0) -> tuple[nn.Module, Any]:
    bare, mesh = build(seed=seed), _mesh(name)
    # One group for DDP and the optimizer, as a context for uneven inputs wants it.
    everyone: Any = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    model = in_ddp(everyone, bare) if way.startswith("wrapped") else bare
    return model, sharded(group, model, SGD, process_group=mesh, reduction=way.split()[1], **MOMENTUM)


def _train(model: nn.Module, optimizer: Any, data: Any) -> None:
    for batch in data:
        optimizer.zero_grad()
        backward(model, batch)
        _clip(model, optimizer)
        optimizer.step()


def _clip(model: nn.Module, optimizer: Any) -> None:
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.clip_grad_norm_(CLIP)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def _positions(group: ProcessGroup, name: str) -> tuple[int, list[int], list[int]]:
    """The shard of this rank, those of all ranks, and those of its replicas."""
    ranks = resolve(_mesh(name), None)
    replicas = [row[0] for row in ranks.replicas.all_gather_ints([ranks.shards.rank])]
    return ranks.shards.rank, list(ranks.positions), replicas


@meshes
def test_every_rank_knows_the_shard_of_every_other_and_replicas_have_the_same(pool: Pool, name: str) -> None:
    found = pool.run(_positions, 4, name)
    own = [position for position, _, _ in found]
    for position, positions, replicas in found:
        assert positions == own and set(replicas) == {position}
        assert len(replicas) == own.count(position)


def _refused(group: ProcessGroup, rows: list[list[int]]) -> None:
    mesh = DeviceMesh("cpu", torch.tensor(rows))
    with pytest.raises(ValueError, match="must rise in the same order in all rows"):
        sharded(group, build(), process_group=mesh)


@pytest.mark.parametrize("rows", [[[0, 2], [3, 1]], [[1, 0], [2, 3]]], ids=str)
def test_a_mesh_whose_columns_would_hold_different_parts_is_refused(pool: Pool, rows: list[list[int]]) -> None:
    pool.run(_refused, 4, rows)


def _trained(group: ProcessGroup, name: str, way: str) -> dict[str, Tensor]:
    plain_model = in_ddp(group, build())
    plain = SGD(plain_model.module.named_parameters(), **MOMENTUM)
    # A bare module starts from rank 0.
    model, optimizer = _pair(group, name, way, seed=0 if way.startswith("wrapped") else dist.get_rank())
    _train(plain_model, plain, series(group, 6))
    _train(model, optimizer, series(group, 6))
    assert gap(values(model), values(plain_model)) < 1e-6
    ours, theirs = whole_state(optimizer)["state"], plain.state_dict()["state"]
    assert len(ours) == len(theirs) > 0
    for number, entry in ours.items():
        assert gap({"": entry["momentum_buffer"]}, {"": theirs[number]["momentum_buffer"]}) < 1e-5
    return values(model)


@pytest.mark.parametrize("way", WAYS)
@meshes
def test_training_with_clipping_equals_plain(pool: Pool, name: str, way: str) -> None:
    results = pool.run(_trained, 4, name, way)
    for other in results[1:]:
        assert_same_bits(other, results[0])


def _saved(group: ProcessGroup, name: str, root: str) -> None:
    model, optimizer = _pair(group, name)
    _train(model, optimizer, series(group, 3))
    path, dcp_path = Path(root, "own"), str(Path(root, "dcp"))
    zerostep.save(path, optimizer, model)
    assert sum(file.startswith("rank-") for file in os.listdir(path)) == optimizer.world_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save({"optim": zerostep.dcp_state(optimizer)}, checkpoint_id=dcp_path)
    expected = whole_state(optimizer)
    for other in ("in order", name):
        again, loaded = _pair(group, other, seed=1)
        zerostep.load(path, loaded, again)
        assert_same_bits(values(again), values(model))
        assert_same_state_dict(whole_state(loaded), expected)
        _, loaded = _pair(group, other, seed=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load({"optim": zerostep.dcp_state(loaded)}, checkpoint_id=dcp_path)
        assert_same_state_dict(whole_state(loaded), expected)
        _, loaded = _pair(group, other, seed=1)
        loaded.load_state_dict(expected)
        assert_same_state_dict(whole_state(loaded), expected)


@meshes
def test_state_moves_between_meshes(pool: Pool, name: str, tmp_path: Path) -> None:
    pool.run(_saved, 4, name, str(tmp_path), deadline=60)


LENGTHS = (4, 1, 2, 0)


def _uneven(group: ProcessGroup, name: str, way: str, clip: bool) -> float:
    plain_model = in_ddp(group, build())
    plain = SGD(plain_model.module.named_parameters(), **MOMENTUM)
    model, optimizer = _pair(group, name, way)
    mine = batches(1, dist.get_rank(), LENGTHS[dist.get_rank()])
    for each, stepping in ((plain_model, plain), (model, optimizer)):
        joinables: list[Any] = (
            [each] if stepping is plain else [each, optimizer] if way.startswith("wrapped") else [optimizer]
        )
        with Join(joinables):
            for batch in mine:
                stepping.zero_grad()
                backward(each, batch)
                if clip:
                    _clip(each, stepping)
                stepping.step()
    return gap(values(model), values(plain_model))


@pytest.mark.parametrize("way", WAYS)
@meshes
def test_ranks_without_inputs_count_as_zeros(pool: Pool, name: str, way: str) -> None:
    clip = (list(MESHES).index(name) + list(WAYS).index(way)) % 2 == 1  # each mesh and each way with and without
    assert max(pool.run(_uneven, 4, name, way, clip, deadline=30)) < 1e-6
