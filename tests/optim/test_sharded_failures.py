"""Steps of `ShardedOptimizer` that fail on one rank, repeated runs, and ranks that leave early."""

import gc
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, build, train
from tests.helpers.sharding import backward, series, sharded, values, whole_state


def _failing_together(group: ProcessGroup) -> None:
    """An error in one rank's update ends the step of all, and nobody goes on before a state is loaded."""
    model = build()
    optimizer = sharded(group, model)
    train(model, optimizer, series(group, 1))
    saved = whole_state(optimizer)
    backward(model, series(group, 1)[0])
    inner = optimizer._inners.all[0]
    if dist.get_rank(group) == 1:

        def fail(*args: Any) -> None:
            raise ArithmeticError("a bad day")

        inner.step = fail  # type: ignore[method-assign, assignment]
    with pytest.raises((ArithmeticError, RuntimeError), match=r"a bad day|failed on rank 1"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="load the last checkpoint"):
        optimizer.step()
    if dist.get_rank(group) == 1:
        del inner.step
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    train(model, optimizer, series(group, 1))


def test_an_error_on_one_rank_ends_the_step_of_all(pool: Pool) -> None:
    pool.run(_failing_together, 2)


def _twice(group: ProcessGroup) -> dict[str, Tensor]:
    model = build()
    optimizer = sharded(group, model, gather="forward")
    train(model, optimizer, series(group, 6))
    optimizer.synchronize()
    return values(model)


@pytest.mark.parametrize("world", [3, 4])
def test_sums_are_the_same_from_run_to_run(pool: Pool, world: int) -> None:
    first, second = pool.run(_twice, world), pool.run(_twice, world)
    for found in (*first, *second):
        assert_same_bits(found, first[0])


def _leaving_first(group: ProcessGroup, key: str) -> None:
    """Rank 0 sends what it has updated only when rank 1 has let go of its optimizer, or is seen to wait with that."""
    store = distributed_c10d._get_default_store()
    model = build()
    optimizer = sharded(group, model, gather="forward", bucket_mb=0.0003)
    train(model, optimizer, series(group, 1))
    updater: Any = optimizer._training.engine._updater
    launch = updater.launch
    if dist.get_rank(group) == 0:

        def late(buckets: Iterable[int]) -> None:
            for number, bucket in enumerate(buckets):
                with suppress(dist.DistStoreError):  # a closed socket tells it some time after the first message
                    store.wait([key if number == 0 else "nobody sets this"], timedelta(seconds=0.1 if number else 0.5))
                launch([bucket])

        updater.launch = late
    train(model, optimizer, series(group, 1))
    if dist.get_rank(group) == 1:
        del optimizer, launch, updater
        gc.collect()
        store.set(key, "gone")
    else:
        optimizer.synchronize()


def test_a_rank_that_is_done_first_does_not_spoil_the_last_step_of_others(pool: Pool) -> None:
    pool.run(_leaving_first, 2, uuid4().hex)
