"""Transports: spans of every dtype and length, pieces of every size, two at once, and dead peers."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.pool import OFFSET, Pool, run_fresh
from tests.helpers.reference import assert_same_bits
from zerostep.comm import stream
from zerostep.comm.transport import (
    TAG_DATA,
    BucketMemory,
    CompanionTransport,
    GroupTransport,
    NullTransport,
    Transport,
    connect,
)
from zerostep.errors import TransportError
from zerostep.memory.bucket_memory import make_bucket_memories
from zerostep.plan.layout import ParamSpec
from zerostep.plan.partition import plan

World = int | tuple[int, ...]

WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4, OFFSET], ids=str)
MANY = pytest.mark.parametrize("world", [2, 3, 4, OFFSET], ids=str)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]
# Uneven, empty and scalar parameters, one that is not contiguous, and fewer of a kind than there are ranks.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "uneven": [(7, 3), (1,), (), (2, 5, 2), (13,), (4, 4), (3,)],
    "empty": [(0,), (5,), (0, 3)],
    "single": [(11,)],
    "nothing": [(0,), (0, 2)],
}


def _size(world: World) -> int:
    return world if isinstance(world, int) else len(world)


def _transport(group: dist.ProcessGroup, companion: bool) -> Transport:
    found = connect(group)
    assert isinstance(found, NullTransport if dist.get_world_size(group) == 1 else GroupTransport)
    return found.companion() if companion else found


def _filled(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Every byte pattern may occur; for booleans only the two that are allowed."""
    size = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(2 if dtype == torch.bool else 256, (size,), generator=torch.Generator().manual_seed(seed))
    found = values.to(torch.uint8).view(dtype).reshape(tuple(shape))
    return found.t().contiguous().t() if found.dim() == 2 else found


def _gather(group: dist.ProcessGroup, case: str, as_views: bool, companion: bool) -> int:
    """Every rank brings its own values; afterwards each parameter has its owner's, everywhere."""
    transport, done = _transport(group, companion), 0
    for dtype in DTYPES:
        shapes = SHAPES[case]
        specs = tuple(
            ParamSpec(f"p{i}", shape, str(dtype).removeprefix("torch."), "cpu:0") for i, shape in enumerate(shapes)
        )
        layout = plan(specs, transport.world_size)
        params = [_filled(shape, dtype, 10 * transport.rank + i) for i, shape in enumerate(shapes)]
        expected = [_filled(shape, dtype, 10 * layout.owner_of(i) + i) for i, shape in enumerate(shapes)]
        bucket_memories = make_bucket_memories(layout, params, as_views)
        assert transport.gather(bucket_memories, [5 + transport.rank, 1], 99) == _statuses(transport, bucket_memories)
        assert_same_bits(_named(params), _named(expected))
        done += 1
    return done


def _statuses(transport: Transport, bucket_memories: Sequence[BucketMemory]) -> list[list[int]]:
    """Without anything to gather nobody meets, and a rank knows only its own word."""
    ranks = range(transport.world_size) if transport.exchanges_status(bucket_memories) else [transport.rank]
    return [[5 + rank, 1] for rank in ranks]


def _named(tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    return [(str(index), tensor) for index, tensor in enumerate(tensors)]


@WORLDS
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("companion", [False, True])
def test_gather(pool: Pool, world: World, case: str, as_views: bool, companion: bool) -> None:
    assert pool.run(_gather, world, case, as_views, companion) == [len(DTYPES)] * _size(world)


def _mixed(group: dist.ProcessGroup, as_views: bool) -> None:
    """Several memories in one gather, in order."""
    transport = connect(group)
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.complex64, torch.bfloat16]
    specs = tuple(
        ParamSpec(f"p{i}", (4 + i,), str(dtype).removeprefix("torch."), "cpu:0") for i, dtype in enumerate(dtypes)
    )
    layout = plan(specs, transport.world_size)
    params = [_filled((4 + i,), dtype, 10 * transport.rank + i) for i, dtype in enumerate(dtypes)]
    expected = [_filled((4 + i,), dtype, 10 * layout.owner_of(i) + i) for i, dtype in enumerate(dtypes)]
    bucket_memories = make_bucket_memories(layout, params, as_views)
    assert len(bucket_memories) == 3
    for _ in range(3):
        transport.gather(bucket_memories, [0], 99)
        assert_same_bits(_named(params), _named(expected))


