"""Properties of streams: tensors of any size are cut into bounded pieces and arrive unchanged."""

from collections import deque
from functools import partial
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zerostep.comm import stream
from zerostep.comm.transport import Transfer, Transport

patient = settings(deadline=None)

_SIZES = st.lists(st.integers(0, 100), max_size=12)
_LIMITS = st.integers(1, 64)


def _memories(sizes: list[int]) -> list[Tensor]:
    """Tensors of these sizes, whose elements are numbered from the first to the last."""
    return list(torch.arange(sum(sizes)).split(sizes))


def _pieces(sizes: list[int], limit: int) -> list[list[list[int]]]:
    return [[part.tolist() for part in piece] for piece in stream.pieces(_memories(sizes), limit)]


@patient
@given(_SIZES, _LIMITS)
def test_pieces_cover_every_element_once_and_in_order(sizes: list[int], limit: int) -> None:
    found = [element for piece in _pieces(sizes, limit) for part in piece for element in part]
    assert found == list(range(sum(sizes)))


@patient
@given(_SIZES, _LIMITS)
def test_pieces_are_bounded_and_full(sizes: list[int], limit: int) -> None:
    lengths = [sum(map(len, piece)) for piece in _pieces(sizes, limit)]
    assert all(length == limit for length in lengths[:-1])
    assert all(0 < length <= limit for length in lengths[-1:])


@patient
@given(_SIZES, _LIMITS)
def test_a_piece_has_no_empty_parts_and_one_part_per_tensor(sizes: list[int], limit: int) -> None:
    owner = [tensor for tensor, size in enumerate(sizes) for _ in range(size)]
    for piece in _pieces(sizes, limit):
        assert all(piece)
        tensors = [owner[part[0]] for part in piece]
        assert tensors == sorted(set(tensors))
        assert all(owner[part[-1]] == tensor for part, tensor in zip(piece, tensors, strict=True))


def test_a_piece_is_sixteen_mebibytes_unless_told() -> None:
    memory = torch.empty((40 << 20) + 1, dtype=torch.uint8, device="meta")
    lengths = [sum(part.numel() for part in piece) for piece in stream.pieces([memory])]
    assert lengths == [16 << 20, 16 << 20, (8 << 20) + 1]


class _Wire:
    """What one rank sends and another receives, in order; counts the transfers that nobody has waited for yet."""

    rank = 0
    world_size = 2
    wire_device = torch.device("cpu")

    def __init__(self) -> None:
        self.sent: deque[Tensor] = deque()
        self.in_flight = self.most_flying = self.largest = 0

    def start_send(self, memory: Tensor, to: int) -> Transfer:
        self.sent.append(memory.clone())
        return self._start(memory)

    def start_receive(self, memory: Tensor, source: int) -> Transfer:
        memory.copy_(self.sent.popleft())
        return self._start(memory)

    def _start(self, memory: Tensor) -> Transfer:
        self.in_flight += 1
        self.most_flying = max(self.most_flying, self.in_flight)
        self.largest = max(self.largest, memory.numel())
        return Transfer(self, memory, "a transfer")

    def wait(self) -> None:
        self.in_flight -= 1


@st.composite
def _tensors(draw: st.DrawFn) -> list[Tensor]:
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    shapes = st.lists(st.integers(0, 4), max_size=3)
    found = []
    for _ in range(draw(st.integers(0, 6))):
        tensor = torch.randint(0, 2, draw(shapes)).to(draw(dtypes))
        found.append(tensor.T if tensor.dim() == 2 else tensor)
    return found


@patient
@given(_tensors(), _LIMITS)
def test_tensors_arrive_as_they_were_sent(tensors: list[Tensor], limit: int) -> None:
    wire = _Wire()
    copies = [torch.ones_like(tensor) for tensor in tensors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "pieces", partial(stream.pieces, limit=limit))
        stream.send(cast(Transport, wire), tensors, 1)
        stream.receive(cast(Transport, wire), copies, 1)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
    assert not wire.sent and not wire.in_flight
    assert wire.most_flying <= 2 and wire.largest <= limit


@patient
@given(st.binary(max_size=200), _LIMITS)
def test_bytes_arrive_as_they_were_sent(data: bytes, limit: int) -> None:
    wire = _Wire()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "pieces", partial(stream.pieces, limit=limit))
        stream.send_bytes(cast(Transport, wire), data, 1)
        assert stream.receive_bytes(cast(Transport, wire), len(data), 1) == data


def test_a_large_tensor_is_sent_from_where_it_lies() -> None:
    wire, tensor = _Wire(), torch.arange(8)
    transfers: list[Tensor] = []
    start = wire.start_send
    wire.start_send = lambda memory, to: transfers.append(memory) or start(memory, to)  # type: ignore[func-returns-value,method-assign]
    stream.send(cast(Transport, wire), [tensor], 1)
    assert [memory.data_ptr() for memory in transfers] == [tensor.data_ptr()]
