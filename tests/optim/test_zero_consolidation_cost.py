"""What a consolidation costs: memory of the sender and bytes sent to the ranks; nothing is pickled."""

import ctypes
import gc
import io
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.pool import OFFSET, Pool, run_fresh
from tests.helpers.reference import assert_same_state_dict, batches, build, train
from zerostep import ZeroRedundancyOptimizer
from zerostep.comm.transport import TAG_DATA, Transfer, Transport
from zerostep.optim.zero import _broadcast_object

MIB = 1 << 20
World = int | tuple[int, ...]
needs_peak = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's record of the peak")


def _memory(key: str) -> int:
    """Bytes that this process has in memory now (VmRSS) or had at most (VmHWM)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


def _stepped(group: dist.ProcessGroup, size: int) -> ZeroRedundancyOptimizer:
    """An optimizer with the state of eight parameters."""
    params = [torch.nn.Parameter(torch.zeros(size)) for _ in range(8)]
    zero = ZeroRedundancyOptimizer(params, torch.optim.Adam, process_group=group, fused=True)
    for param, owner in zero._param_to_rank.items():
        param.grad = torch.ones_like(param) if owner == zero.rank else None
    zero.step()
    zero.zero_grad()
    return zero


def _growth(group: dist.ProcessGroup, size: int) -> tuple[int, int, int]:
    """The bytes of this rank's state, and by how much memory grew at most and in the end while it was consolidated."""
    _stepped(group, 1).consolidate_state_dict()  # code that is loaded once
    zero = _stepped(group, size)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed so far must not be had for nothing
    shard = sum(value.nbytes for entry in zero.state.values() for value in entry.values())
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    zero.consolidate_state_dict(to=0)
    return shard, _memory("VmHWM") - before, _memory("VmRSS") - before


@needs_peak
def test_statement_64_the_sender_needs_little_memory() -> None:
    outcomes = run_fresh(_growth, 2, 5_000_000)
    assert [outcome.error for outcome in outcomes] == [None, None]
    (shard, peak, kept), (other, sender_peak, _) = (outcome.result for outcome in outcomes)
    assert other >= 150 * MIB
    assert sender_peak < 48 * MIB, f"{sender_peak / MIB:.0f} MiB more for a shard of {other / MIB:.0f} MiB"
    # The recipient holds everything, so the measurement would see as much at the sender.
    assert min(kept, peak) > 0.9 * (shard + other)
    assert max(kept, peak) < shard + other + 64 * MIB


@dataclass
class _Counted:
    """A transport that counts the bytes of its payloads, and its calls."""

    inner: Transport
    received: Counter[int] = field(default_factory=Counter)
    sent: Counter[int] = field(default_factory=Counter)
    calls: int = 0

    def start_send(self, memory: Tensor, to: int, tag: int = TAG_DATA) -> Transfer:
        self.calls += 1
        self.sent[to] += memory.nbytes
        return self.inner.start_send(memory, to, tag)

    def start_receive(self, memory: Tensor, source: int, tag: int = TAG_DATA) -> Transfer:
        self.calls += 1
        self.received[source] += memory.nbytes
        return self.inner.start_receive(memory, source, tag)

    def broadcast(self, memory: Tensor, source: int) -> None:
        self.calls += 1
        if source != self.inner.rank:
            self.received[source] += memory.nbytes
        self.inner.broadcast(memory, source)

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        self.calls += 1
        return self.inner.all_gather_ints(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _collectives(group: Any) -> int:
    """How many collectives the group has begun, as it counts them itself."""
    return int(group._get_sequence_number_for_group())


def _counted(group: dist.ProcessGroup, to: int) -> tuple[int, dict[int, int], dict[int, int], int]:
    """Bytes of this rank's shard, received and sent by rank, and the collectives of the group itself."""
    params = [torch.nn.Parameter(torch.zeros(1000 + 10 * index)) for index in range(7)]
    zero = ZeroRedundancyOptimizer(params, torch.optim.Adam, process_group=group)
    for param in params:
        param.grad = torch.ones_like(param)
    zero.step()
    counted = _Counted(zero._control)
    zero._control = counted
    before = _collectives(group)
    zero.consolidate_state_dict(to=to)
    dist.barrier(group)  # the one that is counted
    shard = sum(value.nbytes for entry in zero.state.values() for value in entry.values())
    return shard, dict(counted.received), dict(counted.sent), _collectives(group) - before


@pytest.mark.parametrize("world", [3, 4, OFFSET], ids=str)
def test_statement_64_only_the_recipient_receives(pool: Pool, world: World) -> None:
    size = world if isinstance(world, int) else len(world)
    for to in range(size):
        found = pool.run(_counted, world, to)
        for rank, (shard, received, sent, collectives) in enumerate(found):
            assert shard > 7000
            assert collectives == 1, "consolidation takes no place in the order of the group's own collectives"
            if rank != to:
                assert received == {} and list(sent) == [to]
                assert shard <= sent[to] < shard + 4096
                assert sent[to] == found[to][1][rank]
            else:
                assert sent == {} and sorted(received) == [other for other in range(size) if other != to]


def _untouched(group: dist.ProcessGroup) -> tuple[int, int, bool]:
    """The calls and collectives of `state_dict()`, on one rank alone, and whether it changed a byte."""
    model = build()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=0.01)
    train(model, zero, batches(1, 0, 2))
    zero.consolidate_state_dict(to=zero.world_size - 1)
    counted = _Counted(zero._control)
    zero._control = counted
    before, collectives = _everything(model, zero), _collectives(group)
    if zero.rank == zero.world_size - 1:
        first, second = zero.state_dict(), zero.state_dict()
        assert_same_state_dict(first, second)
    else:
        with pytest.raises(RuntimeError, match="consolidate"):
            zero.state_dict()
    same = before == _everything(model, zero)
    return counted.calls, _collectives(group) - collectives, same


