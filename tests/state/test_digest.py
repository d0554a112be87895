"""The digest of a tensor's bits: whatever changes one bit or the order of elements changes it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zerostep.state.digest import _HOST_CHUNK, _weights, combined, digest

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]
SIZES = st.sampled_from([1, 2, 7, 1000, _HOST_CHUNK, _HOST_CHUNK + 1, 3 * _HOST_CHUNK + 5])


def _random(dtype: torch.dtype, size: int, seed: int) -> Tensor:
    """Any bits at all, NaNs of every payload among them."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=random).view(dtype)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), SIZES, st.integers(0, 1000), st.data())
def test_a_flipped_bit_is_seen_wherever_it_is(dtype: torch.dtype, size: int, seed: int, data: st.DataObject) -> None:
    tensor = _random(dtype, size, seed)
    before = digest(tensor)
    memory = tensor.view(torch.uint8)
    memory[data.draw(st.integers(0, memory.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensor) != before


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), SIZES.filter(lambda size: size > 1), st.integers(0, 1000), st.data())
def test_a_swap_of_two_elements_is_seen(dtype: torch.dtype, size: int, seed: int, data: st.DataObject) -> None:
    tensor = _random(dtype, size, seed)
    rows = tensor.view(torch.uint8).view(size, -1)
    one, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    same = torch.equal(rows[one], rows[other])
    before = digest(tensor)
    rows[[one, other]] = rows[[other, one]]
    assert (digest(tensor) == before) == same


def test_zeros_of_both_signs_and_payloads_of_nan() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert quiet.isnan().all() and other.isnan().all() and digest(quiet) != digest(other)
    assert digest(quiet) == digest(quiet.clone())


def test_the_order_is_that_of_elements_not_of_memory() -> None:
    tensor = torch.randn(4, 5)
    turned = tensor.t().contiguous().t()
    assert turned.stride() != tensor.stride() and digest(turned) == digest(tensor)
    image = torch.randn(2, 3, 4, 5)
    assert digest(image.to(memory_format=torch.channels_last)) == digest(image)


def test_empty_and_single_ones() -> None:
    assert digest(torch.empty(0, 3)) == digest(torch.empty(5, 0)) == 0
    assert digest(torch.tensor(1.5)) == digest(torch.tensor([1.5])) != digest(torch.tensor(2.5))
    one, two = digest(torch.ones(3)), digest(torch.zeros(3) - 1)
    assert combined([one, two]) != combined([two, one])


def test_weights_are_odd_and_differ() -> None:
    weights = _weights(torch.device("cpu"), _HOST_CHUNK)
    assert bool((weights % 2 != 0).all()) and weights.unique().numel() == _HOST_CHUNK


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool], ids=str)
def test_dtypes_that_cannot_be_computed_with(dtype: torch.dtype) -> None:
    one = torch.tensor([0, 1, 1, 0], dtype=torch.uint8).view(dtype)
    assert digest(one) != digest(torch.tensor([0, 1, 1, 1], dtype=torch.uint8).view(dtype))
