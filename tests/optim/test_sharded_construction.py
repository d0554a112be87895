"""`ShardedOptimizer` in the hands of its users: how it is built, what it refuses, schedulers, hooks, meshes."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR
from torch.profiler import ProfilerActivity, profile

from tests.helpers.pool import OFFSET, Pool
from tests.helpers.reference import Batch, assert_same_bits, assert_same_state_dict, build, train
from tests.helpers.sharding import (
    OPTIONS,
    SMALL_BUCKETS,
    WAYS,
    Contest,
    Ordered,
    backward,
    gap,
    in_ddp,
    series,
    sharded,
    sum_in_rank_order,
    values,
    whole_state,
)

# Schedulers, hooks, closures.


def _scheduled(make: Callable[[Any], Any]) -> Callable[..., list[float]]:
    def loop(model: nn.Module, optimizer: Any, data: list[Batch]) -> list[float]:
        scheduler = make(optimizer)
        rates = []
        for batch in data:
            train(model, optimizer, [batch])
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    return loop


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=8),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
}


def _schedulers(group: ProcessGroup, name: str) -> None:
    Contest(ours={"gather": "forward"}).run(group, _scheduled(SCHEDULERS[name]), steps=6)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_and_momenta_follow_a_scheduler(pool: Pool, name: str) -> None:
    pool.run(_schedulers, 2, name)


def _poked(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        optimizer.param_groups[0].update(lr=0.02 / (number + 1), weight_decay=0.01 * number, betas=(0.8, 0.9))
        train(model, optimizer, [batch])


def _rate_as_tensor(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.02)
    for batch in data:
        train(model, optimizer, [batch])
        rate.mul_(0.5)


def _options_in_groups(group: ProcessGroup) -> None:
    Contest().run(group, _poked)
    Contest(options={**OPTIONS, "foreach": False}).run(group, _rate_as_tensor, with_state=False)


def test_options_that_users_change_count_at_once(pool: Pool) -> None:
    pool.run(_options_in_groups, 2)


def _implementations(group: ProcessGroup) -> None:
    for options in ({"foreach": True}, {"foreach": False}):
        Contest(options={**OPTIONS, **options}).run(group, lambda *args: train(*args), steps=6)
    # The fused kernel rounds differently at the end of a tensor, and a cut makes more ends.
    Contest(options={**OPTIONS, "fused": True}, close=1e-6).run(group, lambda *args: train(*args), steps=6)


def test_every_implementation_of_an_optimizer_equals_plain(pool: Pool) -> None:
    pool.run(_implementations, 2)


def _hooked(group: ProcessGroup, gather: str) -> None:
    model = build()
    optimizer = sharded(group, model, gather=gather)
    calls: list[str] = []
    start = values(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append(f"before {_moved(model, start)}"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for batch in series(group, 2):
        backward(model, batch)
        optimizer.step()
    assert calls == ["before False", "after", "before True", "after"]


def _moved(model: nn.Module, start: Mapping[str, Tensor]) -> bool:
    return any(not torch.equal(value, start[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("gather", ["step", "forward"])
def test_step_hooks_run_once_around_a_step(pool: Pool, gather: str) -> None:
    pool.run(_hooked, 2, gather)


def _with_closure(model: nn.Module, optimizer: Any, data: list[Batch]) -> list[float]:
    losses = []
    for batch in data:
        calls = list[int]()

        def closure(batch: Batch = batch, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = mse_loss(model(batch[0]), batch[1])
            loss.backward()
            return loss

        with torch.no_grad():
            losses.append(optimizer.step(closure).item())
        assert calls == [1]
    return losses


def _closures(group: ProcessGroup, gather: str) -> None:
    Contest(ours={"gather": gather}).run(group, _with_closure)


@pytest.mark.parametrize("gather", ["step", "forward"])
def test_closures_run_once_and_first(pool: Pool, gather: str) -> None:
    pool.run(_closures, 2, gather)


def _swapped_step(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """Frameworks put a function of their own in the place of `step`."""
    inner, calls = optimizer.step, list[int]()

    def step(*args: Any) -> Any:
        calls.append(1)
        return inner(*args)

    optimizer.step = step
    train(model, optimizer, data)
    assert len(calls) == len(data)


def _swapped(group: ProcessGroup) -> None:
    Contest().run(group, _swapped_step)


def test_step_may_be_replaced(pool: Pool) -> None:
    pool.run(_swapped, 2)


# Construction.


class WithBuffer(nn.Module):
    """Parameters, a buffer, and a parameter of a dtype of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(7, 3, generator=generator))
        self.phase = nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(4, generator=generator), requires_grad=False)
        self.register_buffer("mean", torch.randn(6, generator=generator))
        self.register_buffer("count", torch.tensor(seed))


