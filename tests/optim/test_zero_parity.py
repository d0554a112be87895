"""DDP with `ZeroRedundancyOptimizer` equals DDP with the plain optimizer, bit for bit.

One job trains three replicas of a model in lockstep: one with the plain optimizer, two with ours, in both bucket-view
modes. On the way parameters are frozen, a group is added, parameters are unfrozen, and every replica in turn goes on
with a fresh optimizer that has loaded the state of another one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from tests.helpers.pool import OFFSET, Pool, Ranks
from tests.helpers.reference import OPTIMIZERS, Batch, Case, assert_same_bits, assert_same_state_dict, batches, build
from zerostep import ZeroRedundancyOptimizer

Groups = list[dict[str, Any]]

STEPS = 28
FREEZE, ADD, UNFREEZE, COMPARE = 4, 8, 11, 15
RELOAD_COPIED, RELOAD_VIEWS, RELOAD_PLAIN = 17, 20, 23


@dataclass
class Replica:
    """A model in DDP with an optimizer, which `make` builds from parameter groups."""

    case: Case
    ddp: DDP
    make: Callable[[Groups], Optimizer]

    def __post_init__(self) -> None:
        self.params: list[Tensor] = list(self.ddp.parameters())
        self.optimizer = self.make(self._first_groups())

    def _first_groups(self) -> Groups:
        first, second, _ = self._thirds()
        return [{"params": first}, {"params": second, "lr": self.case.options["lr"] / 2}]

    def _last_group(self) -> dict[str, Any]:
        return {"params": self._thirds()[2], "lr": self.case.options["lr"] / 4}

    def _thirds(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        cut = len(self.params) // 3
        return self.params[:cut], self.params[cut : 2 * cut], self.params[2 * cut :]

    def train(self, batch: Batch) -> float:
        """One step; the loss before it."""
        inputs, targets = batch
        self.ddp.zero_grad()
        loss = mse_loss(self.ddp(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def set_trainable(self, trainable: bool) -> None:
        """Freeze or unfreeze every third parameter, one of them in the group that is added while it is frozen."""
        for param in self.params[1::3]:
            param.requires_grad_(trainable)

    def add_group(self) -> None:
        """Begin to train what has only had gradients so far."""
        self.optimizer.add_param_group(self._last_group())

    def reload(self, state: dict[str, Any]) -> None:
        """Go on with a fresh optimizer."""
        self.optimizer = self.make([*self._first_groups(), self._last_group()])
        self.optimizer.load_state_dict(state)

    def state(self) -> dict[str, Any]:
        """The whole state; on every rank, one after the other."""
        if not isinstance(self.optimizer, ZeroRedundancyOptimizer):
            return self.optimizer.state_dict()
        for to in range(self.optimizer.world_size):
            self.optimizer.consolidate_state_dict(to=to)
            if to == self.optimizer.rank:
                found = self.optimizer.state_dict()
        return found


def _replicas(group: ProcessGroup, case: Case) -> tuple[Replica, Replica, Replica]:
    def replica(make: Callable[[Groups], Optimizer]) -> Replica:
        return Replica(case, DDP(build(case.model), process_group=group, find_unused_parameters=True), make)

    def zero(views: bool) -> Callable[[Groups], Optimizer]:
        return lambda groups: ZeroRedundancyOptimizer(
            groups, case.kind, process_group=group, parameters_as_bucket_view=views, **case.options
        )

    return replica(case.optimizer), replica(zero(False)), replica(zero(True))


def _events(number: int, plain: Replica, copied: Replica, views: Replica) -> None:
    for replica in (plain, copied, views):
        if number in (FREEZE, UNFREEZE):
            replica.set_trainable(number == UNFREEZE)
        if number == ADD:
            replica.add_group()
    if number in (FREEZE, ADD, UNFREEZE, COMPARE, STEPS):
        _assert_same_states(number, plain, copied, views)
    if number == RELOAD_COPIED:
        copied.reload(plain.state())
    if number == RELOAD_VIEWS:
        views.reload(plain.state())
    if number == RELOAD_PLAIN:
        plain.reload(copied.state())


def _assert_same_states(number: int, plain: Replica, *others: Replica) -> None:
    for replica in others:
        zero = replica.optimizer
        assert isinstance(zero, ZeroRedundancyOptimizer)
        to = number // 4 % zero.world_size
        zero.consolidate_state_dict(to=to)
        if to == zero.rank:
            assert_same_state_dict(zero.state_dict(), plain.state())


def _train_in_lockstep(group: ProcessGroup, name: str) -> None:
    case = OPTIMIZERS[name]
    plain, copied, views = replicas = _replicas(group, case)
    before = [param.detach().clone() for param in plain.params]
    for number, batch in enumerate(batches(1, dist.get_rank(group), STEPS, case.model)):
        _events(number, *replicas)
        losses = torch.tensor([replica.train(batch) for replica in replicas], dtype=torch.float64)
        assert losses.isfinite().all() and (losses == losses[0]).all(), f"step {number}: {losses.tolist()}"
        for other in (copied, views):
            assert_same_bits(other.ddp.named_parameters(), plain.ddp.named_parameters())
    _events(STEPS, *replicas)
    for param, start in zip(plain.params, before, strict=True):
        assert not torch.equal(param, start)


# Further settings of classes that run at all sizes under another name.
SETTINGS = {
    "sgd",
    "sgd_nesterov",
    "sgd_maximize",
    "adam_amsgrad",
    "adam_maximize",
    "adamw_maximize",
    "rmsprop_centered",
}
# Four ranks take their time, and show nothing of a class that three do not.
WITH_FOUR = {"adamw", "muon", "adafactor"}
CASES = [(name, world) for name in OPTIMIZERS for world in ((2, 3) if name in SETTINGS else (1, 2, 3))]
CASES += [(name, 4) for name in OPTIMIZERS if name in WITH_FOUR]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_statement_19_every_optimizer_equals_plain(pool: Pool, name: str, world: int) -> None:
    pool.run(_train_in_lockstep, world, name)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_statement_19_on_a_subgroup(pool: Pool, name: str, world: Ranks = OFFSET) -> None:
    pool.run(_train_in_lockstep, world, name)


def _frozen_between_backward_and_step(group: ProcessGroup, as_views: bool) -> None:
    """A parameter that was frozen after backward has a gradient, which a plain optimizer uses; then it is dropped."""
    case, sides = OPTIMIZERS["sgd_momentum"], []
    for ours in (False, True):
        model: Any = build()
        ddp, optimizer = DDP(model, process_group=group), case.optimizer(model.parameters())
        if ours:
            options = {"parameters_as_bucket_view": as_views, **case.options}
            optimizer = ZeroRedundancyOptimizer(model.parameters(), case.kind, group, **options)
        for number, (inputs, targets) in enumerate(batches(0, dist.get_rank(group), 4)):
            optimizer.zero_grad()
            mse_loss(ddp(inputs), targets).backward()
            for param in model.second.parameters():
                param.requires_grad_(number % 2 == 1)
            optimizer.step()
            for param in model.second.parameters():
                param.requires_grad_(True)
        sides.append(dict(model.named_parameters()))
    assert_same_bits(*sides)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("as_views", [False, True])
def test_a_parameter_that_is_frozen_between_backward_and_step_is_sent(pool: Pool, as_views: bool, world: int) -> None:
    pool.run(_frozen_between_backward_and_step, world, as_views)