@WORLDS
@pytest.mark.parametrize("as_views", [False, True])
def test_gather_of_several_dtypes(pool: Pool, world: World, as_views: bool) -> None:
    pool.run(_mixed, world, as_views)


def _other_parcels(group: dist.ProcessGroup, companion: bool) -> str:
    transport = _transport(group, companion)
    with pytest.raises(TransportError) as caught:
        transport.gather(_two_parcels(transport), [0], 5 if transport.rank == 1 else 6)
    return str(caught.value)


@pytest.mark.parametrize("companion", [False, True])
def test_a_gather_of_different_things_is_refused_everywhere(pool: Pool, companion: bool) -> None:
    first, second = pool.run(_other_parcels, 2, companion)
    assert "rank 1 is about to send other parameters" in first
    assert "rank 0 is about to send other parameters" in second


def _ints(group: dist.ProcessGroup, companion: bool) -> list[list[list[int]]]:
    transport = _transport(group, companion)
    rank = transport.rank
    return [transport.all_gather_ints(row) for row in ([rank], [2**62 + rank, -(2**63), rank], [])]


@WORLDS
@pytest.mark.parametrize("companion", [False, True])
def test_all_gather_ints(pool: Pool, world: World, companion: bool) -> None:
    ranks = range(_size(world))
    for one, three, none in pool.run(_ints, world, companion):
        assert one == [[rank] for rank in ranks]
        assert three == [[2**62 + rank, -(2**63), rank] for rank in ranks]
        assert none == [[] for _ in ranks]


def _sums(group: dist.ProcessGroup, companion: bool) -> None:
    transport = _transport(group, companion)
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int64):
        numbers = (torch.arange(7) * (1 + 2j if dtype.is_complex else 1)).to(dtype)
        found = transport.start_all_reduce(numbers * (1 + transport.rank)).wait()
        expected = numbers * sum(range(1, transport.world_size + 1))
        assert found.dtype == dtype and torch.equal(found, expected), f"{dtype}: {found} and {expected}"


@WORLDS
@pytest.mark.parametrize("companion", [False, True])
def test_sums_of_every_kind_of_number(pool: Pool, world: World, companion: bool) -> None:
    pool.run(_sums, world, companion)


def _broadcasts(group: dist.ProcessGroup, companion: bool) -> None:
    transport = _transport(group, companion)
    for source in range(transport.world_size):
        for dtype in DTYPES:
            memory = _filled((9,), dtype, transport.rank)
            transport.broadcast(memory, source)
            assert_same_bits({"memory": memory}, {"memory": _filled((9,), dtype, source)})


@WORLDS
@pytest.mark.parametrize("companion", [False, True])
def test_broadcast(pool: Pool, world: World, companion: bool) -> None:
    pool.run(_broadcasts, world, companion)


def _tensors(seed: int) -> list[Tensor]:
    """Many small tensors, some without elements, in many dtypes and memory orders, and some larger than any piece."""
    shapes: list[tuple[int, ...]] = [(0,), (1,), (5, 3), (), (0, 5), (50,), (3, 2), (16, 9)]
    found = [
        _filled(shape, dtype, 100 * seed + index)
        for index, (shape, dtype) in enumerate((shape, dtype) for dtype in DTYPES for shape in shapes)
    ]
    return [*found, torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last) + seed]


def _messages(group: dist.ProcessGroup, limit: int, how: str, companion: bool) -> int:
    """From every rank to every other, in pieces of `limit` bytes at most; returns the largest piece."""
    transport = _Counting(_transport(group, companion))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream.pieces, "__defaults__", (limit,))
        for source in range(transport.world_size):
            if how == "broadcast":
                _broadcast_from(transport, source)
            else:
                _send_from(transport, source)
    assert transport.sent <= transport.started and transport.started > 0
    return max(transport.sizes)


