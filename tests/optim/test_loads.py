"""Loads of state: how they are counted on each rank, and what a load leaves that fails while it is applied."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

import zerostep
from tests.helpers.checkpoint_setups import SETUPS
from tests.helpers.pool import Pool
from tests.helpers.zero_state_dicts import full_state_dict

WAYS = pytest.mark.parametrize("way", ["elements", "wrapped", "zero", "hook"])


def _save_with_dcp(path: str, optimizer: Any, group: ProcessGroup) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save({"optim": zerostep.dcp_state(optimizer)}, checkpoint_id=path, process_group=group)


def _load_with_dcp(path: str, optimizer: Any, group: ProcessGroup) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load({"optim": zerostep.dcp_state(optimizer)}, checkpoint_id=path, process_group=group)


def _counted(group: ProcessGroup, path: str, way: str) -> list[int]:
    setup = SETUPS["adamw"]
    pair = setup.make(group, way)
    setup.train(pair, group)
    optimizer = pair[1]
    zerostep.save(f"{path}-own", optimizer)
    _save_with_dcp(f"{path}-dcp", optimizer, group)
    saved, counts = full_state_dict(optimizer), [optimizer._health.loads]
    optimizer.load_state_dict(saved)
    counts.append(optimizer._health.loads)
    if dist.get_rank(group) == 1:
        optimizer.load_state_dict(saved)
    counts.append(optimizer._health.loads)
    zerostep.load(f"{path}-own", optimizer)
    counts.append(optimizer._health.loads)
    optimizer.load_state_dict(saved)
    _load_with_dcp(f"{path}-dcp", optimizer, group)
    counts.append(optimizer._health.loads)
    with pytest.raises(ValueError, match="needs the keys"):
        optimizer.load_state_dict({})
    return [*counts, optimizer._health.loads]


@WAYS
def test_loads_of_one_rank_are_counted_until_all_ranks_load_together(pool: Pool, tmp_path: Path, way: str) -> None:
    first, second = pool.run(_counted, 2, str(tmp_path / "it"), way)
    assert first == [0, 1, 1, 0, 0, 0]
    assert second == [0, 1, 2, 0, 0, 0]


# A load that fails on one rank while it replaces the state.


def _inner_optimizers(optimizer: Any) -> list[Optimizer]:
    found: list[Optimizer] = optimizer._inners.all if hasattr(optimizer, "_inners") else [optimizer.optim]
    return found


@contextmanager
def _failing_loads(optimizer: Any) -> Iterator[None]:
    """Inside, the inner optimizers of this rank cannot load."""

    def fail(inner: Optimizer, state_dict: dict[str, Any]) -> NoReturn:
        raise MemoryError("no memory for exp_avg")

    handles = [inner.register_load_state_dict_pre_hook(fail) for inner in _inner_optimizers(optimizer)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _spoiled(group: ProcessGroup, path: str, way: str) -> tuple[str, str, int]:
    setup = SETUPS["adamw"]
    pair = setup.make(group, way)
    setup.train(pair, group)
    _save_with_dcp(path, pair[1], group)
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        if dist.get_rank(group) == 1:
            with _failing_loads(pair[1]):
                _load_with_dcp(path, pair[1], group)
        else:
            _load_with_dcp(path, pair[1], group)
    with pytest.raises(RuntimeError) as refused:
        pair[1].consolidate_state_dict()
    _load_with_dcp(path, pair[1], group)
    setup.train(pair, group)
    return str(caught.value), str(refused.value), pair[1]._health.loads


@WAYS
def test_a_dcp_load_that_fails_while_it_is_applied(pool: Pool, tmp_path: Path, way: str) -> None:
    (first, *ours), (second, *theirs) = pool.run(_spoiled, 2, str(tmp_path / "it"), way)
    assert first == "rank 1 failed, so no rank goes on: MemoryError: no memory for exp_avg"
    assert second == "no memory for exp_avg"
    for refused, loads in (ours, theirs):
        assert "torch.distributed.checkpoint has read failed half-way" in str(refused)
        assert "load the last checkpoint" in str(refused) and loads == 0
