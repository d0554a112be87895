"""Uneven inputs: every order of joinables, compared with `DistributedDataParallel.join()` and the plain optimizer."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.functional import mse_loss
from torch.nn.modules import module as nn_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from tests.helpers.pool import OFFSET, Pool
from tests.helpers.reference import (
    OPTIMIZERS,
    Batch,
    assert_same_bits,
    assert_same_state_dict,
    batches,
    build,
    difference,
)
from zerostep import ZeroRedundancyOptimizer

World = int | tuple[int, ...]

# Batches by rank; in each world some rank has none, and the one that lasts longest is not always the last.
COUNTS: dict[World, tuple[int, ...]] = {2: (5, 0), 3: (2, 6, 0), 4: (3, 0, 3, 7), OFFSET: (1, 4)}
WORLDS = pytest.mark.parametrize("world", list(COUNTS), ids=str)
ORDERS = pytest.mark.parametrize("order", ["ddp zero", "zero ddp"])
Options = list[tuple[bool, bool, bool, str]]
OPTIONS: Options = [  # divide_by_initial_world_size, gradient_as_bucket_view, parameters_as_bucket_view: all pairs
    (True, True, True, "adamw"),
    (True, False, False, "sgd_momentum"),
    (False, True, False, "adamw"),
    (False, False, True, "sgd_momentum"),
]


@dataclass(frozen=True)
class Scenario:
    """A training run with uneven inputs; both sides of a comparison follow it."""

    counts: tuple[int, ...]
    order: str = "ddp zero"
    zero_grad: str = "before"
    divide: bool = True
    gradient_views: bool = False
    parameter_views: bool = False
    optimizer: str = "adamw"
    closure: bool = False
    unused: bool = False
    before: int = 0  # even steps before the context
    after: int = 0  # even steps after it

    def last(self) -> int:
        """The rank that is live to the end."""
        return self.counts.index(max(self.counts))


class _WithSpare(nn.Module):
    """A model with a parameter that no forward pass uses."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.spare = nn.Parameter(torch.ones(40))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.inner(inputs)
        return result


def _ddp(group: dist.ProcessGroup, scenario: Scenario) -> DDP:
    model = build(OPTIMIZERS[scenario.optimizer].model)
    return DDP(
        _WithSpare(model) if scenario.unused else model,
        process_group=group,
        bucket_cap_mb=0.0005,  # several buckets
        gradient_as_bucket_view=scenario.gradient_views,
        find_unused_parameters=scenario.unused,
    )


def _zero(group: dist.ProcessGroup, model: nn.Module, scenario: Scenario) -> ZeroRedundancyOptimizer:
    case = OPTIMIZERS[scenario.optimizer]
    views = scenario.parameter_views
    return ZeroRedundancyOptimizer(
        model.parameters(), case.kind, process_group=group, parameters_as_bucket_view=views, **case.options
    )


def _iterate(model: nn.Module, optimizer: Optimizer, batch: Batch, scenario: Scenario) -> None:
    def backward() -> float:
        loss = mse_loss(model(batch[0]), batch[1])
        loss.backward()
        return loss.item()

    if scenario.zero_grad in ("before", "fill"):
        optimizer.zero_grad(set_to_none=scenario.zero_grad == "before")
    if scenario.closure:
        assert isinstance(optimizer.step(backward), float)
    else:
        backward()
        optimizer.step()
    if scenario.zero_grad == "after":
        optimizer.zero_grad()


def _series(group: dist.ProcessGroup, scenario: Scenario) -> tuple[list[Batch], list[Batch], list[Batch]]:
    """This rank's batches before, inside and after the join context."""
    rank = dist.get_rank(group)
    start, stop = scenario.before, scenario.before + scenario.counts[rank]
    found = batches(3, rank, stop + scenario.after, OPTIMIZERS[scenario.optimizer].model)
    return found[:start], found[start:stop], found[stop:]


