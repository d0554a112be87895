"""DCP with DTensor parameters: whole shapes and offsets, loaded on other meshes and by torch's own optimizers."""

import warnings
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import zeros
from torch.optim import AdamW

import zerostep
from tests.helpers.meshes import batches, build, loss_of, place, whole
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits
from zerostep import ShardedOptimizer

OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def _trained(mesh: tuple[int, int], steps: int) -> tuple[Any, ShardedOptimizer]:
    here = place(*mesh)
    model = build(here)
    optimizer = ShardedOptimizer(model, AdamW, process_group=here.dp, bucket_mb=0.0002, **OPTIONS)
    for batch in batches(here, steps):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model, optimizer


def _state(model: Any, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    for to in range(optimizer.world_size):
        optimizer.consolidate_state_dict(to=to)
        if to == optimizer.rank:
            found = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    state = {f"{names[at]}.{key}": whole(x).clone() for at, each in found["state"].items() for key, x in each.items()}
    return dict(sorted(state.items()))


def _saved(_: ProcessGroup, path: str) -> dict[str, Tensor]:
    model, optimizer = _trained((2, 2), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save({"optim": zerostep.dcp_state(optimizer)}, checkpoint_id=path)
    return _state(model, optimizer)


def _loaded(_: ProcessGroup, path: str, mesh: tuple[int, int], steps: int) -> dict[str, Tensor]:
    model, optimizer = _trained(mesh, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load({"optim": zerostep.dcp_state(optimizer)}, checkpoint_id=path)
    return _state(model, optimizer)


def _read_by_torch(_: ProcessGroup, path: str) -> dict[str, Tensor]:
    """As torch's own state of an optimizer on DTensors is read."""
    model = build(place(1, 4))
    param: Any = model.up.weight
    wanted = zeros(*param.shape, device_mesh=param.device_mesh, placements=param.placements)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load({"optim": {"state": {"up.weight": {"exp_avg": wanted}}}}, checkpoint_id=path)
    return {"up.weight.exp_avg": wanted.full_tensor()}


def test_state_of_dtensors_goes_to_other_meshes(pool: Pool, tmp_path: Any) -> None:
    path = str(tmp_path / "it")
    expected = pool.run(_saved, 4, path)[0]
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata["optim.state.up.weight.exp_avg"]
    assert tuple(metadata.size) == (12, 8)  # type: ignore[union-attr]
    for mesh, steps in (((1, 4), 0), ((4, 1), 1), ((2, 2), 1)):
        for found in pool.run(_loaded, 4, path, mesh, steps):
            assert_same_bits(found, expected)
    for found in pool.run(_read_by_torch, 4, path):
        assert_same_bits(found, {key: expected[key] for key in found})
