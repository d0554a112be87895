"""State that a class keeps under a name and not under a parameter, such as a counter, is saved and loaded too."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import SGD, Optimizer

import zerostep
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, assert_same_state_dict, build
from tests.helpers.sharding import backward, in_ddp, series, sharded, unnamed, values, whole_state
from zerostep import CheckpointError, ShardedOptimizer, ZeroRedundancyOptimizer

BEFORE, AFTER = 3, 2


class Counts(Optimizer):
    """Gradient descent whose rate falls with a counter, which lies in the state under a name from the first step on."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @property
    def named(self) -> dict[Any, Any]:
        state: Any = self.state
        return state

    def rate(self) -> float:
        self.named.setdefault("k", torch.tensor([0])).add_(1)
        return 1.0 / float(self.named["k"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rate = self.rate()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    total = self.state[param].setdefault("total", torch.zeros_like(param)).add_(param.grad)
                    param.sub_(total, alpha=rate * group["lr"])


class CountsFromTheStart(Counts):
    """The same with two counters, one of them in a dict, which are there before the first step."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr)
        self.named["done"], self.named["phase"] = 0, {"left": 2.0}

    def rate(self) -> float:
        self.named["done"] += 1
        self.named["phase"]["left"] *= 0.5
        return float(self.named["phase"]["left"]) / int(self.named["done"])


class Odd(Counts):
    """A counter under a key that is neither a parameter nor a name."""

    def rate(self) -> float:
        self.named[("k", 0)] = self.named.get(("k", 0), 0) + 1
        return 1.0


KINDS = [Counts, CountsFromTheStart]
by_kind = pytest.mark.parametrize("kind", KINDS)


def _train(group: ProcessGroup, model: nn.Module, optimizer: Any, first: int, count: int) -> None:
    for batch in series(group, first + count)[first:]:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def _zero(group: ProcessGroup, model: nn.Module, kind: type[Counts]) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.named_parameters(), kind, process_group=group)


def _trained(group: ProcessGroup, kind: type[Optimizer], **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    model = build()
    optimizer = sharded(group, model, kind, **options)
    _train(group, model, optimizer, 0, BEFORE)
    return model, optimizer


def _expected(group: ProcessGroup, kind: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters of plain training without a break, and the plain state at the point of the save."""
    model = in_ddp(group, build())
    optimizer = kind(model.parameters())
    _train(group, model, optimizer, 0, BEFORE)
    state = deepcopy(optimizer.state_dict())
    _train(group, model, optimizer, BEFORE, AFTER)
    return values(model), state


def check_state_dicts(group: ProcessGroup, kind: type[Optimizer]) -> None:
    expected, plain_state = _expected(group, kind)
    model, optimizer = _trained(group, kind)
    state = whole_state(optimizer)
    assert_same_state_dict(unnamed(state), plain_state)
    for loaded in (state, plain_state):
        other = build()
        other.load_state_dict(model.state_dict())
        resumed = sharded(group, other, kind, verify=AFTER)
        resumed.load_state_dict(loaded)
        _train(group, other, resumed, BEFORE, AFTER)
        assert_same_bits(values(other), expected)
    plain = in_ddp(group, build())
    plain.module.load_state_dict(model.state_dict())
    make: Any = kind
    theirs = make(plain.module.named_parameters())
    theirs.load_state_dict(state)
    _train(group, plain, theirs, BEFORE, AFTER)
    assert_same_bits(values(plain), expected)
    assert optimizer.stats().state_bytes > 0


@by_kind
def test_a_state_dict_is_that_of_the_plain_optimizer_and_resumes(pool: Pool, kind: type[Counts]) -> None:
    pool.run(check_state_dicts, 2, kind)


def _save(group: ProcessGroup, kind: type[Counts], path: Path) -> dict[str, Tensor]:
    model, optimizer = _trained(group, kind)
    zerostep.save(path / "own", optimizer, model)
    dcp_save({"optim": zerostep.dcp_state(optimizer)}, checkpoint_id=path / "dcp", process_group=group)
    return values(model)


def _load(group: ProcessGroup, kind: type[Counts], path: Path, saved: dict[str, Tensor]) -> None:
    expected, _ = _expected(group, kind)
    for way in ("own", "dcp"):
        for sharding in (True, False):
            model = build()
            model.load_state_dict(saved, strict=False)
            trained: nn.Module = model if sharding else in_ddp(group, model)
            optimizer: Any = sharded(group, model, kind) if sharding else _zero(group, model, kind)
            if way == "own":
                zerostep.load(path / "own", optimizer)
            else:
                dcp_load({"optim": zerostep.dcp_state(optimizer)}, checkpoint_id=path / "dcp", process_group=group)
            _train(group, trained, optimizer, BEFORE, AFTER)
            if dist.get_world_size(group) == 2:
                assert_same_bits(values(trained), expected)
            optimizer.consolidate_state_dict(to=0)
            if optimizer.rank == 0:
                named = {key: value for key, value in optimizer.state_dict()["state"].items() if isinstance(key, str)}
                assert named in ({"k": BEFORE + AFTER}, {"done": BEFORE + AFTER, "phase": {"left": 2.0 ** (1 - 5)}})


@by_kind
def test_checkpoints_have_it_at_any_world_size(pool: Pool, kind: type[Counts], tmp_path: Path) -> None:
    saved = pool.run(_save, 2, kind, tmp_path)[0]
    for world in (2, 3, 1):
        pool.run(_load, world, kind, tmp_path, saved)


def _exported(group: ProcessGroup, path: Path) -> None:
    optimizer = sharded(group, build(), Counts)
    optimizer.load_state_dict(torch.load(path, weights_only=True))


def test_an_exported_state_dict_has_it(pool: Pool, tmp_path: Path) -> None:
    pool.run(_save, 2, Counts, tmp_path)
    zerostep.consolidate(tmp_path / "own", tmp_path / "plain.pt")
    state = torch.load(tmp_path / "plain.pt", weights_only=True)["state"]
    assert state["k"].tolist() == [BEFORE]
    pool.run(_exported, 2, tmp_path / "plain.pt")


def _empty(group: ProcessGroup) -> None:
    """What a framework does before the first step: load what `state_dict()` gives."""
    expected, _ = _expected(group, CountsFromTheStart)
    model = build()
    optimizer = sharded(group, model, CountsFromTheStart)
    optimizer.load_state_dict(optimizer.state_dict())
    _train(group, model, optimizer, 0, BEFORE + AFTER)
    assert_same_bits(values(model), expected)


def test_what_a_class_starts_with_stays_if_nothing_is_loaded(pool: Pool) -> None:
    pool.run(_empty, 2)


def _two_classes(group: ProcessGroup, path: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, *rest = model.named_parameters()
        (second, *rest) = rest
        return [
            {"params": [first]},
            {"params": [second], "optimizer_class": CountsFromTheStart},
            {"params": rest, "optimizer_class": SGD, "lr": 0.1},
        ]

    def fresh() -> tuple[nn.Module, ShardedOptimizer]:
        model = build()
        return model, sharded(group, model, Counts, groups(model))

    model, optimizer = fresh()
    _train(group, model, optimizer, 0, BEFORE)
    zerostep.save(path, optimizer, model)
    state = whole_state(optimizer)
    assert {"0.k", "1.done", "1.phase"} <= set(state["state"])
    resumed = []
    for way in ("file", "dict"):
        other, its = fresh()
        if way == "file":
            zerostep.load(path, its, other)
        else:
            other.load_state_dict(model.state_dict())
            its.load_state_dict(state)
        resumed.append((other, its))
    for each, its in [(model, optimizer), *resumed]:
        _train(group, each, its, BEFORE, AFTER)
        assert_same_bits(values(each), values(model))


def test_each_of_several_classes_has_its_own(pool: Pool, tmp_path: Path) -> None:
    pool.run(_two_classes, 2, tmp_path / "saved")


def _odd(group: ProcessGroup, path: Path) -> None:
    model, optimizer = _trained(group, Odd)
    message = r"Odd keeps state under the key \('k', 0\), which is neither a parameter nor a name"
    with pytest.raises(CheckpointError, match=message):
        zerostep.save(path, optimizer, model)
    with pytest.raises(CheckpointError, match=message):
        optimizer.consolidate_state_dict()


def test_other_keys_are_refused_by_name(pool: Pool, tmp_path: Path) -> None:
    pool.run(_odd, 2, tmp_path / "saved")


class Adds(Counts):
    """A state dict with a further entry, which belongs to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "warmup": 3}


def _adds(group: ProcessGroup, path: Path) -> None:
    _, optimizer = _trained(group, Adds)
    zero = _zero(group, build(), Adds)
    message = "Adds adds warmup to its state dict, which is not saved"
    for number, each in enumerate((optimizer, zero)):
        with pytest.warns(UserWarning, match=message):
            zerostep.save(path / str(number), each)
        with pytest.warns(UserWarning, match=message):
            each.consolidate_state_dict()
    if optimizer.rank == 0:
        assert set(optimizer.state_dict()) == {"state", "param_groups"}


def test_further_entries_of_a_state_dict_are_named_in_a_warning(pool: Pool, tmp_path: Path) -> None:
    pool.run(_adds, 2, tmp_path)
