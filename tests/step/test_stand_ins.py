"""`StandIns`: what stands in `.grad`, whose it is, and how it makes way for DDP."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from zerostep.step.bucket_shards import BucketShards
from zerostep.step.sharded_grad import ShardedGradient
from zerostep.step.stand_ins import StandIns


class Ops:
    """Stands for what stand-ins ask."""


class Setting:
    """Some parameters without gradients, and their stand-ins."""

    def __init__(self, count: int = 3, ops: Any = None) -> None:
        self.params = [nn.Parameter(torch.zeros(2)) for _ in range(count)]
        self.ops = ops or Ops()
        self.stand_ins = StandIns(cast(BucketShards, SimpleNamespace(params=self.params)), ref(self.ops))

    def grads(self) -> list[str]:
        """What stands in `.grad` of each parameter."""
        return [type(param.grad).__name__ for param in self.params]

    def set_grad(self, index: int, grad: Tensor | None) -> None:
        self.params[index].grad = grad

    def backward(self, index: int, value: float = 1.0) -> None:
        (self.params[index] * value).sum().backward()


def test_a_stand_in_is_made_once_and_placed_again() -> None:
    setting = Setting()
    setting.stand_ins.place([0, 2])
    assert setting.grads() == ["ShardedGradient", "NoneType", "ShardedGradient"]
    first = setting.params[0].grad
    setting.set_grad(0, None)
    setting.stand_ins.place_one(0)
    assert setting.params[0].grad is first


def test_stand_ins_do_not_keep_the_optimizer_alive() -> None:
    setting = Setting()
    setting.stand_ins.place([0])
    grad, ops = setting.params[0].grad, ref(setting.ops)
    del setting
    gc.collect()
    assert ops() is None and isinstance(grad, ShardedGradient) and grad.ops() is None


# A gradient of this rank.


def test_a_first_gradient_adds_to_nothing() -> None:
    setting = Setting()
    assert setting.stand_ins.take_grad(0) == (None, False)
    setting.backward(0, 3.0)
    assert setting.stand_ins.has_own_grad(0)
    grad, adds = setting.stand_ins.take_grad(0)
    assert grad is setting.params[0].grad and not adds


def test_a_gradient_on_a_stand_in_is_taken_out_once_and_adds() -> None:
    setting = Setting()
    setting.stand_ins.place([0])
    assert not setting.stand_ins.has_own_grad(0)
    for value in (3.0, 4.0):
        setting.backward(0, value)
    assert setting.stand_ins.has_own_grad(0) and setting.grads()[0] == "ShardedGradient"
    grad, adds = setting.stand_ins.take_grad(0)
    assert grad is not None and grad.tolist() == [7.0, 7.0] and adds
    assert setting.stand_ins.take_grad(0) == (None, True)
    assert not setting.stand_ins.has_own_grad(0)


def test_the_stand_in_of_another_optimizer_is_refused() -> None:
    setting, other = Setting(1), Setting(1)
    other.stand_ins.place([0])
    for known in (False, True):
        setting.set_grad(0, other.params[0].grad)
        with pytest.raises(RuntimeError, match=r"another ShardedOptimizer holds the gradient.*drop it before"):
            setting.stand_ins.take_grad(0)
        if not known:
            setting.stand_ins.place([0])


# Whole sums.


def test_a_whole_sum_is_not_a_gradient_of_this_rank() -> None:
    setting, total = Setting(), torch.ones(2)
    assert not setting.stand_ins.has_own_grad(0)
    setting.stand_ins.place_whole(0, total)
    assert setting.params[0].grad is total and not setting.stand_ins.has_own_grad(0)
    total.mul_(2)  # as clipping does
    assert not setting.stand_ins.has_own_grad(0)


def test_a_whole_sum_that_was_replaced_is_a_gradient_of_this_rank() -> None:
    setting = Setting()
    setting.stand_ins.place_whole(0, torch.ones(2))
    setting.set_grad(0, torch.ones(2))
    assert setting.stand_ins.has_own_grad(0)
    setting.set_grad(0, None)
    assert not setting.stand_ins.has_own_grad(0)


def test_a_whole_sum_is_not_kept_alive() -> None:
    setting, total = Setting(), torch.ones(2)
    setting.stand_ins.place_whole(0, total)
    memory = ref(total)
    setting.set_grad(0, None)
    del total
    gc.collect()
    assert memory() is None


# What the user has dropped.


@pytest.mark.parametrize(("grad", "dropped"), [(None, True), (torch.ones(2), True)], ids=["removed", "replaced"])
def test_a_stand_in_that_is_gone_was_dropped(grad: Tensor | None, dropped: bool) -> None:
    setting = Setting()
    setting.stand_ins.place([0])
    assert not setting.stand_ins.was_dropped(0)
    setting.set_grad(0, grad)
    assert setting.stand_ins.was_dropped(0) == dropped


def test_a_gradient_on_a_stand_in_drops_nothing() -> None:
    setting = Setting()
    setting.stand_ins.place([0])
    setting.backward(0)
    assert not setting.stand_ins.was_dropped(0)


# DDP must find no stand-ins.


def test_lifted_stand_ins_come_back() -> None:
    setting = Setting()
    setting.stand_ins.place([0, 1])
    before = [param.grad for param in setting.params]
    setting.stand_ins.lift(range(3), ())
    assert setting.grads() == ["NoneType"] * 3
    setting.stand_ins.put_back()
    assert [param.grad for param in setting.params] == before


def test_only_the_named_stand_ins_are_lifted() -> None:
    setting = Setting()
    setting.stand_ins.place([0, 1])
    setting.set_grad(2, torch.ones(2))
    setting.stand_ins.lift([1, 2], ())
    assert setting.grads() == ["ShardedGradient", "NoneType", "Tensor"]


def test_what_ddp_has_written_stays_and_drops_nothing() -> None:
    """As in a pass inside `no_sync()`: the gradient of this rank adds to the sum whose stand-in was lifted."""
    setting = Setting()
    setting.stand_ins.place([0, 1])
    setting.stand_ins.lift([0, 1], ())
    setting.backward(0)
    setting.stand_ins.put_back()
    assert setting.grads() == ["Tensor", "ShardedGradient", "NoneType"]
    assert setting.stand_ins.has_own_grad(0) and not setting.stand_ins.was_dropped(0)


def test_what_the_user_drops_after_it_was_lifted_is_put_back_at_most_once() -> None:
    setting = Setting()
    setting.stand_ins.place([0])
    setting.stand_ins.lift([0], ())
    setting.stand_ins.put_back()
    setting.set_grad(0, None)
    setting.stand_ins.put_back()
    assert setting.grads()[0] == "NoneType" and setting.stand_ins.was_dropped(0)


def test_after_a_reduction_nothing_is_lifted() -> None:
    setting = Setting()
    setting.stand_ins.place([0])
    setting.stand_ins.lift([0], ())
    setting.backward(0)
    setting.stand_ins.forget_lifted()
    assert setting.stand_ins.was_dropped(0)
    setting.set_grad(0, None)
    setting.stand_ins.put_back()
    assert setting.grads()[0] == "NoneType"


def test_stand_ins_are_untouched_until_something_is_added_dropped_or_set() -> None:
    setting = Setting()
    setting.stand_ins.place([0, 1])
    assert not setting.stand_ins.untouched  # the last one has none
    setting.stand_ins.place([2])
    assert setting.stand_ins.untouched
    setting.backward(1)
    assert not setting.stand_ins.untouched
    setting.stand_ins.take_grad(1)
    assert setting.stand_ins.untouched
    setting.set_grad(0, torch.ones(2))
    assert not setting.stand_ins.untouched