class Gappy(nn.Module):
    """Parameters and buffers whose elements do not fill their memory, or show it several times."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.gaps = nn.Parameter(draw(6, 4)[:, ::2])
        self.turned = nn.Parameter(draw(3, 5).t())
        self.stretched = nn.Parameter(draw(1, 3).expand(4, 3), requires_grad=False)
        self.register_buffer("every_other", draw(10)[::2])
        self.register_buffer("rows", draw(4, 1).expand(4, 6))
        self.register_buffer("gaps_and_rows", draw(6)[::2].expand(2, 3))
        self.register_buffer("number", draw().expand(2, 2))
        self.register_buffer("nothing", draw(0, 3).expand(0, 3)[::2])

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = inputs[:, :5] @ self.turned * self.stretched.sum() + self.gaps.sum()
        return result


def _start_apart_with_gaps(group: ProcessGroup) -> None:
    model, expected = Gappy(dist.get_rank(group)), Gappy(0)
    strides = {name: buffer.stride() for name, buffer in model.named_buffers()}
    optimizer = sharded(group, model)
    assert_same_bits(model.state_dict(), expected.state_dict())
    assert {name: buffer.stride() for name, buffer in model.named_buffers()} == strides
    plain, data = AdamW(expected.parameters(), **OPTIONS), series(group, 3, "matrices")
    for batch in data:
        for each in (model, expected):
            each.zero_grad()
            backward(each, batch)
        sum_in_rank_order(group, expected.parameters())
        optimizer.step()
        plain.step()
    assert_same_bits(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("world", [2, 3])
def test_memory_with_gaps_and_memory_that_shows_twice_start_from_the_first_rank(pool: Pool, world: int) -> None:
    pool.run(_start_apart_with_gaps, world)


def _added_with_gaps(group: ProcessGroup) -> None:
    model, late, expected = build(), Gappy(dist.get_rank(group)), Gappy(0)
    optimizer = sharded(group, model)
    optimizer.add_param_group({"params": list(late.named_parameters())})
    assert_same_bits(late.named_parameters(), expected.named_parameters())


def test_added_parameters_with_gaps_start_from_the_first_rank(pool: Pool) -> None:
    pool.run(_added_with_gaps, 2)


def _start_apart(group: ProcessGroup) -> None:
    model = WithBuffer(dist.get_rank(group))
    sharded(group, model)
    expected = WithBuffer(0).state_dict()
    assert_same_bits(model.state_dict(), expected)


@pytest.mark.parametrize("world", [2, 3, OFFSET], ids=str)
def test_ranks_that_start_apart_start_from_the_first_one(pool: Pool, world: int) -> None:
    pool.run(_start_apart, world)


def _defaults(group: ProcessGroup) -> None:
    optimizer = sharded(group, build(), lr=0.5)
    assert optimizer.defaults == AdamW([nn.Parameter(torch.ones(1))], lr=0.5, weight_decay=0.1).defaults
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert optimizer.param_groups[0]["param_names"][0] == "words.weight"
    assert optimizer.state_dict()["state"] == {}
    assert isinstance(repr(optimizer), str)


def test_defaults_are_those_of_the_inner_optimizer(pool: Pool) -> None:
    pool.run(_defaults, 2)


def _different_model(group: ProcessGroup) -> Any:
    model: Any = build()
    if dist.get_rank(group) == 1:
        model.last = nn.Linear(5, 4)
    return sharded(group, model)


def _different_options(group: ProcessGroup) -> Any:
    return sharded(group, build(), lr=0.01 if dist.get_rank(group) == 0 else 0.02)


def _different_settings(group: ProcessGroup) -> Any:
    return sharded(group, build(), gather="step" if dist.get_rank(group) == 0 else "forward")


def _different_buckets(group: ProcessGroup) -> Any:
    return sharded(group, build(), bucket_mb=SMALL_BUCKETS * (1 + dist.get_rank(group)))


def _different_classes(group: ProcessGroup) -> Any:
    return sharded(group, build(), AdamW if dist.get_rank(group) == 0 else torch.optim.Adam)


def _different_class_of_a_group(group: ProcessGroup) -> Any:
    model = build()
    kind = SGD if dist.get_rank(group) == 0 else AdamW
    params = [{"params": list(model.parameters()), "optimizer_class": kind, "lr": 0.1, "weight_decay": 0.0}]
    return sharded(group, model, params=params)


def _different_wrapping(group: ProcessGroup) -> Any:
    # DDP's constructor is collective: the bare rank stands in for its part by building one that it does not use.
    model, wrapped = build(), in_ddp(group, build())
    return sharded(group, model if dist.get_rank(group) == 0 else wrapped)


def _different_trainability(group: ProcessGroup) -> Any:
    model = build()
    next(model.parameters()).requires_grad_(dist.get_rank(group) == 0)
    return sharded(group, model)


def _one_rank_fails(group: ProcessGroup) -> Any:
    return sharded(group, build(), lr=0.01 if dist.get_rank(group) == 0 else -1.0)


DISAGREEMENTS: dict[Callable[[ProcessGroup], Any], str] = {
    _different_model: r"disagree on parameter 7.*last\.weight.*\(3, 5\).*\(4, 5\)",
    _different_options: r"disagree on the options of group 0.*lr=0\.01.*lr=0\.02",
    _different_settings: r"disagree on the settings.*gather='step'.*gather='forward'",
    _different_buckets: r"disagree on the settings.*bucket_mb=0\.0003.*bucket_mb=0\.0006",
    _different_classes: "disagree on",
    _different_class_of_a_group: "disagree on",
    _different_wrapping: r"disagree on the settings.*bare.*wrapped",
    _different_trainability: r"disagree on parameter 0.*trainable.*frozen",
    _one_rank_fails: r"Invalid learning rate: -1\.0",
}


def _refused(group: ProcessGroup, make: Callable[[ProcessGroup], Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        make(group)
    sharded(group, build())  # the ranks are still together


@pytest.mark.parametrize("make", DISAGREEMENTS)
def test_ranks_that_disagree_are_all_told_where(pool: Pool, make: Callable[[ProcessGroup], Any]) -> None:
    pool.run(_refused, 2, make, DISAGREEMENTS[make])


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"partition": "rows"}, ValueError, "partition must be one of.*'rows'"),
    ({"reduction": "sum"}, ValueError, "reduction must be one of.*'sum'"),
    ({"gather": "never"}, ValueError, "gather must be one of.*'never'"),
    ({"master_dtype": torch.int32}, ValueError, "master_dtype must be a floating-point dtype"),
    ({"reduce_dtype": "float32"}, ValueError, "reduce_dtype must be a floating-point dtype"),
    ({"bucket_mb": 0}, ValueError, "bucket_mb must be a positive number"),
    ({"bucket_mb": "5"}, ValueError, "bucket_mb must be a positive number"),
    ({"params": []}, ValueError, "empty"),
    ({"params": [1, 2]}, TypeError, "params must be an iterable of tensors"),
    ({"kind": LBFGS, "lr": 1.0}, ValueError, "looks at all parameters at once"),
    ({"kind": "AdamW"}, TypeError, "optimizer_class must be"),
    ({"nonsense": 1}, TypeError, "nonsense"),
]


def _bad_settings(group: ProcessGroup) -> None:
    for options, kind, pattern in BAD:
        with pytest.raises(kind, match=pattern):
            sharded(group, build(), **options)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        sharded(group, list(build().parameters()))  # type: ignore[arg-type]
    model = build()
    with pytest.raises(ValueError, match="which this optimizer does not hold"):
        sharded(group, in_ddp(group, model), params=list(model.parameters())[:2])


def test_settings_that_mean_nothing_are_refused(pool: Pool) -> None:
    pool.run(_bad_settings, 2)


def _not_copied(group: ProcessGroup) -> None:
    optimizer = sharded(group, build())
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*load_state_dict"):
            attempt(optimizer)


def test_it_cannot_be_copied_or_pickled(pool: Pool) -> None:
    pool.run(_not_copied, 2)


def _let_go(group: ProcessGroup, way: str) -> None:
    """Nothing keeps an optimizer alive that its owner has dropped, whatever hooks the model still has."""
    model, optimizer = Contest(ours={"gather": "forward"}).sharded(group, way)
    train(model, optimizer, series(group, 2))
    optimizer.synchronize()
    engine = weakref.ref(optimizer._running)
    del optimizer
    gc.collect()
    assert engine() is None


@pytest.mark.parametrize("way", ["bare scatter", "wrapped all"])
def test_an_optimizer_that_is_dropped_is_gone(pool: Pool, way: str) -> None:
    pool.run(_let_go, 2, way)


def _after_another(group: ProcessGroup) -> None:
    """A second optimizer takes over the model of the first."""
    model, twin = build(), Ordered(group)
    optimizer = sharded(group, model)
    data = series(group, 6)
    train(model, optimizer, data[:3])
    for batch in data[:3]:
        twin.train(batch)
    state = whole_state(optimizer)
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    second = sharded(group, model, bucket_mb=0.0006)
    second.load_state_dict(state)
    train(model, second, data[3:])
    for batch in data[3:]:
        twin.train(batch)
    assert_same_bits(values(model), values(twin.model))


def test_one_optimizer_may_follow_another(pool: Pool) -> None:
    pool.run(_after_another, 2)


@contextmanager
def _no_collector() -> Iterator[None]:
    """What goes inside goes because nobody holds it, not because somebody looked for cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _hooks(model: nn.Module) -> int:
    found = [(param._post_accumulate_grad_hooks, param._backward_hooks) for param in model.parameters()]
    return sum(len(hooks or ()) for both in found for hooks in both)