def _train(group: dist.ProcessGroup, ddp: DDP, optimizer: Optimizer, context: Any, scenario: Scenario) -> None:
    before, inside, after = _series(group, scenario)
    for batch in before:
        _iterate(ddp, optimizer, batch, scenario)
    with context():
        for batch in inside:
            _iterate(ddp, optimizer, batch, scenario)
    for batch in after:
        optimizer.zero_grad()
        _iterate(ddp, optimizer, batch, scenario)


def _joinables(ddp: DDP, zero: ZeroRedundancyOptimizer, order: str) -> list[Joinable]:
    known: dict[str, Joinable] = {"ddp": ddp, "zero": zero}
    return [known[name] for name in order.split()]


def _compare(group: dist.ProcessGroup, scenario: Scenario) -> None:
    """Both runs on this rank: same parameters everywhere, same state as on the rank that was live to the end."""
    twin, ddp = _ddp(group, scenario), _ddp(group, scenario)
    plain, zero = OPTIMIZERS[scenario.optimizer].optimizer(twin.parameters()), _zero(group, ddp, scenario)
    _train(group, twin, plain, lambda: twin.join(divide_by_initial_world_size=scenario.divide), scenario)

    def context() -> Join:
        joinables = _joinables(ddp, zero, scenario.order)
        return Join(joinables, divide_by_initial_world_size=scenario.divide)

    _train(group, ddp, zero, context, scenario)
    assert_same_bits(ddp.named_parameters(), twin.named_parameters())
    assert difference(ddp.parameters(), _ddp(group, scenario).parameters()) > 1e-3, "nothing was trained"
    zero.consolidate_state_dict(to=scenario.last())
    if zero.rank == scenario.last():
        assert_same_state_dict(zero.state_dict(), plain.state_dict())


def _compare_options(group: dist.ProcessGroup, scenario: Scenario, chosen: Options) -> int:
    for divide, gradient_views, parameter_views, optimizer in chosen:
        found = replace(scenario, divide=divide, gradient_views=gradient_views)
        _compare(group, replace(found, parameter_views=parameter_views, optimizer=optimizer))
    return len(chosen)


@WORLDS
@ORDERS
@pytest.mark.parametrize("zero_grad", ["before", "after", "never", "fill"])
def test_statements_52_and_53_uneven_inputs_equal_ddp_join(
    pool: Pool, world: World, order: str, zero_grad: str
) -> None:
    scenario = Scenario(COUNTS[world], order, zero_grad)
    # Many ranks take their time: three and four share the options, and change over with the order.
    half = (len(COUNTS[world]) + ["ddp zero", "zero ddp"].index(order)) % 2
    chosen = OPTIONS if len(COUNTS[world]) == 2 else OPTIONS[half::2]
    assert pool.run(_compare_options, world, scenario, chosen) == [len(chosen)] * len(COUNTS[world])


@ORDERS
@pytest.mark.parametrize("gradient_views", [False, True])
def test_statement_52_a_rank_without_batches_after_even_steps(pool: Pool, order: str, gradient_views: bool) -> None:
    # DDP's shadow then writes into gradients that this rank still has from before the context.
    for zero_grad, divide in (("before", True), ("before", False), ("never", False)):
        scenario = Scenario((0, 3), order, zero_grad, divide, gradient_views=gradient_views, before=3)
        pool.run(_compare, 2, scenario)


@ORDERS
@pytest.mark.parametrize("world", [2, 3], ids=str)
def test_statement_52_with_channels_last_parameters(pool: Pool, order: str, world: int) -> None:
    for parameter_views in (False, True):
        scenario = Scenario(COUNTS[world], order, optimizer="adamw_convolutions", parameter_views=parameter_views)
        pool.run(_compare, world, scenario)


@ORDERS
def test_statement_52_with_a_parameter_that_nobody_uses(pool: Pool, order: str) -> None:
    # Weight decay would move it if the joined owner got a gradient of zeros instead of none.
    # Every rank has a batch: a DDP module without one puts whatever is in its memory into the vote on what is used.
    pool.run(_compare, 3, Scenario((2, 6, 1), order, unused=True))


