"""`ShardedOptimizer` for a bare module that is trained through DDP, put around it before or afterwards."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.modules import module as torch_module
from torch.optim import SGD, AdamW

from tests.helpers.pool import Pool, RankError
from tests.helpers.reference import Batch, assert_same_bits, build
from tests.helpers.sharding import FOUND, Contest, Ordered, backward, in_ddp, no_sync, series, sharded, values

WORLDS = pytest.mark.parametrize("world", [1, 2])


def _steps(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for batch in data:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def _accumulating(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        with no_sync(model, optimizer):
            backward(model, first)
        backward(model, second)
        optimizer.step()


def _in_ddp_s_no_sync(model: Any, optimizer: Any, data: list[Batch]) -> None:
    for first, second in zip(data[::2], data[1::2], strict=True):
        with model.no_sync():
            backward(model, first)
        backward(model, second)
        optimizer.step()
        optimizer.zero_grad()


def _evaluating(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    with torch.no_grad():
        model(data[0][0])
    _steps(model, optimizer, data)


LOOPS = {"plain": _steps, "optimizer.no_sync": _accumulating, "ddp.no_sync": _in_ddp_s_no_sync, "eval": _evaluating}


def _equals_plain(group: ProcessGroup, loop: str, ddp: dict[str, Any], ours: dict[str, Any]) -> None:
    Contest(ways=FOUND, ddp=ddp, ours=ours).run(group, LOOPS[loop], steps=6)


@WORLDS
@pytest.mark.parametrize("loop", LOOPS)
def test_found_ddp_equals_plain(pool: Pool, world: int, loop: str) -> None:
    pool.run(_equals_plain, world, loop, {}, {})


@pytest.mark.parametrize(
    ("ddp", "ours"),
    [
        ({"find_unused_parameters": True}, {}),
        ({"static_graph": True}, {}),
        ({"gradient_as_bucket_view": True}, {}),
        ({}, {"gather": "forward"}),
        ({}, {"verify": 2}),
    ],
    ids=str,
)
def test_found_ddp_with_options_equals_plain(pool: Pool, ddp: dict[str, Any], ours: dict[str, Any]) -> None:
    pool.run(_equals_plain, 2, "plain", ddp, ours)


class _Parent(nn.Module):
    """Trains its child without a call of it, as a LightningModule may."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, inputs: Tensor) -> Tensor:
        return self.child.forward(inputs)


def _around_a_parent(group: ProcessGroup) -> None:
    data = series(group, 4)
    plain, model = in_ddp(group, _Parent(build())), _Parent(build())
    _steps(plain, AdamW(plain.parameters(), lr=0.1), data)
    optimizer = sharded(group, model.child, lr=0.1, weight_decay=0.01)
    _steps(in_ddp(group, model), optimizer, data)
    assert_same_bits(values(model), values(plain))


def test_ddp_around_a_parent_of_the_module_is_found(pool: Pool) -> None:
    pool.run(_around_a_parent, 2)


def _halves(group: ProcessGroup) -> None:
    """Two optimizers for one DDP module: each takes DDP's sums."""
    data = series(group, 4)
    sides = []
    for ours in (False, True):
        model = build()
        named = list(model.named_parameters())
        parts = named[::2], named[1::2]
        if ours:
            optimizers: list[Any] = [sharded(group, model, SGD, part, reduction="all", lr=0.1) for part in parts]
        else:
            optimizers = [SGD(part, lr=0.1) for part in parts]
        wrapped = in_ddp(group, model)
        for batch in data:
            backward(wrapped, batch)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        sides.append(values(model))
    assert_same_bits(*sides)


def test_two_optimizers_find_one_ddp(pool: Pool) -> None:
    pool.run(_halves, 2)


def _not_called(group: ProcessGroup) -> None:
    """DDP is there, and the bare module is trained: nothing of DDP happens."""
    model, ordered = build(), Ordered(group)
    optimizer = sharded(group, model)
    wrapped = in_ddp(group, model)
    for batch in series(group, 4):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        ordered.train(batch)
    assert_same_bits(values(model), values(ordered.model))
    assert not wrapped._comm_hooks


