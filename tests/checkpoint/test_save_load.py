"""`save` and `load`: every world size and mode into every other, names, options, extra state and meshes."""

import itertools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

import zerostep
from tests.helpers.checkpoint_setups import (
    ADAMW,
    SETUPS,
    WAYS,
    Setup,
    same_weights,
    save_extra,
    sharded_pair,
    weights,
    whole,
)
from tests.helpers.pool import Pool, run_fresh
from tests.helpers.reference import assert_same_bits, assert_same_state_dict, batches, build, train
from tests.helpers.sharding import SMALL_BUCKETS, values
from zerostep import Checkpoint, ShardedOptimizer

Named = list[tuple[str, Tensor]]


# Every world into every other.


WORLDS = (1, 2, 3, 5)
PAIRS = (("auto", "auto"), ("elements", "view"), ("zero", "elements"), ("parameters", "zero"))


def _every_pair(world: ProcessGroup, root: str) -> int:
    """Rank 0 is in all groups: it has every state, before and after."""
    groups = {size: dist.new_group(list(range(size))) for size in WORLDS}
    compared = 0
    for (name, setup), size in itertools.product(SETUPS.items(), WORLDS):
        if dist.get_rank() < size:
            for number, (way, _) in enumerate(_pairs(name)):
                _save_and_remember(setup, groups[size], way, Path(root, f"{name}-{number}-{size}"))
    dist.barrier()
    for (name, setup), size in itertools.product(SETUPS.items(), WORLDS):
        if dist.get_rank() < size:
            for number, (_, way) in enumerate(_pairs(name)):
                compared += _load_and_compare(
                    setup, groups[size], way, [Path(root, f"{name}-{number}-{n}") for n in WORLDS]
                )
    return compared


def _pairs(name: str) -> list[tuple[str, str]]:
    if name == "adamw":
        return list(PAIRS)
    if name == "muon and adamw":
        return [("auto", "auto")]  # the other class has one optimizer for all groups
    return [("auto", "zero"), ("zero", "auto")]


def _save_and_remember(setup: Setup, group: ProcessGroup, way: str, path: Path) -> None:
    pair = setup.make(group, way)
    setup.train(pair, group)
    state, model = whole(pair[1]), weights(pair[0])
    zerostep.save(path, pair[1], pair[0])
    assert_same_state_dict(whole(pair[1]), state)  # saving has changed nothing
    if dist.get_rank() == 0:
        torch.save([state, model], path.with_suffix(".expected"))


def _load_and_compare(setup: Setup, group: ProcessGroup, way: str, paths: list[Path]) -> int:
    pair = setup.make(group, way, seed=1)  # the same object takes one after the other
    for path in paths:
        found = zerostep.load(path, pair[1], pair[0])
        assert found.step == 2
        state, model = torch.load(path.with_suffix(".expected"), weights_only=True)
        same_weights(weights(pair[0]), model)
        now = whole(pair[1])
        if dist.get_rank() == 0:
            assert_same_state_dict(now, state)
            assert now["state"]
    return len(paths)


@pytest.mark.timeout(240)
def test_every_world_loads_into_every_other(tmp_path: Path) -> None:
    outcomes = run_fresh(_every_pair, max(WORLDS), str(tmp_path), deadline=200.0)
    assert [each.error for each in outcomes] == [None] * max(WORLDS)
    assert outcomes[0].result == len(WORLDS) ** 2 * (len(PAIRS) + 2 + 2 + 1)


def _every_way(group: ProcessGroup, root: str) -> None:
    """Saved by every way, loaded by every way."""
    setup = SETUPS["adamw"]
    for way in WAYS:
        _save_and_remember(setup, group, way, Path(root, way))
    for way in WAYS:
        _load_and_compare(setup, group, way, [Path(root, other) for other in WAYS])


def test_every_way_loads_what_every_other_saved(pool: Pool, tmp_path: Path) -> None:
    pool.run(_every_way, 2, str(tmp_path))


def _overlap_steps(group: ProcessGroup, root: str, way: str) -> None:
    """The step counter, and going on after a load, where the step happens inside backward."""
    setup = SETUPS["adamw"]
    series = batches(3, dist.get_rank(group), 5)
    pair = setup.make(group, way)
    train(*pair, series[:3])
    zerostep.save(Path(root, "it"), pair[1], pair[0])
    train(*pair, series[3:])
    again = setup.make(group, way, seed=1)
    assert zerostep.load(Path(root, "it"), again[1], again[0]).step == 3
    train(*again, series[3:])
    zerostep.save(Path(root, "later"), again[1])
    assert zerostep.load(Path(root, "later"), again[1]).step == 5  # it went on counting
    for each in (pair, again):
        getattr(each[1], "synchronize", lambda: None)()
    assert_same_bits(values(again[0]), values(pair[0]))


@pytest.mark.parametrize("way", ["hook", "interleaved", "forward", "wrapped"])
def test_training_goes_on_after_a_load(pool: Pool, tmp_path: Path, way: str) -> None:
    pool.run(_overlap_steps, 2, str(tmp_path), way)


# Names and positions.


