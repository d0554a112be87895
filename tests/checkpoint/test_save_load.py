"""What `save`, `load` and `latest` promise: any world into any other bit for bit, and runs that go on unchanged."""

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adafactor, AdamW, Muon
from torch.optim.lr_scheduler import StepLR

import zerostep
from tests.helpers.pool import Pool, run_fresh
from tests.helpers.reference import OUTPUTS, assert_same_bits, assert_same_state_dict, batches, build, train
from tests.helpers.sharding import SMALL_BUCKETS, gap, in_ddp, values
from zerostep import (
    Checkpoint,
    CheckpointError,
    ShardedOptimizer,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

Pair = tuple[nn.Module, Any]
Named = list[tuple[str, Tensor]]

ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


# The ways to hold state.


def _hooked(group: ProcessGroup, model: nn.Module, params: Any, kind: Any, hook: Any, **options: Any) -> Pair:
    zero = ZeroRedundancyOptimizer(params, kind, process_group=group, overlap_with_ddp=True, **options)
    ddp = in_ddp(group, model)
    ddp.register_comm_hook(group, hook(allreduce_hook, ddp, zero))
    return ddp, zero


def _zero(group: ProcessGroup, model: nn.Module, params: Any, kind: Any, view: bool, **options: Any) -> Pair:
    found = ZeroRedundancyOptimizer(params, kind, process_group=group, parameters_as_bucket_view=view, **options)
    return in_ddp(group, model), found


def _sharded(group: ProcessGroup, model: nn.Module, params: Any, kind: Any, **options: Any) -> Pair:
    options = {"bucket_mb": SMALL_BUCKETS, **options}
    return model, ShardedOptimizer(model, kind, params, process_group=group, **options)


def _wrapped(group: ProcessGroup, model: nn.Module, params: Any, kind: Any, **options: Any) -> Pair:
    ddp = in_ddp(group, model)
    return ddp, ShardedOptimizer(ddp, kind, params, process_group=group, bucket_mb=SMALL_BUCKETS, **options)


WAYS: dict[str, Callable[..., Pair]] = {
    "elements": partial(_sharded, partition="elements"),
    "parameters": partial(_sharded, partition="parameters"),
    "auto": _sharded,
    "forward": partial(_sharded, gather="forward", bucket_mb=25.0),
    "wrapped": _wrapped,
    "zero": partial(_zero, view=False),
    "view": partial(_zero, view=True),
    "hook": partial(_hooked, hook=hook_with_zero_step),
    "interleaved": partial(_hooked, hook=hook_with_zero_step_interleaved),
}


@dataclass(frozen=True)
class Setup:
    """A model and an optimizer for it, before anybody says how its state is held."""

    kind: Any = AdamW
    options: dict[str, Any] = field(default_factory=lambda: dict(ADAMW))
    build: Callable[[int], nn.Module] = lambda seed: build("mlp", seed)
    params: Callable[[nn.Module], Any] = lambda model: list(model.named_parameters())
    batches: str = "mlp"

    def make(self, group: ProcessGroup, way: str, seed: int = 0, **more: Any) -> Pair:
        """A module and an optimizer on this rank."""
        model = self.build(seed)
        return WAYS[way](group, model, self.params(model), self.kind, **{**self.options, **more})

    def train(self, pair: Pair, group: ProcessGroup, steps: int = 2) -> None:
        """Some steps with data of this rank's own."""
        train(*pair, batches(3, dist.get_rank(group), steps, self.batches))


def _matrices_first(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    matrices = [item for item in named if item[1].dim() == 2]
    others = [item for item in named if item[1].dim() != 2]
    return [{"params": matrices, "optimizer_class": Muon, "lr": 0.02}, {"params": others}]


SETUPS = {
    "adamw": Setup(),
    "momentum": Setup(SGD, {"lr": 0.05, "momentum": 0.9}),
    "adafactor": Setup(Adafactor, {"lr": 0.02}),
    "muon and adamw": Setup(params=_matrices_first),
}


def whole(optimizer: Any) -> dict[str, Any]:
    """The whole state on group rank 0, in `torch.optim`'s format without names; elsewhere this rank's options."""
    optimizer.consolidate_state_dict(to=0)
    found = optimizer.state_dict() if optimizer.rank == 0 else {"state": {}, "param_groups": optimizer.param_groups}
    optimizer.release_state_dict()
    groups = [{k: v for k, v in group.items() if k not in _UNCOMPARED} for group in found["param_groups"]]
    return {"state": found["state"], "param_groups": groups}


_UNCOMPARED = ("params", "param_names", "optimizer_class")


def weights(model: nn.Module) -> dict[str, Any]:
    """A copy of the state dict of the module itself."""
    found = model.module if isinstance(model, DDP) else model
    return {key: x.clone() if isinstance(x, Tensor) else x for key, x in found.state_dict().items()}


def same_weights(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    tensors = [{key: x for key, x in each.items() if isinstance(x, Tensor)} for each in (a, b)]
    assert_same_bits(*tensors)
    assert {k: x for k, x in a.items() if k not in tensors[0]} == {k: x for k, x in b.items() if k not in tensors[1]}


# Every world into every other.

WORLDS = (1, 2, 3, 4, 8)
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
    outcomes = run_fresh(_every_pair, 8, str(tmp_path), deadline=200.0)
    assert [each.error for each in outcomes] == [None] * 8
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


# Odd parameters.


class Odd(nn.Module):
    """One parameter of every kind that could be forgotten."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)

        def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float64).to(dtype))

        self.scalar, self.single = fresh(), fresh(1)
        self.empty = fresh(0, 3)
        self.conv = nn.Parameter(fresh(3, 2, 2, 3).detach().to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(fresh(5, 4).detach().t())
        self.frozen = fresh(4, 2).requires_grad_(False)
        self.unused = fresh(7)
        self.tied = self.conv
        self.norm = nn.BatchNorm1d(2)
        self.imaginary = nn.Parameter(torch.randn(5, generator=random, dtype=torch.complex64))
        self.wide = fresh(3, 3, dtype=torch.float64)
        self.low = fresh(9, dtype=torch.float16)
        self.brain = fresh(11, dtype=torch.bfloat16)
        self.register_buffer("table", torch.randn(6, generator=random)[::2])  # not dense
        self.counts = [seed]

    def get_extra_state(self) -> dict[str, Any]:
        """Not a tensor."""
        return {"counts": self.counts, "when": (1, None)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Back again."""
        self.counts = state["counts"]

    def forward(self, x: Tensor) -> Tensor:
        """A number that depends on all parameters but two."""
        self.norm(x.view(-1, 1) * torch.ones(1, 2))
        used = [param for name, param in self.named_parameters() if param.requires_grad and name != "unused"]
        parts = [((param.abs() if param.is_complex() else param).double() * x.mean()).square().sum() for param in used]
        return torch.stack(parts).sum()


def _odd_training(pair: Pair, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        pair[1].zero_grad()
        pair[0](torch.tensor([1.0, 0.5, -0.25]) * (1 + rank + step)).backward()
        pair[1].step()


CHOICES: dict[str, Callable[[nn.Module], Any]] = {
    "all": lambda model: list(model.named_parameters()),
    "positions": lambda model: list(model.parameters()),
    "trained": lambda model: [item for item in model.named_parameters() if item[1].requires_grad],
}


def _odd_pair(group: ProcessGroup, way: str, seed: int, params: str) -> Pair:
    model = Odd(seed)
    if way in ("elements", "parameters", "auto"):
        return WAYS[way](group, model, CHOICES[params](model), AdamW, **ADAMW)
    options = {"process_group": group, "parameters_as_bucket_view": way == "view", **ADAMW}
    zero = ZeroRedundancyOptimizer(CHOICES[params](model), AdamW, **options)
    return in_ddp(group, model, find_unused_parameters=True), zero


def _save_odd(group: ProcessGroup, path: str, way: str, params: str) -> None:
    pair = _odd_pair(group, way, 0, params)
    _odd_training(pair, dist.get_rank(group))
    state, kept = whole(pair[1]), weights(pair[0])
    zerostep.save(path, pair[1], pair[0])
    if dist.get_rank(group) == 0:
        torch.save([state, kept], f"{path}.expected")


def _load_odd(group: ProcessGroup, path: str, way: str, params: str) -> None:
    pair = _odd_pair(group, way, 1, params)
    zerostep.load(path, pair[1], pair[0])
    state, kept = torch.load(f"{path}.expected", weights_only=True)
    same_weights(weights(pair[0]), kept)
    model = pair[0].module if isinstance(pair[0], DDP) else pair[0]
    assert model.tied is model.conv and model.counts == [0]
    now = whole(pair[1])
    if dist.get_rank(group) == 0:
        assert_same_state_dict(now, state)
        names = [name for name, param in model.named_parameters() if params != "trained" or param.requires_grad]
        assert {"unused", "frozen", "empty"} >= {name for n, name in enumerate(names) if n not in now["state"]}
        assert names.index("unused") not in now["state"]


@pytest.mark.parametrize("params", ["all", "positions", "trained"])
@pytest.mark.parametrize(("saver", "loader"), [("elements", "zero"), ("view", "auto"), ("parameters", "elements")])
def test_odd_parameters_come_back(pool: Pool, tmp_path: Path, saver: str, loader: str, params: str) -> None:
    """Without dimensions, empty, frozen, unused, tied, channels last, complex, of every dtype; buffers, extra state."""
    for world, other in ((4, 3), (1, 4), (2, 1)):
        path = str(tmp_path / f"{world}-{other}")
        pool.run(_save_odd, world, path, saver, params)
        pool.run(_load_odd, other, path, loader, params)


def _orders(group: ProcessGroup, root: str) -> None:
    """The same model with its weights in one order in memory and in the other."""
    formats = (torch.channels_last, torch.contiguous_format)
    for number, (saver, loader, order) in enumerate(
        itertools.product(("elements", "zero"), ("elements", "view"), (0, 1))
    ):

        def made(seed: int, order: int) -> nn.Module:
            return build("convolutions", seed).to(memory_format=formats[order])  # type: ignore[call-overload]

        setup = Setup(build=partial(made, order=order), batches="convolutions")
        pair = setup.make(group, saver)
        setup.train(pair, group)
        zerostep.save(Path(root, str(number)), pair[1], pair[0])
        other = Setup(build=partial(made, order=1 - order), batches="convolutions").make(group, loader, seed=1)
        zerostep.load(Path(root, str(number)), other[1], other[0])
        same_weights(weights(other[0]), weights(pair[0]))
        assert_same_state_dict(whole(other[1]), whole(pair[1]))


def test_another_order_in_memory(pool: Pool, tmp_path: Path) -> None:
    pool.run(_orders, 2, str(tmp_path))


class TensorExtra(nn.Linear):
    """Its extra state is a tensor, made anew whenever somebody asks."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.seen = [0.0, 0.0]

    def get_extra_state(self) -> Tensor:
        """A tensor that is not the module's own."""
        return torch.tensor(self.seen)

    def set_extra_state(self, state: Tensor) -> None:
        """Back again."""
        self.seen = state.tolist()


def _tensor_extra(group: ProcessGroup, path: str) -> None:
    model, other = TensorExtra(), TensorExtra()
    model.seen = [1.0, 2.0]
    zerostep.save(path, _sharded(group, model, None, AdamW)[1], model)
    zerostep.load(path, _sharded(group, other, None, AdamW)[1], other)
    assert other.seen == [1.0, 2.0]


def test_extra_state_that_is_a_tensor_is_set_and_not_written_into(pool: Pool, tmp_path: Path) -> None:
    pool.run(_tensor_extra, 2, str(tmp_path / "it"))


def _more_ranks_than_elements(group: ProcessGroup, root: str) -> None:
    """Three elements for four ranks, and back."""
    for number, (saver, loader) in enumerate(itertools.product(("elements", "zero"), ("elements", "view"))):
        pairs = []
        for way in (saver, loader):
            model = nn.Linear(2, 1)
            with torch.no_grad():
                model.weight.fill_(0.5)
            pairs.append(WAYS[way](group, model, list(model.named_parameters()), AdamW, **ADAMW))
        for _ in range(2):
            pairs[0][1].zero_grad()
            pairs[0][0](torch.ones(1, 2)).sum().backward()
            pairs[0][1].step()
        zerostep.save(Path(root, str(number)), *reversed(pairs[0]))
        zerostep.load(Path(root, str(number)), *reversed(pairs[1]))
        assert_same_state_dict(whole(pairs[1][1]), whole(pairs[0][1]))
        assert_same_bits(values(pairs[1][0]), values(pairs[0][0]))


def test_more_ranks_than_elements(pool: Pool, tmp_path: Path) -> None:
    pool.run(_more_ranks_than_elements, 4, str(tmp_path))


def _before_the_first_step(group: ProcessGroup, root: str) -> None:
    setup = SETUPS["adamw"]
    for saver, loader in (("auto", "zero"), ("zero", "auto")):
        path = Path(root, saver)
        fresh = setup.make(group, saver)
        zerostep.save(path, fresh[1], fresh[0])
        used = setup.make(group, loader, seed=1, lr=0.5)
        setup.train(used, group)
        assert zerostep.load(path, used[1], used[0]).step == 0
        assert whole(used[1])["state"] == {}
        assert used[1].param_groups[0]["lr"] == 0.01
        same_weights(weights(used[0]), weights(fresh[0]))
        setup.train(used, group)
        setup.train(fresh, group)
        assert_same_bits(values(used[0]), values(fresh[0]))


def test_a_checkpoint_from_before_the_first_step_takes_all_state_away(pool: Pool, tmp_path: Path) -> None:
    pool.run(_before_the_first_step, 2, str(tmp_path))


# Names and positions.


def _renamed(group: ProcessGroup, root: str) -> None:
    setup = SETUPS["adamw"]
    pair = setup.make(group, "elements")
    setup.train(pair, group)
    zerostep.save(Path(root, "named"), pair[1], pair[0])
    by_name = dict(zip(dict(pair[0].named_parameters()), whole(pair[1])["state"].values(), strict=False))
    for choose in (_reversed, _prefixed, _unnamed):
        model = build(seed=1)
        ours = _sharded(group, model, choose(model), AdamW, **ADAMW)
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


# Masters.


def _masters(group: ProcessGroup, root: str, kind: Any, options: dict[str, Any]) -> None:
    """A bfloat16 model with float32 masters: exactly back, into float32 and from it."""
    low: dict[str, Any] = {"master_dtype": torch.float32, "reduce_dtype": torch.float32}
    setup = Setup(kind, options, build=lambda seed: build("mlp", seed).bfloat16())
    full = Setup(kind, options)

    def trained(pair: Pair) -> Pair:
        for inputs, targets in batches(3, dist.get_rank(group), 3):
            pair[1].zero_grad()
            mse_loss(pair[0](inputs).float(), targets).backward()
            pair[1].step()
        return pair

    pair = trained(setup.make(group, "elements", **low))
    zerostep.save(Path(root, "low"), pair[1], pair[0])
    again = setup.make(group, "parameters", seed=1, **low)
    zerostep.load(Path(root, "low"), again[1], again[0])
    assert_same_state_dict(_with_masters(again[1]), _with_masters(pair[1]))
    same_weights(weights(again[0]), weights(pair[0]))
    trained(pair), trained(again)
    assert_same_state_dict(_with_masters(again[1]), _with_masters(pair[1]))

    # Into a float32 model: its weights are the masters, which the bfloat16 weights are too coarse for.
    zerostep.save(Path(root, "low again"), pair[1], pair[0])
    wide = full.make(group, "zero", seed=1)
    zerostep.load(Path(root, "low again"), wide[1], wide[0])
    masters = _masters_of(pair[1])
    if masters:
        assert_same_bits(dict(zip(masters, values(wide[0]).values(), strict=True)), masters)
        assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())

    # And from a float32 model: the masters are its weights.
    trained(wide)
    zerostep.save(Path(root, "full"), wide[1], wide[0])
    narrow = setup.make(group, "elements", seed=1, **low)
    zerostep.load(Path(root, "full"), narrow[1], narrow[0])
    masters = _masters_of(narrow[1])
    if masters:
        assert_same_bits(masters, dict(zip(masters, values(wide[0]).values(), strict=True)))
    for name, value in values(narrow[0]).items():
        assert torch.equal(value, values(wide[0])[name].bfloat16())


def _masters_of_nobody(group: ProcessGroup, root: str) -> None:
    """Saved without masters, in bfloat16: they are made of the weights that were loaded, not of those before."""
    setup = Setup(build=lambda seed: build("mlp", seed).bfloat16())
    pair = setup.make(group, "elements")
    zerostep.save(Path(root, "it"), pair[1], pair[0])
    again = setup.make(group, "elements", seed=1, master_dtype=torch.float32)
    zerostep.load(Path(root, "it"), again[1], again[0])
    masters = _masters_of(again[1])
    if masters:
        assert_same_bits(masters, {str(i): value.float() for i, value in enumerate(values(pair[0]).values())})


def test_masters_that_nobody_saved_are_the_loaded_weights(pool: Pool, tmp_path: Path) -> None:
    pool.run(_masters_of_nobody, 2, str(tmp_path))


def _with_masters(optimizer: Any) -> dict[str, Any]:
    found = whole(optimizer)
    assert optimizer.rank or all("master" in entry for entry in found["state"].values())
    return found


def _masters_of(optimizer: Any) -> dict[str, Tensor]:
    return {str(number): entry["master"] for number, entry in _with_masters(optimizer)["state"].items()}


@pytest.mark.parametrize(("kind", "options"), [(AdamW, ADAMW), (SGD, {"lr": 0.05, "momentum": 0.9})])
def test_masters_come_back_exactly(pool: Pool, tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    pool.run(_masters, 2, str(tmp_path), kind, options)


def _masters_without_state(group: ProcessGroup, root: str) -> None:
    """Plain gradient descent keeps nothing but the masters."""
    low: dict[str, Any] = {"master_dtype": torch.float32, "reduce_dtype": torch.float32}
    setup = Setup(SGD, {"lr": 1e-4}, build=lambda seed: build("mlp", seed).bfloat16())
    runs = []
    for resumed in (False, True):
        pair = setup.make(group, "elements", **low)
        for step, (inputs, targets) in enumerate(batches(3, dist.get_rank(group), 40)):
            if resumed and step == 20:
                zerostep.save(Path(root, "it"), pair[1], pair[0])
                pair = setup.make(group, "elements", seed=1, **low)
                zerostep.load(Path(root, "it"), pair[1], pair[0])
            pair[1].zero_grad()
            mse_loss(pair[0](inputs).float(), targets).backward()
            pair[1].step()
        shards = pair[1]._running.shards.values()
        runs.append({str(i): shard.master.clone() for i, shard in enumerate(shards)})
    assert_same_bits(*runs)


def test_masters_of_an_optimizer_without_state_come_back(pool: Pool, tmp_path: Path) -> None:
    pool.run(_masters_without_state, 2, str(tmp_path))


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


def _save_extra(group: ProcessGroup, path: str, extra: Any) -> None:
    pair = SETUPS["adamw"].make(group, "auto")
    zerostep.save(path, pair[1], extra=[extra, dist.get_rank(group)] if extra == "own" else extra)


def test_extra_is_this_ranks_or_that_of_rank_0(pool: Pool, tmp_path: Path) -> None:
    pool.run(_save_extra, 2, str(tmp_path / "own"), "own")
    pool.run(_save_extra, 2, str(tmp_path / "same"), {"epoch": 3})
    pool.run(_save_extra, 2, str(tmp_path / "none"), None)
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


# Resuming.

GLOBAL_BATCH, HALF, STEPS = 12, 4, 8


class Dropping(nn.Module):
    """A model that draws random numbers as it goes."""

    def __init__(self, seed: int, drop: float) -> None:
        super().__init__()
        self.body, self.drop = build("matrices", seed), drop
        self.norm = nn.BatchNorm1d(9) if drop else nn.Identity()  # sees a rank's own share, unlike the sums

    def forward(self, x: Tensor) -> Tensor:
        """With noise on the inputs."""
        result: Tensor = self.body(self.norm(nn.functional.dropout(x, self.drop)))
        return result


@dataclass(frozen=True)
class Run:
    """A training that can be stopped and resumed: clipped, two micro-batches a step, a schedule, random numbers."""

    way: str
    drop: float
    kind: Any = AdamW
    options: tuple[tuple[str, Any], ...] = (("lr", 0.01),)
    wait: bool = True

    def start(self, group: ProcessGroup, seed: int = 0) -> tuple[nn.Module, Any, StepLR]:
        """New objects."""
        model = Dropping(seed, self.drop)
        pair = WAYS[self.way](group, model, list(model.named_parameters()), self.kind, **dict(self.options))
        return *pair, StepLR(pair[1], 3, 0.5)

    def first(self, group: ProcessGroup, root: str, steps: int) -> dict[str, Tensor]:
        """From the start, with a checkpoint on the way."""
        objects = self.start(group)
        torch.manual_seed(100 + dist.get_rank(group))
        self._go_on(group, objects, range(HALF))
        extra = {"step": HALF, "scheduler": objects[2].state_dict(), "rng": torch.get_rng_state().tolist()}
        pending = zerostep.save(Path(root, "it"), objects[1], objects[0], extra, wait=self.wait)
        assert (pending is None) == self.wait
        self._go_on(group, objects, range(HALF, steps))
        if pending is not None:
            pending.wait()
        return weights(objects[0])

    def resumed(self, group: ProcessGroup, root: str) -> dict[str, Tensor]:
        """From the checkpoint to the end."""
        objects = self.start(group, seed=1)
        torch.manual_seed(999)
        path = zerostep.latest(root, group)
        assert path is not None
        found = zerostep.load(path, objects[1], objects[0])
        objects[2].load_state_dict(found.extra["scheduler"])
        torch.set_rng_state(torch.tensor(found.extra["rng"], dtype=torch.uint8))
        assert found.step == found.extra["step"] == HALF
        self._go_on(group, objects, range(found.extra["step"], STEPS))
        return weights(objects[0])

    def _go_on(self, group: ProcessGroup, objects: tuple[nn.Module, Any, StepLR], steps: Iterable[int]) -> None:
        model, optimizer, scheduler = objects
        for step in steps:
            optimizer.zero_grad()
            inputs, targets = batches(11, step, 1, "matrices", 2 * GLOBAL_BATCH)[0]
            mine = slice(dist.get_rank(group), None, group.size())
            for half in (0, 1):
                part = slice(half * GLOBAL_BATCH, (half + 1) * GLOBAL_BATCH)
                with _not_yet(model, optimizer) if half == 0 else nullcontext():
                    (mse_loss(model(inputs[part][mine]), targets[part][mine]) / 2).backward()
            _clip(model, optimizer)
            optimizer.step()
            scheduler.step()
        getattr(optimizer, "synchronize", lambda: None)()


def _not_yet(model: nn.Module, optimizer: Any) -> AbstractContextManager[None]:
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.no_sync()
    assert isinstance(model, DDP)
    return model.no_sync()


def _clip(model: nn.Module, optimizer: Any) -> None:
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.clip_grad_norm_(0.1)
    elif not optimizer._overlap_with_ddp:
        clip_grad_norm_(model.parameters(), 0.1)


def _no_buffers(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the statistics, which are those of rank 0."""
    return {key: value for key, value in found.items() if "running" not in key}


def _first(group: ProcessGroup, run: Run, root: str, steps: int) -> dict[str, Tensor]:
    return run.first(group, root, steps)


def _resumed(group: ProcessGroup, run: Run, root: str) -> dict[str, Tensor]:
    return run.resumed(group, root)


@pytest.mark.parametrize("way", ["elements", "forward", "wrapped", "zero", "view", "hook"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_resumed_run_is_the_uninterrupted_one(pool: Pool, tmp_path: Path, way: str, wait: bool) -> None:
    run = Run(way, drop=0.3, wait=wait)
    whole_way = pool.run(_first, 2, run, str(tmp_path), STEPS)
    found = pool.run(_resumed, 2, run, str(tmp_path))
    assert_same_bits(found[0], whole_way[0])
    assert_same_bits(_no_buffers(found[1]), _no_buffers(whole_way[1]))


def test_a_run_resumes_in_new_processes(pool: Pool, tmp_path: Path) -> None:
    run = Run("forward", drop=0.3, wait=False)
    stopped = run_fresh(_first, 3, run, str(tmp_path / "stopped"), HALF)
    assert [each.error for each in stopped] == [None] * 3
    whole_way = pool.run(_first, 3, run, str(tmp_path / "whole"), STEPS)
    for ours, theirs in zip(pool.run(_resumed, 3, run, str(tmp_path / "stopped")), whole_way, strict=True):
        assert_same_bits(_no_buffers(ours), _no_buffers(theirs))


@pytest.mark.parametrize(
    ("way", "kind", "options"),
    [
        ("elements", AdamW, (("lr", 0.01),)),
        ("forward", SGD, (("lr", 0.05), ("momentum", 0.9))),
        ("zero", AdamW, (("lr", 0.01),)),
        ("auto", Muon, (("lr", 0.02),)),
    ],
)
def test_a_run_goes_on_at_another_world_size(pool: Pool, tmp_path: Path, way: str, kind: Any, options: Any) -> None:
    run = Run(way, drop=0.0, kind=kind, options=options)
    whole_way = pool.run(_first, 2, run, str(tmp_path), STEPS)[0]
    for world in (1, 3, 4):
        for found in pool.run(_resumed, world, run, str(tmp_path)):
            assert 0.0 <= gap(found, whole_way) <= 1e-6
    shutil.rmtree(tmp_path / "it")


# A series of checkpoints.


def _series(group: ProcessGroup, root: str) -> list[list[str]]:
    pair = SETUPS["adamw"].make(group, "auto")
    found = []
    for name in ("step-9", "step-10", "step-11", "step-12"):
        zerostep.save(Path(root, name), pair[1], keep=2)
        found.append(sorted(os.listdir(root)))
        assert zerostep.latest(root, group) == Path(root, name)
    pending = zerostep.save(Path(root, "step-13"), pair[1], keep=3, wait=False)
    assert pending is not None
    pending.wait()
    found.append(sorted(os.listdir(root)))
    return found


def test_keep_removes_the_oldest_complete_ones_and_stale_drafts(pool: Pool, tmp_path: Path) -> None:
    others = ["notes.txt", "other", "step-1"]
    hidden = [".hidden", ".backup.old-2024", f".precious.old-{1:032x}"]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "manifest.json").write_text("{}")  # damaged: not counted, and not removed either
    (tmp_path / f".step-8.draft-{2:032x}").mkdir()
    (tmp_path / f".step-8.draft-{2:032x}" / "rank-0.safetensors").write_bytes(b"half a file")
    (tmp_path / f".step-7.old-{3:032x}").mkdir()
    for name in hidden:
        (tmp_path / name).mkdir()
    (tmp_path / hidden[-1] / "thesis.txt").write_text("not a file of ours")
    for found in pool.run(_series, 2, str(tmp_path)):
        names = [[name for name in names if name not in (*others, *hidden)] for names in found]
        assert names == [
            ["step-9"],
            ["step-10", "step-9"],
            ["step-10", "step-11"],
            ["step-11", "step-12"],
            ["step-11", "step-12", "step-13"],
        ]
        assert all({*others, *hidden} <= set(each) for each in found)


def _latest(group: ProcessGroup, root: str) -> Path | None:
    return zerostep.latest(root, group)


def test_latest_is_the_newest_complete_one(pool: Pool, tmp_path: Path) -> None:
    root = tmp_path / "series"
    assert zerostep.latest(root) is None
    assert pool.run(_latest, 2, str(root)) == [None, None]
    pool.run(_save_extra, 2, str(root / "b"), "x")
    pool.run(_save_extra, 2, str(root / "a"), "x")
    shutil.copytree(root / "a", root / ".z.draft-1")
    assert pool.run(_latest, 2, str(root)) == [root / "a"] * 2 and zerostep.latest(root) == root / "a"
    for damage in (_shorten, _empty_manifest, _forget_a_file):
        shutil.copytree(root / "a", tmp_path / "spare")
        damage(root / "a")
        assert pool.run(_latest, 2, str(root)) == [root / "b"] * 2
        shutil.rmtree(root / "a")
        os.rename(tmp_path / "spare", root / "a")
        assert zerostep.latest(root) == root / "a"
    shutil.rmtree(root / "b")
    _shorten(root / "a")
    assert zerostep.latest(root) is None


def _shorten(path: Path) -> None:
    file = path / "rank-1.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def _empty_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 0)


def _forget_a_file(path: Path) -> None:
    (path / "rank-0.safetensors").unlink()


def _ranks_see_different_ones(group: ProcessGroup, root: str) -> str:
    with pytest.raises(ValueError, match="the ranks disagree on the newest checkpoint") as caught:
        zerostep.latest(Path(root, str(dist.get_rank(group))), group)
    return str(caught.value)


def test_ranks_that_see_different_checkpoints_say_so(pool: Pool, tmp_path: Path) -> None:
    pool.run(_save_extra, 1, str(tmp_path / "0" / "a"), 1)
    pool.run(_save_extra, 1, str(tmp_path / "1" / "b"), 1)
    for text in pool.run(_ranks_see_different_ones, 2, str(tmp_path)):
        assert (
            "rank 0 has 'a', " in text
            and "but rank 1 has 'b', " in text
            and "from a file system that all of them share" in text
        )


# Wrong uses.


@dataclass(frozen=True)
class Wrong:
    """What somebody does, with a checkpoint of `SETUPS["adamw"]` at `path`, and what he is told."""

    act: Callable[[ProcessGroup, Path], Any]
    kind: type[Exception]
    text: str


def _into(
    setup: Setup, with_model: bool = True, way: str = "auto", **options: Any
) -> Callable[[ProcessGroup, Path], Any]:
    def act(group: ProcessGroup, path: Path) -> None:
        pair = setup.make(group, way, seed=1, **options)
        before = weights(pair[0]), whole(pair[1])
        try:
            zerostep.load(path, pair[1], pair[0] if with_model else None)
        finally:
            same_weights(weights(pair[0]), before[0])
            assert_same_state_dict(whole(pair[1]), before[1])

    return act


def _saving(way: str = "auto", name: str | None = None, **options: Any) -> Callable[[ProcessGroup, Path], Any]:
    def act(group: ProcessGroup, path: Path) -> None:
        pair = SETUPS["adamw"].make(group, way)
        zerostep.save(path if name is None else path.parent / name, pair[1], **options)

    return act


def _no_weights(group: ProcessGroup, path: Path) -> None:
    pair = SETUPS["adamw"].make(group, "auto")
    zerostep.save(path.parent / "bare", pair[1])
    zerostep.load(path.parent / "bare", *reversed(pair))


def _wide(seed: int) -> nn.Module:
    model = build("mlp", seed)
    model.last = nn.Linear(5, OUTPUTS + 1)
    return model


def _longer(seed: int) -> nn.Module:
    model = build("mlp", seed)
    model.more = nn.Linear(1, 1)
    return model


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": named[:2]}, {"params": named[2:]}]


def _shapes_by_position(model: nn.Module) -> list[Tensor]:
    return list(reversed(list(model.parameters())))


WRONG = {
    "the path exists": Wrong(
        _saving(), CheckpointError, r"/it exists already: give each checkpoint a name of its own, such as step-1200"
    ),
    "the path exists, in the background": Wrong(_saving(wait=False), CheckpointError, r"/it exists already"),
    "keep=1": Wrong(
        _saving(name="new", keep=1), ValueError, r"keep must be at least 2, or None to remove nothing; got 1"
    ),
    "keep='2'": Wrong(_saving(name="new", keep="2"), ValueError, r"keep must be at least 2, .*; got '2'"),
    "a hidden name": Wrong(
        _saving(name=".new"),
        CheckpointError,
        r"'\.new' begins with a dot, as unfinished checkpoints do: choose another name",
    ),
    "extra is no plain value": Wrong(
        _saving(name="new", extra={"x": object()}), TypeError, r"extra\['x'\] is a builtins.object, which cannot travel"
    ),
    "an optimizer that is not ours": Wrong(
        lambda group, path: zerostep.save(path.parent / "new", AdamW(build().parameters())),
        TypeError,
        r"a AdamW has no shards to save or load: pass a zerostep.ShardedOptimizer or a zerostep.ZeroRedundancy",
    ),
    "loading into one that is not ours": Wrong(
        lambda group, path: zerostep.load(path, AdamW(build().parameters())),
        TypeError,
        r"a AdamW has no shards to save or load",
    ),
    "no checkpoint": Wrong(
        lambda group, path: _into(SETUPS["adamw"])(group, path / "none"),
        CheckpointError,
        r"none is not a checkpoint: .* cannot be read, No such file or directory; load another .*, see zerostep.latest",
    ),
    "the root": Wrong(
        lambda group, path: _into(SETUPS["adamw"])(group, path.parent),
        CheckpointError,
        r"is not a checkpoint: .*; in it there are it, see zerostep.latest\(\)",
    ),
    "other shapes": Wrong(
        _into(Setup(build=_wide)),
        CheckpointError,
        r"parameter 'last\.weight' has shape \(4, 5\), 'last\.weight' in the checkpoint has \(3, 5\): build the same",
    ),
    "other shapes by position": Wrong(
        _into(Setup(params=_shapes_by_position)),
        CheckpointError,
        r"parameter 'param\.0' has shape \(3,\), 'words\.weight' in the checkpoint has \(13, 7\)",
    ),
    "more parameters": Wrong(
        _into(Setup(build=_longer)),
        CheckpointError,
        r"the checkpoint lacks parameter 'more\.bias', unlike the optimizer: build the same model",
    ),
    "fewer parameters": Wrong(
        _into(Setup(params=lambda model: list(model.named_parameters())[1:])),
        CheckpointError,
        r"the checkpoint has parameter 'words\.weight', unlike the optimizer: build the same model",
    ),
    "fewer parameters without names": Wrong(
        _into(Setup(params=lambda model: list(model.parameters())[1:])),
        CheckpointError,
        r"the checkpoint has 9 parameters, the optimizer 8, and not both know their names: build the same optimizer",
    ),
    "another class": Wrong(
        _into(SETUPS["momentum"]),
        CheckpointError,
        r"group 0 was optimized by AdamW and is now by SGD, which cannot use its state: build the same optimizer",
    ),
    "other groups": Wrong(
        _into(Setup(params=_two_groups)),
        CheckpointError,
        r"the checkpoint has 1 parameter groups, the optimizer has 2: build the same groups",
    ),
    "no weights": Wrong(
        _no_weights, CheckpointError, r"bare was saved without model=, so it has no weights to load: load it without"
    ),
    "the model is an optimizer": Wrong(
        lambda group, path: zerostep.load(path, SETUPS["adamw"].make(group, "auto")[1], "model"),  # type: ignore[arg-type]
        TypeError,
        r"model must be a torch\.nn\.Module, got a str",
    ),
}


def _wrong_uses(group: ProcessGroup, root: str) -> dict[str, str]:
    path = Path(root, "it")
    pair = SETUPS["adamw"].make(group, "auto")
    SETUPS["adamw"].train(pair, group)
    zerostep.save(path, *reversed(pair))
    found = {}
    for name, wrong in WRONG.items():
        dist.barrier(group)
        with pytest.raises(wrong.kind) as caught:
            wrong.act(group, path)
        assert type(caught.value) is wrong.kind, f"{name}: {caught.value!r}"
        found[name] = str(caught.value)
        dist.barrier(group)
        shutil.rmtree(path.parent / "bare", ignore_errors=True)
        assert os.listdir(path.parent) == ["it"], f"{name}: {os.listdir(path.parent)}"
    zerostep.load(path, *reversed(pair))
    return found


def test_wrong_uses_are_told_on_every_rank_and_change_nothing(pool: Pool, tmp_path: Path) -> None:
    for texts in pool.run(_wrong_uses, 2, str(tmp_path)):
        for name, wrong in WRONG.items():
            assert re.search(wrong.text, texts[name]), f"{name}: {texts[name]}"


def _moved_to_another_group(group: ProcessGroup, root: str) -> None:
    def cut(place: int, model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [{"params": named[:place]}, {"params": named[place:], "lr": 0.5}]

    pair = Setup(params=partial(cut, 2)).make(group, "auto")
    zerostep.save(Path(root, "it"), pair[1], pair[0])
    told = r"parameter 'first\.bias' is in group 0, and was in group 1: build the same groups"
    with pytest.raises(CheckpointError, match=told):
        _into(Setup(params=partial(cut, 3)))(group, Path(root, "it"))


def test_a_parameter_that_moved_to_another_group_is_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(_moved_to_another_group, 2, str(tmp_path))


def _ranks_differ(group: ProcessGroup, root: str) -> str:
    pair = SETUPS["adamw"].make(group, "auto")
    with pytest.raises(ValueError, match="the ranks disagree on") as caught:
        zerostep.save(Path(root, f"of-{dist.get_rank(group)}"), pair[1])
    assert os.listdir(root) == []
    return str(caught.value)


def test_ranks_that_save_under_different_names_say_so(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(_ranks_differ, 2, str(tmp_path)):
        assert (
            "the name of the checkpoint: rank 0 has 'of-0', but rank 1 has 'of-1'; save the same optimizer and model"
            in text
        )


def test_a_manifest_is_json_that_anybody_can_read(pool: Pool, tmp_path: Path) -> None:
    pool.run(_save_extra, 2, str(tmp_path / "it"), {"epoch": 3})
    body = json.loads((tmp_path / "it" / "manifest.json").read_text())["manifest"]
    assert (body["format"], body["version"], body["extra"]) == ("zerostep", 1, [["dict", ["epoch", 3]]])
    assert [file["bytes"] for file in body["files"]] == [
        (tmp_path / "it" / file["name"]).stat().st_size for file in body["files"]
    ]