def _everything(model: torch.nn.Module, zero: ZeroRedundancyOptimizer) -> list[bytes]:
    """All bytes of parameters, gradients, state, the consolidated copy and options."""
    tensors = [*model.parameters(), *(param.grad for param in model.parameters())]
    tensors += [value for entry in zero.state.values() for value in entry.values()]
    shards = [entry for shard in zero._all_state_dicts for entry in shard["state"].values()]
    tensors += [value for entry in shards for value in entry.values()]
    options = [{key: value for key, value in group.items() if key != "params"} for group in zero.param_groups]
    found = [bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist()) for tensor in tensors if tensor is not None]
    return [*found, repr(options).encode()]


@pytest.mark.parametrize("world", [1, 2, 3, OFFSET], ids=str)
def test_state_dict_is_local_and_changes_nothing(pool: Pool, world: World) -> None:
    size = world if isinstance(world, int) else len(world)
    assert pool.run(_untouched, world) == [(0, 0, True)] * size


def _unpickled(group: dist.ProcessGroup) -> dict[str, list[str]]:
    """The names that anything unpickled looked up, by what was going on."""
    found: dict[str, list[str]] = {}
    names: list[str] = []

    def listen(event: str, args: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            names.append(f"{args[0]}.{args[1]}")

    def end(section: str) -> None:
        found[section] = names[:]
        names.clear()

    train(build(), torch.optim.AdamW(build().parameters()), batches(1, 0, 1))  # torch imports more at the first step
    sys.addaudithook(listen)  # for good: the process ends with this job
    pickle.loads(pickle.dumps(OrderedDict()))  # noqa: S301
    torch.load(_file({"a": OrderedDict()}), weights_only=False)
    end("control")
    model = build()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=0.01)
    end("construction")
    train(model, zero, batches(1, dist.get_rank(group), 3))
    end("step")
    zero.add_param_group({"params": [torch.nn.Parameter(torch.zeros(5))]})
    end("add_param_group")
    zero.consolidate_state_dict(to=0)
    end("consolidation")
    saved = zero.state_dict() if zero.rank == 0 else None
    end("state_dict")
    saved = _broadcast_object(saved, 0, group)
    end("broadcast")
    zero.load_state_dict(saved)
    end("load")
    with pytest.raises(ValueError, match="disagree"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=float(zero.rank))
    end("disagreement")
    return found


def _file(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_statement_65_nothing_is_unpickled() -> None:
    for outcome in run_fresh(_unpickled, 2):
        assert outcome.error is None, outcome.error
        control = outcome.result.pop("control")
        assert control.count("collections.OrderedDict") == 2, "the audit does not hear"
        assert outcome.result == {section: [] for section in outcome.result} and len(outcome.result) == 8
