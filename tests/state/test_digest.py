"""The digests of tensors' bits: whatever changes one bit or the order of elements changes one."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zerostep.state.digest import (
    _ACCELERATOR_ROWS,
    _HOST_ROWS,
    _ROW,
    Summand,
    _mixed,
    _weights,
    counts,
    different_bits,
    digest,
    digests,
    odd,
)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]
CHUNK = _HOST_ROWS * _ROW
SIZES = st.sampled_from([1, 2, 7, 1000, _ROW, _ROW + 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
HOST = torch.device("cpu")


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
    state = [torch.ones(3), torch.zeros(3) - 1]
    there, back = (
        digests([Summand(0, x, odd(i)) for i, x in enumerate(each)], 1, HOST) for each in (state, state[::-1])
    )
    assert there != back and there == digest(state[0]) * odd(0) + digest(state[1]) * odd(1)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), SIZES), max_size=12), st.integers(0, 1000))
def test_tensors_that_are_packed_have_the_numbers_that_they_have_alone(
    kinds: list[tuple[torch.dtype, int]], seed: int
) -> None:
    tensors = [_random(dtype, size, seed + index) for index, (dtype, size) in enumerate(kinds)]
    packed = digests([Summand(index, each) for index, each in enumerate(tensors)], len(tensors), HOST)
    assert packed.tolist() == [int(digest(each)) for each in tensors]


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), SIZES), max_size=8), st.integers(0, 1000))
def test_flags_are_counted(kinds: list[tuple[int, int]], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    flags = [Summand(number, torch.rand(size, generator=random) < 0.5) for number, size in kinds]
    expected = [sum(int(each.tensor.sum()) for each in flags if each.number == number) for number in range(4)]
    assert counts(flags, 4, HOST).tolist() == expected


def test_elements_with_other_bits() -> None:
    one, other = torch.tensor([1.0, 0.0, torch.nan, 2.0]), torch.tensor([1.0, -0.0, torch.nan, 2.5])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert different_bits(one.to(dtype), other.to(dtype)).tolist() == [False, True, False, True]


def test_weights_are_odd_and_differ() -> None:
    for weights in (_weights(), _mixed(torch.arange(1 << 16))):
        assert bool((weights % 2 != 0).all()) and weights.unique().numel() == weights.numel()
    # A swap inside a row is seen for certain: words differ by less than 2**32, so their weights must in the lower half.
    assert (_weights() % 2**32).unique().numel() == _ROW


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool], ids=str)
def test_dtypes_that_cannot_be_computed_with(dtype: torch.dtype) -> None:
    one = torch.tensor([0, 1, 1, 0], dtype=torch.uint8).view(dtype)
    assert digest(one) != digest(torch.tensor([0, 1, 1, 1], dtype=torch.uint8).view(dtype))


class _Kernels(TorchDispatchMode):
    """Counts what would be a kernel, or a copy, on an accelerator: all but views and new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.name().partition("::")[2].partition(".")[0]
        if not function.is_view and name not in ("detach", "split", "unbind", "resolve_conj", "resolve_neg", "empty"):
            self.names.append(name)
        return result


def test_the_number_of_kernels_does_not_depend_on_the_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerostep.state.digest._HOST_ROWS", _ACCELERATOR_ROWS)
    counted = []
    for number in (2, 148):
        tensors = [Summand(index, torch.ones(7 + index % 3)) for index in range(number)]
        with _Kernels() as kernels:
            digests(tensors, number, HOST)
        counted.append(len(kernels.names))
    assert counted[0] == counted[1] <= 30, kernels.names
