"""`ZeroRedundancyOptimizer` over parameters without names: another order, or other values, on some ranks."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from tests.helpers.pool import OFFSET, Pool, Ranks
from tests.helpers.reference import assert_same_bits
from tests.helpers.zero_steps import MODES, make_params, numbered, set_gradients
from zerostep import ZeroRedundancyOptimizer


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def _logged() -> Iterator[list[str]]:
    handler, logger = _Records(), logging.getLogger("zerostep")
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


def _rotated(params: list[Any], rank: int, odd: int) -> list[Any]:
    return [params[1], params[2], params[0], *params[3:]] if rank == odd else params


def _other_order(group: ProcessGroup, views: bool, odd: int) -> str:
    params, rank = make_params((3, 4), (3, 4), (3, 4), (2,)), dist.get_rank(group)
    before = numbered(params)
    with pytest.raises(ValueError, match="in another order") as caught:
        ZeroRedundancyOptimizer(_rotated(params, rank, odd), SGD, group, views, lr=0.1)
    assert_same_bits(numbered(params), before)
    with _logged() as texts:
        zero = ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1)  # the ranks are still together
    assert not texts
    set_gradients(params, 0)
    zero.step()
    return str(caught.value)


@MODES
@pytest.mark.parametrize("world", [2, 4, OFFSET], ids=str)
def test_another_order_of_equal_shapes_shows_in_the_values(pool: Pool, world: int | Ranks, views: bool) -> None:
    text, *others = pool.run(_other_order, world, views, 1)
    assert set(others) == {text}
    assert text.startswith(
        "rank 1 has the parameters of rank 0 in another order: its parameter 0 ('param.0') has the values of parameter "
        "1 ('param.1') of rank 0, and 3 parameters have changed places; pass them in the same order on every rank"
    )


def test_the_first_rank_may_be_the_odd_one(pool: Pool) -> None:
    text, *others = pool.run(_other_order, 3, False, 0)
    assert set(others) == {text} and text.startswith("rank 1, 2 has the parameters")


def _added_in_another_order(group: ProcessGroup, views: bool) -> str:
    params, rank = make_params((4,)), dist.get_rank(group)
    zero = ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1)
    added = make_params((5,), (5,), (5,))
    with pytest.raises(ValueError, match="in another order") as caught:
        zero.add_param_group({"params": _rotated(added, rank, 1)})
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 1
    zero.add_param_group({"params": added})
    set_gradients([*params, *added], 0)
    zero.step()
    return str(caught.value)


@MODES
def test_another_order_of_an_added_group_shows_in_the_values(pool: Pool, views: bool) -> None:
    for text in pool.run(_added_in_another_order, 2, views):
        assert "its parameter 1 ('param.1') has the values of parameter 2 ('param.2') of rank 0" in text


def _other_values(group: ProcessGroup) -> list[str]:
    rank = dist.get_rank(group)
    params = [nn.Parameter(torch.full((2, 3), float(value))) for value in (1, 2 + rank // 2, 3)]
    with _logged() as texts:
        zero = ZeroRedundancyOptimizer([("a", params[0]), ("b", params[1]), ("c", params[2])], SGD, group, lr=0.0)
    for param in params:
        param.grad = torch.zeros_like(param)
    zero.step()
    assert [param.mean().item() for param in params] in ([1, 2, 3], [1, 3, 3])  # the owner's
    return texts


def test_other_values_are_a_warning_on_the_first_rank(pool: Pool) -> None:
    (text,), *others = pool.run(_other_values, 4)
    assert others == [[], [], []]
    assert text.startswith("parameter 1 ('b') has other values on rank 2, 3 than on rank 0, as 1 of 3 parameters have")
    assert "wrap the model in DistributedDataParallel, or broadcast" in text


def _equal_bits(group: ProcessGroup) -> list[str]:
    """Values that are equal in every bit, in all kinds of memory; what is not sampled does not count."""
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
    params = [nn.Parameter(torch.full((3, 5), torch.nan, dtype=kind)) for kind in kinds]
    params += [nn.Parameter(torch.arange(24.0).view(4, 6).t()), nn.Parameter(torch.arange(12.0)[::2])]
    params += [nn.Parameter(torch.ones(1, 3).expand(4, 3), requires_grad=False)]
    params += [nn.Parameter(torch.tensor(-0.0)), nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(1000))]
    params += [nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)]
    params += [nn.Parameter(torch.tensor([True, False]), requires_grad=False)]
    with _logged() as texts:
        ZeroRedundancyOptimizer(params, SGD, group, lr=0.1)
    return texts


def test_equal_values_of_every_kind_make_no_noise(pool: Pool) -> None:
    assert pool.run(_equal_bits, 2) == [[], []]


def _signs(group: ProcessGroup) -> list[str]:
    params = [nn.Parameter(torch.tensor([0.0 if dist.get_rank(group) == 0 else -0.0]))]
    with _logged() as texts:
        ZeroRedundancyOptimizer(params, SGD, group, lr=0.1)
    return texts


def test_values_are_compared_as_bits(pool: Pool) -> None:
    (text,), nothing = pool.run(_signs, 2)
    assert "has other values on rank 1 than on rank 0" in text and not nothing


def _equal_by_ddp(group: ProcessGroup) -> list[str]:
    torch.manual_seed(dist.get_rank(group))
    with _logged() as texts:
        ddp = DDP(nn.Linear(4, 4), process_group=group)
        ZeroRedundancyOptimizer(ddp.parameters(), SGD, group, lr=0.1)
    return texts


def test_replicas_that_ddp_has_made_equal_make_no_noise(pool: Pool) -> None:
    assert pool.run(_equal_by_ddp, 2) == [[], []]
