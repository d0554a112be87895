"""Ranks that build `ShardedOptimizer` from other buffers, another order or other ranks than DDP's are all refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW

from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, build, train
from tests.helpers.sharding import OPTIONS, in_ddp, series, sharded, values


class Buffered(nn.Module):
    """Two parameters of one shape, and the buffers that it is given."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


class TurnedAround(Buffered):
    """The same parameters, registered in the other order."""

    def __init__(self) -> None:
        super().__init__(mean=torch.ones(6))
        self._parameters["weight"] = self._parameters.pop("weight")  # moves to the end


SAME = {"mean": torch.ones(6), "count": torch.ones(6)}
OTHER_MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shape": (
        lambda: Buffered(mean=torch.ones(5), count=torch.ones(6)),
        r"tensor 2 of the model: rank 0 has buffer 'mean', shape \(6,\), float32.* rank 1 has .*'mean', shape \(5,\)",
    ),
    "dtype": (
        lambda: Buffered(mean=torch.ones(6).double(), count=torch.ones(6)),
        r"tensor 2 of the model: rank 0 has buffer 'mean', .* float32, .* rank 1 has buffer 'mean', .* float64, ",
    ),
    "device": (
        lambda: Buffered(mean=torch.ones(6, device="meta"), count=torch.ones(6)),
        r"tensor 2 of the model: rank 0 has .* on cpu:0, .* rank 1 has .* on meta:0",
    ),
    "name": (
        lambda: Buffered(average=torch.ones(6), count=torch.ones(6)),
        r"tensor 2 of the model: rank 0 has buffer 'mean', .* rank 1 has buffer 'average'",
    ),
    "order": (
        lambda: Buffered(count=torch.ones(6), mean=torch.ones(6)),
        r"tensor 2 of the model: rank 0 has buffer 'mean', .* rank 1 has buffer 'count'",
    ),
    "fewer": (
        lambda: Buffered(mean=torch.ones(6)),
        r"tensor 3 of the model: rank 0 has buffer 'count', .* rank 1 has nothing",
    ),
    "more": (
        lambda: Buffered(**SAME, more=torch.ones(6)),
        r"tensor 4 of the model: rank 0 has nothing, but rank 1 has buffer 'more'",
    ),
}


def _other_model(group: ProcessGroup, name: str) -> None:
    make, pattern = OTHER_MODELS[name]
    model = Buffered(**SAME) if dist.get_rank(group) == 0 else make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"the ranks disagree on {pattern}"):
        sharded(group, model)
    if name != "device":
        assert_same_bits(model.state_dict(), before)
    sharded(group, Buffered(**SAME))  # the ranks are still together


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_buffers_that_differ_are_named_on_all_ranks(pool: Pool, name: str) -> None:
    pool.run(_other_model, 2, name)


def _not_held(group: ProcessGroup) -> None:
    """What the optimizer does not hold is broadcast, too, and paired by its order."""
    model: nn.Module = Buffered(mean=torch.ones(6)) if dist.get_rank(group) == 0 else TurnedAround()
    with pytest.raises(ValueError, match=r"tensor 0 of the model: rank 0 has parameter 'weight'.* parameter 'bias'"):
        sharded(group, model, params=[("weight", model.get_parameter("weight"))])


def test_parameters_that_the_optimizer_does_not_hold_are_compared(pool: Pool) -> None:
    pool.run(_not_held, 2)


def _buffers_grow_apart(group: ProcessGroup) -> None:
    model, late = Buffered(cache=torch.ones(6)), nn.Parameter(torch.ones(3))
    optimizer = sharded(group, model)
    model.register_buffer("cache", torch.ones(2 + dist.get_rank(group)))
    optimizer.add_param_group({"params": [("late", late)]})
    assert len(optimizer.param_groups) == 2


def test_buffers_may_differ_once_nothing_is_broadcast_into_them(pool: Pool) -> None:
    pool.run(_buffers_grow_apart, 2)


# Another order of parameters without names.


def _swapped(group: ProcessGroup, params: list[Any]) -> list[Any]:
    return params if dist.get_rank(group) == 0 else [params[1], params[0], *params[2:]]


def _other_order(group: ProcessGroup, wrapped: bool) -> None:
    model = Buffered()
    params = _swapped(group, [model.weight, model.bias])
    with pytest.raises(ValueError, match=r"on parameter 0 \('weight'\): rank 0 has 'weight', .* rank 1 has 'bias'"):
        sharded(group, in_ddp(group, model) if wrapped else model, params=params)
    named = [(str(number), param) for number, param in enumerate(params)]
    with pytest.raises(ValueError, match=r"rank 0 has '0, which is weight in the model', .* which is bias in the"):
        sharded(group, model, params=named)
    optimizer = sharded(group, model, params=[model.weight, model.bias])
    assert "param_names" not in optimizer.param_groups[0]  # names of the model are for the comparison alone


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "wrapped"])
def test_another_order_shows_in_the_names_of_the_model(pool: Pool, wrapped: bool) -> None:
    pool.run(_other_order, 2, wrapped)


