"""What outlives a `ShardedOptimizer`, a join context, a replaced list of groups, and a look at its statistics."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join

from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, build
from tests.helpers.sharding import backward, series, sharded, values


def _join(group: ProcessGroup, model: Any, optimizer: Any) -> None:
    """Rank 0 has no inputs, the others have three batches."""
    with Join([optimizer]):
        for batch in series(group, 3) if dist.get_rank(group) else []:
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()


def _state_after_shadow_steps(group: ProcessGroup) -> str:
    model = build()
    optimizer = sharded(group, model)
    _join(group, model, optimizer)
    with pytest.raises(RuntimeError, match="has not been consolidated") as caught:
        optimizer.state_dict()
    return str(caught.value)


def test_a_rank_that_only_shadowed_steps_has_state(pool: Pool) -> None:
    pool.run(_state_after_shadow_steps, 2)


def _dropped_after_a_join(group: ProcessGroup) -> None:
    model = build()
    optimizer = sharded(group, model)
    _join(group, model, optimizer)
    model.zero_grad()
    engine = weakref.ref(optimizer._training.engine)
    gc.disable()
    try:
        del optimizer
        assert engine() is None
    finally:
        gc.enable()
    later = sharded(group, model)
    for batch in series(group, 2):
        backward(model, batch)
        later.step()
        later.zero_grad()


def test_an_optimizer_goes_with_its_last_reference_after_a_join(pool: Pool) -> None:
    pool.run(_dropped_after_a_join, 2)


def _replaced_groups(group: ProcessGroup) -> None:
    model = build()
    optimizer = sharded(group, model, lr=0.1, weight_decay=0.0)
    before = values(model)
    optimizer.param_groups = [dict(each) for each in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] = 0.0
    backward(model, series(group, 1)[0])
    optimizer.step()
    assert_same_bits(values(model), before)


def test_groups_that_the_user_has_replaced_count(pool: Pool) -> None:
    pool.run(_replaced_groups, 2)


def _watched(group: ProcessGroup) -> None:
    model = build()
    optimizer = sharded(group, model)
    errors, over = list[BaseException](), threading.Event()

    def watch() -> None:
        while not over.is_set():
            try:
                optimizer.stats()
            except BaseException as error:
                errors.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for batch in series(group, 20):
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        over.set()
        watcher.join()
    assert errors == []
    assert optimizer.stats().steps == 20


def test_statistics_may_be_read_while_another_thread_trains(pool: Pool) -> None:
    pool.run(_watched, 2)