def _send_from(transport: "_Counting", source: int) -> None:
    others = [rank for rank in range(transport.world_size) if rank != source]
    if transport.rank == source:
        for rank in others:
            stream.send(transport, _tensors(source), rank)
            stream.send_bytes(transport, b"", rank)
            stream.send_bytes(transport, bytes(range(256)), rank)
        return
    found = [torch.zeros_like(tensor) for tensor in _tensors(source)]
    stream.receive(transport, found, source)
    assert_same_bits(_named(found), _named(_tensors(source)))
    assert stream.receive_bytes(transport, 0, source) == b""
    assert stream.receive_bytes(transport, 256, source) == bytes(range(256))


def _broadcast_from(transport: "_Counting", source: int) -> None:
    found = _tensors(transport.rank)
    stream.broadcast(transport, found, source)
    assert_same_bits(_named(found), _named(_tensors(source)))
    own = bytes([transport.rank]) * 300
    assert stream.broadcast_bytes(transport, own, source) == bytes([source]) * 300


@dataclass
class _Counting:
    """A transport that remembers the sizes of its messages."""

    inner: Transport
    sizes: list[int] = field(default_factory=list)
    started: int = 0
    sent: int = 0

    def start_send(self, memory: Tensor, to: int, tag: int = TAG_DATA) -> Any:
        self._count(memory)
        self.sent += 1
        return self.inner.start_send(memory, to, tag)

    def start_receive(self, memory: Tensor, source: int, tag: int = TAG_DATA) -> Any:
        self._count(memory)
        return self.inner.start_receive(memory, source, tag)

    def broadcast(self, memory: Tensor, source: int) -> None:
        self._count(memory)
        self.inner.broadcast(memory, source)

    def _count(self, memory: Tensor) -> None:
        self.started += 1
        self.sizes.append(memory.numel() * memory.element_size())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@MANY
@pytest.mark.parametrize("how", ["send", "broadcast"])
@pytest.mark.parametrize("companion", [False, True])
def test_streams_in_pieces(pool: Pool, world: World, how: str, companion: bool) -> None:
    total = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(0))
    for limit in (57, 4096, 16 << 20):
        assert pool.run(_messages, world, limit, how, companion) == [min(limit, total)] * _size(world)


def _large(group: dist.ProcessGroup) -> bool:
    """Two tensors that end in the middle of a piece, with the real limit."""
    transport = connect(group)
    sizes = [stream.PIECE_BYTES + 5, stream.PIECE_BYTES * 2 - 7]
    sent = [_filled((size,), torch.uint8, index) for index, size in enumerate(sizes)]
    if transport.rank == 0:
        stream.send(transport, sent, 1)
        return True
    found = [torch.zeros_like(tensor) for tensor in sent]
    stream.receive(transport, found, 0)
    return all(torch.equal(here, there) for here, there in zip(found, sent, strict=True))


def test_streams_of_large_tensors(pool: Pool) -> None:
    assert pool.run(_large, OFFSET) == [True, True]


def _side_by_side(group: dist.ProcessGroup, rounds: int) -> tuple[int, int]:
    """A companion in a thread beside collectives on the group, in no order with each other."""
    transport = connect(group)
    companion = transport.companion()
    assert isinstance(companion, CompanionTransport)
    rank, size = transport.rank, transport.world_size
    wrong: list[object] = []

    def talk() -> None:
        try:
            wrong.extend(number for number in range(rounds) if not _talk(companion, number))
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=talk)
    thread.start()
    good = 0
    for number in range(rounds):
        value = torch.full((257,), float(rank + number))
        dist.all_reduce(value, group=group)
        good += bool((value == sum(other + number for other in range(size))).all())
    thread.join()
    assert not wrong, wrong
    return good, rounds


def _talk(companion: Transport, number: int) -> bool:
    rank, size = companion.rank, companion.world_size
    rows = companion.all_gather_ints([rank, number])
    found = torch.zeros(1000)
    receive = companion.start_receive(found, (rank - 1) % size)
    companion.start_send(torch.full((1000,), float(rank * number)), (rank + 1) % size).wait()
    receive.wait()
    return rows == [[other, number] for other in range(size)] and bool((found == ((rank - 1) % size) * number).all())


