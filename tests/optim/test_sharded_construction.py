"""Constructing `ShardedOptimizer`: starting values, refusals, disagreement, successors, meshes and groups."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import LBFGS, SGD, AdamW

from tests.helpers.pool import OFFSET, Pool
from tests.helpers.reference import assert_same_bits, assert_same_state_dict, build, train
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
    engine = weakref.ref(optimizer._training)
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
        engine = weakref.ref(optimizer._training)
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
    with pytest.raises(RuntimeError, match="the backward pass of step 1 failed"):
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