@WORLDS
def test_ddp_that_is_not_called_changes_nothing(pool: Pool, world: int) -> None:
    pool.run(_not_called, world)


def _after_bare_steps(group: ProcessGroup) -> None:
    """Two steps with the bare module, then two through DDP, with a gradient in between that was reduced before."""
    data, model = series(group, 5), build()
    optimizer = sharded(group, model, SGD, lr=0.1)
    plain = in_ddp(group, build())
    plain_optimizer = SGD(plain.parameters(), lr=0.1)
    _steps(plain, plain_optimizer, data)
    _steps(model, optimizer, data[:2])
    _steps(in_ddp(group, model), optimizer, data[2:])
    assert_same_bits(values(model), values(plain))


@WORLDS
def test_ddp_may_come_after_bare_steps(pool: Pool, world: int) -> None:
    pool.run(_after_bare_steps, world)


def _refused(group: ProcessGroup, problem: str) -> None:
    model = build()
    ours: dict[str, Any] = {"update": "backward"} if problem == "update" else {}
    params = list(model.named_parameters())[1:] if problem == "foreign" else None
    optimizer = sharded(group, model, params=params, **ours)
    wrapped = in_ddp(group, model)
    if problem == "hook":
        wrapped.register_comm_hook(group, allreduce_hook)
    before = values(model)
    batch = series(group, 1)[0]
    try:
        wrapped(batch[0])
    finally:  # nothing is lost: the bare module can be trained
        assert_same_bits(values(model), before)
        backward(model, batch)
        optimizer.step()


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        ("update", "DDP would keep them: pass the module without DistributedDataParallel"),
        ("foreign", "which this optimizer does not hold"),
        ("hook", 'has a communication hook, which reduces the gradients: use reduction="all"'),
    ],
)
def test_what_cannot_work_in_ddp_is_refused_on_all_ranks_before_backward(pool: Pool, problem: str, text: str) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(_refused, 2, problem)
    assert [text in error for error in caught.value.errors.values()] == [True, True]


def _hidden(group: ProcessGroup) -> None:
    """DDP whose forward pass was not called as a module's."""
    model = build()
    optimizer = sharded(group, model)
    wrapped = in_ddp(group, model)
    inputs, targets = series(group, 1)[0]
    nn.functional.mse_loss(wrapped.forward(inputs), targets).backward()
    optimizer.step()


def test_ddp_that_was_not_noticed_is_named_in_the_error(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(_hidden, 2)
    assert all("as DistributedDataParallel does" in error for error in caught.value.errors.values())
    assert all("ShardedOptimizer(ddp, ...)" in error for error in caught.value.errors.values())


def _uneven(group: ProcessGroup) -> None:
    rank, results = torch.distributed.get_rank(group), []
    data = series(group, 2 + rank)
    for ours in (False, True):
        model = build()
        optimizer: Any = sharded(group, model, SGD, lr=0.1) if ours else SGD(model.parameters(), lr=0.1)
        wrapped = in_ddp(group, model)
        with Join([wrapped, optimizer] if ours else [wrapped]):
            _steps(wrapped, optimizer, data)
        results.append(values(model))
    assert_same_bits(*results)


def test_uneven_inputs_with_ddp_that_was_found(pool: Pool) -> None:
    pool.run(_uneven, 2)


def _lifetime(group: ProcessGroup) -> None:
    hooks = len(torch_module._global_module_registration_hooks)
    model = build()
    optimizer, wrapped = sharded(group, model), in_ddp(group, model)
    assert len(torch_module._global_module_registration_hooks) == hooks + 1
    assert len(wrapped._forward_pre_hooks) == 1
    _steps(wrapped, optimizer, series(group, 1))
    assert len(torch_module._global_module_registration_hooks) == hooks and not wrapped._forward_pre_hooks
    unused = sharded(group, build())
    gone = ref(optimizer), ref(unused)
    del optimizer, unused
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert len(torch_module._global_module_registration_hooks) == hooks


def test_hooks_go_with_their_purpose(pool: Pool) -> None:
    pool.run(_lifetime, 2)
