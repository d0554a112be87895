"""Exchanges over real ranks: sums in the order of the ranks, parts of every length and dtype, and bytes counted."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.pool import OFFSET, Pool
from tests.helpers.reference import assert_same_bits
from zerostep.comm import exchange
from zerostep.comm.exchange import Exchange, HostExchange, NullExchange, StreamExchange
from zerostep.comm.transport import GroupTransport
from zerostep.comm.transport import connect as connect_transport
from zerostep.plan.buckets import Cost, padded_size, plan_buckets
from zerostep.plan.layout import Bucket, ParamSpec, Slot, Span

World = int | tuple[int, ...]

MANY = pytest.mark.parametrize("world", [2, 3, 4, OFFSET], ids=str)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]
# As the message for one part is cut: one element, a few with a rest, and everything at once.
MESSAGES = pytest.mark.parametrize("message", [1, 24, 4 << 20])

CUTS: dict[int, list[tuple[int, ...]]] = {
    2: [(0, 5, 10), (0, 5, 9), (0, 0, 7), (0, 7, 7), (0, 0, 0), (0, 1, 14)],
    3: [(0, 4, 8, 12), (0, 4, 8, 10), (0, 0, 5, 5), (0, 3, 3, 11), (0, 1, 2, 2), (0, 0, 0, 0)],
    4: [(0, 3, 6, 9, 12), (0, 3, 6, 9, 10), (0, 1, 2, 2, 2), (0, 0, 6, 6, 9), (0, 2, 2, 9, 11), (0, 0, 0, 0, 0)],
}


def _size(world: World) -> int:
    return world if isinstance(world, int) else len(world)


def _bucket(cuts: Sequence[int]) -> Bucket:
    return Bucket("float32", "cpu", True, (Slot(0, Span(0, cuts[-1])),), tuple(cuts))


def _memory(size: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Numbers whose sum depends on the order; small ones where they must be whole."""
    generator = torch.Generator().manual_seed(17 + rank)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 50, (size,), generator=generator).to(dtype)
    return (torch.randn(size, generator=generator) * 10.0 ** torch.randint(-3, 4, (size,), generator=generator)).to(
        dtype
    )


def _in_order(size: int, dtype: torch.dtype, world_size: int) -> Tensor:
    total = _memory(size, dtype, 0)
    for rank in range(1, world_size):
        total = total + _memory(size, dtype, rank)
    return total