def _succeeding(group: ProcessGroup, way: str) -> None:
    """The successor of an optimizer that was dropped in the middle of a step begins as if nobody had been there."""
    contest, data = Contest(ways=(way,), ours={"gather": "forward"}), series(group, 6)
    with _no_collector():
        model, optimizer = contest.sharded(group, way)
        train(model, optimizer, data[:2])
        backward(model, data[2])
        assert _hooks(model) > 0 or way == "wrapped all"
        optimizer.synchronize()
        bare: Any = model.module if isinstance(model, DDP) else model
        engine = weakref.ref(optimizer._running)
        del optimizer, model
        assert engine() is None
        assert _hooks(bare) == 0
    twin = build()
    twin.load_state_dict(bare.state_dict())
    bare.zero_grad()
    model = in_ddp(group, bare) if way.startswith("wrapped") else bare
    second = sharded(group, model, reduction=way.split()[1])
    ddp, plain = in_ddp(group, twin), AdamW(twin.named_parameters(), **OPTIONS)
    train(model, second, data[3:])
    train(ddp, plain, data[3:])
    assert_same_bits(values(bare), values(twin))
    assert_same_state_dict(whole_state(second), plain.state_dict())


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_that_is_dropped_leaves_no_hooks_to_its_successor(pool: Pool, way: str) -> None:
    pool.run(_succeeding, 2, way)


