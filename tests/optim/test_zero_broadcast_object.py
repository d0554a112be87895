"""Values sent from one rank to all, and values that cannot be sent."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.pool import OFFSET, Pool
from tests.helpers.reference import assert_same_state_dict, train
from tests.helpers.zero_state_dicts import World, same_data, tensors_in, zero_pair
from zerostep.optim.zero import _broadcast_object


def _value() -> Any:
    return {
        "tensors": [torch.arange(6.0).view(2, 3), (torch.tensor(3, dtype=torch.int64), torch.zeros(0, 4))],
        "strange": {3: torch.ones(3, 4).t(), (1, "a"): torch.tensor([True, False]), None: 1 + 2j},
        "plain": [1, -(2**70), 0.1, float("inf"), "text \u2603", None, True, (), [], {}],
        "low": torch.randn(5, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "dtype": torch.float16,
        "strided": torch.arange(20)[::3],
        "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last) * 0 + 7,
    }


def _broadcast(group: dist.ProcessGroup, value: Any, source: int) -> None:
    here = dist.get_rank(group) == source
    world_rank = dist.get_global_rank(group, source)
    found = _broadcast_object(value if here else "ignored", world_rank, group, torch.device("cpu"))
    if here:
        assert found is value
    _assert_equal(found, value)
    assert all(tensor.device.type == "cpu" and not tensor.requires_grad for tensor in tensors_in(found) if not here)


def _assert_equal(a: Any, b: Any) -> None:
    if isinstance(b, float) and math.isnan(b):
        assert math.isnan(a)
    elif isinstance(b, dict):
        assert type(a) is dict and list(a) == list(b)
        for key in b:
            _assert_equal(a[key], b[key])
    else:
        assert_same_state_dict({"value": a}, {"value": b})


@pytest.mark.parametrize("world", [1, 2, 3, OFFSET], ids=str)
@pytest.mark.parametrize(
    "value",
    [{}, [], (), None, 5, "word", True, torch.tensor(2.5), [torch.zeros(0)], [{}, ({"a": [torch.ones(2)]},)], _value()],
    ids=["dict", "list", "tuple", "none", "int", "text", "bool", "scalar", "no elements", "nested", "everything"],
)
def test_statement_68_broadcast_object(pool: Pool, world: World, value: Any) -> None:
    size = world if isinstance(world, int) else len(world)
    for source in range(size):
        pool.run(_broadcast, world, value, source)


def _broadcast_meta(group: dist.ProcessGroup) -> None:
    here = dist.get_rank(group) == 0
    found = _broadcast_object({"a": nn.Parameter(torch.ones(3))} if here else None, 0, group, "cpu")
    assert torch.equal(found["a"].detach(), torch.ones(3)) and (here or type(found["a"]) is Tensor)


def test_statement_68_the_device_may_be_text(pool: Pool) -> None:
    pool.run(_broadcast_meta, 2)


class _Own:
    """A type of the user's."""


def _unsupported(group: dist.ProcessGroup, kind: str, source: int) -> str:
    values: dict[str, Callable[[], Any]] = {
        "own": lambda: {"x": [_Own()]},
        "set": lambda: {1, 2},
        "bytes": lambda: b"abc",
        "function": lambda: print,
        "sparse": lambda: torch.eye(3).to_sparse(),
        "subclass": lambda: nn.Buffer(torch.ones(2)).as_subclass(_Subclass),
        "key": lambda: {_Own(): 1},
        "device": lambda: torch.device("cpu"),
    }
    here = dist.get_rank(group) == source
    world_rank = dist.get_global_rank(group, source)
    with pytest.raises(TypeError) as caught:
        _broadcast_object(values[kind]() if here else None, world_rank, group)
    assert _broadcast_object("fine" if here else None, world_rank, group) == "fine"
    return str(caught.value)


class _Subclass(Tensor):
    """Carries what no other rank would know."""


@pytest.mark.parametrize("kind", ["own", "set", "bytes", "function", "sparse", "subclass", "key", "device"])
def test_statement_68_a_value_that_cannot_travel_is_an_error_everywhere(pool: Pool, kind: str) -> None:
    for world in (2, OFFSET):
        for message in pool.run(_unsupported, world, kind, 1):
            assert "cannot travel" in message


def _unsupported_state(group: dist.ProcessGroup) -> str:
    model, zero = zero_pair(group)
    train(model, zero, same_data(1))
    if zero.rank == 1:
        next(iter(zero.optim.state.values()))["mine"] = _Own()
    with pytest.raises(TypeError) as caught:
        zero.consolidate_state_dict()
    return str(caught.value)


def test_statement_72_state_that_cannot_travel_is_an_error_everywhere(pool: Pool) -> None:
    for message in pool.run(_unsupported_state, 3):
        assert "_Own" in message and "mine" in message