@pytest.mark.parametrize("world", [2, 3, OFFSET], ids=str)
def test_a_companion_beside_collectives_of_the_group(pool: Pool, world: World) -> None:
    assert pool.run(_side_by_side, world, 200) == [(200, 200)] * _size(world)


def _companions(group: dist.ProcessGroup) -> list[list[int]]:
    """Several companions do not hear each other."""
    transport = connect(group)
    first, second = transport.companion(), transport.companion()
    rank, to, source = transport.rank, (transport.rank + 1) % 2, (transport.rank + 1) % 2
    memories = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    transfers = [
        each.start_receive(memory, source) for each, memory in zip((transport, first, second), memories, strict=True)
    ]
    for number, each in enumerate((second, first, transport)):
        transfers.append(each.start_send(torch.tensor([10 * rank + 2 - number]), to))
    for transfer in transfers:
        transfer.wait()
    return [memory.tolist() for memory in memories]


@pytest.mark.parametrize("world", [2, OFFSET], ids=str)
def test_companions_are_apart(pool: Pool, world: World) -> None:
    assert pool.run(_companions, world) == [[[10], [11], [12]], [[0], [1], [2]]]


# Nobody there, or nobody any more.


def test_a_world_of_one_has_nobody_to_talk_to() -> None:
    null = NullTransport()
    memory = torch.arange(3.0)
    null.broadcast(memory, 0)
    assert memory.tolist() == [0.0, 1.0, 2.0]
    assert (null.gather([], [7], 99), null.all_gather_ints([1, 2]), null.companion()) == ([[7]], [[1, 2]], null)
    assert null.exchanges_status([]) is False
    with pytest.raises(TransportError, match="rank 3"):
        null.start_send(memory, 3)
    with pytest.raises(TransportError, match="rank 2"):
        null.start_receive(memory, 2)


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        connect(None)


def _not_a_member(group: dist.ProcessGroup) -> str:
    other = dist.new_group([0])
    if dist.get_rank() == 0:
        return str(connect(other).world_size)
    with pytest.raises(ValueError) as caught:
        connect(other)
    return str(caught.value)


def test_a_group_without_this_rank(pool: Pool) -> None:
    first, second, *_ = pool.run(_not_a_member, 4)
    assert first == "1" and "rank 1" in second and "not a member" in second


def _dead_peer(group: dist.ProcessGroup, call: str, companion: bool) -> list[str]:
    """Rank 1 dies without a word; rank 0 learns who, while it waits and when it tries again."""
    transport = _transport(group, companion)
    transport.all_gather_ints([0])
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    memory = torch.zeros(1 << 20)
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: stream.send(transport, [memory], 1),
        "receive": lambda: stream.receive(transport, [memory], 1),
        "broadcast": lambda: stream.broadcast(transport, [memory], 1),
        "gather": lambda: transport.gather(_two_parcels(transport), [0], 99),
        "all_gather_ints": lambda: transport.all_gather_ints([1]),
    }
    found = []
    for name in ("receive", call):
        with pytest.raises(TransportError) as caught:
            calls[name]()
        found.append(str(caught.value))
    return found


def _two_parcels(transport: Transport) -> list[BucketMemory]:
    specs = tuple(ParamSpec(f"p{i}", (1000,), "float32", "cpu:0") for i in range(transport.world_size))
    return make_bucket_memories(plan(specs, transport.world_size), [torch.zeros(1000) for _ in specs], False)


CALLS = ("send", "receive", "broadcast", "gather", "all_gather_ints")


@pytest.mark.parametrize(
    ("call", "companion"), [*((call, False) for call in CALLS), ("send", True), ("all_gather_ints", True)]
)
def test_a_dead_peer_is_named(call: str, companion: bool) -> None:
    outcomes = run_fresh(_dead_peer, 2, call, companion)
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert outcomes[0].error is None, outcomes[0].error
    first, second = outcomes[0].result
    assert "rank 1" in first
    assert ("all-gather" if call == "all_gather_ints" else "rank 1") in second
