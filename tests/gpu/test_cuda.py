"""`ZeroRedundancyOptimizer` on a CUDA device: several Gloo ranks on one GPU, NCCL alone, and late kernels."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.helpers.cuda_training import nccl_group
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, assert_same_state_dict
from zerostep import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from zerostep.comm.transport import GroupTransport
from zerostep.memory.bucket_memory import FlatBucket, ScatteredBucket
from zerostep.plan.groups import param_specs
from zerostep.plan.partition import plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STEPS = 8
LATE = 20_000_000  # cycles: about ten milliseconds
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
}
HOOKS = {"sequential": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(48, 48), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(48, 3)).cuda()


def _ddp(group: dist.ProcessGroup, **options: Any) -> DDP:
    return DDP(_model(), process_group=group, bucket_cap_mb=0.01, **options)


def _inputs(rank: int, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 48, generator=generator).cuda() for _ in range(steps)]


def _compare(ours: nn.Module, twin: nn.Module) -> None:
    torch.cuda.synchronize()
    assert_same_bits(
        [(name, param.detach().cpu()) for name, param in ours.named_parameters()],
        [(name, param.detach().cpu()) for name, param in twin.named_parameters()],
    )


def _nccl() -> dist.ProcessGroup:
    group = dist.new_group([dist.get_rank()], backend="nccl", use_local_synchronization=True)
    assert group is not None
    return group


def _delayed_hook(group: dist.ProcessGroup) -> Callable[[Any, GradBucket], Future[Tensor]]:
    """A hook whose result comes late, on a stream of its own, in memory of its own."""
    side = torch.cuda.Stream()

    def delayed(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        side.wait_stream(torch.cuda.current_stream())
        future: Future[Tensor] = Future(devices=[bucket.buffer().device])
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE)
            result = bucket.buffer() / dist.get_world_size(group)
            dist.all_reduce(result, group=group)
            future.set_result(result)
        return future

    return delayed


# -------------------------------------------------------------------------------------------------------- drop-in


def _drop_in(group: dist.ProcessGroup, optimizer: str, view: bool) -> None:
    kind, options = OPTIMIZERS[optimizer]
    ours, twin = _ddp(group), _ddp(group)
    zero = ZeroRedundancyOptimizer(
        ours.parameters(), kind, process_group=group, parameters_as_bucket_view=view, **options
    )
    plain = kind(twin.parameters(), **options)
    for inputs in _inputs(dist.get_rank(group)):
        for ddp, each in ((ours, zero), (twin, plain)):
            each.zero_grad()
            ddp(inputs).square().sum().backward()
            torch.cuda._sleep(LATE // 10)
            each.step()
        _compare(ours, twin)
    zero.consolidate_state_dict(to=0)
    if dist.get_rank(group) == 0:
        found = zero.state_dict()
        expected = torch.optim.Optimizer.state_dict(plain)
        _host(expected)
        assert_same_state_dict(found, expected)
        restored = kind(_model().parameters(), **options)
        restored.load_state_dict(found)


def _host(state_dict: dict[str, Any]) -> None:
    for entry in state_dict["state"].values():
        entry.update({key: value.cpu() for key, value in entry.items() if isinstance(value, Tensor)})


@pytest.mark.parametrize("view", [False, True], ids=["scattered", "bucket view"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_drop_in_equals_plain_with_several_ranks_on_one_gpu(pool: Pool, world: int, optimizer: str, view: bool) -> None:
    pool.run(_drop_in, world, optimizer, view, deadline=120)


def _drop_in_nccl(group: dist.ProcessGroup, optimizer: str, view: bool, group_bytes: int) -> None:
    with patch("zerostep.comm.transport.base._GROUP_BYTES", group_bytes):
        _drop_in(nccl_group(group), optimizer, view)


@pytest.mark.parametrize("group_bytes", [1, 64 << 20], ids=["one by one", "together"])
@pytest.mark.parametrize("view", [False, True], ids=["scattered", "bucket view"])
@pytest.mark.parametrize("world", [1, 2])
def test_drop_in_on_nccl(pool: Pool, world: int, view: bool, group_bytes: int) -> None:
    pool.run(_drop_in_nccl, world, "adamw fused", view, group_bytes, deadline=120)


def _nccl_transport(group: dist.ProcessGroup) -> None:
    transport = GroupTransport(_nccl(), torch.device("cuda", 0))
    assert transport.stream_ordered(torch.device("cuda", 0)) and transport.wire_device.type == "cuda"
    assert transport.all_gather_ints([1, -2]) == [[1, -2]]
    params = [nn.Parameter(torch.randn(n, device="cuda")) for n in (3, 5_000_000, 7)]
    before = [param.detach().clone() for param in params]
    layout = plan(param_specs([{"params": params}]), 1)
    for memory in (ScatteredBucket(layout.buckets[0], params), FlatBucket(layout.buckets[0], params)):
        assert transport.gather([memory], [0], 0) == [[0]]
    torch.cuda.synchronize()
    assert all(torch.equal(param, value) for param, value in zip(params, before, strict=True))


def test_transport_broadcasts_in_stream_order_on_nccl(pool: Pool) -> None:
    pool.run(_nccl_transport, 1, deadline=120)


# ----------------------------------------------------------------------------------------------------- overlap


def _overlap(group: dist.ProcessGroup, hook: str, optimizer: str, late: bool, options: dict[str, Any]) -> None:
    kind, arguments = OPTIMIZERS[optimizer]
    ours, twin = _ddp(group, **options), _ddp(group, **options)
    zero = ZeroRedundancyOptimizer(ours.parameters(), kind, process_group=group, overlap_with_ddp=True, **arguments)
    plain = kind(twin.parameters(), **arguments)
    inner = _delayed_hook(group) if late else allreduce_hook
    state = None if late else group
    ours.register_comm_hook(state, HOOKS[hook](inner, ours, zero))
    twin.register_comm_hook(state, inner)
    for inputs in _inputs(dist.get_rank(group)):
        zero.zero_grad()
        ours(inputs).square().sum().backward()
        plain.zero_grad()
        twin(inputs).square().sum().backward()
        plain.step()
        # No synchronisation here: the next forward pass must find the new parameters by stream order alone.
    _compare(ours, twin)


@pytest.mark.parametrize("hook", list(HOOKS))
@pytest.mark.parametrize("optimizer", ["sgd", "adamw fused", "nadam"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_overlap_equals_plain_with_several_ranks_on_one_gpu(pool: Pool, world: int, optimizer: str, hook: str) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        pool.run(_overlap, world, hook, optimizer, False, options, deadline=120)


@pytest.mark.parametrize("hook", list(HOOKS))
@pytest.mark.parametrize("world", [1, 2])
def test_overlap_waits_for_late_reductions(pool: Pool, world: int, hook: str) -> None:
    pool.run(_overlap, world, hook, "adamw", True, {}, deadline=120)


def _overlap_nccl(
    group: dist.ProcessGroup, hook: str, optimizer: str, late: bool, together: int, options: dict[str, Any]
) -> None:
    with patch("zerostep.optim.overlap_hooks._TOGETHER_BYTES", together):
        _overlap(nccl_group(group), hook, optimizer, late, options)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize(("hook", "together"), [("sequential", 0), ("interleaved", 0), ("interleaved", 20_000)])
@pytest.mark.parametrize("late", [False, True], ids=["prompt", "late"])
@pytest.mark.parametrize("world", [1, 2])
def test_overlap_on_nccl(pool: Pool, world: int, late: bool, hook: str, together: int, options: dict[str, Any]) -> None:
    pool.run(_overlap_nccl, world, hook, "adamw fused", late, together, options, deadline=120)


def _quantised(group: dist.ProcessGroup, hook: str) -> None:
    # Not torch's hook per channel: with it, two plain runs differ from each other on a busy device.
    inner = quantization_hooks.quantization_pertensor_hook
    ours, twin = _ddp(group), _ddp(group)
    kind, arguments = OPTIMIZERS["adamw"]
    zero = ZeroRedundancyOptimizer(ours.parameters(), kind, process_group=group, overlap_with_ddp=True, **arguments)
    plain = kind(twin.parameters(), **arguments)
    ours.register_comm_hook(group, HOOKS[hook](inner, ours, zero))
    twin.register_comm_hook(group, inner)
    for inputs in _inputs(dist.get_rank(group)):
        zero.zero_grad()
        ours(inputs).square().sum().backward()
        plain.zero_grad()
        twin(inputs).square().sum().backward()
        plain.step()
    _compare(ours, twin)


def _quantised_nccl(group: dist.ProcessGroup, hook: str) -> None:
    _quantised(_nccl(), hook)


@pytest.mark.parametrize("hook", list(HOOKS))
def test_a_quantising_hook_inside(pool: Pool, hook: str) -> None:
    pool.run(_quantised_nccl, 1, hook, deadline=120)


# ---------------------------------------------------------------------------------------------- several devices


def _several_devices(group: dist.ProcessGroup, view: bool) -> None:
    torch.manual_seed(0)
    values = [torch.randn(n, device=device) for n in (7, 300_000, 5, 11) for device in ("cpu", "cuda")]
    ours, twin = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    # Left alone, torch picks the implementation by the kinds of device among the parameters of each optimizer.
    options: dict[str, Any] = {"lr": 0.1, "foreach": False}
    zero = ZeroRedundancyOptimizer(
        ours, torch.optim.AdamW, process_group=group, parameters_as_bucket_view=view, **options
    )
    plain = torch.optim.AdamW(twin, **options)
    for _ in range(STEPS):
        for mine, other in zip(ours, twin, strict=True):
            other.grad = torch.randn_like(other)
            mine.grad = other.grad.clone()
        zero.step()
        plain.step()
    assert_same_bits(
        [(str(i), param.detach().cpu()) for i, param in enumerate(ours)],
        [(str(i), param.detach().cpu()) for i, param in enumerate(twin)],
    )
    zero.consolidate_state_dict(to=0)


@pytest.mark.parametrize("view", [False, True], ids=["scattered", "bucket view"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_statement_30_parameters_on_several_devices(pool: Pool, world: int, view: bool) -> None:
    pool.run(_several_devices, world, view, deadline=120)


# ------------------------------------------------------------------------------------------------ uneven inputs


def _uneven(group: dist.ProcessGroup, zero_first: bool) -> None:
    kind, options = OPTIMIZERS["adamw"]
    ours, twin = _ddp(group), _ddp(group)
    zero = ZeroRedundancyOptimizer(ours.parameters(), kind, process_group=group, **options)
    plain = kind(twin.parameters(), **options)
    rank = dist.get_rank(group)
    for ddp, each, context in (
        (ours, zero, Join([zero, ours] if zero_first else [ours, zero])),
        (twin, plain, twin.join()),
    ):
        with context:
            for inputs in _inputs(rank, 3 + 2 * rank):
                each.zero_grad()
                ddp(inputs).square().sum().backward()
                each.step()
    _compare(ours, twin)


@pytest.mark.parametrize("zero_first", [False, True])
def test_uneven_inputs(pool: Pool, zero_first: bool) -> None:
    pool.run(_uneven, 2, zero_first, deadline=120)
