"""What a step of `ZeroRedundancyOptimizer` sends, and the scratch memory it needs."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD

from tests.helpers.pool import Pool, Ranks
from tests.helpers.reference import assert_same_bits, build
from tests.helpers.zero_steps import MODES, SEVERAL, make_params, numbered, set_gradients, storages_of
from zerostep import ZeroRedundancyOptimizer
from zerostep.comm.transport import TAG_DATA, wire_tag

# Statement 25.


TALK = ("broadcast", "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "reduce", "barrier", "send")


@dataclass
class Traffic:
    """What a rank sends: bytes by message, and the names of other calls."""

    data: list[tuple[int, int]] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @contextmanager
    def counted(self) -> Iterator[None]:
        isend = dist.isend

        def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs["tag"] == wire_tag(TAG_DATA, tensor.nbytes):
                self.data.append((kwargs["group_dst"], tensor.nbytes))
            else:
                self.words.append(tensor.nbytes)
            return isend(tensor, *args, **kwargs)

        with patch.object(dist, "isend", counting):
            patches = [patch.object(dist, name, side_effect=self._noting(name)) for name in TALK]
            for each in patches:
                each.start()
            try:
                yield
            finally:
                for each in patches:
                    each.stop()

    def _noting(self, name: str) -> Callable[..., Any]:
        call = getattr(dist, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            self.other.append(name)
            return call(*args, **kwargs)

        return noting


def _count(zero: ZeroRedundancyOptimizer) -> Traffic:
    traffic = Traffic()
    with traffic.counted():
        zero.step()
    return traffic


def _transfers(group: ProcessGroup, views: bool) -> None:
    singles = make_params(*[(n % 7 + 1, 11) for n in range(300)])
    params = [*singles, *make_params(*[(5,)] * 40, dtype=torch.float64)]
    zero = ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1, momentum=0.9)
    for seed, trainable in enumerate([params, params[100:], singles[:1], params]):
        for param in params:
            param.requires_grad_(any(param is each for each in trainable))
            param.grad = None
        set_gradients(trainable, seed)
        traffic = _count(zero)
        owned = [param for param in trainable if zero._param_to_rank[param] == zero.rank]
        spans = [sum(p.nbytes for p in owned if p.dtype == dtype) for dtype in (torch.float32, torch.float64)]
        peers = [rank for rank in range(zero.world_size) if rank != zero.rank]
        # One message to each other rank for each dtype, with exactly the trainable bytes, and one small word.
        assert sorted(traffic.data) == sorted((peer, span) for peer in peers for span in spans if span)
        # A fingerprint, a status, and the five numbers that say where the rank is.
        assert traffic.words == [56] * len(peers) and traffic.other == []


@MODES
@SEVERAL
def test_statement_25_one_transfer_per_dtype_and_owner_without_what_is_frozen(
    pool: Pool, world: int | Ranks, views: bool
) -> None:
    pool.run(_transfers, world, views)


def _large_transfers(group: ProcessGroup, views: bool) -> None:
    params = [nn.Parameter(torch.zeros(100_000 if n % 4 else 200_000)) for n in range(48)]
    zero = ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1)
    traffic = _count(zero)
    owned = [param.nbytes for param, rank in zero._param_to_rank.items() if rank == zero.rank]
    for peer in range(zero.world_size):
        sent = [nbytes for to, nbytes in traffic.data if to == peer]
        assert sum(sent) == (0 if peer == zero.rank else sum(owned))
        # Without views a parameter of 512 KiB or more goes alone; smaller ones fill messages of 2 MiB.
        assert len(sent) <= (1 if views else 1 + sum(owned) // (512 << 10))
        assert views or max(sent, default=0) <= 2 << 20


@MODES
@pytest.mark.parametrize("world", [2, 3])
def test_statement_25_only_bytes_make_more_messages(pool: Pool, world: int, views: bool) -> None:
    pool.run(_large_transfers, world, views)


def _no_transfers(group: ProcessGroup, views: bool) -> None:
    params = make_params((4,), (3,))
    for param in params:
        param.requires_grad_(False)
    traffic = _count(ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1))
    assert traffic == Traffic()


@MODES
def test_statement_25_nothing_is_sent_where_all_is_frozen(pool: Pool, views: bool) -> None:
    pool.run(_no_transfers, 3, views)


# Copies and memory.


def _copied_model(group: ProcessGroup, views: bool) -> None:
    model: nn.Module = build("convolutions")
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, group, views, lr=0.1)
    set_gradients(list(model.parameters()), 0)
    zero.step()
    twin = copy.deepcopy(model)
    assert_same_bits(twin.named_parameters(), model.named_parameters())
    assert [param.stride() for param in twin.parameters()] == [param.stride() for param in model.parameters()]
    own = storages_of(list(twin.parameters()))
    assert len(set(own)) == len(own) and set(own).isdisjoint(storages_of(list(model.parameters())))
    before = numbered(list(twin.parameters()))
    set_gradients(list(model.parameters()), 1)
    zero.step()
    assert_same_bits(numbered(list(twin.parameters())), before)
    other = ZeroRedundancyOptimizer(twin.parameters(), SGD, group, views, lr=0.1)
    set_gradients(list(twin.parameters()), 1)
    other.step()
    assert_same_bits(twin.named_parameters(), model.named_parameters())


@MODES
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_model_can_be_copied(pool: Pool, world: int, views: bool) -> None:
    pool.run(_copied_model, world, views)


def _peak(call: Callable[[], object]) -> int:
    """The most bytes of host memory that torch holds at a time for `call`, beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    result = profile.profiler
    assert result is not None
    events = [event for event in result.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _scratch(group: ProcessGroup, views: bool, count: int, size: int) -> tuple[int, int]:
    params = [nn.Parameter(torch.zeros(size)) for _ in range(count)]
    zero = ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1)
    zero.step()
    return _peak(lambda: torch.ones(5000)), _peak(zero.step)


def _peaks(pool: Pool, world: int, views: bool, count: int, size: int) -> list[int]:
    found = pool.run(_scratch, world, views, count, size)
    assert all(20_000 <= probe < 30_000 for probe, _ in found)  # the measurement works
    return [peak for _, peak in found]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_scratch_for_small_parameters_is_the_own_part_and_a_few_messages(pool: Pool, world: int) -> None:
    count, size = 144, 100_000
    own, most = count * size * 4 // world, 8 << 21  # eight messages of 2 MiB at a time
    assert own + most < count * size * 4
    for peak in _peaks(pool, world, False, count, size):
        assert own < peak < own + most + 50_000


@pytest.mark.parametrize("world", [2, 3, 4])
def test_large_parameters_need_no_scratch(pool: Pool, world: int) -> None:
    assert max(_peaks(pool, world, False, 12, 200_000)) < 50_000


@pytest.mark.parametrize("world", [2, 3, 4])
def test_views_need_no_scratch(pool: Pool, world: int) -> None:
    assert max(_peaks(pool, world, True, 240, 1000)) < 50_000
