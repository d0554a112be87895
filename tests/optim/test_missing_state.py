"""State dicts that lack the state of some parameters: refused, insisted on, and those that lack nothing."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, AdamW, Optimizer

import zerostep
from tests.helpers.checkpoint_setups import WAYS, Pair
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, assert_same_state_dict
from tests.helpers.sharding import values
from tests.helpers.zero_state_dicts import full_state_dict

MODES = pytest.mark.parametrize("way", ["elements", "parameters", "wrapped", "zero", "hook"])


class Partly(nn.Module):
    """A model with a parameter that is never used and, if wanted, a frozen one."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first, self.unused, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.unused.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        """Without one of the layers."""
        found: Tensor = self.last(self.first(x).relu())
        return found


def _pair(group: ProcessGroup, way: str, frozen: bool = False, kind: Any = AdamW, **options: Any) -> Pair:
    # Frozen in DDP, which would wait for the gradient of an unused parameter.
    model = Partly(frozen or way in ("wrapped", "hook", "zero"))
    return WAYS[way](group, model, list(model.named_parameters()), kind, **{"lr": 0.1, **options})


def _train(pair: tuple[nn.Module, Any], steps: int = 2) -> None:
    model, optimizer = pair
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        if not getattr(optimizer, "_overlap_with_ddp", False):
            optimizer.step()


def _plain(kind: Any = AdamW, steps: int = 2, **options: Any) -> tuple[Partly, Optimizer]:
    model = Partly()
    found = model, kind(model.named_parameters(), **{"lr": 0.1, **options})
    _train(found, steps)
    return found


def _without(saved: dict[str, Any], indices: list[int]) -> dict[str, Any]:
    return {**saved, "state": {key: entry for key, entry in saved["state"].items() if key not in indices}}


# Lost entries.


def _refused(group: ProcessGroup, way: str) -> str:
    pair = _pair(group, way)
    _train(pair)
    pair[1].param_groups[0]["lr"] = 0.25
    saved = full_state_dict(pair[1])
    before, options = copy.deepcopy(saved["state"]), dict(pair[1].param_groups[0])
    with pytest.raises(ValueError, match="has no state for") as caught:
        pair[1].load_state_dict({**_without(saved, [4, 5]), "param_groups": [{**saved["param_groups"][0], "lr": 9.0}]})
    assert_same_state_dict(full_state_dict(pair[1])["state"], before)
    assert pair[1].param_groups[0]["lr"] == options["lr"] == 0.25
    pair[1].load_state_dict(_without(saved, [4, 5]), allow_missing=True)
    _train(pair, 1)
    steps = {index: float(entry["step"]) for index, entry in full_state_dict(pair[1])["state"].items()}
    assert steps == {0: 3.0, 1: 3.0, 4: 1.0, 5: 1.0}
    return str(caught.value)


@MODES
def test_half_of_the_entries_is_refused_by_name(pool: Pool, way: str) -> None:
    for text in pool.run(_refused, 2, way):
        assert text.startswith("the state dict has no state for 2 of the 6 parameters of group 0")
        assert "the first is 'last.weight'" in text and "allow_missing=True" in text


def _shard_of_one_rank(group: ProcessGroup) -> None:
    """The entries of one rank, as a program has them that saves on every rank without collecting."""
    model = Partly(frozen=True)
    zero = zerostep.ZeroRedundancyOptimizer(model.parameters(), AdamW, process_group=group, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    zero.step()
    whole = full_state_dict(zero)
    mine = {zero._param_to_index[param]: dict(entry) for param, entry in zero.state.items()}
    assert 0 < len(mine) < len(whole["state"])
    with pytest.raises(ValueError, match="has no state for"):
        zero.load_state_dict({"state": mine, "param_groups": whole["param_groups"]})


def test_the_shard_of_one_rank_is_refused(pool: Pool) -> None:
    pool.run(_shard_of_one_rank, 2)


def _whole_group(group: ProcessGroup, way: str) -> None:
    """All entries of one group are lost, and it is one that has state."""
    model = Partly(frozen=True)
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.last.parameters())}]
    pair = WAYS[way](group, model, groups, AdamW, lr=0.1)
    _train(pair)
    saved = full_state_dict(pair[1])
    with pytest.raises(ValueError, match="2 of the 2 parameters of group 1"):
        pair[1].load_state_dict(_without(saved, [2, 3]))


@pytest.mark.parametrize("way", ["elements", "zero"])
def test_a_group_without_any_entry_is_refused(pool: Pool, way: str) -> None:
    pool.run(_whole_group, 2, way)


# Nothing is lost.


def _round_trip(group: ProcessGroup, path: str, way: str) -> None:
    """Parameters that were never used, or are frozen, come back without a word, in every format of ours."""
    pair, again, third = (_pair(group, way) for _ in range(3))
    _train(pair)
    saved = full_state_dict(pair[1])
    assert saved["without_state"] == [2, 3] and sorted(saved["state"]) == [0, 1, 4, 5]
    again[0].requires_grad_(True)  # what was frozen is trained from here on
    if way != "hook":
        again[1].load_state_dict(saved)
        assert_same_state_dict(full_state_dict(again[1])["state"], saved["state"])
    zerostep.save(f"{path}/step", pair[1])
    if dist.get_rank(group) == 0:
        zerostep.consolidate(f"{path}/step", f"{path}/optimizer.pt")
    dist.barrier(group)
    exported = torch.load(f"{path}/optimizer.pt", weights_only=True)
    third[1].load_state_dict(exported)
    assert exported["without_state"] == [2, 3]
    zerostep.load(f"{path}/step", third[1])
    plain = Partly()
    optimizer = AdamW(plain.named_parameters(), lr=0.1)
    optimizer.load_state_dict(saved)  # torch does not look at the list
    assert sorted(optimizer.state_dict()) == ["param_groups", "state"]


@MODES
def test_parameters_without_state_round_trip(pool: Pool, tmp_path: Path, way: str) -> None:
    pool.run(_round_trip, 2, str(tmp_path), way)


def _from_plain(group: ProcessGroup, way: str) -> None:
    """A plain state dict cannot tell an unused parameter from a lost one; where it is frozen, nothing is asked."""
    model, optimizer = _plain()
    frozen, trained = _pair(group, way, frozen=True), _pair(group, "elements")
    frozen[1].load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"the first is 'unused\.weight'"):
        trained[1].load_state_dict(optimizer.state_dict())
    trained[1].load_state_dict(optimizer.state_dict(), allow_missing=True)
    assert_same_state_dict(full_state_dict(trained[1])["state"], optimizer.state_dict()["state"])
    with torch.no_grad():
        for ours, theirs in zip(trained[0].parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    _train(trained, 1)
    _train((model, optimizer), 1)
    assert_same_bits(values(trained[0]), values(model))


@MODES
def test_a_plain_state_dict_with_unused_parameters(pool: Pool, way: str) -> None:
    pool.run(_from_plain, 1, way)


def _stateless(group: ProcessGroup, way: str) -> None:
    """Without momentum there is no state, before the first step there is none, and one group may have none."""
    pair = _pair(group, way, kind=SGD)
    _train(pair)
    saved = full_state_dict(pair[1])
    assert saved["state"] == {} and "without_state" not in saved
    _pair(group, way, kind=SGD, momentum=0.9)[1].load_state_dict(saved)
    fresh = _pair(group, way)
    fresh[1].load_state_dict(_pair(group, way)[1].state_dict())
    fresh[1].load_state_dict(_plain(steps=0)[1].state_dict())


@MODES
def test_state_that_never_was_is_not_missed(pool: Pool, way: str) -> None:
    pool.run(_stateless, 2, way)


def _one_group_without_momentum(group: ProcessGroup, way: str) -> None:
    """The options that count are those of the state dict, which are about to be loaded."""
    model, plain = Partly(frozen=True), Partly(frozen=True)

    def groups(module: Partly, momentum: float) -> list[dict[str, Any]]:
        tail = list(module.last.parameters())
        return [{"params": list(module.first.parameters())}, {"params": tail, "momentum": momentum}]

    optimizer = SGD(groups(plain, 0.0), lr=0.1, momentum=0.9)
    _train((plain, optimizer))
    pair = WAYS[way](group, model, groups(model, 0.5), SGD, lr=0.1, momentum=0.9)
    pair[1].load_state_dict(optimizer.state_dict())
    assert pair[1].param_groups[1]["momentum"] == 0.0


@pytest.mark.parametrize("way", ["elements", "zero"])
def test_a_group_that_keeps_no_state(pool: Pool, way: str) -> None:
    pool.run(_one_group_without_momentum, 2, way)


class MatricesOnly(SGD):
    """Keeps a state for matrices alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if param.dim() == 2:
                        self.state[param].setdefault("sum", torch.zeros_like(param)).add_(param.grad)
                    param.data.sub_(param.grad, alpha=group["lr"])


