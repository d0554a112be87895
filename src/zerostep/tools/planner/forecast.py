"""The time of a step, from two constants of the network and one of the ranks: an alpha-beta model of rings.

A collective over `n` ranks is a ring: each message costs the latency *alpha*, and each byte the time *beta*, one over
the bandwidth. An all-reduce may be a tree instead. Buckets are sent one after the other, each as soon as backward has
filled it; what has not arrived when backward ends is exposed. With updates inside backward, the gather of a
bucket is launched before the reduction of the next but one. Computing takes six floating-point operations for each
parameter and token, two of them in forward. Neither the update nor memory accesses are counted, and all links are
equally fast. `Network.error` is the relative error of the modelled time of collectives; it gives a step's least and
most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import ceil, log2
from typing import Literal

from zerostep.step.reduction import MOST_IN_FLIGHT

_OPERATIONS_FORWARD, _OPERATIONS_BACKWARD = 2, 4


class Strategy(Enum):
    """The strategies, by the name of what the user writes."""

    DDP = "DDP"
    WHOLE = "ZeroRedundancyOptimizer"
    SHARDED_IN_DDP = "ShardedOptimizer in DDP"
    SHARDED = "ShardedOptimizer"
    FULL = "FSDP-style"


@dataclass(frozen=True)
class Network:
    """`bandwidth` in bytes per second that a rank sends while it receives as much; `latency` in seconds per message.

    `error` is the relative error assumed for the time of a collective.
    """

    bandwidth: float
    latency: float
    error: float = 0.0

    def slower(self, factor: float) -> Network:
        """Return a network on which everything takes `factor` times as long."""
        return Network(self.bandwidth / factor, self.latency * factor, self.error)


@dataclass(frozen=True)
class Compute:
    """The operations per second that a rank achieves, and the tokens of its batch."""

    flops: float
    tokens: int

    def forward(self, elements: int) -> float:
        """Return the seconds of a forward pass."""
        return _OPERATIONS_FORWARD * elements * self.tokens / self.flops

    def backward(self, elements: int) -> float:
        """Return the seconds of a backward pass."""
        return _OPERATIONS_BACKWARD * elements * self.tokens / self.flops


@dataclass(frozen=True)
class Traffic:
    """Bytes of each message, in the order in which backward fills the buckets.

    `reduced` and `gathered` are the buckets of `ShardedOptimizer`, `ddp` those of DDP, and `units` what full sharding
    gathers at a time, in forward's order. `elements` are those of all parameters.
    """

    reduced: tuple[int, ...]
    gathered: tuple[int, ...]
    ddp: tuple[int, ...]
    units: tuple[int, ...]
    elements: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step that compute, and those that wait for the network (`exposed`).

    `least` and `most` are `exposed` if collectives take less or more by the network's `error`.
    """

    compute: float
    exposed: float
    least: float
    most: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.exposed


# ---------------------------------------------------------------------- bytes


