"""Norms computed from parts on several ranks equal torch's norms of whole gradients."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from tests.helpers.reference import assert_same_bits
from zerostep.comm.exchange import NullExchange
from zerostep.step.norms import combine, power_sum, root

TYPES = pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])


class _Ranks(NullExchange):
    """The numbers that every rank gave; this rank's own are checked."""

    def __init__(self, rows: Sequence[Tensor], rank: int) -> None:
        self._rows, self._rank = torch.stack(list(rows)), rank

    def all_gather_values(self, values: Tensor) -> Tensor:
        assert_same_bits({"own": values}, {"own": self._rows[self._rank]})
        return self._rows


def _power_sum(parts: Sequence[Tensor], norm_type: float) -> Tensor:
    return power_sum(parts, norm_type, torch.device("cpu"))


def _together(shares: Sequence[Sequence[Tensor]], norm_type: float) -> float:
    """What every rank finds; all must find the same."""
    sums = [_power_sum(parts, norm_type).view(1) for parts in shares]
    totals = [combine(_Ranks(sums, rank), each, norm_type) for rank, each in enumerate(sums)]
    assert len({repr(total.tolist()) for total in totals}) == 1
    return root(totals[0], norm_type).item()


def _gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator, dtype=torch.float32).to(dtype) for size in (7, 1, 40, 13)]


def _shares(gradients: Sequence[Tensor], world_size: int) -> list[list[Tensor]]:
    """Each gradient in pieces, one for each rank; some have no elements."""
    chunks = [gradient.tensor_split(world_size) for gradient in gradients]
    return [[pieces[rank] for pieces in chunks] for rank in range(world_size)]


@TYPES
@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_the_norm_is_that_of_whole_gradients(norm_type: float, world_size: int, dtype: torch.dtype) -> None:
    gradients = _gradients(dtype)
    expected = get_total_norm(gradients, norm_type).item()
    assert _together(_shares(gradients, world_size), norm_type) == pytest.approx(expected, rel=1e-6)


@TYPES
def test_no_gradients_have_no_norm(norm_type: float) -> None:
    assert _together([[], [torch.empty(0)]], norm_type) == 0.0
    assert get_total_norm([], norm_type).item() == 0.0


@TYPES
@pytest.mark.parametrize(
    "bad", [[math.inf], [-math.inf], [math.nan], [math.inf, math.nan], [math.inf, -math.inf]], ids=str
)
@pytest.mark.parametrize("together", [True, False])
def test_what_is_not_finite_is_what_torch_finds(norm_type: float, bad: list[float], together: bool) -> None:
    gradients = _gradients()
    for place, value in enumerate(bad):
        gradients[2][-1 - place if together else place * 39] = value
    found, expected = _together(_shares(gradients, 3), norm_type), get_total_norm(gradients, norm_type).item()
    assert not math.isfinite(expected)
    assert repr(found) == repr(expected)


def test_large_numbers_do_not_overflow_on_the_way() -> None:
    """In single precision the sum of these squares would be infinite."""
    parts = [torch.full((4,), 1e18)] * 1000
    assert _together([parts, []], 2.0) == pytest.approx(2e18 * math.sqrt(1000), rel=1e-6)


def test_a_sum_beyond_all_numbers_is_infinite() -> None:
    assert _together([[torch.full((1,), 1.3e154, dtype=torch.float64)] * 2], 2.0) == math.inf


def test_small_parts_are_not_lost_beside_large_ones() -> None:
    """In single precision the sum of squares would stop growing."""
    parts = [torch.ones(1)] * 5000 + [torch.full((1,), 1e4)]
    assert _together([parts, []], 2.0) == pytest.approx(math.sqrt(1e8 + 5000), rel=1e-9)


@TYPES
def test_several_norms_in_one_go(norm_type: float) -> None:
    gradients = _gradients()
    sums = [torch.stack([_power_sum([part], norm_type) for part in share]) for share in _shares(gradients, 2)]
    totals = combine(_Ranks(sums, 1), sums[1], norm_type)
    expected = [torch.linalg.vector_norm(gradient, norm_type).item() for gradient in gradients]
    assert root(totals, norm_type).tolist() == pytest.approx(expected, rel=1e-6)


def test_the_least_element_counts_for_minus_infinity() -> None:
    shares: list[list[Any]] = [[torch.tensor([3.0, -2.0])], [], [torch.tensor([5.0])]]
    assert _together(shares, -math.inf) == 2.0
