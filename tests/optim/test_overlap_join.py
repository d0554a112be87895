"""Uneven inputs in overlap mode, compared with plain DDP under `join()`."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tests.helpers.overlap import (
    EACH_HOOK,
    Branches,
    Values,
    assert_equal_on_all_ranks,
    backward,
    in_ddp,
    overlapped,
    plain_optimizer,
    rank_batches,
    state_on_every_rank,
    train,
    values_of,
)
from tests.helpers.pool import Pool
from tests.helpers.reference import OPTIMIZERS, assert_same_bits, assert_same_state_dict

COUNTS: dict[int, tuple[int, ...]] = {2: (5, 0), 3: (2, 6, 0)}
JOIN_GRAPHS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}


def _train_unevenly(group: ProcessGroup, hook: str, options: dict[str, Any], before: int) -> Values:
    rank, counts = dist.get_rank(group), COUNTS[dist.get_world_size(group)]
    plain, ours = (in_ddp(group, **options) for _ in range(2))
    optimizer, zero = (
        plain_optimizer(plain, **OPTIMIZERS["adamw"].options),
        overlapped(ours, hook, **OPTIMIZERS["adamw"].options),
    )
    series = rank_batches(group, before + counts[rank])
    for ddp, each in ((plain, optimizer), (ours, zero)):
        train(ddp, each, series[:before])
        with ddp.join():
            train(ddp, each, series[before:])
    assert_same_bits(ours.named_parameters(), plain.named_parameters())
    state = state_on_every_rank(zero)
    if counts[rank] == max(counts):  # a joined rank's plain optimizer has missed some steps
        assert_same_state_dict(state, optimizer.state_dict())
    for batch in rank_batches(group, 3):
        backward(ours, batch)
        zero.step()
    return values_of(ours)


# A static graph must be settled before: DDP's own shadow passes fail while DDP is still learning it.
@pytest.mark.parametrize(
    ("graph", "before"),
    [(graph, before) for graph in JOIN_GRAPHS for before in (0, 3) if before or graph != "static_graph"],
)
@pytest.mark.parametrize("world", list(COUNTS))
@EACH_HOOK
def test_statement_56_uneven_inputs_equal_plain(pool: Pool, hook: str, world: int, graph: str, before: int) -> None:
    assert_equal_on_all_ranks(pool.run(_train_unevenly, world, hook, JOIN_GRAPHS[graph], before))


def _join_after_using_more(group: ProcessGroup, hook: str, zero_grad: str) -> None:
    plain, ours = (in_ddp(group, Branches(), find_unused_parameters=True) for _ in range(2))
    optimizer, zero = plain_optimizer(plain), overlapped(ours, hook)
    series = rank_batches(group, 5)
    for ddp, each in ((plain, optimizer), (ours, zero)):
        with ddp.join():
            for number, batch in enumerate(series if dist.get_rank(group) == 0 else series[:2]):
                if zero_grad == "before":
                    each.zero_grad()
                backward(ddp, batch, ["abc", "ab", "a", "a", "c"][number])
                if each is optimizer:
                    each.step()
                if zero_grad == "after":
                    each.zero_grad()
    assert_same_bits(ours.named_parameters(), plain.named_parameters())


@pytest.mark.parametrize("zero_grad", ["before", "after"])
@EACH_HOOK
def test_statement_56_for_ddp_a_joined_rank_goes_on_using_what_was_used_last(
    pool: Pool, hook: str, zero_grad: str
) -> None:
    pool.run(_join_after_using_more, 2, hook, zero_grad)