def _gradients_of_another(group: ProcessGroup) -> None:
    model, data = build(), series(group, 2)
    first = sharded(group, model)
    backward(model, data[0])
    del first
    second = sharded(group, model)
    with pytest.raises(RuntimeError, match="another ShardedOptimizer holds the gradient"):
        backward(model, data[1])
    with pytest.raises(RuntimeError, match="a backward pass failed"):
        second.step()


def test_gradients_of_an_optimizer_that_is_gone_are_not_added_to(pool: Pool) -> None:
    pool.run(_gradients_of_another, 2)


# Meshes and groups.


def _mesh(kind: str) -> DeviceMesh:
    if kind == "init":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    shards = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mine = [replicas[dist.get_rank() % 2], shards[dist.get_rank() // 2]]
    return DeviceMesh.from_group(mine, "cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("replicate", "shard"))


def _hybrid(group: ProcessGroup, kind: str, wrapped: bool, reduction: str) -> dict[str, Tensor]:
    mesh = _mesh(kind)
    twin = Ordered(group, make=lambda named: SGD(named, lr=0.05, momentum=0.9, weight_decay=0.01))
    bare = build(seed=0 if wrapped else dist.get_rank())  # a bare module starts from rank 0
    model = in_ddp(group, bare) if wrapped else bare
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = sharded(group, model, SGD, process_group=mesh, reduction=reduction, **options)
    assert optimizer.world_size == 2 and optimizer.rank == dist.get_rank() % 2
    for batch in series(group, 8):
        train(model, optimizer, [batch])
        twin.train(batch)
    assert gap(values(model), values(twin.model)) < 1e-6
    found = whole_state(optimizer)
    for number, entry in found["state"].items():
        other = twin.optimizer.state_dict()["state"][number]["momentum_buffer"]
        assert gap({"": entry["momentum_buffer"]}, {"": other}) < 1e-5
    norm = optimizer.grad_norm()
    grads = {str(number): param.grad for number, param in enumerate(twin.model.parameters()) if param.grad is not None}
    assert torch.isclose(norm, torch.stack([grad.norm() for grad in grads.values()]).norm(), rtol=1e-5)
    return values(model)


@pytest.mark.parametrize(
    ("kind", "wrapped", "reduction"),
    [
        ("init", False, "scatter"),
        ("init", True, "scatter"),
        ("init", True, "all"),
        ("init", False, "all"),
        ("groups", False, "scatter"),
    ],
)
def test_a_mesh_shards_inside_and_replicates_across(pool: Pool, kind: str, wrapped: bool, reduction: str) -> None:
    results = pool.run(_hybrid, 4, kind, wrapped, reduction)
    for other in results[1:]:
        assert_same_bits(other, results[0])


def _counted_on_a_mesh(group: ProcessGroup) -> tuple[int, int]:
    model = build()
    early, late = list(model.named_parameters())[::2], list(model.named_parameters())[1::2]
    optimizer = sharded(group, model, process_group=_mesh("init"), params=early)
    train(model, optimizer, series(group, 3))
    before = optimizer.stats().bytes_sent
    optimizer.add_param_group({"params": late})
    return before, optimizer.stats().bytes_sent


def test_a_further_group_forgets_no_bytes_of_a_mesh(pool: Pool) -> None:
    for before, after in pool.run(_counted_on_a_mesh, 4):
        assert 0 < before <= after


def _one_dimension(group: ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    twin, model = Ordered(group), build()
    optimizer = sharded(group, model, process_group=mesh)
    for batch in series(group, 3):
        train(model, optimizer, [batch])
        twin.train(batch)
    assert_same_bits(values(model), values(twin.model))
    cube = init_device_mesh("cpu", (1, 2, 2))
    with pytest.raises(ValueError, match="this one has 3"):
        sharded(group, build(), process_group=cube)


def test_a_mesh_of_one_dimension_is_a_group_and_three_are_refused(pool: Pool) -> None:
    pool.run(_one_dimension, 4)


def _subgroup(group: ProcessGroup) -> None:
    Contest(ours={"gather": "forward"}).run(group, lambda *args: train(*args))
    model = build()
    optimizer = sharded(group, in_ddp(group, model), process_group=None)  # the module's own
    assert optimizer.process_group is group and optimizer.world_size == 2


def test_ranks_of_a_subgroup(pool: Pool) -> None:
    pool.run(_subgroup, OFFSET)


# Numbers about itself.


class Wide(nn.Module):
    """A few thousand elements, so that words between ranks count little."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


def _numbers(group: ProcessGroup, way: str, steps: int) -> None:
    contest = Contest(build=Wide, ours={"bucket_mb": 0.02, "gather": "forward"})
    model, optimizer = contest.sharded(group, way)
    world, size = dist.get_world_size(group), sum(param.nbytes for param in model.parameters())
    before = optimizer.stats()
    assert before.steps == before.bytes_sent == before.bytes_received == 0
    train(model, optimizer, series(group, steps, "matrices"))
    optimizer.synchronize()
    found = optimizer.stats()
    assert (found.steps, found.rank, found.world_size) == (steps, dist.get_rank(group), world)
    assert found.elements == size // 4 and found.buckets >= 3 and 1.0 <= found.imbalance < 1.02
    assert abs(found.owned_elements - found.elements / world) < 0.02 * found.elements
    # One way for parameters; for gradients one way to their owners, and the same way back where everyone wants them.
    ways = {"bare scatter": 2, "wrapped scatter": 2, "bare all": 3, "wrapped all": 1}[way]
    expected = steps * ways * size * (world - 1) / world
    assert 0.98 * expected <= found.bytes_sent <= 1.02 * expected, (found.bytes_sent, expected)
    assert 0.98 * expected <= found.bytes_received <= 1.02 * expected, (found.bytes_received, expected)
    assert all(seconds >= 0 for seconds in found.wait_seconds.values())
    assert "gather" in found.wait_seconds


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("way", ["bare scatter", "bare all", "wrapped scatter", "wrapped all"])
def test_as_many_bytes_travel_as_the_arithmetic_says(pool: Pool, way: str, world: int) -> None:
    pool.run(_numbers, world, way, 3)


def _ranges(group: ProcessGroup, way: str) -> tuple[set[str], int]:
    model, optimizer = Contest(ours={"gather": "forward"}).sharded(group, way)
    data = series(group, 2)
    train(model, optimizer, data[:1])
    with profile(activities=[ProfilerActivity.CPU]) as found:
        train(model, optimizer, data[1:])
        optimizer.synchronize()
    names = {event.name for event in found.events() if event.name.startswith("zerostep/")}
    return names, optimizer.stats().buckets


@pytest.mark.parametrize("way", ["bare scatter", "wrapped scatter"])
def test_a_profile_names_what_each_bucket_does(pool: Pool, way: str) -> None:
    for names, buckets in pool.run(_ranges, 2, way):
        assert buckets >= 3
        for bucket in range(buckets):
            for phase in ("reduce", "gather"):
                assert f"zerostep/{phase} bucket {bucket}" in names
                assert f"zerostep/{phase} bucket {bucket} wait" in names
        assert any(name.startswith("zerostep/update bucket") for name in names)


# Checkpoints.


def _whole(group: ProcessGroup, seed: int, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train, and return what a checkpoint holds."""
    model = build(seed=seed)
    optimizer = sharded(group, model)
    train(model, optimizer, series(group, steps))
    return model.state_dict(), whole_state(optimizer)


def _resumed(
    group: ProcessGroup, saved: tuple[dict[str, Any], dict[str, Any]], options: dict[str, Any]
) -> dict[str, Tensor]:
    """Go on from a checkpoint, with the plain optimizer and with ours, on the same gradients."""
    model, twin = build(seed=9), build(seed=8)
    optimizer = sharded(group, model, **options)
    plain = AdamW(twin.named_parameters(), **OPTIONS)
    for each, other in ((model, optimizer), (twin, plain)):
        each.load_state_dict(saved[0])
        before = copy.deepcopy(saved[1])
        other.load_state_dict(state_dict=saved[1])
        assert_same_state_dict(saved[1], before)
    assert_same_state_dict(whole_state(optimizer), saved[1])
    for batch in series(group, 4, seed=11):
        train(model, optimizer, [batch])
        twin.zero_grad()
        backward(twin, batch)
        sum_in_rank_order(group, twin.parameters())
        plain.step()
    optimizer.synchronize()
    assert_same_bits(values(model), values(twin))
    assert_same_state_dict(whole_state(optimizer), plain.state_dict())
    return values(model)


OTHERWISE: list[dict[str, Any]] = [
    {},
    {"bucket_mb": 1.0, "gather": "forward"},
    {"partition": "parameters"},
    {"reduction": "all"},
]


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 3), (3, 2), (2, 1), (3, 4)])
def test_a_checkpoint_resumes_at_any_world_size_and_in_the_plain_optimizer(pool: Pool, first: int, second: int) -> None:
    saved = pool.run(_whole, first, 0, 5)[-1]
    for options in OTHERWISE[: 4 if second == 3 else 1]:
        pool.run(_resumed, second, saved, options)


def _from_plain(group: ProcessGroup) -> None:
    model = build()
    optimizer = AdamW(model.named_parameters(), **OPTIONS)
    train(model, optimizer, series(group, 3, seed=1))
    state = [optimizer.state_dict(), model.state_dict()]
    dist.broadcast_object_list(state, src=dist.get_global_rank(group, 0), group=group)
    _resumed(group, (state[1], state[0]), {})
    strings = {
        "state": {f"p{number}": entry for number, entry in state[0]["state"].items()},
        "param_groups": [{**state[0]["param_groups"][0], "params": [f"p{n}" for n in range(9)]}],
    }
    loaded = sharded(group, build())
    loaded.load_state_dict(strings)
    assert_same_state_dict(whole_state(loaded), state[0])
    loaded.load_state_dict({"state": {}, "param_groups": state[0]["param_groups"]})
    assert loaded.state_dict()["state"] == {}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_checkpoint_of_the_plain_optimizer_resumes(pool: Pool, world: int) -> None:
    pool.run(_from_plain, world)


def _interrupted(group: ProcessGroup, options: dict[str, Any], low: bool) -> None:
    """Save, build everything anew, load: the run goes on as if nothing had happened."""
    make: Callable[[], nn.Module] = (lambda: build().bfloat16()) if low else build
    data = [(batch[0], batch[1].bfloat16()) if low else batch for batch in series(group, 8)]
    model = make()
    optimizer = sharded(group, model, **options)
    train(model, optimizer, data[:4])
    saved = copy.deepcopy(model.state_dict()), whole_state(optimizer)
    train(model, optimizer, data[4:])
    again = make()
    fresh = sharded(group, again, **options)
    again.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    train(again, fresh, data[4:])
    for each in (optimizer, fresh):
        each.synchronize()
    assert_same_bits(values(again), values(model))
    assert_same_state_dict(whole_state(fresh), whole_state(optimizer))


@pytest.mark.parametrize("options", OTHERWISE)
def test_a_resumed_run_equals_an_uninterrupted_one(pool: Pool, options: dict[str, Any]) -> None:
    pool.run(_interrupted, 2, options, False)


def test_a_resumed_run_with_masters_equals_an_uninterrupted_one(pool: Pool) -> None:
    pool.run(_interrupted, 2, {"master_dtype": torch.float32}, True)


def _who_has_it(group: ProcessGroup) -> None:
    model = build()
    optimizer = sharded(group, model)
    rank = dist.get_rank(group)
    train(model, optimizer, series(group, 2))
    with pytest.raises(RuntimeError, match=rf"consolidate_state_dict\(to={rank}\)"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        assert len(optimizer.state_dict()["state"]) == 9
        optimizer.release_state_dict()
    with pytest.raises(RuntimeError, match="has not been consolidated"):
        optimizer.state_dict()
    for bad in (2, -1, "0"):
        with pytest.raises(ValueError, match="must be a rank of the group"):
            optimizer.consolidate_state_dict(to=bad)  # type: ignore[arg-type]


def test_the_state_is_where_it_was_asked_for_and_nowhere_else(pool: Pool) -> None:
    pool.run(_who_has_it, 2)


def _bad_state(group: ProcessGroup) -> None:
    model = build()
    optimizer = sharded(group, model)
    train(model, optimizer, series(group, 2))
    before = whole_state(optimizer)
    wrong = copy.deepcopy(before)
    wrong["state"][0]["exp_avg"] = torch.zeros(3)
    for state, pattern in [
        ({"state": {}}, "needs the keys"),
        ({**before, "param_groups": before["param_groups"] * 2}, "2 parameter groups"),
        (wrong, "exp_avg.*shape"),
    ]:
        with pytest.raises(ValueError, match=pattern):
            optimizer.load_state_dict(state)
    assert_same_state_dict(whole_state(optimizer), before)


def test_a_state_that_does_not_fit_changes_nothing(pool: Pool) -> None:
    pool.run(_bad_state, 2)


def _not_shared(group: ProcessGroup) -> None:
    model = build()
    optimizer = sharded(group, model)
    train(model, optimizer, series(group, 2))
    given = whole_state(optimizer)
    before = copy.deepcopy(given)
    optimizer.load_state_dict(given)
    for entry in optimizer.state.values():
        entry["exp_avg"].fill_(77.0)
        entry["step"].fill_(9.0)
    assert_same_state_dict(given, before)


@pytest.mark.parametrize("world", [1, 2])
def test_loading_neither_changes_nor_shares_the_argument(pool: Pool, world: int) -> None:
    pool.run(_not_shared, world)


def _live_state(group: ProcessGroup) -> tuple[int, int]:
    model = build()
    optimizer = sharded(group, model)
    assert not optimizer.state
    train(model, optimizer, series(group, 2))
    assert set(optimizer.state) <= set(model.parameters())
    found = sum(entry["exp_avg"].numel() for entry in optimizer.state.values())
    for entry in optimizer.state.values():
        entry["exp_avg"].fill_(3.0)
    whole = whole_state(optimizer)["state"].values()
    assert all(bool((entry["exp_avg"] == 3.0).all()) for entry in whole)
    return found, sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_state_of_a_rank_is_live_and_its_own_part(pool: Pool, world: int) -> None:
    results = pool.run(_live_state, world)
    assert sum(found for found, _ in results) == results[0][1]


def _failing_together(group: ProcessGroup) -> None:
    """An error in one rank's update ends the step of all, and nobody goes on before a state is loaded."""
    model = build()
    optimizer = sharded(group, model)
    train(model, optimizer, series(group, 1))
    saved = whole_state(optimizer)
    backward(model, series(group, 1)[0])
    inner = optimizer._inners.all[0]
    if dist.get_rank(group) == 1:

        def fail(*args: Any) -> None:
            raise ArithmeticError("a bad day")

        inner.step = fail  # type: ignore[method-assign, assignment]
    with pytest.raises((ArithmeticError, RuntimeError), match=r"a bad day|failed on rank 1"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="load the last checkpoint"):
        optimizer.step()
    if dist.get_rank(group) == 1:
        del inner.step
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    train(model, optimizer, series(group, 1))


def test_an_error_on_one_rank_ends_the_step_of_all(pool: Pool) -> None:
    pool.run(_failing_together, 2)


def _twice(group: ProcessGroup) -> dict[str, Tensor]:
    model = build()
    optimizer = sharded(group, model, gather="forward")
    train(model, optimizer, series(group, 6))
    optimizer.synchronize()
    return values(model)


@pytest.mark.parametrize("world", [3, 4])
def test_sums_are_the_same_from_run_to_run(pool: Pool, world: int) -> None:
    first, second = pool.run(_twice, world), pool.run(_twice, world)
    for found in (*first, *second):
        assert_same_bits(found, first[0])


def _leaving_first(group: ProcessGroup, key: str) -> None:
    """Rank 0 sends what it has updated only when rank 1 has let go of its optimizer, or is seen to wait with that."""
    store = distributed_c10d._get_default_store()
    model = build()
    optimizer = sharded(group, model, gather="forward", bucket_mb=0.0003)
    train(model, optimizer, series(group, 1))
    launch = optimizer._running.launch
    if dist.get_rank(group) == 0:

        def late(buckets: Iterable[int]) -> None:
            for number, bucket in enumerate(buckets):
                with suppress(dist.DistStoreError):  # a closed socket tells it some time after the first message
                    store.wait([key if number == 0 else "nobody sets this"], timedelta(seconds=0.1 if number else 0.5))
                launch([bucket])

        optimizer._running.launch = late  # type: ignore[method-assign]
    train(model, optimizer, series(group, 1))
    if dist.get_rank(group) == 1:
        del optimizer, launch
        gc.collect()
        store.set(key, "gone")
    else:
        optimizer.synchronize()


def test_a_rank_that_is_done_first_does_not_spoil_the_last_step_of_others(pool: Pool) -> None:
    pool.run(_leaving_first, 2, uuid4().hex)