def wire_bytes(strategy: Strategy, traffic: Traffic, ranks: int, shards: int) -> float:
    """Return the bytes that a rank sends in one step, on average; `shards` ranks divide one copy."""
    whole, gathered, reduced = sum(traffic.ddp), sum(traffic.gathered), sum(traffic.reduced)
    once, inside = (ranks - 1) / ranks, (shards - 1) / shards
    across = 2 * (ranks // shards - 1) / (ranks // shards) / shards
    if strategy is Strategy.DDP:
        return 2 * once * whole
    if strategy is Strategy.WHOLE:
        return 3 * once * whole
    if strategy is Strategy.FULL:
        return 3 * inside * whole + across * whole
    return inside * (reduced + gathered) + across * reduced


# ---------------------------------------------------------------------- collectives


def all_reduce_seconds(size: float, ranks: int, network: Network) -> float:
    """Return the time of a ring, or of a tree, which is faster for few bytes."""
    ring = 2 * reduce_scatter_seconds(size, ranks, network)
    tree = 2 * (ceil(log2(ranks)) * network.latency + size / network.bandwidth)
    return min(ring, tree)


def reduce_scatter_seconds(size: float, ranks: int, network: Network) -> float:
    """Return the time of a ring: every rank sends `ranks - 1` messages of its share of `size` bytes."""
    return (ranks - 1) * (network.latency + size / ranks / network.bandwidth)


def all_gather_seconds(size: float, ranks: int, network: Network) -> float:
    """Return the time of a ring, which is that of a reduce-scatter."""
    return reduce_scatter_seconds(size, ranks, network)


def broadcast_seconds(size: float, ranks: int, network: Network) -> float:
    """Return the time in which every rank receives the `size` bytes that all ranks own together, but for its own."""
    return (ranks - 1) * network.latency + size * (ranks - 1) / ranks / network.bandwidth


# ---------------------------------------------------------------------- a step

Cost = Callable[[float], float]


def step_time(
    strategy: Strategy,
    traffic: Traffic,
    compute: Compute,
    network: Network,
    ranks: int,
    shards: int,
    gather: Literal["step", "forward"] = "step",
    update: Literal["step", "backward"] = "step",
) -> StepTime:
    """Return the time of one step on `ranks` ranks, of which `shards` divide one copy."""
    forward, backward = compute.forward(traffic.elements), compute.backward(traffic.elements)
    error = network.error
    waits = (
        _exposed(strategy, traffic, (forward, backward), network.slower(factor), (ranks, shards), (gather, update))
        for factor in (1, 1 - error, 1 + error)
    )
    return StepTime(forward + backward, *waits)


def _exposed(
    strategy: Strategy,
    traffic: Traffic,
    passes: tuple[float, float],
    network: Network,
    counts: tuple[int, int],
    moments: tuple[str, str],
) -> float:
    (forward, backward), (ranks, shards), (gather, update) = passes, counts, moments

    def reduce(size: float) -> float:
        inside = reduce_scatter_seconds(size, shards, network)
        return inside + all_reduce_seconds(size / shards, ranks // shards, network)

    def collect(size: float) -> float:
        return all_gather_seconds(size, shards, network)

    if strategy in (Strategy.DDP, Strategy.WHOLE):
        behind = behind_backward(traffic.ddp, backward, lambda size: all_reduce_seconds(size, ranks, network))
        return behind + (broadcast_seconds(sum(traffic.ddp), ranks, network) if strategy is Strategy.WHOLE else 0)
    if strategy is Strategy.FULL:
        ahead = before_compute(traffic.units, forward, collect)
        return ahead + behind_backward(traffic.units[::-1], backward, lambda size: collect(size) + reduce(size))
    if update == "backward" and strategy is Strategy.SHARDED:
        reduced_at, gathered_at = update_in_backward(traffic, backward, reduce, collect)
        end = max([backward, *(reduced_at if gather == "forward" else gathered_at)])
        waits = wait_in_forward(traffic.gathered[::-1], [at - end for at in gathered_at[::-1]], forward)
        return end - backward + waits
    late = behind_backward(traffic.reduced, backward, reduce)
    if gather == "forward":
        return late + before_compute(traffic.gathered[::-1], forward, collect)
    return late + sum(map(collect, traffic.gathered))


def behind_backward(sizes: Sequence[int], backward: float, cost: Cost) -> float:
    """Return how long after backward the last bucket arrives, if backward fills them one by one."""
    total, filled, done = sum(sizes) or 1, 0.0, 0.0
    for size in sizes:
        filled += backward * size / total
        done = max(filled, done) + cost(size)
    return max(0.0, done - backward)


def before_compute(sizes: Sequence[int], forward: float, cost: Cost) -> float:
    """Return how long forward waits, if each bucket must have arrived before its part is computed."""
    return wait_in_forward(sizes, list(accumulate(map(cost, sizes))), forward)


def wait_in_forward(sizes: Sequence[int], arrivals: Sequence[float], forward: float) -> float:
    """Return how long forward waits for buckets, in its order, that arrive at given times after its beginning."""
    total, clock = sum(sizes) or 1, 0.0
    for size, arrived in zip(sizes, arrivals, strict=True):
        clock = max(clock, arrived) + forward * size / total
    return max(0.0, clock - forward)


def update_in_backward(
    traffic: Traffic, backward: float, reduce: Cost, collect: Cost
) -> tuple[list[float], list[float]]:
    """Return when each bucket is reduced and when it is gathered, counted from the beginning of backward.

    As in a real pass, the launch of a bucket first waits for the last but one, and launches that one's gather.
    """
    total, filled, done = sum(traffic.reduced) or 1, 0.0, 0.0
    reduced, gathered = list[float](), list[float]()
    for size in traffic.reduced:
        filled += backward * size / total
        if len(reduced) >= MOST_IN_FLIGHT:
            done = max(filled, done) + collect(traffic.gathered[len(gathered)])
            gathered.append(done)
        done = max(filled, done) + reduce(size)
        reduced.append(done)
    for size in traffic.gathered[len(gathered) :]:
        done += collect(size)
        gathered.append(done)
    return reduced, gathered
