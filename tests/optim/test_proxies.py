"""Wrappers of frameworks that derive from our classes and hold one of our optimizers, and those that only hold one."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import AdamW, Optimizer

import zerostep
from tests.helpers.pool import Pool, RankError
from tests.helpers.reference import assert_same_state_dict, build
from tests.helpers.sharding import backward, series, sharded
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer
from zerostep.optim.base import PartitionedOptimizer


class _Imitation:
    """Takes the class of what it wraps, as Fabric's and Lightning's wrappers do."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type(f"Framework{type(optimizer).__name__}", (type(self), type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class _Holder(Optimizer):
    """An optimizer of torch only by its class, as Accelerate's wrapper is."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def _zero(group: ProcessGroup, model: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(model.named_parameters(), AdamW, process_group=group, lr=0.1)


CLASSES: dict[str, Callable[[ProcessGroup, nn.Module], Any]] = {"sharded": sharded, "zero": _zero}
WRAPPERS: dict[str, Any] = {"imitation": _Imitation, "holder": _Holder}
EACH_CLASS = pytest.mark.parametrize("kind", CLASSES)
EACH_WRAPPER = pytest.mark.parametrize("wrapper", WRAPPERS)


def _steps(group: ProcessGroup, model: nn.Module, optimizer: Any, count: int = 2) -> None:
    for batch in series(group, count):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def _everything(group: ProcessGroup, kind: str) -> None:
    model = build()
    real = CLASSES[kind](group, model)
    proxy: Any = _Imitation(real)
    assert all(isinstance(proxy, kind) for kind in (type(real), Optimizer))
    before = set(vars(proxy))
    _steps(group, model, proxy)
    if kind == "sharded":
        proxy.clip_grad_norm_(1.0)
        with proxy.no_sync():
            pass
        proxy.synchronize()
        assert proxy.stats().steps == 2
    assert list(map(id, proxy.state)) == list(map(id, real.state)) and len(proxy.state) > 0
    proxy.add_param_group({"params": [("more", nn.Parameter(torch.ones(3)))]})
    assert len(real.param_groups) == 2
    proxy.zero_grad(set_to_none=False)
    proxy.consolidate_state_dict(to=0)
    if real.rank == 0:
        assert_same_state_dict(proxy.state_dict(), real.state_dict())
        found = proxy.state_dict()
        proxy.load_state_dict(found)
    else:
        with pytest.raises(RuntimeError, match="has not been consolidated on this rank"):
            proxy.state_dict()
    proxy.release_state_dict()
    proxy.register_step_post_hook(lambda *args: None)
    assert set(vars(proxy)) == before, "the proxy has fields of its own"


@EACH_CLASS
def test_a_proxy_passes_on_all_that_it_inherits(pool: Pool, kind: str) -> None:
    pool.run(_everything, 2, kind)


def _schedulers(group: ProcessGroup, kind: str) -> None:
    model = build()
    proxy: Any = _Imitation(CLASSES[kind](group, model))
    scheduler = torch.optim.lr_scheduler.StepLR(proxy, 1, 0.5)
    before = proxy.optimizer.param_groups[0]["lr"]
    for _ in range(2):
        _steps(group, model, proxy, 1)
        scheduler.step()
    assert proxy.optimizer.param_groups[0]["lr"] == before / 4


@EACH_CLASS
def test_a_scheduler_may_hold_a_proxy(pool: Pool, kind: str) -> None:
    pool.run(_schedulers, 2, kind)


def _saved(group: ProcessGroup, kind: str, wrapper: str, folder: Path) -> None:
    model = build()
    real = CLASSES[kind](group, model)
    proxy = WRAPPERS[wrapper](real)
    _steps(group, model, proxy)
    zerostep.save(folder / "own", proxy)
    dcp_save({"optim": zerostep.dcp_state(proxy)}, checkpoint_id=folder / "dcp", process_group=group)
    other = build()
    fresh = CLASSES[kind](group, other)
    for load in (
        lambda: zerostep.load(folder / "own", WRAPPERS[wrapper](fresh)),
        lambda: dcp_load(
            {"optim": zerostep.dcp_state(WRAPPERS[wrapper](fresh))}, checkpoint_id=folder / "dcp", process_group=group
        ),
    ):
        load()
        for each in (real, fresh):
            each.consolidate_state_dict()
        if real.rank == 0:
            assert_same_state_dict(fresh.state_dict(), real.state_dict())


@EACH_CLASS
@EACH_WRAPPER
def test_checkpoints_are_made_and_loaded_through_a_wrapper(pool: Pool, kind: str, wrapper: str, tmp_path: Path) -> None:
    pool.run(_saved, 2, kind, wrapper, tmp_path)


def _given_to_dcp(group: ProcessGroup, kind: str) -> None:
    model = build()
    proxy: Any = _Imitation(CLASSES[kind](group, model))
    _steps(group, model, proxy)
    get_optimizer_state_dict(model, proxy)


@EACH_CLASS
def test_dcp_is_refused_through_a_proxy(pool: Pool, kind: str) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(_given_to_dcp, 2, kind)
    assert all("cannot handle a" in error for error in caught.value.errors.values())


class _Subclass(ShardedOptimizer):
    """A user's own class, which is no wrapper."""

    marker = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)


def test_a_subclass_keeps_its_methods() -> None:
    assert _Subclass.step is ShardedOptimizer.step
    assert _Subclass.zero_grad is not ShardedOptimizer.zero_grad


@pytest.mark.parametrize("cls", [ShardedOptimizer, ZeroRedundancyOptimizer, PartitionedOptimizer])
def test_no_field_has_a_value_on_the_class(cls: type) -> None:
    # A wrapper with `__getattr__` would see it in place of the value of the optimizer inside.
    names = [name for name in vars(cls) if not name.startswith(("__", "_abc_"))]
    values = [name for name in names if not isinstance(inspect.getattr_static(cls, name), (property, staticmethod))]
    assert [name for name in values if not inspect.isfunction(inspect.getattr_static(cls, name))] == []
