"""`ShardedOptimizer` equals DDP with the plain optimizer: every class, bare or in DDP, in every mode.

One job trains a model in lockstep under several settings, beside two plain twins. The first is plain DDP; one and two
ranks, and DDP's own sums at any number of ranks, must equal it bit for bit. The second adds the gradients in the order
of the ranks, as a reduction to owners does: from three ranks on, that is what all other settings must equal bit for
bit, and the two twins must stay close to each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from tests.helpers.pool import OFFSET, Pool, Ranks
from tests.helpers.reference import OPTIMIZERS, Batch, Case, assert_same_bits, assert_same_state_dict, batches, build
from tests.helpers.sharding import SMALL_BUCKETS, gap, in_ddp, sum_in_rank_order
from zerostep import ShardedOptimizer

STEPS = 50
CLOSE = 1e-6

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """One way to put a model and the optimizer together."""

    wrapped: bool
    reduction: str
    gather: str

    @property
    def sums_as_ddp(self) -> bool:
        """Whether DDP itself makes the sums."""
        return self.wrapped and self.reduction == "all"


SETTINGS = [Setting(*each) for each in product((False, True), ("scatter", "all"), ("step", "forward"))]


# What is trained.


class Garden(nn.Module):
    """A small model for each of several optimizers, from nine numbers to three each."""

    def __init__(self, cases: Mapping[str, Case]) -> None:
        super().__init__()
        self.beds = nn.ModuleDict({name: _bed(case.model) for name, case in cases.items()})

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum of all predictions, so that none is independent of the others."""
        return torch.stack([torch.tanh(bed(inputs)) for bed in self.beds.values()]).sum(0)