def _added_in_another_order(group: ProcessGroup) -> None:
    model = Buffered()
    optimizer = sharded(group, model, params=[model.weight])
    late = Buffered()
    with pytest.raises(ValueError, match=r"its parameter 1 has the values of parameter 2 of rank 0, and 2 parameters"):
        optimizer.add_param_group({"params": _swapped(group, [late.weight, late.bias])})
    with pytest.raises(
        ValueError, match=r"on parameter 1 \('bias'\): rank 0 has 'bias', shape .* rank 1 has 'param.1'"
    ):
        optimizer.add_param_group({"params": [model.bias if dist.get_rank(group) == 0 else late.bias]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [late.weight, late.bias]})
    assert len(optimizer.param_groups) == 2


def test_another_order_of_parameters_outside_the_model_shows_in_their_values(pool: Pool) -> None:
    pool.run(_added_in_another_order, 2)


# The ranks of DDP.


def _ranks_apart(group: ProcessGroup) -> None:
    ddp, pairs = in_ddp(group, build()), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    theirs = r"the DDP module ranks \[0, 1, 2, 3\]"
    ours = r"\[0, 1\]" if dist.get_rank() < 2 else r"\[2, 3\]"
    with pytest.raises(ValueError, match=rf"the optimizer spans ranks {ours}, {theirs}.*same process group"):
        sharded(group, ddp, process_group=mine)
    small = in_ddp(mine, build())
    for reduction in ("scatter", "all"):
        with pytest.raises(ValueError, match=rf"spans ranks \[0, 1, 2, 3\], the DDP module ranks {ours}"):
            sharded(group, small, process_group=group, reduction=reduction)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match=rf"the optimizer spans ranks {ours}, {theirs}"):
        sharded(group, ddp, process_group=mesh["shard"])
    sharded(group, ddp, process_group=mesh)


def test_ranks_other_than_those_of_ddp_are_refused(pool: Pool) -> None:
    pool.run(_ranks_apart, 4)


def _shards_inside_ddp(group: ProcessGroup) -> dict[str, Tensor]:
    """DDP gives equal gradients to all four ranks; each pair divides the state of its own copy."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    twin, model = in_ddp(group, build()), in_ddp(group, build())
    plain = AdamW(twin.parameters(), **OPTIONS)
    optimizer = sharded(group, model, process_group=pairs[dist.get_rank() // 2], reduction="all")
    assert optimizer.world_size == 2
    train(model, optimizer, series(group, 3))
    train(twin, plain, series(group, 3))
    assert_same_bits(values(model), values(twin))
    return values(model)


def test_some_of_ddps_ranks_may_divide_the_state_of_whole_gradients(pool: Pool) -> None:
    results = pool.run(_shards_inside_ddp, 4)
    for other in results[1:]:
        assert_same_bits(other, results[0])


def _world_of_one(group: ProcessGroup) -> None:
    model = Buffered(**SAME)
    sharded(group, model, SGD, params=[model.bias, model.weight], lr=0.1)


def test_a_world_of_one_has_nobody_to_differ_from(pool: Pool) -> None:
    pool.run(_world_of_one, 1)


# Layouts that differ although all that was passed is equal.


class _Layers(nn.Module):
    """Two layers of one shape, which may be registered in another order."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(16, 16, bias=False))


def _other_places(group: ProcessGroup) -> str:
    model = _Layers("ba" if dist.get_rank(group) == 2 else "ab")
    named = [(name, model.get_parameter(name)) for name in ("a.weight", "b.weight")]
    with pytest.raises(ValueError) as caught:
        sharded(group, in_ddp(group, model), params=named)
    return str(caught.value)


def test_another_order_of_the_model_is_told_by_the_first_parameter_that_lies_elsewhere(pool: Pool) -> None:
    for text in pool.run(_other_places, 3):
        assert text.startswith(
            "the ranks disagree on the place of parameter 'a.weight', which follows from the order of parameters in "
            "the model: rank 0 has elements 0 to 256 of bucket 1, with owners 0, 1, 2, but rank 2 has elements 0 to "
            "256 of bucket 0, with owners 0, 1, 2; build the optimizer from the same parameters"
        )


def _class_with(coupled: bool) -> type[SGD]:
    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            """A step of SGD, of length one if `coupled`."""
            for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
                scale = 1 / param.grad.norm() if coupled else 1.0
                param.data.sub_(param.grad * scale, alpha=0.1)

    return Own


def _other_trial(group: ProcessGroup) -> str:
    model = _Layers("ab")
    with pytest.raises(ValueError) as caught:
        sharded(group, model, _class_with(coupled=dist.get_rank(group) > 0), lr=0.1)
    return str(caught.value)


def test_a_class_that_may_be_cut_on_one_rank_alone(pool: Pool) -> None:
    for text in pool.run(_other_trial, 3):
        assert "disagree on whether parameter 'a.weight' may be cut: rank 0 has yes, but ranks 1, 2 have no; " in text


def _three_values(group: ProcessGroup) -> str:
    with pytest.raises(ValueError) as caught:
        sharded(group, _Layers("ab"), lr=0.1 * 2 ** dist.get_rank(group))
    return str(caught.value)


def test_every_value_is_told_with_its_ranks(pool: Pool) -> None:
    for text in pool.run(_three_values, 3):
        values = [text.partition(f"rank {rank} has ")[2].partition("}")[0] for rank in range(3)]
        assert [f"lr={0.1 * 2**rank}" in value for rank, value in enumerate(values)] == [True] * 3, text
