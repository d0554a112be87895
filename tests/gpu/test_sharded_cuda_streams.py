"""`ShardedOptimizer` on a CUDA device: collectives in stream order, hosts that never wait, low precision."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from tests.helpers.cuda_training import (
    DEADLINE,
    DEVICE,
    LATE,
    RECIPES,
    SMALL_BUCKETS,
    WAYS,
    Group,
    assert_same,
    backward,
    in_ddp,
    inputs_of,
    nccl_group,
    train,
    values_of,
)
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits
from zerostep import ShardedOptimizer
from zerostep.comm.exchange import StreamExchange
from zerostep.comm.transport import GroupTransport, Transfer
from zerostep.plan.buckets import padded_size
from zerostep.plan.layout import Bucket, Slot, Span

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
VERY_LATE = 20 * LATE


# ---------------------------------------------------------------------------------------- collectives in stream order


@dataclass(frozen=True)
class _Event:
    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class _LateTransport(GroupTransport):
    """Collectives come late, on a stream of their own; what they write is garbage until then."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group, DEVICE)
        self._side = torch.cuda.Stream()

    def start_reduce_scatter(self, output: Tensor, memory: Tensor, parts: Sequence[Tensor] | None) -> Transfer:
        return self._late(partial(super().start_reduce_scatter, output, memory, parts), output)

    def start_all_gather(self, memory: Tensor, parts: Sequence[Tensor] | None) -> Transfer:
        return self._late(partial(super().start_all_gather, memory, parts), memory)

    def start_all_reduce(self, memory: Tensor) -> Transfer:
        return self._late(partial(super().start_all_reduce, memory), memory)

    def _late(self, start: Callable[[], Transfer], memory: Tensor) -> Transfer:
        before = memory.clone()
        memory.fill_(99)  # on the caller's own stream: whoever goes on without waiting reads this
        self._side.wait_stream(torch.cuda.current_stream())
        for each in (before, memory):
            each.record_stream(self._side)
        with torch.cuda.stream(self._side):
            torch.cuda._sleep(LATE // 10)
            memory.copy_(before)
            start().wait()
            return Transfer(_Event(self._side.record_event()), memory, "")


def _transport(nccl: ProcessGroup, late: bool) -> GroupTransport:
    return _LateTransport(nccl) if late else GroupTransport(nccl, DEVICE)


@contextmanager
def _through(transport: GroupTransport) -> Iterator[None]:
    """A world of one has nothing to send. Here it sends it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerostep.step.bucket_shards.connect_exchange", lambda ranks, device: StreamExchange(transport))
        yield


def _bucket(lengths: Sequence[int]) -> Bucket:
    cuts = tuple(accumulate(lengths, initial=0))
    return Bucket("float32", "cuda:0", True, (Slot(0, Span(0, cuts[-1])),), cuts)


# Even, padded, uneven, empty.
LENGTHS: dict[int, list[tuple[int, ...]]] = {
    1: [(1,), (13,), (70_001,)],
    2: [(5, 5), (7, 6), (35_001, 35_000), (1, 0), (2, 11), (0, 7), (30_001, 1), (1, 30_001)],
}


def _exchange(group: ProcessGroup, late: bool) -> None:
    exchange, rank, world = (
        StreamExchange(_transport(nccl_group(group), late)),
        dist.get_rank(group),
        dist.get_world_size(group),
    )
    for lengths, dtype in product(LENGTHS[world], (torch.float32, torch.bfloat16, torch.int64, torch.complex64)):
        bucket = _bucket(lengths)
        owned = bucket.owned(rank)
        memory = torch.full((padded_size(bucket),), 77, device=DEVICE, dtype=dtype)
        memory[: bucket.size] = torch.arange(bucket.size, device=DEVICE) % 10
        numbers = memory[: bucket.size].clone()
        torch.cuda._sleep(LATE // 10)
        memory.mul_(1 + rank)
        reducing, meeting = exchange.reduce(memory, bucket), exchange.start_all_gather_ints([rank, -(2**63), 2**63 - 1])
        part = reducing.finish() + 0
        memory.fill_(0)
        memory[owned.start : owned.stop] = 3 * numbers[owned.start : owned.stop]
        exchange.gather(memory, bucket).wait()
        whole = memory[: bucket.size] + 0
        assert meeting.wait() == [[each, -(2**63), 2**63 - 1] for each in range(world)]
        total = numbers * (world * (world + 1) // 2)
        assert_same_bits(
            {"part": part, "whole": whole}, {"part": total[owned.start : owned.stop], "whole": 3 * numbers}
        )


@pytest.mark.parametrize("late", [False, True], ids=["prompt", "late"])
@pytest.mark.parametrize("world", [1, 2])
def test_an_exchange_in_stream_order(pool: Pool, world: int, late: bool) -> None:
    pool.run(_exchange, world, late, deadline=DEADLINE)


def _in_stream_order(group: ProcessGroup, recipe: str, late: bool) -> None:
    chosen, nccl = RECIPES[recipe], nccl_group(group)
    twin, series = in_ddp(nccl, chosen.build()), inputs_of(group, 5)
    plain = chosen.plain(twin.module)
    for inputs in series:
        train(twin, plain, inputs)
    for way in WAYS:
        with _through(_transport(nccl, late)):
            model, optimizer = way.ours(nccl, chosen)
        assert isinstance(optimizer._training.engine.buckets.exchanges[0], StreamExchange)
        for inputs in series:
            # Nothing between a step and the next pass, which must find the new parameters by stream order alone.
            train(model, [optimizer], inputs)
        optimizer.synchronize()
        assert_same(way, model, twin)


@pytest.mark.parametrize("late", [False, True], ids=["prompt", "late"])
@pytest.mark.parametrize("recipe", ["sgd", "adamw fused", "muon and adamw"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_whole_step_in_stream_order_equals_plain(pool: Pool, world: int, recipe: str, late: bool) -> None:
    pool.run(_in_stream_order, world, recipe, late, deadline=DEADLINE)


# --------------------------------------------------------------------------------------------- hosts that never wait


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _never_waits(group: ProcessGroup, recipe: str, through: bool) -> None:
    chosen, nccl = RECIPES[recipe], nccl_group(group)
    for way in WAYS:
        if through:
            with _through(GroupTransport(nccl, DEVICE)):
                model, optimizer = way.ours(nccl, chosen)
        else:
            model, optimizer = way.ours(nccl, chosen)
        series = inputs_of(group, 4)
        for inputs in series[:3]:
            train(model, [optimizer], inputs)
        for inputs in series[3:]:
            optimizer.zero_grad()
            backward(model, inputs)
            torch.cuda.synchronize()
            torch.cuda._sleep(VERY_LATE)
            done = torch.cuda.Event()
            done.record()
            with _waiting_forbidden():
                norm = optimizer.clip_grad_norm_(1e-3)
                left = optimizer.grad_norm()
                optimizer.step()
            assert not done.query(), f"{way}: the host has waited for the device"
        torch.cuda.synchronize()
        assert norm > 1e-3 and left.item() == pytest.approx(1e-3, rel=1e-2)
    with _waiting_forbidden(), pytest.raises(RuntimeError, match="synchroniz"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)  # it has to: the mode is on


@pytest.mark.parametrize(("world", "through"), [(1, False), (1, True), (2, True)])
@pytest.mark.parametrize("recipe", ["sgd", "adamw", "adamw fused", "muon and adamw"])
def test_the_host_does_not_wait_for_the_device_in_a_step(pool: Pool, recipe: str, world: int, through: bool) -> None:
    pool.run(_never_waits, world, recipe, through, deadline=DEADLINE)


# ------------------------------------------------------------------------------------------------- low precision


class _Masters:
    """A plain optimizer over float32 copies of low-precision parameters."""

    def __init__(self, model: nn.Module, kind: type[Optimizer], options: Group) -> None:
        self._params = list(model.parameters())
        self._masters = [nn.Parameter(param.detach().float()) for param in self._params]
        self._optimizer = kind(self._masters, **options)

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        self._optimizer.step()
        for param, master in zip(self._params, self._masters, strict=True):
            param.copy_(master)
            param.grad = None


def _low_precision(group: ProcessGroup, recipe: str, through: bool) -> None:
    chosen = RECIPES[recipe]
    group = nccl_group(group) if through else group
    for way in WAYS:
        twin = in_ddp(group, chosen.build().bfloat16())
        plain = _Masters(twin.module, chosen.kind, chosen.options)
        bare = chosen.build().bfloat16()
        model = in_ddp(group, bare) if way.wrapped else bare
        options: Group = {"reduction": way.reduction, "gather": way.gather, **chosen.options}
        make = partial(ShardedOptimizer, model, chosen.kind, process_group=group, bucket_mb=SMALL_BUCKETS)
        if through:
            with _through(_transport(group, True)):
                optimizer = make(master_dtype=torch.float32, **options)
        else:
            optimizer = make(master_dtype=torch.float32, **options)
        for inputs in inputs_of(group):
            backward(twin, inputs.bfloat16())
            plain.step()
            train(model, [optimizer], inputs.bfloat16())
        optimizer.synchronize()
        assert_same(way, model, twin)
        assert all(value.dtype == torch.bfloat16 for value in values_of(model).values())


@pytest.mark.parametrize("recipe", ["sgd", "adamw fused"])
@pytest.mark.parametrize("world", [1, 2])
def test_masters_of_bfloat16_parameters(pool: Pool, world: int, recipe: str) -> None:
    pool.run(_low_precision, world, recipe, False, deadline=DEADLINE)


@pytest.mark.parametrize("world", [1, 2])
def test_masters_of_bfloat16_parameters_in_stream_order(pool: Pool, world: int) -> None:
    pool.run(_low_precision, world, "adamw fused", True, deadline=DEADLINE)


def _scaled(group: ProcessGroup, model: nn.Module, optimizer: Optimizer, unscale: bool) -> list[float]:
    """Train with a loss scale; in the third step, the last rank meets a number that is not finite."""
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    scales = []
    for number, inputs in enumerate(inputs_of(group)):
        optimizer.zero_grad()
        last = dist.get_rank(group) == dist.get_world_size(group) - 1
        found = inputs * torch.inf if number == 2 and last else inputs
        scaler.scale(model(found).square().sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def _scaling(group: ProcessGroup, recipe: str, unscale: bool) -> None:
    chosen = RECIPES[recipe]
    twin = in_ddp(group, chosen.build())
    expected = _scaled(group, twin, chosen.plain(twin.module)[0], unscale)
    assert expected[2] < expected[1] < expected[-1], "no number was found that is not finite"
    for way in WAYS:
        model, optimizer = way.ours(group, chosen)
        assert _scaled(group, model, optimizer, unscale) == expected, way
        optimizer.synchronize()
        assert_same(way, model, twin)


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled first"])
@pytest.mark.parametrize("recipe", ["adamw", "adamw fused"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_scale_and_an_infinity_on_one_rank(pool: Pool, world: int, recipe: str, unscale: bool) -> None:
    pool.run(_scaling, world, recipe, unscale, deadline=DEADLINE)
