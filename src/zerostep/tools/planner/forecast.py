"""How long a step takes, from two constants of the network and one of the ranks: an alpha-beta model of rings.

A collective over `n` ranks is a ring: each of its messages pays the latency *alpha*, and each byte the time *beta*, one
over the bandwidth. An all-reduce may be a tree instead. Buckets travel one after the other, each as soon as backward
has made it; what has not arrived when backward ends is exposed. Computing takes six floating-point operations for each
parameter and token, two of them in forward. Neither the update nor the reading of memory is counted, and all links are
equally fast. By how much the model usually misses measured times of collectives is part of the network; what that makes
of a step is its least and its most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil, log2
from typing import Literal

__all__ = [
    "Compute",
    "Network",
    "StepTime",
    "Strategy",
    "Traffic",
    "all_gather_seconds",
    "all_reduce_seconds",
    "broadcast_seconds",
    "reduce_scatter_seconds",
    "step_time",
    "wire_bytes",
]

_OPERATIONS_FORWARD, _OPERATIONS_BACKWARD = 2, 4


class Strategy(Enum):
    """The ways to divide the work, by what the user writes."""

    DDP = "DDP"
    WHOLE = "ZeroRedundancyOptimizer"
    SHARDED_IN_DDP = "ShardedOptimizer in DDP"
    SHARDED = "ShardedOptimizer"
    FULL = "FSDP-style"


@dataclass(frozen=True)
class Network:
    """`bandwidth` in bytes per second that a rank sends and receives at once; `latency` in seconds per message.

    `error` is the part of a collective's time by which the model is taken to be off.
    """

    bandwidth: float
    latency: float
    error: float = 0.0

    def slower(self, factor: float) -> Network:
        """The network on which everything takes `factor` times as long."""
        return Network(self.bandwidth / factor, self.latency * factor, self.error)


@dataclass(frozen=True)
class Compute:
    """What a rank achieves in operations per second, and the tokens of its batch."""

    flops: float
    tokens: int

    def forward(self, elements: int) -> float:
        """Seconds of a forward pass."""
        return _OPERATIONS_FORWARD * elements * self.tokens / self.flops

    def backward(self, elements: int) -> float:
        """Seconds of a backward pass."""
        return _OPERATIONS_BACKWARD * elements * self.tokens / self.flops


@dataclass(frozen=True)
class Traffic:
    """Bytes that travel together, in the order in which backward makes them.

    `reduced` and `gathered` are the buckets of `ShardedOptimizer`, `ddp` those of DDP, and `units` what full sharding
    brings together at a time, in forward's order.
    """

    reduced: tuple[int, ...]
    gathered: tuple[int, ...]
    ddp: tuple[int, ...]
    units: tuple[int, ...]
    elements: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: those that compute, and those that wait for the network.

    `least` and `most` are the latter where collectives take less or more by the network's `error`.
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
    """The bytes that a rank sends in one step, on average; `shards` ranks divide one copy."""
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
    """A reduce-scatter and an all-gather; or up and down a tree, where that is quicker, as it is for few bytes."""
    ring = 2 * reduce_scatter_seconds(size, ranks, network)
    tree = 2 * (ceil(log2(ranks)) * network.latency + size / network.bandwidth)
    return min(ring, tree)


def reduce_scatter_seconds(size: float, ranks: int, network: Network) -> float:
    """Every rank sends ranks - 1 messages, each with its part of `size` bytes."""
    return (ranks - 1) * (network.latency + size / ranks / network.bandwidth)


def all_gather_seconds(size: float, ranks: int, network: Network) -> float:
    """The same way back."""
    return reduce_scatter_seconds(size, ranks, network)


def broadcast_seconds(size: float, ranks: int, network: Network) -> float:
    """Every owner's part to all, `size` bytes in all: what a rank lacks must reach it."""
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
) -> StepTime:
    """One step of one strategy on `ranks` ranks, of which `shards` divide one copy."""
    forward, backward = compute.forward(traffic.elements), compute.backward(traffic.elements)
    error = network.error
    waits = (
        _exposed(strategy, traffic, (forward, backward), network.slower(factor), (ranks, shards), gather)
        for factor in (1, 1 - error, 1 + error)
    )
    return StepTime(forward + backward, *waits)


def _exposed(
    strategy: Strategy,
    traffic: Traffic,
    passes: tuple[float, float],
    network: Network,
    counts: tuple[int, int],
    gather: str,
) -> float:
    (forward, backward), (ranks, shards) = passes, counts

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
    late = behind_backward(traffic.reduced, backward, reduce)
    if gather == "forward":
        return late + before_compute(traffic.gathered[::-1], forward, collect)
    return late + sum(map(collect, traffic.gathered))


def behind_backward(sizes: Sequence[int], backward: float, cost: Cost) -> float:
    """The seconds by which the last of several buckets arrives after backward, which makes them one by one."""
    total, made, done = sum(sizes) or 1, 0.0, 0.0
    for size in sizes:
        made += backward * size / total
        done = max(made, done) + cost(size)
    return max(0.0, done - backward)


def before_compute(sizes: Sequence[int], forward: float, cost: Cost) -> float:
    """The seconds for which forward waits, where each bucket must have come before its part is computed."""
    total, come, clock = sum(sizes) or 1, 0.0, 0.0
    for size in sizes:
        come += cost(size)
        clock = max(clock, come) + forward * size / total
    return max(0.0, clock - forward)
