"""State dicts in overlap mode: saved at any time, and exchanged with plain optimizers and other world sizes."""

from typing import Any

import pytest
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Optimizer

from tests.helpers.overlap import (
    EACH_HOOK,
    HOOKS,
    OPTIONS,
    assert_same,
    in_ddp,
    overlapped,
    plain_optimizer,
    rank_batches,
    state_on_every_rank,
    train,
)
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_state_dict
from zerostep import ZeroRedundancyOptimizer


def _save_at_any_time(group: ProcessGroup, hook: str) -> None:
    plain, ours = (in_ddp(group) for _ in range(2))
    optimizer, zero = plain_optimizer(plain), overlapped(ours, hook)
    assert_same_state_dict(zero.state_dict(), optimizer.state_dict())
    for batch in rank_batches(group, 4):
        assert_same_state_dict(state_on_every_rank(zero), optimizer.state_dict())
        train(plain, optimizer, [batch])
        train(ours, zero, [batch])
    assert_same_state_dict(state_on_every_rank(zero), optimizer.state_dict())


@EACH_HOOK
def test_statement_49_checkpoints_at_any_time(pool: Pool, hook: str) -> None:
    pool.run(_save_at_any_time, 2, hook)


def _fresh(group: ProcessGroup, kind: str) -> tuple[DDP, Optimizer]:
    ddp = in_ddp(group)
    if kind in HOOKS:
        return ddp, overlapped(ddp, kind)
    if kind == "plain":
        return ddp, plain_optimizer(ddp)
    ddp.register_comm_hook(group, allreduce_hook)
    return ddp, ZeroRedundancyOptimizer(ddp.parameters(), AdamW, process_group=group, **OPTIONS)


def _save(group: ProcessGroup, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    ddp, optimizer = _fresh(group, kind)
    train(ddp, optimizer, rank_batches(group, 3))
    return ddp.state_dict(), state_on_every_rank(optimizer)


def _resume(group: ProcessGroup, kind: str, model: dict[str, Any], state: dict[str, Any]) -> None:
    """Go on from a checkpoint, in lockstep with a plain optimizer that does the same."""
    plain, optimizer = _fresh(group, "plain")
    ours, zero = _fresh(group, kind)
    for ddp, each in ((plain, optimizer), (ours, zero)):
        train(ddp, each, rank_batches(group, 1))  # something to forget
        ddp.load_state_dict(model)
        each.load_state_dict(state)
    for batch in rank_batches(group, 4):
        for ddp, each in ((plain, optimizer), (ours, zero)):
            train(ddp, each, [batch])
        assert_same(ours, plain)
    assert_same_state_dict(state_on_every_rank(zero), optimizer.state_dict())


@pytest.mark.parametrize("source", ["plain", "step", *HOOKS])
def test_statement_49_checkpoints_are_exchanged_in_all_directions(pool: Pool, source: str) -> None:
    saved = pool.run(_save, 2, source)
    for target in ("step", *HOOKS):
        pool.run(_resume, 2, target, *saved[1])


@EACH_HOOK
def test_statement_49_checkpoints_of_other_world_sizes(pool: Pool, hook: str) -> None:
    saved = pool.run(_save, 3, hook)[0]
    for world in (1, 2, 4):
        pool.run(_resume, world, hook, *saved)