@ORDERS
@pytest.mark.parametrize("counts", [(4, 0), (0, 4), (1, 3), (3, 3)], ids=str)
def test_statement_52_closures_inside_the_context(pool: Pool, order: str, counts: tuple[int, ...]) -> None:
    for divide in (True, False):
        pool.run(_compare, 2, Scenario(counts, order, closure=True, divide=divide))


def _accumulated(group: dist.ProcessGroup, scenario: Scenario, no_sync: bool) -> None:
    """Two passes for each step, the first of them without a reduction if asked."""
    twin, ddp = _ddp(group, scenario), _ddp(group, scenario)
    plain, zero = OPTIMIZERS[scenario.optimizer].optimizer(twin.parameters()), _zero(group, ddp, scenario)
    for model, optimizer, context in (
        (twin, plain, twin.join()),
        (ddp, zero, Join(_joinables(ddp, zero, scenario.order))),
    ):
        with context:
            for number, (inputs, targets) in enumerate(_series(group, scenario)[1]):
                with model.no_sync() if no_sync and number % 2 == 0 else nullcontext():
                    mse_loss(model(inputs), targets).backward()
                if number % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
    assert_same_bits(ddp.named_parameters(), twin.named_parameters())
    zero.consolidate_state_dict(to=scenario.last())
    if zero.rank == scenario.last():
        assert_same_state_dict(zero.state_dict(), plain.state_dict())


@ORDERS
@pytest.mark.parametrize("no_sync", [False, True])
def test_statement_52_with_accumulated_gradients(pool: Pool, order: str, no_sync: bool) -> None:
    pool.run(_accumulated, 3, Scenario((2, 8, 0), order), no_sync)


@WORLDS
@ORDERS
def test_ordinary_steps_before_and_after_the_context(pool: Pool, world: World, order: str) -> None:
    # The plain optimizers of joined ranks have old momentum, so only a stateless one can go on alike.
    pool.run(_compare, world, Scenario(COUNTS[world], order, optimizer="sgd", before=2, after=3))


def _two_contexts(group: dist.ProcessGroup, first: Scenario, second: Scenario) -> None:
    twin, ddp = _ddp(group, first), _ddp(group, first)
    plain, zero = OPTIMIZERS[first.optimizer].optimizer(twin.parameters()), _zero(group, ddp, first)
    for scenario in (first, second):
        _train(group, twin, plain, twin.join, scenario)
        _train(group, ddp, zero, lambda found=scenario: Join(_joinables(ddp, zero, found.order)), scenario)
        assert_same_bits(ddp.named_parameters(), twin.named_parameters())


@pytest.mark.parametrize("orders", ["ddp zero, zero ddp", "zero ddp, ddp zero", "zero ddp, zero ddp"])
@pytest.mark.parametrize("gradient_views", [False, True])
def test_two_contexts_one_after_the_other(pool: Pool, orders: str, gradient_views: bool) -> None:
    first, second = orders.split(", ")
    one = Scenario((2, 0, 4), first, optimizer="sgd", gradient_views=gradient_views)
    pool.run(_two_contexts, 3, one, replace(one, counts=(0, 5, 1), order=second))


# The optimizer alone, and behind a joinable that is not DDP.


def _alone(group: dist.ProcessGroup, counts: Sequence[int], same_data: bool) -> list[Tensor]:
    rank = dist.get_rank(group)
    case = OPTIMIZERS["adamw"]
    model, twin = build(), build()
    zero = ZeroRedundancyOptimizer(model.parameters(), case.kind, process_group=group, **case.options)
    with Join([zero]):
        for batch in batches(5, 0 if same_data else rank, counts[rank]):
            _iterate(model, zero, batch, Scenario(()))
    if same_data:
        plain = case.optimizer(twin.parameters())
        for batch in batches(5, 0, max(counts)):
            _iterate(twin, plain, batch, Scenario(()))
        assert_same_bits(model.named_parameters(), twin.named_parameters())
    return [param.detach() for param in model.parameters()]


