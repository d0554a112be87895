"""State dicts of `ShardedOptimizer`: resuming, loading and refusing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import AdamW

from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, assert_same_state_dict, build, train
from tests.helpers.sharding import OPTIONS, backward, series, sharded, sum_in_rank_order, values, whole_state


def _whole(group: ProcessGroup, seed: int, steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train, and return what a checkpoint holds."""
    model = build(seed=seed)
    optimizer = sharded(group, model)
    train(model, optimizer, series(group, steps))
    return model.state_dict(), whole_state(optimizer)


def _resumed(
    group: ProcessGroup, saved: tuple[dict[str, Any], dict[str, Any]], options: dict[str, Any]
) -> dict[str, Tensor]:
    """Go on from a checkpoint, with the plain optimizer and with ours, on the same gradients."""
    model, twin = build(seed=9), build(seed=8)
    optimizer = sharded(group, model, **options)
    plain = AdamW(twin.named_parameters(), **OPTIONS)
    for each, other in ((model, optimizer), (twin, plain)):
        each.load_state_dict(saved[0])
        before = copy.deepcopy(saved[1])
        other.load_state_dict(state_dict=saved[1])
        assert_same_state_dict(saved[1], before)
    assert_same_state_dict(whole_state(optimizer), saved[1])
    for batch in series(group, 4, seed=11):
        train(model, optimizer, [batch])
        twin.zero_grad()
        backward(twin, batch)
        sum_in_rank_order(group, twin.parameters())
        plain.step()
    optimizer.synchronize()
    assert_same_bits(values(model), values(twin))
    assert_same_state_dict(whole_state(optimizer), plain.state_dict())
    return values(model)


OTHERWISE: list[dict[str, Any]] = [
    {},
    {"bucket_mb": 1.0, "gather": "forward"},
    {"partition": "parameters"},
    {"reduction": "all"},
]


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 3), (3, 2), (2, 1), (3, 4)])
def test_a_checkpoint_resumes_at_any_world_size_and_in_the_plain_optimizer(pool: Pool, first: int, second: int) -> None:
    saved = pool.run(_whole, first, 0, 5)[-1]
    for options in OTHERWISE[: 4 if second == 3 else 1]:
        pool.run(_resumed, second, saved, options)


def _from_plain(group: ProcessGroup) -> None:
    model = build()
    optimizer = AdamW(model.named_parameters(), **OPTIONS)
    train(model, optimizer, series(group, 3, seed=1))
    state = [optimizer.state_dict(), model.state_dict()]
    dist.broadcast_object_list(state, src=dist.get_global_rank(group, 0), group=group)
    _resumed(group, (state[1], state[0]), {})
    strings = {
        "state": {f"p{number}": entry for number, entry in state[0]["state"].items()},
        "param_groups": [{**state[0]["param_groups"][0], "params": [f"p{n}" for n in range(9)]}],
    }
    loaded = sharded(group, build())
    loaded.load_state_dict(strings)
    assert_same_state_dict(whole_state(loaded), state[0])
    loaded.load_state_dict({"state": {}, "param_groups": state[0]["param_groups"]})
    assert loaded.state_dict()["state"] == {}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_checkpoint_of_the_plain_optimizer_resumes(pool: Pool, world: int) -> None:
    pool.run(_from_plain, world)


def _interrupted(group: ProcessGroup, options: dict[str, Any], low: bool) -> None:
    """Save, build everything anew, load: the run goes on as if nothing had happened."""
    make: Callable[[], nn.Module] = (lambda: build().bfloat16()) if low else build
    data = [(batch[0], batch[1].bfloat16()) if low else batch for batch in series(group, 8)]
    model = make()
    optimizer = sharded(group, model, **options)
    train(model, optimizer, data[:4])
    saved = copy.deepcopy(model.state_dict()), whole_state(optimizer)
    train(model, optimizer, data[4:])
    again = make()
    fresh = sharded(group, again, **options)
    again.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    train(again, fresh, data[4:])
    for each in (optimizer, fresh):
        each.synchronize()
    assert_same_bits(values(again), values(model))
    assert_same_state_dict(whole_state(fresh), whole_state(optimizer))


@pytest.mark.parametrize("options", OTHERWISE)
def test_a_resumed_run_equals_an_uninterrupted_one(pool: Pool, options: dict[str, Any]) -> None:
    pool.run(_interrupted, 2, options, False)


def test_a_resumed_run_with_masters_equals_an_uninterrupted_one(pool: Pool) -> None:
    pool.run(_interrupted, 2, {"master_dtype": torch.float32}, True)


def _who_has_it(group: ProcessGroup) -> None:
    model = build()
    optimizer = sharded(group, model)
    rank = dist.get_rank(group)
    train(model, optimizer, series(group, 2))
    with pytest.raises(RuntimeError, match=rf"consolidate_state_dict\(to={rank}\)"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        assert len(optimizer.state_dict()["state"]) == 9
        optimizer.release_state_dict()
    with pytest.raises(RuntimeError, match="has not been consolidated"):
        optimizer.state_dict()
    for bad in (2, -1, "0"):
        with pytest.raises(ValueError, match="must be a rank of the group"):
            optimizer.consolidate_state_dict(to=bad)  # type: ignore[arg-type]


def test_the_state_is_where_it_was_asked_for_and_nowhere_else(pool: Pool) -> None:
    pool.run(_who_has_it, 2)


def _bad_state(group: ProcessGroup) -> None:
    model = build()
    optimizer = sharded(group, model)
    train(model, optimizer, series(group, 2))
    before = whole_state(optimizer)
    wrong = copy.deepcopy(before)
    wrong["state"][0]["exp_avg"] = torch.zeros(3)
    for state, pattern in [
        ({"state": {}}, "needs the keys"),
        ({**before, "param_groups": before["param_groups"] * 2}, "2 parameter groups"),
        (wrong, "exp_avg.*shape"),
    ]:
        with pytest.raises(ValueError, match=pattern):
            optimizer.load_state_dict(state)
    assert_same_state_dict(whole_state(optimizer), before)


def test_a_state_that_does_not_fit_changes_nothing(pool: Pool) -> None:
    pool.run(_bad_state, 2)


def _not_shared(group: ProcessGroup) -> None:
    model = build()
    optimizer = sharded(group, model)
    train(model, optimizer, series(group, 2))
    given = whole_state(optimizer)
    before = copy.deepcopy(given)
    optimizer.load_state_dict(given)
    for entry in optimizer.state.values():
        entry["exp_avg"].fill_(77.0)
        entry["step"].fill_(9.0)
    assert_same_state_dict(given, before)


@pytest.mark.parametrize("world", [1, 2])
def test_loading_neither_changes_nor_shares_the_argument(pool: Pool, world: int) -> None:
    pool.run(_not_shared, world)


def _live_state(group: ProcessGroup) -> tuple[int, int]:
    model = build()
    optimizer = sharded(group, model)
    assert not optimizer.state
    train(model, optimizer, series(group, 2))
    assert set(optimizer.state) <= set(model.parameters())
    found = sum(entry["exp_avg"].numel() for entry in optimizer.state.values())
    for entry in optimizer.state.values():
        entry["exp_avg"].fill_(3.0)
    whole = whole_state(optimizer)["state"].values()
    assert all(bool((entry["exp_avg"] == 3.0).all()) for entry in whole)
    return found, sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_state_of_a_rank_is_live_and_its_own_part(pool: Pool, world: int) -> None:
    results = pool.run(_live_state, world)
    assert sum(found for found, _ in results) == results[0][1]
