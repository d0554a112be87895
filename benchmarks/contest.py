"""What each rank does in the comparison of training steps: build every entry, time them in turn, look into them."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.network import LOOPBACK, bytes_sent, throughput
from benchmarks.peers.entries import BOUND, PLAIN, Entry, entries_of
from benchmarks.peers.trainer import Trainer, size_of, trainable
from benchmarks.timing import rotate, slowest, steady
from benchmarks.workloads import Workload, workload_named
from zerostep.demo import largest_difference

STEPS = 2  # timed in a row, after one that is not
WARMUP = 1
TRIAL_STEPS = 2
COUNTED_STEPS = 2

Trainers = Mapping[str, Trainer]


def chosen(name: str, batch: int | None) -> Workload:
    """Return the workload of that name, with another batch if one is given."""
    workload = workload_named(name)
    return workload if batch is None else replace(workload, batch=batch)


def measure(name: str, keys: Sequence[str], batch: int | None, rounds: int, interface: str) -> dict[str, Any]:
    """Time the entries and look into them; collective. Rank 0's answer speaks for all ranks, but for failures."""
    workload = chosen(name, batch)
    data = workload.data(dist.get_rank())
    gigabits = {way: _line_rate(way) for way in ("one way", "both ways")}
    trainers, failures = _assemble(workload, keys, data)
    clocks = {key: partial(steady, partial(it.step, data), it.settle, STEPS) for key, it in trainers.items()}
    seconds = rotate(clocks, rounds, WARMUP)
    # The loopback interface counts every rank's bytes, and those of strangers.
    sent = {} if interface == LOOPBACK else _sent(workload, trainers, data, interface)
    answer = {"gigabits per second": gigabits, "seconds": seconds, "failures": failures, "sent over P": sent}
    return {**answer, "state bytes": _state(trainers), "difference": _differences(trainers)}


def attempt(name: str, key: str, batch: int | None) -> str:
    """Try one entry on its own; collective. Returns why it failed, or nothing."""
    workload = chosen(name, batch)
    entry = next(entry for entry in entries_of([key]) if entry.key == key)
    return _tried(entry, workload, workload.data(dist.get_rank()))[1]


def _assemble(workload: Workload, keys: Sequence[str], data: Tensor) -> tuple[dict[str, Trainer], dict[str, str]]:
    trainers, failures = {}, {}
    for entry in entries_of(keys):
        trainer, reason = _tried(entry, workload, data)
        if trainer is not None and _everyone(not reason):
            trainers[entry.key] = trainer
        else:
            failures[entry.key] = reason
    return trainers, failures


def _tried(entry: Entry, workload: Workload, data: Tensor) -> tuple[Trainer | None, str]:
    print(f"building {entry.name}", flush=True)  # the last words, should it hang
    try:
        trainer = entry.build(workload.model, workload.optimizer.kind, workload.optimizer.options)
        for _ in range(TRIAL_STEPS):
            trainer.step(data)
        trainer.full_parameters()
    except Exception as error:  # whatever a peer raises is its row
        traceback.print_exc()
        return None, _reason(error)
    return trainer, ""


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _everyone(mine: bool) -> bool:
    flag = torch.tensor([int(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def _sent(workload: Workload, trainers: Trainers, data: Tensor, interface: str) -> dict[str, float]:
    size = size_of(trainable(workload.model()))
    bytes_each = [_bytes_per_step(trainer, data, interface) for trainer in trainers.values()]
    return {key: value / size for key, value in zip(trainers, slowest(bytes_each), strict=True)}


def _bytes_per_step(trainer: Trainer, data: Tensor, interface: str) -> float:
    dist.barrier()
    before = bytes_sent(interface)
    for _ in range(COUNTED_STEPS):
        trainer.step(data)
    trainer.settle()
    dist.barrier()  # all has arrived, so all has left
    return (bytes_sent(interface) - before) / COUNTED_STEPS


def _state(trainers: Trainers) -> dict[str, float]:
    sizes = [float(trainer.state_bytes()) for trainer in trainers.values()]
    return dict(zip(trainers, slowest(sizes), strict=True))


def _differences(trainers: Trainers) -> dict[str, float]:
    plain = trainers[PLAIN.key].full_parameters()
    others = [key for key in trainers if key != BOUND.key]
    gaps = [largest_difference(plain, trainers[key].full_parameters()) for key in others]
    return dict(zip(others, slowest(gaps), strict=True))


def _line_rate(direction: Literal["one way", "both ways"]) -> float:
    if dist.get_world_size() == 1:
        return 0.0
    throughput(direction)  # the first message opens the connection
    return throughput(direction)