def _bed(kind: str) -> nn.Module:
    if kind == "convolutions":
        layers = [nn.Unflatten(1, (3, 1, 3)), nn.Conv2d(3, 4, (1, 2)), nn.Flatten(), nn.Linear(8, 3)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bias = kind != "matrices"
    return nn.Sequential(nn.Linear(9, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias))


@dataclass(frozen=True)
class Task:
    """The model, and the groups that optimizers are made from; a group may name a class of its own."""

    common: Case
    each: Mapping[str, Case] | None = None
    matrices_apart: bool = False
    steps: int = STEPS
    bucket_mb: float = SMALL_BUCKETS

    def build(self) -> nn.Module:
        if self.each is None:
            return build(self.common.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Garden(self.each)

    def batches(self, rank: int) -> list[Batch]:
        return batches(1, rank, self.steps, "matrices" if self.each is not None else self.common.model)

    def groups(self, model: nn.Module) -> Groups | None:
        named = list(model.named_parameters())
        if self.each is not None:
            return [
                _own(case, [n for n in named if n[0].startswith(f"beds.{bed}.")]) for bed, case in self.each.items()
            ]
        if self.matrices_apart:
            matrices, others = [n for n in named if n[1].dim() == 2], [n for n in named if n[1].dim() != 2]
            return [_own(OPTIMIZERS["muon"], matrices), {"params": others, "lr": 0.005}]
        return None

    def plain(self, model: nn.Module) -> "Plain":
        groups = self.groups(model)
        if groups is None:
            return Plain([self.common.optimizer(model.named_parameters())])
        return Plain([_plain(self.common, group) for group in groups])

    def ours(self, group: ProcessGroup, bare: nn.Module, setting: Setting) -> "Replica":
        model = in_ddp(group, bare) if setting.wrapped else bare
        options: dict[str, Any] = {"reduction": setting.reduction, "gather": setting.gather, **self.common.options}
        params = self.groups(bare)
        return Replica(
            model,
            ShardedOptimizer(model, self.common.kind, params, process_group=group, bucket_mb=self.bucket_mb, **options),
        )


def _own(case: Case, named: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
    return {"params": list(named), "optimizer_class": case.kind, **case.options}


def _plain(common: Case, group: dict[str, Any]) -> Optimizer:
    """Options for everybody are for groups of the common class, whether they name it or not."""
    kind = group.pop("optimizer_class", common.kind)
    return common.optimizer([group]) if kind is common.kind else kind([group])


@dataclass(frozen=True)
class Plain:
    """Plain optimizers; together they do what one of ours does."""

    all: Sequence[Optimizer]

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """As if it were one optimizer with several groups."""
        state: dict[int, Any] = {}
        groups: Groups = []
        for optimizer in self.all:
            found, first = optimizer.state_dict(), sum(len(group["params"]) for group in groups)
            state |= {first + number: entry for number, entry in found["state"].items()}
            for group in found["param_groups"]:
                groups.append({**group, "params": [first + number for number in group["params"]]})
        return {"state": state, "param_groups": groups}


# How it is trained.


class Replica:
    """A model, and what one step of it is."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def train(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        mse_loss(self.model(batch[0]), batch[1]).backward()
        self.finish()

    def finish(self) -> None:
        self.optimizer.step()

    def values(self) -> dict[str, Tensor]:
        return {name.removeprefix("module."): param.detach() for name, param in self.model.named_parameters()}


class InRankOrder(Replica):
    """A bare model whose gradients are added in the order of the ranks."""

    def __init__(self, group: ProcessGroup, model: nn.Module, optimizer: Any) -> None:
        super().__init__(model, optimizer)
        self.group = group

    def finish(self) -> None:
        sum_in_rank_order(self.group, self.model.parameters())
        self.optimizer.step()


class Twins:
    """Plain DDP, and sums in the order of the ranks; with one or two ranks these are the same."""

    def __init__(self, group: ProcessGroup, task: Task) -> None:
        bare, other = task.build(), task.build()
        self.ddp = Replica(in_ddp(group, bare), task.plain(bare))
        self.ordered = InRankOrder(group, other, task.plain(other)) if dist.get_world_size(group) > 2 else self.ddp
        self.start = {name: value.clone() for name, value in self.ddp.values().items()}

    def train(self, batch: Batch) -> None:
        self.ddp.train(batch)
        if self.ordered is not self.ddp:
            self.ordered.train(batch)

    def of(self, setting: Setting) -> Replica:
        return self.ddp if setting.sums_as_ddp else self.ordered


def _lockstep(group: ProcessGroup, task: Task, settings: Sequence[Setting]) -> dict[str, Tensor]:
    """Train everything, compare everything, and return what the first setting came to."""
    twins = Twins(group, task)
    replicas = {setting: task.ours(group, task.build(), setting) for setting in settings}
    for number, batch in enumerate(task.batches(dist.get_rank(group))):
        twins.train(batch)
        for setting, replica in replicas.items():
            replica.train(batch)
            if number % 10 == 0 or number == task.steps - 1:
                replica.optimizer.synchronize()
                _assert_same_values(f"{setting}, step {number}", replica, twins.of(setting))
        if number == 0:
            assert gap(twins.ordered.values(), twins.ddp.values()) < CLOSE
    for place, (setting, replica) in enumerate(replicas.items()):
        _assert_same_state(place % dist.get_world_size(group), replica.optimizer, twins.of(setting).optimizer)
    for name, value in twins.ddp.values().items():
        assert not torch.equal(value, twins.start[name]), name
    return {name: value.clone() for name, value in replicas[settings[0]].values().items()}


def _assert_same_values(excerpt: str, ours: Replica, expected: Replica) -> None:
    try:
        assert_same_bits(ours.values(), expected.values())
    except AssertionError as error:
        raise AssertionError(f"{excerpt}: {error}") from None


def _assert_same_state(to: int, ours: ShardedOptimizer, plain: Plain) -> None:
    ours.consolidate_state_dict(to=to)
    if to == ours.rank:
        assert_same_state_dict(ours.state_dict(), plain.state_dict())


def _lockstep_each(group: ProcessGroup, tasks: Sequence[tuple[Task, Sequence[Setting]]]) -> list[dict[str, Tensor]]:
    return [_lockstep(group, task, settings) for task, settings in tasks]


# Every class at once, and every class by itself.

ADAMW = OPTIMIZERS["adamw"]
ALL_AT_ONCE = Task(ADAMW, each=OPTIMIZERS, steps=20, bucket_mb=0.0015)
MUON_AND_ADAMW = Task(ADAMW, matrices_apart=True, bucket_mb=0.0006)


# Many ranks take their time: three and four share the settings.
ALL_AT_ONCE_IN = [(1, SETTINGS), (2, SETTINGS[::2]), (2, SETTINGS[1::2])]
ALL_AT_ONCE_IN += [(3, [SETTINGS[index] for index in (0, 3, 5, 6)]), (4, [SETTINGS[index] for index in (1, 2, 4, 7)])]


@pytest.mark.parametrize(("world", "settings"), ALL_AT_ONCE_IN)
def test_a_group_for_every_class_equals_plain(pool: Pool, world: int, settings: list[Setting]) -> None:
    results = pool.run(_lockstep, world, ALL_AT_ONCE, settings, deadline=110.0)
    for other in results[1:]:
        assert_same_bits(other, results[0])


def _by_turns() -> Iterator[tuple[str, int, list[Setting]]]:
    """Each class with two and three ranks; every setting comes up again and again."""
    for number, name in enumerate(OPTIMIZERS):
        for world in (2, 3):
            yield name, world, [SETTINGS[(3 * number + world) % 8]]


@pytest.mark.parametrize("world", [2, 3])
def test_every_class_by_itself_equals_plain(pool: Pool, world: int) -> None:
    tasks = [
        (Task(OPTIMIZERS[name], steps=7, bucket_mb=0.0005), chosen)
        for name, size, chosen in _by_turns()
        if size == world
    ]
    pool.run(_lockstep_each, world, tasks)


@pytest.mark.parametrize("world", [2, 3])
def test_muon_for_matrices_and_adamw_for_the_rest_equals_plain(pool: Pool, world: int) -> None:
    pool.run(_lockstep, world, MUON_AND_ADAMW, SETTINGS[:1] + SETTINGS[5:7])


def test_a_subgroup_of_the_world_equals_plain(pool: Pool, world: Ranks = OFFSET) -> None:
    pool.run(_lockstep, world, Task(ADAMW, steps=20), SETTINGS[1::2])
