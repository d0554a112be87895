"""Bytes and profiler ranges that `ShardedOptimizer` reports."""

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

from tests.helpers.pool import Pool
from tests.helpers.reference import train
from tests.helpers.sharding import Contest, series


class Wide(nn.Module):
    """A few thousand elements, so that words between ranks count little."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


def _numbers(group: ProcessGroup, way: str, steps: int) -> None:
    contest = Contest(build=Wide, ours={"bucket_mb": 0.02, "gather": "forward"})
    model, optimizer = contest.sharded(group, way)
    world, size = dist.get_world_size(group), sum(param.nbytes for param in model.parameters())
    before = optimizer.stats()
    assert before.steps == before.bytes_sent == before.bytes_received == 0
    train(model, optimizer, series(group, steps, "matrices"))
    optimizer.synchronize()
    found = optimizer.stats()
    assert (found.steps, found.rank, found.world_size) == (steps, dist.get_rank(group), world)
    assert found.elements == size // 4 and found.buckets >= 3 and 1.0 <= found.imbalance < 1.02
    assert abs(found.owned_elements - found.elements / world) < 0.02 * found.elements
    # One way for parameters; for gradients one way to their owners, and the same way back where everyone wants them.
    ways = {"bare scatter": 2, "wrapped scatter": 2, "bare all": 3, "wrapped all": 1}[way]
    expected = steps * ways * size * (world - 1) / world
    assert 0.98 * expected <= found.bytes_sent <= 1.02 * expected, (found.bytes_sent, expected)
    assert 0.98 * expected <= found.bytes_received <= 1.02 * expected, (found.bytes_received, expected)
    assert all(seconds >= 0 for seconds in found.wait_seconds.values())
    assert "gather" in found.wait_seconds


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("way", ["bare scatter", "bare all", "wrapped scatter", "wrapped all"])
def test_as_many_bytes_travel_as_the_arithmetic_says(pool: Pool, way: str, world: int) -> None:
    pool.run(_numbers, world, way, 3)


def _ranges(group: ProcessGroup, way: str) -> tuple[set[str], int]:
    model, optimizer = Contest(ours={"gather": "forward"}).sharded(group, way)
    data = series(group, 2)
    train(model, optimizer, data[:1])
    with profile(activities=[ProfilerActivity.CPU]) as found:
        train(model, optimizer, data[1:])
        optimizer.synchronize()
    names = {event.name for event in found.events() if event.name.startswith("zerostep/")}
    return names, optimizer.stats().buckets


@pytest.mark.parametrize("way", ["bare scatter", "wrapped scatter"])
def test_a_profile_names_what_each_bucket_does(pool: Pool, way: str) -> None:
    for names, buckets in pool.run(_ranges, 2, way):
        assert buckets >= 3
        for bucket in range(buckets):
            for phase in ("reduce", "gather"):
                assert f"zerostep/{phase} bucket {bucket}" in names
                assert f"zerostep/{phase} bucket {bucket} wait" in names
        assert any(name.startswith("zerostep/update bucket") for name in names)
