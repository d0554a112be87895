"""Saved on one mesh of data and tensor parallelism, loaded on any other: equal to the byte."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.optim import SGD, AdamW

import zerostep
from tests.helpers.meshes import (
    Net,
    Place,
    average,
    batches,
    build,
    loss_of,
    place,
    sequence_parallel,
    tensor_parallel,
    whole,
)
from tests.helpers.pool import Pool, RankError
from tests.helpers.reference import assert_same_bits
from zerostep import CheckpointError, ShardedOptimizer, ZeroRedundancyOptimizer, reshard
from zerostep.checkpoint.directory import read_manifest

STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
MESHES = [(4, 1), (1, 4), (1, 2), (2, 1), (2, 2)]
Everything = dict[str, dict[str, Any]]


def _turned() -> dict[str, ParallelStyle]:
    """`up` by rows and `down` by columns: each weight is cut in the other dimension."""
    return {
        "up": RowwiseParallel(input_layouts=Replicate()),
        "down": ColwiseParallel(output_layouts=Replicate()),
    }


STYLES = {"tp": tensor_parallel, "turned": _turned, "sp": sequence_parallel}


def _optimizer(way: str, model: nn.Module, group: Any, kind: Any = AdamW, **options: Any) -> Any:
    options = OPTIONS | options if kind is AdamW else {"lr": 0.02, **options}
    if way == "sharded":
        return ShardedOptimizer(model, kind, process_group=group, bucket_mb=0.0002, **options)
    return ZeroRedundancyOptimizer(list(model.named_parameters()), kind, group, **options)


def _group_of(way: str, here: Place) -> Any:
    return here.dp if way == "sharded" else here.dp.get_group()


def _train(here: Place, model: nn.Module, optimizer: Any, steps: int, seed: int = 0) -> None:
    """Some steps; the drop-in leaves the average to its caller."""
    for batch in batches(here, seed + steps)[seed:]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            average(here, list(model.parameters()))
        optimizer.step()


def _everything(model: nn.Module, optimizer: Any) -> Everything:
    """All parameters and all state as one process would have them."""
    for to in range(optimizer.world_size):
        optimizer.consolidate_state_dict(to=to)
        if to == optimizer.rank:
            found = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    state = {
        f"{names[index]}.{key}": whole(value).clone()
        for index, entry in found["state"].items()
        for key, value in entry.items()
        if isinstance(value, Tensor)
    }
    weights = {key: whole(value).detach().clone() for key, value in model.state_dict().items()}
    return {"model": weights, "state": dict(sorted(state.items()))}


def _assert_same(found: Everything, expected: Everything) -> None:
    assert_same_bits(found["model"], expected["model"])
    assert_same_bits(found["state"], expected["state"])


def _first(here: Place) -> bool:
    """Whether this rank is in the first of the meshes that lie beside each other."""
    return int(here.mesh.get_local_rank("rest")) == 0


def _saved(
    _: ProcessGroup, path: Path, mesh: tuple[int, int], way: str, style: str, options: dict[str, Any]
) -> Everything | None:
    here = place(*mesh)
    if not _first(here):
        return None
    model = build(here, STYLES[style])
    optimizer = _optimizer(way, model, _group_of(way, here), **options)
    _train(here, model, optimizer, STEPS)
    extra = {"rank": dist.get_rank()}
    pending = zerostep.save(path, optimizer, model, extra=extra, wait=way == "sharded")
    found = _everything(model, optimizer)
    if pending is not None:
        pending.wait()
    return found


def _loaded(
    _: ProcessGroup, path: Path, mesh: tuple[int, int], way: str, style: str, options: dict[str, Any]
) -> tuple[zerostep.Checkpoint, Everything] | None:
    here = place(*mesh)
    if not _first(here):
        return None
    model = build(here, STYLES[style])
    optimizer = _optimizer(way, model, _group_of(way, here), **options)
    _train(here, model, optimizer, 1, seed=7)  # so that what is loaded is not what was there
    checkpoint = zerostep.load(path, optimizer, model)
    found = _everything(model, optimizer)
    _train(here, model, optimizer, 1)  # and training goes on
    return checkpoint, found


def _plain(group: ProcessGroup, path: Path, way: str) -> Everything:
    torch.manual_seed(5)
    model = Net()
    optimizer = _optimizer(way, model, group)
    zerostep.load(path, optimizer, model)
    return _everything(model, optimizer)


def _save_at(pool: Pool, path: Path, mesh: tuple[int, int], way: str, style: str = "tp", **options: Any) -> Everything:
    found = [each for each in pool.run(_saved, 4, path, mesh, way, style, options) if each is not None]
    for each in found[1:]:
        _assert_same(each, found[0])
    return found[0]


def _load_at(
    pool: Pool, path: Path, mesh: tuple[int, int], way: str, style: str = "tp", **options: Any
) -> list[tuple[zerostep.Checkpoint, Everything]]:
    return [each for each in pool.run(_loaded, 4, path, mesh, way, style, options) if each is not None]


@pytest.mark.parametrize("way", ["sharded", "zero"])
def test_saved_on_two_by_two_and_loaded_on_every_mesh(pool: Pool, tmp_path: Path, way: str) -> None:
    expected = _save_at(pool, tmp_path / "it", (2, 2), way)
    assert set(expected["state"]) >= {"up.weight.exp_avg", "norm.weight.exp_avg_sq", "head.bias.step"}
    for mesh in MESHES:
        for style in ("tp", "turned"):
            for checkpoint, found in _load_at(pool, tmp_path / "it", mesh, way, style):
                assert (checkpoint.step, checkpoint.world_size) == (STEPS, 4)
                _assert_same(found, expected)


@pytest.mark.parametrize(("saved", "loaded"), [("sharded", "zero"), ("zero", "sharded")])
def test_from_one_class_into_the_other(pool: Pool, tmp_path: Path, saved: str, loaded: str) -> None:
    expected = _save_at(pool, tmp_path / "it", (2, 2), saved)
    for _, found in _load_at(pool, tmp_path / "it", (1, 4), loaded, "turned"):
        _assert_same(found, expected)


@pytest.mark.parametrize("way", ["sharded", "zero"])
def test_into_plain_parameters_and_offline(pool: Pool, tmp_path: Path, way: str) -> None:
    expected = _save_at(pool, tmp_path / "it", (2, 2), way)
    for world in (1, 3):
        for found in pool.run(_plain, world, tmp_path / "it", way):
            _assert_same(found, expected)
    _check_offline(tmp_path / "it", tmp_path, expected)
    reshard(tmp_path / "it", tmp_path / "on-3", 3)
    (tmp_path / "again").mkdir()
    _check_offline(tmp_path / "on-3", tmp_path / "again", expected)
    for _, found in _load_at(pool, tmp_path / "on-3", (2, 2), way):
        _assert_same(found, expected)


def _check_offline(path: Path, folder: Path, expected: Everything) -> None:
    zerostep.consolidate(path, folder / "model.pt", part="model")
    zerostep.consolidate(path, folder / "model.safetensors", part="model")
    zerostep.consolidate(path, folder / "optimizer.pt")
    assert_same_bits(torch.load(folder / "model.pt", weights_only=True), expected["model"])
    model = Net()
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    optimizer = AdamW(model.named_parameters())
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    state = {f"{names[param]}.{key}": value for param, entry in optimizer.state.items() for key, value in entry.items()}
    assert_same_bits(dict(sorted(state.items())), expected["state"])


def test_what_all_tensor_parallel_ranks_hold_is_written_once(pool: Pool, tmp_path: Path) -> None:
    _save_at(pool, tmp_path / "it", (2, 2), "sharded")
    manifest = read_manifest(tmp_path / "it")
    assert (manifest.ranks, len(manifest.layouts), len(manifest.files)) == (4, 2, 4)
    by_name = {param.name: places for param, places in zip(manifest.params, manifest.stored, strict=True)}
    assert {name: [place.layout for place in places] for name, places in by_name.items()} == {
        "norm.weight": [0], "norm.bias": [0], "up.weight": [0, 1], "up.bias": [0, 1], "down.weight": [0, 1],
        "down.bias": [0], "scale": [0], "head.weight": [0], "head.bias": [0],
    }  # fmt: skip
    body = json.loads((tmp_path / "it" / "manifest.json").read_text())["manifest"]
    assert body["version"] == 2
    assert [extra["rank"] for extra in manifest.extra] == [0, 1, 2, 3]


def test_another_optimizer(pool: Pool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": SGD, "momentum": 0.9}
    expected = _save_at(pool, tmp_path / "it", (2, 2), "sharded", **options)
    for mesh in ((1, 4), (4, 1)):
        for _, found in _load_at(pool, tmp_path / "it", mesh, "sharded", "turned", **options):
            _assert_same(found, expected)


def test_sequence_parallel_and_masters(pool: Pool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"master_dtype": torch.float64}
    expected = _save_at(pool, tmp_path / "it", (2, 2), "sharded", "sp", **options)
    for mesh in ((1, 4), (2, 1)):
        for _, found in _load_at(pool, tmp_path / "it", mesh, "sharded", "sp", **options):
            _assert_same(found, expected)


def _refused(_: ProcessGroup, path: Path) -> None:
    here = place(2, 2)
    model = build(here)
    rest = [(name, param) for name, param in model.named_parameters() if name != "up.weight"]
    optimizer = ShardedOptimizer(model, AdamW, rest, process_group=here.dp, **OPTIONS)
    zerostep.save(path, optimizer, model)


def test_weights_that_no_rank_would_write_are_refused(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"'up.weight' is a DTensor that the optimizer does not hold.*save without"):
        pool.run(_refused, 4, tmp_path / "it")
    assert not (tmp_path / "it").exists()


def _two_trainings(_: ProcessGroup, root: Path) -> str:
    """Ranks 0, 1 and 2, 3 train models of their own, with tensor parallelism, and save at different times."""
    here = place(1, 2)
    number = int(here.mesh.get_local_rank("rest"))
    model = build(here)
    optimizer = _optimizer("sharded", model, here.dp)
    for step in range(1 + number):
        _train(here, model, optimizer, 1)
        zerostep.save(root / f"{number}-{step}", optimizer, model)
    if number:
        with pytest.raises(CheckpointError, match="exists already"):
            zerostep.save(root / f"{number}-0", optimizer, model)
    return str(zerostep.load(root / f"{number}-{number}", optimizer, model).step)


def test_ranks_of_another_training_are_left_alone(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_two_trainings, 4, tmp_path) == ["1", "1", "2", "2"]
