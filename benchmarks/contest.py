"""What each rank does in the comparison of training steps: build every entry, time them in turn, look into them."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.census import FirstSteps, calls_in, first_steps
from benchmarks.network import LOOPBACK, bytes_sent, throughput
from benchmarks.peers.entries import ENTRIES, PLAIN, Entry, entries_of
from benchmarks.peers.trainer import Trainer, size_of, trainable
from benchmarks.timing import rotate, slowest, steady
from benchmarks.workloads import Workload, workload_named
from zerostep.tools.demo import largest_difference

TRIAL_STEPS = 2  # which warm up, too
MOST_TRIAL_STEPS = 5  # of an entry that leaves the parameters as they are

Trainers = Mapping[str, Trainer]


def chosen(name: str, batch: int | None) -> Workload:
    """Return the workload of that name, with another batch if one is given."""
    workload = workload_named(name)
    return workload if batch is None else replace(workload, batch=batch)


def measure(
    name: str, keys: Sequence[str], batch: int | None, rounds: int, steps: int, interface: str
) -> dict[str, Any]:
    """Time the entries and look into them; collective. Rank 0's answer speaks for all ranks, but for failures.

    In a round, `steps` are timed in a row, after one that is not.
    """
    workload = chosen(name, batch)
    data = workload.data(dist.get_rank())
    gigabits = {way: _line_rate(way) for way in ("one way", "both ways")}
    trainers, starts, failures = _assemble(workload, keys, data)
    clocks = {key: partial(steady, partial(it.step, data), it.settle, steps) for key, it in trainers.items()}
    seconds = rotate(clocks, rounds, warmup=0)
    calls, sent = _counted(workload, trainers, data, interface)
    answer = {"gigabits per second": gigabits, "seconds": seconds, "failures": failures, "sent over P": sent}
    counted = {"calls": calls, "lost": {key: start.lost for key, start in starts.items()}}
    memory = {"state bytes": _state(trainers), "peak bytes": _peaks(starts)}
    return {**answer, **memory, "difference": _differences(trainers), **counted}


def attempt(name: str, key: str, batch: int | None) -> str:
    """Try one entry on its own; collective. Returns why it failed, or nothing."""
    workload = chosen(name, batch)
    entry = next(entry for entry in entries_of([key]) if entry.key == key)
    found = _tried(entry, workload, workload.data(dist.get_rank()))
    return found if isinstance(found, str) else ""


Started = tuple[Trainer, FirstSteps]


def _assemble(
    workload: Workload, keys: Sequence[str], data: Tensor
) -> tuple[dict[str, Trainer], dict[str, FirstSteps], dict[str, str]]:
    trainers, starts, failures = {}, {}, {}
    for entry in entries_of(keys):
        found = _tried(entry, workload, data)
        if _everyone(not isinstance(found, str)) and not isinstance(found, str):
            trainers[entry.key], starts[entry.key] = found
        else:
            failures[entry.key] = found if isinstance(found, str) else ""
    return trainers, starts, failures


def _tried(entry: Entry, workload: Workload, data: Tensor) -> Started | str:
    """The trainer after its first steps, or why there is none."""
    print(f"building {entry.name}", flush=True)  # the last words, should it hang
    try:
        entry.prepare()
        make = partial(entry.build, workload.model, workload.optimizer.kind, workload.optimizer.options)
        most = TRIAL_STEPS if entry.role == "bound" else MOST_TRIAL_STEPS
        return first_steps(make, data, TRIAL_STEPS, most)
    except Exception as error:  # whatever a peer raises is its row
        traceback.print_exc()
        return _reason(error)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _everyone(mine: bool) -> bool:
    flag = torch.tensor([int(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def _counted(
    workload: Workload, trainers: Trainers, data: Tensor, interface: str
) -> tuple[dict[str, dict[str, int]], dict[str, float]]:
    """Rank 0's calls of its backend in one step, and the bytes that the busiest rank sends, over those of parameters.

    The loopback interface counts every rank's bytes, and those of strangers: then there are none.
    """
    size = size_of(trainable(workload.model()))
    found = [_count(trainer, data, interface) for trainer in trainers.values()]
    calls = {key: calls for key, (calls, _) in zip(trainers, found, strict=True)}
    bytes_each = slowest([float(count) for _, count in found])
    sent = {key: value / size for key, value in zip(trainers, bytes_each, strict=True)}
    return calls, {} if interface == LOOPBACK else sent


def _count(trainer: Trainer, data: Tensor, interface: str) -> tuple[dict[str, int], int]:
    def once() -> None:
        trainer.step(data)
        trainer.settle()

    dist.barrier()
    before = bytes_sent(interface)
    calls = calls_in(once)
    dist.barrier()  # all has arrived, so all has left
    return calls, bytes_sent(interface) - before


def _peaks(starts: Mapping[str, FirstSteps]) -> dict[str, float]:
    if any(start.growth is None for start in starts.values()):
        return {}
    growths = [float(start.growth or 0) for start in starts.values()]
    return dict(zip(starts, slowest(growths), strict=True))


def _state(trainers: Trainers) -> dict[str, float]:
    sizes = [float(trainer.state_bytes()) for trainer in trainers.values()]
    return dict(zip(trainers, slowest(sizes), strict=True))


def _differences(trainers: Trainers) -> dict[str, float]:
    plain = trainers[PLAIN.key].full_parameters()
    bounds = {entry.key for entry in ENTRIES if entry.role == "bound"}
    others = [key for key in trainers if key not in bounds]
    gaps = [largest_difference(plain, trainers[key].full_parameters()) for key in others]
    return dict(zip(others, slowest(gaps), strict=True))


def _line_rate(direction: Literal["one way", "both ways"]) -> float:
    if dist.get_world_size() == 1:
        return 0.0
    throughput(direction)  # the first message opens the connection
    return throughput(direction)
