"""State that is never gathered: each rank keeps its part, and `merge_shards` makes a whole at any world size."""

import copy
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from tests.helpers.pool import OFFSET, Pool, Ranks
from tests.helpers.reference import OPTIMIZERS, assert_same_bits, assert_same_state_dict, batches, plain, train
from zerostep import ZeroRedundancyOptimizer, merge_shards

NAMES = ["adamw", "sgd_momentum", "muon", "adafactor"]
StateDict = dict[str, Any]


def _zero(group: ProcessGroup, name: str) -> tuple[Any, ZeroRedundancyOptimizer]:
    case = OPTIMIZERS[name]
    ddp, _ = plain(case, group)
    return ddp, ZeroRedundancyOptimizer(ddp.parameters(), case.kind, process_group=group, **case.options)


def _shards(group: ProcessGroup, name: str) -> tuple[StateDict, StateDict, StateDict]:
    """After three steps: this rank's part, the whole from the plain twin, and its parameters."""
    model = OPTIMIZERS[name].model
    ours, zero = _zero(group, name)
    twin, optimizer = plain(OPTIMIZERS[name], group)
    for ddp, each in ((ours, zero), (twin, optimizer)):
        train(ddp, each, batches(0, group.rank(), 3, model))
    found = zero.local_state_dict()
    before = copy.deepcopy(found)
    train(ours, zero, batches(1, group.rank(), 1, model))
    assert_same_state_dict(found, before)
    return found, optimizer.state_dict(), {key: value.clone() for key, value in twin.state_dict().items()}


def _continued(group: ProcessGroup, name: str, whole: StateDict, weights: StateDict) -> None:
    case = OPTIMIZERS[name]
    ours, zero = _zero(group, name)
    twin, optimizer = plain(case, group)
    for ddp, each in ((ours, zero), (twin, optimizer)):
        ddp.load_state_dict(weights)
        each.load_state_dict(whole)
        train(ddp, each, batches(2, group.rank(), 3, case.model))
    assert_same_bits(ours.named_parameters(), twin.named_parameters())


@pytest.mark.parametrize("saved_at", [1, 2, 3, OFFSET], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_statement_67_shards_load_at_any_world_size(pool: Pool, name: str, saved_at: int | Ranks) -> None:
    answers = pool.run(_shards, saved_at, name)
    whole = merge_shards([shard for shard, _, _ in reversed(answers)])
    assert_same_state_dict(whole, answers[0][1])
    for world in (1, 2, 3, 4):
        pool.run(_continued, world, name, whole, answers[0][2])


def test_statement_67_what_is_no_whole_is_refused(pool: Pool) -> None:
    first, second = (shard for shard, _, _ in pool.run(_shards, 2, "adamw"))
    third = pool.run(_shards, 3, "adamw")[2][0]
    incomplete: list[list[StateDict]] = [[], [first], [first, first], [first, second, second], [first, third]]
    for wrong in [*incomplete, [{"state": {}}]]:
        with pytest.raises(ValueError, match=r"merge_shards|every rank is needed"):
            merge_shards(wrong)
    foreign = copy.deepcopy(second)
    foreign["shard"]["owned"][0].pop()
    with pytest.raises(ValueError, match="different runs"):
        merge_shards([first, foreign])


def _refuses_a_part(group: ProcessGroup) -> None:
    ours, zero = _zero(group, "adamw")
    train(ours, zero, batches(0, group.rank(), 1))
    with pytest.raises(ValueError, match=r"one rank.*merge_shards"):
        zero.load_state_dict(zero.local_state_dict())
    assert torch.is_tensor(next(iter(zero.state.values()))["exp_avg"])


def test_a_part_is_not_taken_for_the_whole(pool: Pool) -> None:
    pool.run(_refuses_a_part, 2)
