"""A rank that holds parts of several sets of ranks, as with experts: one file for each, and loaded on other ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import AdamW

import zerostep
from tests.helpers.pool import Pool, RankError
from tests.helpers.reference import assert_same_bits
from zerostep import ShardedOptimizer
from zerostep.checkpoint.directory import read_manifest
from zerostep.comm.model_ranks import ModelRanks
from zerostep.comm.transport import NullTransport
from zerostep.optim.view import OptimizerView, ViewPart

LR: dict[str, Any] = {"lr": 0.01}


class Experts(nn.Module):
    """A layer that all ranks share, and some of the experts."""

    def __init__(self, numbers: Sequence[int], prefix: str = "expert") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shared = nn.Linear(5, 4)
        every = [nn.Linear(4, 3 + number) for number in range(2)]
        self.experts = nn.ModuleDict({f"{prefix}{number}": every[number] for number in numbers})
        self.register_buffer("table", torch.arange(3.0))
        for number in numbers:
            self.register_buffer(f"seen{number}", torch.full((2,), float(number)))

    def split(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        """The shared parameters and those of experts, by name."""
        named = list(self.named_parameters())
        return [each for each in named if "experts" not in each[0]], [each for each in named if "experts" in each[0]]


class Both:
    """Two optimizers, whose groups are divided among different ranks, as one."""

    def __init__(self, model: Experts, group: ProcessGroup, own: ProcessGroup) -> None:
        shared, experts = model.split()
        self._names = [[name for name, _ in members] for members in (shared, experts)]
        members = [[param for _, param in each] for each in (shared, experts)]
        groups: list[list[dict[str, Any]]] = [
            [{"params": members[0]}, {"params": []}],
            [{"params": []}, {"params": members[1]}],
        ]
        models = nn.ModuleDict({"shared": model.shared}), nn.ModuleDict({"experts": model.experts})
        self.each = [
            ShardedOptimizer(module, AdamW, chosen, process_group=ranks, **LR)
            for module, chosen, ranks in zip(models, groups, (group, own), strict=True)
        ]
        self._own = tuple(dist.get_process_group_ranks(own))

    def step(self) -> None:
        """A step of both."""
        for optimizer in self.each:
            optimizer.step()

    def optimizer_view(self) -> OptimizerView:
        """What a checkpoint sees."""
        one, two = (optimizer.optimizer_view() for optimizer in self.each)

        def restore(
            saved: Sequence[Mapping[int, Any]], named: Mapping[str, Any], options: Sequence[Any], step: int
        ) -> Callable[[], None]:
            acts = [view.restore([each], named, options, step) for view, each in zip((one, two), saved, strict=True)]
            return lambda: [act() for act in acts] and None  # type: ignore[return-value]

        groups = [
            {**optimizer.param_groups[number], "param_names": self._names[number]}
            for number, optimizer in enumerate(self.each)
        ]
        parts = [_named(part, names) for part, names in zip((*one.parts, *two.parts), self._names, strict=True)]
        parts[1] = replace(parts[1], own_ranks=self._own)
        return replace(one, parts=parts, groups=groups, restore=restore)


def _named(part: ViewPart, names: Sequence[str]) -> ViewPart:
    specs = [replace(spec, name=name) for spec, name in zip(part.layout.params, names, strict=True)]
    return replace(part, layout=replace(part.layout, params=tuple(specs)))


def _train(model: Experts, step: Callable[[], None], steps: int) -> None:
    for number in range(steps):
        for place, (_, param) in enumerate(sorted(model.named_parameters())):
            (param * (number + 1) * (1 + param.numel() % 3 + place * 0)).sum().backward()
        step()


def _values(model: Experts, optimizers: Sequence[ShardedOptimizer]) -> dict[str, Tensor]:
    """This rank's parameters, buffers and state, all of it."""
    found = {key: value.detach().clone() for key, value in model.state_dict().items()}
    named = model.split() if len(optimizers) > 1 else ([*model.split()[0], *model.split()[1]],)
    for optimizer, members in zip(optimizers, named, strict=True):
        for to in range(optimizer.world_size):
            optimizer.consolidate_state_dict(to=to)
            if to == optimizer.rank:
                state = optimizer.state_dict()
        names = [name for name, _ in members]
        for index, entry in state["state"].items():
            found |= {f"{names[index]}.{key}": value for key, value in entry.items()}
    return dict(sorted(found.items()))