@WORLDS
@pytest.mark.parametrize("same_data", [True, False])
def test_statement_53_the_optimizer_alone(pool: Pool, world: World, same_data: bool) -> None:
    first, *others = pool.run(_alone, world, COUNTS[world], same_data)
    for other in others:
        assert_same_bits(_numbered(first), _numbered(other))


def _numbered(tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    return [(str(index), tensor) for index, tensor in enumerate(tensors)]


class _Reducer(Joinable):
    """Sums gradients over all ranks; a joined rank adds zeros and puts the sums into `.grad` its own way."""

    def __init__(self, params: Sequence[Tensor], group: dist.ProcessGroup, store: Callable[..., None]) -> None:
        super().__init__()
        self.params, self.group, self.store = params, group, store

    def reduce(self) -> None:
        Join.notify_join_context(self)
        sums = self._sums([param.grad if param.grad is not None else torch.zeros_like(param) for param in self.params])
        for param, found in zip(self.params, sums, strict=True):
            param.grad = found

    def shadow(self) -> None:
        self.store(self.params, self._sums([torch.zeros_like(param) for param in self.params]))

    def _sums(self, grads: Sequence[Tensor]) -> list[Tensor]:
        found = [grad.clone() for grad in grads]
        for grad in found:
            dist.all_reduce(grad, group=self.group)
        return found

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _ReducerHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


class _ReducerHook(JoinHook):
    def __init__(self, reducer: _Reducer) -> None:
        self.reducer = reducer

    def main_hook(self) -> None:
        self.reducer.shadow()


def _store_new(params: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    for param, found in zip(params, sums, strict=True):
        param.grad = found


def _store_in_place(params: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    for param, found in zip(params, sums, strict=True):
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.copy_(found)


def _store_in_data(params: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
    # `.data` has a version counter of its own, so nobody can notice this.
    for param, found in zip(params, sums, strict=True):
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        param.grad.data.copy_(found)


def _behind_reducer(group: dist.ProcessGroup, counts: Sequence[int], store: Callable[..., None]) -> list[list[Tensor]]:
    """Returns the parameters after each live iteration and at the end."""
    rank, case = dist.get_rank(group), OPTIMIZERS["adamw"]
    model, twin = build(), build()
    zero = ZeroRedundancyOptimizer(model.parameters(), case.kind, process_group=group, **case.options)
    plain = case.optimizer(twin.parameters())
    reducer = _Reducer(list(model.parameters()), group, store)
    history = []
    with Join([reducer, zero]):
        for inputs, targets in batches(7, rank, counts[rank]):
            zero.zero_grad()
            mse_loss(model(inputs), targets).backward()
            reducer.reduce()
            for param, other in zip(model.parameters(), twin.parameters(), strict=True):
                other.grad = None if param.grad is None else param.grad.clone()
            plain.step()
            zero.step()
            assert_same_bits(model.named_parameters(), twin.named_parameters())
            history.append([param.detach().clone() for param in model.parameters()])
    history.append([param.detach().clone() for param in model.parameters()])
    return history


@WORLDS
@pytest.mark.parametrize("store", [_store_new, _store_in_place, _store_in_data])
def test_statement_51_gradients_set_by_an_earlier_hook(pool: Pool, world: World, store: Callable[..., None]) -> None:
    counts = COUNTS[world]
    histories = pool.run(_behind_reducer, world, counts, store)
    longest = histories[counts.index(max(counts))]
    for count, history in zip(counts, histories, strict=True):
        for here, there in zip(history[:count], longest, strict=False):
            assert_same_bits(_numbered(here), _numbered(there))
        assert_same_bits(_numbered(history[-1]), _numbered(longest[-1]))


class _Giver(_Reducer):
    """Gives joined ranks gradients that no live rank has."""

    def reduce(self) -> None:
        Join.notify_join_context(self)

    def shadow(self) -> None:
        self.store(self.params, [torch.full_like(param, 2.0) for param in self.params])


def _store_after_reset(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    values = [float(grad.view(-1)[0]) for grad in grads]
    del grads
    for param, value in zip(params, values, strict=True):
        param.grad = None
        param.grad = torch.full_like(param, value)  # may well have the address of the one before


def _given(group: dist.ProcessGroup, store: Callable[..., None]) -> list[Tensor]:
    rank = dist.get_rank(group)
    params = [nn.Parameter(torch.zeros(4)) for _ in range(4)]
    zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, process_group=group, lr=1.0)
    giver = _Giver(params, group, store)
    with Join([giver, zero]):
        for _ in range(1 if rank == 1 else 5):
            giver.reduce()
            for param in params:
                param.grad = torch.ones_like(param)
            zero.step()
    owners = zero._param_to_rank
    return [torch.full((4,), -5.0 if owners[param] == 0 else -9.0) - param.detach() for param in params]


@pytest.mark.parametrize("store", [_store_new, _store_in_place, _store_after_reset])
def test_statement_51_the_hooks_gradients_count_and_not_the_live_ranks(pool: Pool, store: Callable[..., None]) -> None:
    # Rank 1 joins after one step of 1 and then steps its shard four times by 2; rank 0 steps its own by 1.
    for gaps in pool.run(_given, 2, store):
        assert all(not gap.any() for gap in gaps), gaps


# Early termination, and what else the protocol asks for.


def _terminated(group: dist.ProcessGroup, order: str, counts: Sequence[int]) -> tuple[str, int, bool]:
    scenario = Scenario(tuple(counts), order, optimizer="sgd")
    rank, done, text = dist.get_rank(group), 0, ""
    twin, ddp = _ddp(group, scenario), _ddp(group, scenario)
    plain, zero = OPTIMIZERS["sgd"].optimizer(twin.parameters()), _zero(group, ddp, scenario)
    model = ddp if "ddp" in order else ddp.module
    series = batches(9, rank, 8)
    try:
        with Join(_joinables(ddp, zero, order), throw_on_early_termination=True):
            for batch in series[: counts[rank]]:
                _iterate(model, zero, batch, scenario)
                done += 1
    except RuntimeError as error:
        text = str(error)
    for batch in series[:done]:
        _iterate(twin if "ddp" in order else twin.module, plain, batch, scenario)
    # The context is over: everybody goes on together, if they like.
    for batch in series[done : done + 2]:
        _iterate(model, zero, batch, scenario)
        _iterate(twin if "ddp" in order else twin.module, plain, batch, scenario)
    same = difference(ddp.parameters(), twin.parameters()) == 0.0
    return text, done, same


@pytest.mark.parametrize("order", ["ddp zero", "zero ddp", "zero"])
@pytest.mark.parametrize("counts", [(3, 1), (0, 2), (4, 2, 4)], ids=str)
def test_statement_54_early_termination(pool: Pool, order: str, counts: tuple[int, ...]) -> None:
    found = pool.run(_terminated, len(counts), order, counts)
    least = min(counts)
    texts = {text for text, _, _ in found}
    exhausted = {text for (text, _, _), count in zip(found, counts, strict=True) if count == least}
    assert "" not in texts and len(texts) == 2 and len(exhausted) == 1, found
    assert [done for _, done, _ in found] == [least] * len(counts)
    if "ddp" in order:  # alone, each rank trains on gradients of its own
        assert all(same for _, _, same in found)


def _disabled(group: dist.ProcessGroup, order: str) -> bool:
    scenario = Scenario((), order)
    twin, ddp = _ddp(group, scenario), _ddp(group, scenario)
    plain, zero = OPTIMIZERS["adamw"].optimizer(twin.parameters()), _zero(group, ddp, scenario)
    for _ in range(2):
        with Join(_joinables(ddp, zero, order), enable=False):
            for batch in batches(2, dist.get_rank(group), 2):
                _iterate(ddp, zero, batch, scenario)
                _iterate(twin, plain, batch, scenario)
    return difference(ddp.parameters(), twin.parameters()) == 0.0


@ORDERS
def test_a_disabled_context_does_nothing(pool: Pool, order: str) -> None:
    assert pool.run(_disabled, 2, order) == [True, True]


def _forward_hooks(group: dist.ProcessGroup, enable: bool, throw: bool) -> list[int]:
    """How many module hooks of all modules exist after each of several contexts."""
    scenario = Scenario((2, 1) if enable else (2, 2), "zero ddp")
    ddp = _ddp(group, scenario)
    zero = _zero(group, ddp, scenario)
    found = []
    for _ in range(4):
        with (
            suppress(RuntimeError if throw else ZeroDivisionError),
            Join(_joinables(ddp, zero, "zero ddp"), enable=enable, throw_on_early_termination=throw),
        ):
            for batch in _series(group, scenario)[1]:
                _iterate(ddp, zero, batch, scenario)
        found.append(len(nn_module._global_forward_pre_hooks))
    return found


@pytest.mark.parametrize(("enable", "throw"), [(True, False), (True, True), (False, False)])
def test_contexts_leave_no_pile_of_hooks_behind(pool: Pool, enable: bool, throw: bool) -> None:
    for counts in pool.run(_forward_hooks, 2, enable, throw):
        assert counts[-1] == counts[0] <= 1, counts


def _protocol(group: dist.ProcessGroup) -> tuple[bool, bool, bool]:
    zero = ZeroRedundancyOptimizer(build().parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    hook = zero.join_hook(divide_by_initial_world_size=False, anything=object(), zero=3)
    return (
        isinstance(hook, JoinHook),
        zero.join_device == next(iter(zero._all_params)).device,
        zero.join_process_group is group,
    )


@pytest.mark.parametrize("world", [1, 2, OFFSET], ids=str)
def test_statement_55_the_protocols_names(pool: Pool, world: World) -> None:
    assert set(pool.run(_protocol, world)) == {(True, True, True)}


def _two_groups(group: dist.ProcessGroup, order: str) -> str:
    other = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    ddp = DDP(build(), process_group=group)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, process_group=other, lr=0.1)
    with pytest.raises(ValueError, match="process group") as caught:
        Join(_joinables(ddp, zero, order))
    return str(caught.value)


@ORDERS
def test_statement_55_different_groups_are_refused(pool: Pool, order: str) -> None:
    assert len(pool.run(_two_groups, 2, order)) == 2


def _one(group: dist.ProcessGroup, order: str) -> None:
    _compare(group, Scenario((4,), order))


@ORDERS
def test_a_world_of_one_joins_with_itself(pool: Pool, order: str) -> None:
    pool.run(_one, 1, order)


def _scheduled(group: dist.ProcessGroup, order: str) -> None:
    """The learning rate follows the live ranks, also where the owner of a parameter has joined."""
    scenario = Scenario((1, 6), order)
    rank = dist.get_rank(group)
    twin, ddp = _ddp(group, scenario), _ddp(group, scenario)
    plain, zero = OPTIMIZERS["adamw"].optimizer(twin.parameters()), _zero(group, ddp, scenario)
    for model, optimizer, context in (
        (twin, plain, twin.join()),
        (ddp, zero, Join(_joinables(ddp, zero, order))),
    ):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        with context:
            for batch in batches(3, rank, scenario.counts[rank]):
                _iterate(model, optimizer, batch, scenario)
                scheduler.step()
    assert_same_bits(ddp.named_parameters(), twin.named_parameters())


@ORDERS
def test_statement_52_with_a_scheduler(pool: Pool, order: str) -> None:
    pool.run(_scheduled, 2, order)
