"""What `ShardedOptimizer.stats()` returns."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stats:
    """Counters of this rank since the optimizer was built, and the bytes that it holds now.

    `gradient_bytes` counts reduced gradients, buckets in flight and buffers that receive them; `state_bytes` the state
    of the inner optimizers. `wait_seconds` counts, by phase, the time for which this rank's host waited for others:
    communication that was not hidden. On a backend that works in stream order the host never waits: use a profiler.
    With `compile=True`, `compiled_graphs` and `compile_seconds` say how many updates were compiled, and for how long.
    """

    steps: int
    rank: int
    world_size: int
    buckets: int
    elements: int
    owned_elements: int
    imbalance: float
    bytes_sent: int
    bytes_received: int
    gradient_bytes: int = 0
    state_bytes: int = 0
    compiled_graphs: int = 0
    compile_seconds: float = 0.0
    wait_seconds: dict[str, float] = field(default_factory=dict)
