"""Tensors over a part of flat memory, each with a storage of its own."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from zerostep import tensors
from zerostep.tensors import with_own_storage

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn),
    *(torch.int64, torch.int8, torch.bool),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("start", "stop"), [(0, 10), (3, 7), (9, 10), (0, 0), (4, 4), (10, 10)])
def test_a_part_is_the_same_memory_in_a_storage_of_its_length(dtype: torch.dtype, start: int, stop: int) -> None:
    flat = torch.arange(10).to(dtype)
    part = with_own_storage(flat, start, stop)
    assert part.dtype == dtype and part.storage_offset() == 0 and not part._is_view()
    assert part.view(torch.uint8).tolist() == flat[start:stop].view(torch.uint8).tolist()
    assert part.untyped_storage().nbytes() == (stop - start) * dtype.itemsize
    part.zero_()
    assert not flat[start:stop].to(torch.complex64).any()


def test_a_part_keeps_the_memory_alive_and_nothing_else_does() -> None:
    flat = torch.arange(10.0)
    storage = StorageWeakRef(flat.untyped_storage())
    part = with_own_storage(flat, 2, 5)
    del flat
    gc.collect()
    assert not storage.expired() and part.tolist() == [2, 3, 4]
    del part
    assert storage.expired()


def _without_second_storage() -> Iterator[Tensor]:
    yield torch.zeros(10, device="meta")
    with FakeTensorMode():
        yield torch.zeros(10)


def test_where_memory_has_no_address_a_part_is_a_view() -> None:
    for flat in _without_second_storage():
        part = with_own_storage(flat, 3, 7)
        assert part.shape == (4,) and part.storage_offset() == 3 and part.device == flat.device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.int8], ids=str)
def test_on_an_accelerator_the_offset_in_the_storage_tells_the_alignment(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    # Inductor believes the offset of a parameter when it compiles kernels that need 16 bytes of alignment.
    monkeypatch.setattr(tensors, "_HOST_DEVICES", frozenset[str]())
    flat = torch.arange(40).to(dtype)
    assert flat.data_ptr() % 16 == 0
    parts = [with_own_storage(flat, start, start + 3) for start in range(0, 36, 3)]
    assert [part.data_ptr() for part in parts] == [flat[start:].data_ptr() for start in range(0, 36, 3)]
    assert all(part.untyped_storage().data_ptr() % 16 == 0 for part in parts)
    assert all(part.storage_offset() * dtype.itemsize == part.data_ptr() % 16 for part in parts)
    assert len({(part.untyped_storage().data_ptr(), part.untyped_storage().nbytes()) for part in parts}) == 12
