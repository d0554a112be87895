"""Ranks that construct `ZeroRedundancyOptimizer` with different arguments are all refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import SGD

from tests.helpers.pool import OFFSET, Pool, Ranks
from tests.helpers.reference import assert_same_bits
from tests.helpers.zero_steps import MODES, make_params, numbered, set_gradients, storages_of
from zerostep import ZeroRedundancyOptimizer

Variant = Callable[[list[tuple[str, nn.Parameter]]], dict[str, Any]]


def _same(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {"params": named, "optimizer_class": SGD, "lr": 0.1}


def _permuted(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": [named[0], named[2], named[1], *named[3:]]}


def _other_shape(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": [*named[:3], ("d", nn.Parameter(torch.ones(4, 3)))]}


def _other_dtype(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": [*named[:3], ("d", nn.Parameter(torch.ones(3, 4).double()))]}


def _fewer(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": named[:3]}


def _more(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": [*named, ("e", nn.Parameter(torch.ones(2)))]}


def _other_name(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": [*named[:2], ("x", named[2][1]), named[3]]}


def _frozen(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    named[1][1].requires_grad_(False)
    return _same(named)


def _other_split(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": [{"params": named[:2]}, {"params": named[2:]}]}


def _other_lr(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "lr": 0.25}


def _other_class(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "optimizer_class": MySGD}


class MySGD(SGD):
    """A class of its own."""


B = r"parameter 1 \('b'\)"
C = r"parameter 2 \('c'\)"
D = r"parameter 3 \('d'\)"
DISAGREEMENTS: dict[str, tuple[Variant, str]] = {
    "permuted": (_permuted, rf"{B}: rank 0 has 'b', shape \(3, 4\).* but {{other}} has 'c', shape \(3, 4\)"),
    "shape": (_other_shape, rf"{D}: rank 0 has 'd', shape \(3, 4\).* but {{other}} has 'd', shape \(4, 3\)"),
    "dtype": (_other_dtype, rf"{D}: rank 0 has .* float32, .* but {{other}} has .* float64"),
    "fewer": (_fewer, rf"{D}: rank 0 has 'd', shape \(3, 4\).* but {{other}} has nothing"),
    "more": (_more, r"parameter 4: rank 0 has nothing, but {other} has 'e', shape \(2,\)"),
    "name": (_other_name, rf"{C}: rank 0 has 'c', .* but {{other}} has 'x'"),
    "requires_grad": (_frozen, rf"{B}: rank 0 has .* trainable, .* but {{other}} has .* frozen"),
    "groups": (_other_split, rf"{C}: rank 0 has .* in group 0.* but {{other}} has .* in group 1"),
    "lr": (_other_lr, r"the options of group 0: rank 0 has .*lr=0\.1[,}}].* but {other} has .*lr=0\.25[,}}]"),
    "class": (_other_class, r"the optimizer class: rank 0 has SGD, but {other} has MySGD"),
}


def _refused(group: ProcessGroup, name: str, odd: int, views: bool) -> str:
    rank = dist.get_rank(group)
    # Values differ from rank to rank, so that a single transfer would show.
    named = [(letter, nn.Parameter(torch.full((3, 4), 10.0 * rank + n))) for n, letter in enumerate("abcd")]
    params = [param for _, param in named]
    before, storages = numbered(params), storages_of(params)
    make = DISAGREEMENTS[name][0] if rank == odd else _same
    with pytest.raises(ValueError, match="the ranks disagree on") as caught:
        ZeroRedundancyOptimizer(process_group=group, parameters_as_bucket_view=views, **make(named))
    assert_same_bits(numbered(params), before)
    assert storages_of(params) == storages
    # The group is in order: the next attempt finds nothing left over.
    for param in params:
        param.requires_grad_(True)
    again = ZeroRedundancyOptimizer(process_group=group, parameters_as_bucket_view=views, **_same(named))
    set_gradients(params, 0)
    again.step()
    return str(caught.value)


@MODES
@pytest.mark.parametrize("world", [2, 4, OFFSET], ids=str)
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_statement_31_different_lists_are_refused(pool: Pool, name: str, world: int | Ranks, views: bool) -> None:
    size = world if isinstance(world, int) else len(world)
    text, *others = pool.run(_refused, world, name, size - 1, views)
    assert set(others) == {text}
    _assert_matches(DISAGREEMENTS[name][1].format(other=f"rank {size - 1}"), text)


def _assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"the ranks disagree on {pattern}.*; build the optimizer from the same"):
        raise ValueError(text)


@pytest.mark.parametrize("name", ["permuted", "requires_grad", "lr", "class"])
def test_statement_31_rank_0_may_be_the_odd_one(pool: Pool, name: str) -> None:
    text, *others = pool.run(_refused, 3, name, 0, False)
    assert set(others) == {text} and "ranks 1, 2 have" in text


def _unnamed(group: ProcessGroup, views: bool) -> str:
    rank = dist.get_rank(group)
    params = [nn.Parameter(torch.full(shape, float(rank))) for shape in ((3, 4), (4, 3), (2, 6))]
    before = numbered(params)
    given = params if rank else [params[0], params[2], params[1]]
    with pytest.raises(ValueError, match="the ranks disagree on") as caught:
        ZeroRedundancyOptimizer(given, SGD, group, views, lr=0.1)
    assert_same_bits(numbered(params), before)
    return str(caught.value)


@MODES
def test_statement_31_another_order_of_unnamed_parameters_shows_in_the_shapes(pool: Pool, views: bool) -> None:
    for text in pool.run(_unnamed, 2, views):
        assert "parameter 1 ('param.1'): rank 0 has 'param.1', shape (2, 6)" in text
        assert "but rank 1 has 'param.1', shape (4, 3)" in text


def _other_group_added(group: ProcessGroup, views: bool) -> str:
    params = make_params((4,), (4,))
    zero = ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1)
    before = numbered(params)
    added = make_params((3 if zero.rank else 2,))
    with pytest.raises(ValueError, match="the ranks disagree on") as caught:
        zero.add_param_group({"params": added})
    assert_same_bits(numbered(params), before)
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 1
    set_gradients(params, 0)
    zero.step()
    zero.add_param_group({"params": make_params((5,))})
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 2
    return str(caught.value)


@MODES
def test_statement_31_holds_for_added_groups(pool: Pool, views: bool) -> None:
    for text in pool.run(_other_group_added, 2, views):
        assert "parameter 2 ('param.2'): rank 0 has 'param.2', shape (2,)" in text


def _one_rank_fails(group: ProcessGroup) -> str:
    rank = dist.get_rank(group)
    with pytest.raises(ValueError, match="Invalid learning rate") as caught:
        ZeroRedundancyOptimizer(make_params((4,), (3,)), SGD, group, lr=-1.0 if rank == 1 else 0.1)
    return str(caught.value)


def test_statement_31_an_error_of_one_rank_is_everyones(pool: Pool) -> None:
    own = "Invalid learning rate: -1.0"
    quoted = f"rank 1 failed, so no rank goes on: ValueError: {own}"
    assert pool.run(_one_rank_fails, 3) == [quoted, own, quoted]