def _own_groups(members: Sequence[list[int]]) -> tuple[int, ProcessGroup]:
    """The number of this rank's expert, and the ranks that have it."""
    number = next(number for number, ranks in enumerate(members) if dist.get_rank() in ranks)
    group = [dist.new_group(ranks) for ranks in members][number]
    assert group is not None
    return number, group


def _saved(group: ProcessGroup, path: Path, prefix: str, wait: bool) -> dict[str, Tensor]:
    number, own = _own_groups([[0, 2], [1, 3]])
    model = Experts([number], prefix)
    optimizer = Both(model, group, own)
    _train(model, optimizer.step, 3)
    pending = zerostep.save(path, optimizer, model, wait=wait)
    if pending is not None:
        pending.wait()
    return _values(model, optimizer.each)


def _loaded(group: ProcessGroup, path: Path) -> dict[str, Tensor]:
    number, own = _own_groups([[0, 1, 3], [2]])
    model = Experts([number])
    optimizer = Both(model, group, own)
    _train(model, optimizer.step, 1)
    zerostep.load(path, optimizer, model)
    return _values(model, optimizer.each)


def _loaded_whole(group: ProcessGroup, path: Path) -> dict[str, Tensor]:
    model = Experts([0, 1])
    shared, experts = model.split()
    groups: list[Any] = [{"params": shared}, {"params": experts}]
    optimizer = ShardedOptimizer(model, AdamW, groups, process_group=group, **LR)
    zerostep.load(path, optimizer, model)
    return _values(model, [optimizer])


@pytest.mark.parametrize("wait", [True, False])
def test_experts_load_on_other_ranks_and_on_one(pool: Pool, tmp_path: Path, wait: bool) -> None:
    saved = pool.run(_saved, 4, tmp_path / "it", "expert", wait)
    manifest = read_manifest(tmp_path / "it")
    assert [record.layout.world_size for record in manifest.layouts] == [4, 2, 2]
    assert (manifest.ranks, len(manifest.files)) == (4, 8)
    assert [group.params for group in manifest.groups] == [(0, 1), (2, 3, 4, 5)]
    for rank, found in enumerate(pool.run(_loaded, 4, tmp_path / "it")):
        assert_same_bits(found, saved[rank == 2])
    everything = dict(sorted((saved[0] | saved[1]).items()))
    for world in (1, 3):
        for found in pool.run(_loaded_whole, world, tmp_path / "it"):
            assert_same_bits(found, everything)
    zerostep.consolidate(tmp_path / "it", tmp_path / "model.pt", part="model")
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_same_bits(dict(sorted(model.items())), {key: each for key, each in everything.items() if key in model})


def test_experts_of_one_name_are_refused(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"each have a parameter 'experts.same0.weight'.*no other rank's has"):
        pool.run(_saved_alike, 4, tmp_path / "it")


def _saved_alike(group: ProcessGroup, path: Path) -> None:
    _, own = _own_groups([[0, 2], [1, 3]])
    optimizer = Both(Experts([0], "same"), group, own)
    zerostep.save(path, optimizer)


def test_an_expert_that_no_rank_has_is_missed(pool: Pool, tmp_path: Path) -> None:
    pool.run(_saved, 4, tmp_path / "it", "expert", True)
    with pytest.raises(RankError, match=r"the checkpoint has 'experts.expert1.weight', and no rank has it"):
        pool.run(_loaded_some, 1, tmp_path / "it")


def _loaded_some(group: ProcessGroup, path: Path) -> None:
    model = Experts([0])
    zerostep.load(path, Both(model, group, group), model)


def test_a_world_of_one_needs_no_messages() -> None:
    control = NullTransport()
    assert ModelRanks(control).transport([torch.ones(2)]) is control