@contextmanager
def _messages(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_MESSAGE_BYTES", size)
        yield


def _host(group: dist.ProcessGroup) -> HostExchange:
    found = exchange.connect(connect_transport(group), torch.device("cpu"))
    assert isinstance(found, HostExchange)
    return found


def _stream(group: dist.ProcessGroup) -> StreamExchange:
    found = connect_transport(group)
    assert isinstance(found, GroupTransport)
    return StreamExchange(found)


def _named(tensor: Tensor) -> dict[str, Tensor]:
    return {"memory": tensor}


def _reduce(group: dist.ProcessGroup, message: int) -> int:
    with _messages(message):
        return _reduce_all(group)


def _reduce_all(group: dist.ProcessGroup) -> int:
    found, rank, world_size = _host(group), dist.get_rank(group), dist.get_world_size(group)
    done = 0
    for dtype in DTYPES:
        for cuts in CUTS[world_size]:
            bucket, before = _bucket(cuts), (found.bytes_sent, found.bytes_received)
            part = found.reduce(_memory(bucket.size, dtype, rank), bucket).finish()
            owned = bucket.owned(rank)
            expected = _in_order(bucket.size, dtype, world_size)[owned.start : owned.stop]
            assert_same_bits(_named(part), _named(expected))
            assert found.bytes_sent - before[0] == (bucket.size - owned.length) * dtype.itemsize
            assert found.bytes_received - before[1] == (world_size - 1) * owned.length * dtype.itemsize
            done += 1
    return done


@MANY
@MESSAGES
def test_sums_are_made_in_the_order_of_the_ranks(pool: Pool, world: World, message: int) -> None:
    size = _size(world)
    assert pool.run(_reduce, world, message) == [len(DTYPES) * len(CUTS[size])] * size


def _gather(group: dist.ProcessGroup, message: int) -> int:
    with _messages(message):
        return _gather_all(group)


def _gather_all(group: dist.ProcessGroup) -> int:
    found, rank, world_size = _host(group), dist.get_rank(group), dist.get_world_size(group)
    done = 0
    for dtype in DTYPES:
        for cuts in CUTS[world_size]:
            bucket, before = _bucket(cuts), (found.bytes_sent, found.bytes_received)
            memory = _memory(bucket.size, dtype, rank)
            pointer = memory.data_ptr()
            found.gather(memory, bucket).wait()
            assert_same_bits(_named(memory), _named(_by_owner(bucket, dtype)))
            assert memory.data_ptr() == pointer
            owned = bucket.owned(rank).length * dtype.itemsize
            assert found.bytes_sent - before[0] == (world_size - 1) * owned
            assert found.bytes_received - before[1] == bucket.size * dtype.itemsize - owned
            done += 1
    return done


def _by_owner(bucket: Bucket, dtype: torch.dtype) -> Tensor:
    parts = []
    for rank in range(len(bucket.cuts) - 1):
        owned = bucket.owned(rank)
        parts.append(_memory(bucket.size, dtype, rank)[owned.start : owned.stop])
    return torch.cat(parts)


@MANY
@MESSAGES
def test_every_owner_s_part_comes_to_all(pool: Pool, world: World, message: int) -> None:
    size = _size(world)
    assert pool.run(_gather, world, message) == [len(DTYPES) * len(CUTS[size])] * size


def _meet(group: dist.ProcessGroup, stream: bool) -> list[list[list[int]]]:
    found: Exchange = _stream(group) if stream else _host(group)
    rank = dist.get_rank(group)
    meetings = [
        found.start_all_gather_ints([rank, -(2**63) + rank, 2**63 - 1 - rank]),
        found.start_all_gather_ints([7 * rank]),
    ]
    return [meeting.wait() for meeting in meetings]


@MANY
@pytest.mark.parametrize("stream", [False, True])
def test_words_come_to_all(pool: Pool, world: World, stream: bool) -> None:
    ranks = range(_size(world))
    expected = [[[rank, -(2**63) + rank, 2**63 - 1 - rank] for rank in ranks], [[7 * rank] for rank in ranks]]
    assert pool.run(_meet, world, stream) == [expected] * len(ranks)


def _numbers(group: dist.ProcessGroup, stream: bool) -> str:
    found: Exchange = _stream(group) if stream else _host(group)
    rank = dist.get_rank(group)
    values = [rank + 0.5, -0.0, math.inf, math.nan, 5e-324, 1.7e308]
    return repr(found.all_gather_values(torch.tensor(values, dtype=torch.float64)).tolist())


@MANY
@pytest.mark.parametrize("stream", [False, True])
def test_numbers_of_every_rank_come_in_every_bit(pool: Pool, world: World, stream: bool) -> None:
    ranks = range(_size(world))
    expected = repr([[rank + 0.5, -0.0, math.inf, math.nan, 5e-324, 1.7e308] for rank in ranks])
    assert pool.run(_numbers, world, stream) == [expected] * len(ranks)


def _side_by_side(group: dist.ProcessGroup) -> bool:
    """Reduces, gathers and words under way at once, waited for in another order."""
    found, rank, world_size = _host(group), dist.get_rank(group), dist.get_world_size(group)
    bucket = _bucket(tuple(100 * number for number in range(world_size + 1)))
    memories = [_memory(bucket.size, torch.float32, rank) for _ in range(4)]
    with _messages(64):
        first, second = (found.reduce(memory, bucket) for memory in memories[:2])
        meeting = found.start_all_gather_ints([rank])
        third, fourth = (found.gather(memory, bucket) for memory in memories[2:])
        parts = [reducing.finish() for reducing in (second, first)]
    fourth.wait()
    assert meeting.wait() == [[number] for number in range(world_size)]
    third.wait()
    owned = bucket.owned(rank)
    expected = _in_order(bucket.size, torch.float32, world_size)[owned.start : owned.stop]
    for part in parts:
        assert_same_bits(_named(part), _named(expected))
    for memory in memories[2:]:
        assert_same_bits(_named(memory), _named(_by_owner(bucket, torch.float32)))
    return True


@MANY
def test_several_are_under_way_at_once(pool: Pool, world: World) -> None:
    assert pool.run(_side_by_side, world) == [True] * _size(world)


def _again(group: dist.ProcessGroup, times: int) -> list[bytes]:
    found, rank, world_size = _host(group), dist.get_rank(group), dist.get_world_size(group)
    bucket = _bucket(tuple(321 * number for number in range(world_size + 1)))
    memory = _memory(bucket.size, torch.float32, rank)
    with _messages(64):
        parts = [found.reduce(memory, bucket).finish() for _ in range(times)]
    assert_same_bits(_named(memory), _named(_memory(bucket.size, torch.float32, rank)))
    assert len({part.data_ptr() for part in parts} | {memory.data_ptr()}) == times + 1
    return [part.numpy().tobytes() for part in parts]


@MANY
def test_the_same_sum_on_every_run(pool: Pool, world: World) -> None:
    """And in memory of its own, with the given memory as it was."""
    first, second = pool.run(_again, world, 5), pool.run(_again, world, 5)
    assert first == second
    assert all(len(set(runs)) == 1 for runs in first)


# The backend's own collectives: their logic, over host memory.


def _buckets(world_size: int) -> list[Bucket]:
    """Even, padded, uneven and empty parts."""
    loose = [[ParamSpec("p", (size,), "float32", splittable=True)] for size in (12, 13, 1, 0, 70_000)]
    even = [plan_buckets(specs, world_size, 1 << 30, [4], [Cost(1)]).buckets[0] for specs in loose]
    return [*even, *(_bucket(cuts) for cuts in CUTS[world_size] if cuts[-1])]


def _streams(group: dist.ProcessGroup, dtype: torch.dtype) -> list[bool]:
    stream, host, rank, world_size = _stream(group), _host(group), dist.get_rank(group), dist.get_world_size(group)
    kinds = []
    for bucket in _buckets(world_size):
        # Small whole numbers: the order of the sum makes no difference. What pads is garbage.
        memory = torch.full((padded_size(bucket),), 99.0, dtype=dtype)
        memory[: bucket.size] = (torch.arange(bucket.size) % 10 + rank).to(dtype)
        copies = [memory.clone() for _ in range(4)]
        part = stream.reduce(copies[0], bucket).finish()
        assert_same_bits(_named(part), _named(host.reduce(copies[1], bucket).finish()))
        assert part.numel() == bucket.owned(rank).length
        if padded_size(bucket) == world_size * bucket.cuts[1]:  # Gloo itself gathers no uneven parts
            stream.gather(copies[2], bucket).wait()
            host.gather(copies[3], bucket).wait()
            assert_same_bits(_named(copies[2][: bucket.size]), _named(copies[3][: bucket.size]))
        kinds.append(padded_size(bucket) != bucket.size)
    return kinds


@MANY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_stream_order_gives_the_same(pool: Pool, world: World, dtype: torch.dtype) -> None:
    for kinds in pool.run(_streams, world, dtype):
        assert any(kinds) and not all(kinds)


def _counted(group: dist.ProcessGroup) -> tuple[int, int]:
    found, world_size = _stream(group), dist.get_world_size(group)
    bucket = _bucket(tuple(10 * number for number in range(world_size + 1)))
    found.reduce(torch.zeros(bucket.size), bucket).finish()
    found.gather(torch.zeros(bucket.size), bucket).wait()
    return found.bytes_sent, found.bytes_received


@MANY
def test_stream_order_counts_what_a_ring_sends(pool: Pool, world: World) -> None:
    size = _size(world)
    assert pool.run(_counted, world) == [(2 * (size - 1) * 40, 2 * (size - 1) * 40)] * size


# A world of one.


def _alone(group: dist.ProcessGroup) -> bool:
    return isinstance(exchange.connect(connect_transport(group), torch.device("cpu")), NullExchange)


def test_a_world_of_one_has_nothing_to_send(pool: Pool) -> None:
    assert pool.run(_alone, 1) == [True]
    found, memory, bucket = NullExchange(), torch.arange(5.0), _bucket((0, 4))
    part: Any = found.reduce(memory, bucket).finish()
    assert part.tolist() == [0, 1, 2, 3] and part.data_ptr() == memory.data_ptr()
    found.gather(memory, bucket).wait()
    assert found.start_all_gather_ints([1, 2]).wait() == [[1, 2]]
    assert found.all_gather_values(torch.tensor([1.5, 2.0])).tolist() == [[1.5, 2.0]]
    assert (found.bytes_sent, found.bytes_received) == (0, 0)
