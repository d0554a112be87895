"""The interleaved hook really updates and gathers a bucket while backward still computes the gradients of others.

Nothing here depends on speed. Backward blocks half-way until the first bucket has been updated and gathered; if updates
came after backward, it would block until the deadline. The profiler's trace then has to show the same order.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Adam
from torch.profiler import ProfilerActivity, profile, record_function

from tests.helpers.pool import Pool
from zerostep import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved

HOOKS = {"sequential": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
LAYERS = 3
DEADLINE = 20.0
NEVER = 0.3  # how long to look at a gate that must not open


@dataclass
class Gate:
    """Holds up backward until the first bucket is through, or until the deadline.

    With the interleaved hook the bucket is through when it has been gathered, on whatever rank; with the sequential one
    any update of this rank would count.
    """

    deadline: float
    reduced: Event = field(default_factory=Event)
    through: Event = field(default_factory=Event)
    armed: bool = False
    opened: bool | None = None

    def hold(self) -> None:
        """Called in the middle of backward."""
        if self.armed:
            with record_function("test/gate"):
                assert self.reduced.wait(DEADLINE)
                self.opened = self.through.wait(self.deadline)


class _Hold(torch.autograd.Function):
    """The identity, whose backward holds at a gate."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, gate: Gate) -> Tensor:
        ctx.gate = gate
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.gate.hold()
        return gradient, None


class Gated(nn.Module):
    """Layers with a gate before the last one: in backward, that one's gradients are ready before the gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))
        self.gate = gate

    def forward(self, inputs: Tensor) -> Tensor:
        """All layers, in order."""
        hidden = inputs
        for number, layer in enumerate(self.layers):
            if number == LAYERS - 1:
                hidden = _Hold.apply(hidden, self.gate)
            hidden = torch.tanh(layer(hidden))
        return hidden


class _Telling(Adam):
    """Adam that tells a gate when it has made a step."""

    gate: Gate | None = None

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.gate is not None:
            self.gate.through.set()
        return loss


def _train_to_the_gate(group: ProcessGroup, hook: str, gate: Gate) -> tuple[DDP, Tensor]:
    """A gated model whose buckets have settled: one for each layer, that of the last layer first."""
    ddp = DDP(Gated(gate), process_group=group, bucket_cap_mb=0.001)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), _Telling, group, overlap_with_ddp=True, lr=0.01)
    assert isinstance(zero.optim, _Telling)
    zero.optim.gate = gate if hook == "sequential" else None
    inner = HOOKS[hook](_watched(gate), ddp, zero)

    def outer(state: Any, bucket: GradBucket) -> Future[Tensor]:
        future = inner(state, bucket)
        if bucket.index() == 0 and hook == "interleaved":  # the other hook's future tells of the reduction alone
            future.add_done_callback(lambda _: gate.through.set())
        return future

    ddp.register_comm_hook(group, outer)
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(dist.get_rank(group)))
    for _ in range(3):
        ddp.zero_grad()
        ddp(inputs).square().sum().backward()
    gate.reduced.clear()
    gate.through.clear()
    gate.armed = True
    return ddp, inputs


def _watched(gate: Gate) -> Any:
    def wrapped(state: Any, bucket: GradBucket) -> Future[Tensor]:
        future = allreduce_hook(state, bucket)
        if bucket.index() == 0:
            future.add_done_callback(lambda _: gate.reduced.set())
        return future

    return wrapped


class Range(NamedTuple):
    """A named stretch of time on one thread."""

    name: str
    thread: int
    start: float
    stop: float


def _traced(group: ProcessGroup, hook: str, deadline: float, directory: Path) -> tuple[bool | None, list[Range]]:
    """Whether the gate opened during backward, and the ranges of that backward pass in its trace."""
    gate = Gate(deadline)
    ddp, inputs = _train_to_the_gate(group, hook, gate)
    loss = ddp(inputs).square().sum()
    with _profiled(directory / f"{dist.get_rank(group)}.json") as ranges:
        loss.backward()
    return gate.opened, ranges


@contextmanager
def _profiled(path: Path) -> Iterator[list[Range]]:
    """The ranges of all threads, known at the end."""
    ranges: list[Range] = []
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads) as profiler:
        yield ranges
    profiler.export_chrome_trace(os.fspath(path))
    events = json.loads(path.read_text())["traceEvents"]
    named = (event for event in events if event.get("ph") == "X" and event["name"].startswith(("zerostep/", "test/")))
    ranges += [Range(event["name"], event["tid"], event["ts"], event["ts"] + event["dur"]) for event in named]


def _by_name(ranges: list[Range]) -> dict[str, Range]:
    found = {each.name: each for each in ranges}
    assert len(found) == len(ranges), sorted(each.name for each in ranges)
    return found


PHASES = {f"zerostep/{phase} bucket {bucket}" for phase in ("update", "gather") for bucket in range(LAYERS)}


@pytest.mark.parametrize("world", [2, 3])
def test_an_early_bucket_is_updated_and_gathered_while_backward_computes_the_others(
    pool: Pool, world: int, tmp_path: Path
) -> None:
    for opened, ranges in pool.run(_traced, world, "interleaved", DEADLINE, tmp_path):
        assert opened
        found = _by_name(ranges)
        assert set(found) == PHASES | {"test/gate"}
        gate, update, gather = (
            found[name] for name in ("test/gate", "zerostep/update bucket 0", "zerostep/gather bucket 0")
        )
        assert update.thread == gather.thread != gate.thread
        assert update.stop <= gather.start and gather.stop <= gate.stop
        assert all(found[name].start >= gate.stop for name in PHASES if not name.endswith(" 0"))


@pytest.mark.parametrize("world", [2, 3])
def test_the_sequential_hook_updates_nothing_while_backward_computes(pool: Pool, world: int, tmp_path: Path) -> None:
    for opened, ranges in pool.run(_traced, world, "sequential", NEVER, tmp_path):
        assert opened is False
        found = _by_name(ranges)
        assert set(found) == PHASES | {"test/gate"}
        assert all(found[name].start >= found["test/gate"].stop for name in PHASES)


@pytest.mark.parametrize("hook", HOOKS)
def test_buckets_go_through_their_phases_in_order(pool: Pool, hook: str, tmp_path: Path) -> None:
    for _, ranges in pool.run(_traced, 2, hook, DEADLINE if hook == "interleaved" else 0.0, tmp_path):
        work = sorted((each for each in ranges if each.name in PHASES), key=lambda each: each.start)
        expected = [f"zerostep/{phase} bucket {bucket}" for bucket in range(LAYERS) for phase in ("update", "gather")]
        assert [each.name for each in work] == expected
        assert len({each.thread for each in work}) == 1