def _renamed(group: ProcessGroup, root: str) -> None:
    setup = SETUPS["adamw"]
    pair = setup.make(group, "elements")
    setup.train(pair, group)
    zerostep.save(Path(root, "named"), pair[1], pair[0])
    by_name = dict(zip(dict(pair[0].named_parameters()), whole(pair[1])["state"].values(), strict=False))
    for choose in (_reversed, _prefixed, _unnamed):
        model = build(seed=1)
        ours = sharded_pair(group, model, choose(model), AdamW, **ADAMW)
        zerostep.load(Path(root, "named"), ours[1], model)
        assert_same_bits(values(model), values(pair[0]))
        names = [name for name, _ in (_reversed if choose is _reversed else _prefixed)(model)]
        found = {
            name.removeprefix("module."): entry
            for name, entry in zip(names, whole(ours[1])["state"].values(), strict=False)
        }
        for name, entry in found.items():
            assert_same_bits(entry, by_name[name])
        assert len(found) == (len(names) if dist.get_rank(group) == 0 else 0)


def _reversed(model: nn.Module) -> Named:
    return list(reversed(list(model.named_parameters())))


def _prefixed(model: nn.Module) -> Named:
    return [(f"module.{name}", param) for name, param in model.named_parameters()]


def _unnamed(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def test_parameters_are_found_by_name_or_else_by_position(pool: Pool, tmp_path: Path) -> None:
    pool.run(_renamed, 2, str(tmp_path))


# Options and extra.


def _options(group: ProcessGroup, root: str) -> None:
    for number, way in enumerate(("elements", "zero")):
        setup = Setup(options={"lr": torch.tensor(0.25), "betas": (0.8, 0.9), "weight_decay": 0.0})
        pair = setup.make(group, way)
        scheduler = StepLR(pair[1], 1, gamma=0.5)
        setup.train(pair, group)
        scheduler.step()
        plain = {key: value for key, value in scheduler.state_dict().items() if key != "_last_lr" and key != "base_lrs"}
        extra = {"scheduler": plain, "rank": dist.get_rank(group)}
        zerostep.save(Path(root, str(number)), pair[1], extra=extra)
        again = Setup().make(group, way)
        found = zerostep.load(Path(root, str(number)), again[1])
        assert found.extra == extra and [each["rank"] for each in found.extras] == list(range(group.size()))
        chosen = again[1].param_groups[0]
        assert isinstance(chosen["lr"], Tensor) and chosen["lr"].item() == 0.125
        assert chosen["betas"] == (0.8, 0.9) and chosen["weight_decay"] == 0.0
        setup.train(again, group)  # the options have reached the inner optimizer
        StepLR(again[1], 1).load_state_dict(found.extra["scheduler"])


def test_options_and_the_schedulers_state_come_back(pool: Pool, tmp_path: Path) -> None:
    pool.run(_options, 2, str(tmp_path))


def _extra_of_another_world(group: ProcessGroup, path: str) -> Checkpoint:
    pair = SETUPS["adamw"].make(group, "auto")
    return zerostep.load(path, pair[1])


def test_extra_is_this_ranks_or_that_of_rank_0(pool: Pool, tmp_path: Path) -> None:
    pool.run(save_extra, 2, str(tmp_path / "own"), "own")
    pool.run(save_extra, 2, str(tmp_path / "same"), {"epoch": 3})
    pool.run(save_extra, 2, str(tmp_path / "none"), None)
    assert [found.extra for found in pool.run(_extra_of_another_world, 2, str(tmp_path / "own"))] == [
        ["own", 0],
        ["own", 1],
    ]
    assert [found.extra for found in pool.run(_extra_of_another_world, 3, str(tmp_path / "own"))] == [["own", 0]] * 3
    for found in pool.run(_extra_of_another_world, 3, str(tmp_path / "same")):
        assert (found.extra, found.extras, found.world_size, found.step) == ({"epoch": 3}, ({"epoch": 3},), 2, 0)
    assert [found.extra for found in pool.run(_extra_of_another_world, 1, str(tmp_path / "none"))] == [None]


# Meshes.


def _mesh(group: ProcessGroup, root: str) -> None:
    setup, path = SETUPS["adamw"], Path(root, "it")
    model = build()
    pair = (
        model,
        ShardedOptimizer(model, AdamW, process_group=init_device_mesh("cpu", (2, 2)), bucket_mb=SMALL_BUCKETS, **ADAMW),
    )
    setup.train(pair, group)
    zerostep.save(path, pair[1], model)
    assert sorted(os.listdir(path)) == ["manifest.json", "rank-0.safetensors", "rank-1.safetensors"]
    for shape in ((1, 4), (4, 1), (2, 2)):
        other = build(seed=1)
        mesh = init_device_mesh("cpu", shape)
        optimizer = ShardedOptimizer(other, AdamW, process_group=mesh, bucket_mb=SMALL_BUCKETS, **ADAMW)
        zerostep.load(path, optimizer, other)
        assert_same_bits(values(other), values(model))
        expected, found = whole(pair[1]), whole(optimizer)
        if dist.get_rank() == 0:
            assert_same_state_dict(found, expected)
            assert found["state"]


def test_a_mesh_saves_once_and_loads_into_another(pool: Pool, tmp_path: Path) -> None:
    pool.run(_mesh, 4, str(tmp_path))