def _lazy(group: ProcessGroup, way: str) -> None:
    model = Partly(frozen=True)
    optimizer = MatricesOnly(model.parameters(), lr=0.1)
    _train((model, optimizer))
    pair = _pair(group, way, frozen=True, kind=MatricesOnly)
    pair[1].load_state_dict(optimizer.state_dict())
    lost = optimizer.state_dict()
    del lost["state"][4]
    with pytest.raises(ValueError, match=r"1 of the 6 parameters of group 0, the first is 'last.weight'"):
        pair[1].load_state_dict(lost)


@pytest.mark.parametrize("way", ["parameters", "zero"])
def test_a_class_that_keeps_state_for_some_shapes(pool: Pool, way: str) -> None:
    pool.run(_lazy, 2, way)


def _masters(group: ProcessGroup) -> None:
    """A parameter that was never used has a master, and no other state."""
    model = Partly().to(torch.bfloat16)
    optimizer = zerostep.ShardedOptimizer(model, AdamW, process_group=group, lr=0.1, master_dtype=torch.float32)
    model(torch.ones(2, 3, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    saved = full_state_dict(optimizer)  # type: ignore[arg-type]
    assert list(saved["state"][2]) == ["master"] and saved["without_state"] == [2, 3]
    optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="has no state for"):
        optimizer.load_state_dict({key: saved[key] for key in ("state", "param_groups")})


def test_masters_are_not_taken_for_state(pool: Pool) -> None:
    pool.run(_masters, 2)
