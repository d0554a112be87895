"""Which rank owns which parameter: the partition, added groups, subgroups, and torch's private names."""

import logging
import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.helpers.pool import OFFSET, Pool, Ranks
from tests.helpers.reference import assert_same_bits, assert_same_state_dict
from zerostep import ZeroRedundancyOptimizer

Shares = list[list[list[int]]]
"""By rank, by group: indices of parameters."""

ADAM: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01}


def _param(size: int, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(seed)))


def _params(sizes: Sequence[int]) -> list[nn.Parameter]:
    return [_param(size, seed) for seed, size in enumerate(sizes)]


def _groups(sizes: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [{"params": _params(members)} for members in sizes]


def _expected(groups: Sequence[Sequence[int]], world: int) -> Shares:
    """The rule in plain words: group by group, the largest first, each to the first of the least loaded ranks."""
    loads, first = [0] * world, 0
    shares: Shares = [[[] for _ in groups] for _ in range(world)]
    for number, sizes in enumerate(groups):
        for place in sorted(range(len(sizes)), key=lambda place: sizes[place], reverse=True):
            rank = loads.index(min(loads))
            loads[rank] += sizes[place]
            shares[rank][number].append(first + place)
        first += len(sizes)
    return shares


def _found(zero: ZeroRedundancyOptimizer) -> Shares:
    number = zero._param_to_index
    return [[[number[p] for p in group["params"]] for group in share] for share in zero._partition_parameters()]


def _size(world: int | Ranks) -> int:
    return world if isinstance(world, int) else len(world)


def _set_gradients(params: Sequence[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def _numbered(params: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(number): param for number, param in enumerate(params)}


def _state_everywhere(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    for to in range(zero.world_size):
        zero.consolidate_state_dict(to=to)
        if to == zero.rank:
            found = zero.state_dict()
    return found


def _assert_equal(zero: ZeroRedundancyOptimizer, plain: Optimizer) -> None:
    params = [param for group in plain.param_groups for param in group["params"]]
    assert_same_bits(_numbered(zero._all_params), _numbered(params))
    assert_same_state_dict(_state_everywhere(zero), plain.state_dict())


def _step_both(zero: ZeroRedundancyOptimizer, plain: Optimizer, params: Sequence[Tensor], steps: int = 3) -> None:
    """Steps with the same gradients for both on all ranks; `params` are the plain optimizer's."""
    for seed in range(steps):
        _set_gradients(zero._all_params, seed)
        _set_gradients(params, seed)
        zero.step()
        plain.step()


# Statements 16 to 18.


def _partition(group: ProcessGroup, sizes: Sequence[Sequence[int]], frozen: Sequence[int]) -> tuple[Shares, list[Any]]:
    zero = ZeroRedundancyOptimizer(_groups(sizes), SGD, process_group=group, lr=0.1)
    for index in frozen:
        zero._all_params[index].requires_grad_(False)
    again = ZeroRedundancyOptimizer(zero.param_groups, SGD, process_group=group, lr=0.1)
    number = again._param_to_index
    inner = [[number[param] for param in group["params"]] for group in again.optim.param_groups]
    assert _found(zero) == _found(again)
    return _found(again), inner


EXAMPLES: list[tuple[int, list[list[int]], Shares]] = [
    (2, [[3, 10, 3, 10, 1]], [[[1, 0, 4]], [[3, 2]]]),
    (3, [[3, 10, 3, 10, 1]], [[[1]], [[3]], [[0, 2, 4]]]),
    (2, [[7, 7, 7, 7, 7]], [[[0, 2, 4]], [[1, 3]]]),
    (2, [[5], [1, 3], [2]], [[[0], [], []], [[], [2, 1], [3]]]),
]


@pytest.mark.parametrize(("world", "sizes", "shares"), EXAMPLES)
def test_statement_16_the_examples_of_the_rule(pool: Pool, world: int, sizes: list[list[int]], shares: Shares) -> None:
    assert _expected(sizes, world) == shares
    assert pool.run(_partition, world, sizes, ()) == [(shares, shares[rank]) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 4, OFFSET])
def test_statement_16_random_sizes_whatever_is_trainable(pool: Pool, world: int | Ranks) -> None:
    draw = random.Random(16)
    for _ in range(8):
        sizes = [[draw.choice((1, 2, 3, 5, 8, 40)) for _ in range(draw.randint(1, 7))] for _ in range(3)]
        frozen = draw.sample(range(sum(map(len, sizes))), 2)
        shares = _expected(sizes, _size(world))
        assert pool.run(_partition, world, sizes, frozen) == [(shares, mine) for mine in shares]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_statement_16_what_divides_evenly_is_divided_evenly(pool: Pool, world: int) -> None:
    sizes = [[8] * world, [2] * (3 * world), [5, 1] * world]
    shares = pool.run(_partition, world, sizes, ())[0][0]
    flat = [size for members in sizes for size in members]
    assert {sum(flat[index] for part in share for index in part) for share in shares} == {8 + 6 + 6}


def _private_names(group: ProcessGroup, added: bool) -> None:
    given = _params([4, 9, 4, 1, 6, 2])
    zero = ZeroRedundancyOptimizer(
        [{"params": given[:3]}, {"params": given[3:5], "lr": 0.2}], SGD, process_group=group, lr=0.1
    )
    if added:
        zero.add_param_group({"params": given[5:]})
    known = given if added else given[:5]
    assert [id(p) for p in zero._all_params] == [id(p) for p in zero._index_to_param] == [id(p) for p in known]
    assert zero._param_to_index == {param: index for index, param in enumerate(known)}
    shares = zero._partition_parameters()
    assert len(shares) == zero.world_size
    owners = {param: rank for rank, share in enumerate(shares) for part in share for param in part["params"]}
    assert zero._param_to_rank == owners
    for outer, inner, mine in zip(zero.param_groups, zero.optim.param_groups, shares[zero.rank], strict=True):
        assert [id(p) for p in inner["params"]] == [id(p) for p in mine["params"]]
        assert inner["lr"] == mine["lr"] == outer["lr"]
        assert mine is not outer and inner is not outer


@pytest.mark.parametrize("world", [1, 2, 3, 4, OFFSET])
@pytest.mark.parametrize("added", [False, True])
def test_statement_17_the_private_names_agree(pool: Pool, world: int | Ranks, added: bool) -> None:
    pool.run(_private_names, world, added)


def _few_parameters(group: ProcessGroup, sizes: Sequence[int], views: bool) -> list[int]:
    ours, theirs = _params(sizes), _params(sizes)
    zero = ZeroRedundancyOptimizer(ours, Adam, process_group=group, parameters_as_bucket_view=views, **ADAM)
    plain = Adam(theirs, **ADAM)
    assert len(zero.optim.param_groups) == 1
    _step_both(zero, plain, theirs)
    _assert_equal(zero, plain)
    zero.load_state_dict(plain.state_dict())
    _step_both(zero, plain, theirs)
    _assert_equal(zero, plain)
    return [len(group["params"]) for group in zero.optim.param_groups]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("views", [False, True])
def test_statement_18_fewer_parameters_than_ranks(pool: Pool, world: int, views: bool) -> None:
    assert pool.run(_few_parameters, world, [5], views) == [[1]] + [[0]] * (world - 1)
    assert pool.run(_few_parameters, world, [5] * (world - 1), views) == [[1]] * (world - 1) + [[0]]


# Statements 27 to 29.


def _add_group(group: ProcessGroup, views: bool) -> None:
    first, second, third = (_params(sizes) for sizes in ([4, 9, 4], [3, 7], [1]))
    make: dict[str, Any] = {"process_group": group, "parameters_as_bucket_view": views, **ADAM}
    zero = ZeroRedundancyOptimizer(first, Adam, **make)
    owners = zero._param_to_rank
    zero.add_param_group({"params": second, "lr": 0.3})
    zero.add_param_group({"params": third[0], "betas": (0.8, 0.9)})
    assert {param: zero._param_to_rank[param] for param in owners} == owners
    assert len(zero.optim.param_groups) == 3
    assert _found(zero) == _expected([[4, 9, 4], [3, 7], [1]], zero.world_size)

    at_once = _groups([[4, 9, 4], [3, 7], [1]])
    at_once[1]["lr"], at_once[2]["betas"] = 0.3, (0.8, 0.9)
    other = ZeroRedundancyOptimizer(at_once, Adam, **make)
    theirs = _groups([[4, 9, 4], [3, 7], [1]])
    theirs[1]["lr"], theirs[2]["betas"] = 0.3, (0.8, 0.9)
    plain = Adam(theirs, **ADAM)
    assert _found(other) == _found(zero)
    for optimizer in (zero, other):
        plain.load_state_dict({**plain.state_dict(), "state": {}})
        for param, start in zip(_flat(theirs), _flat(_groups([[4, 9, 4], [3, 7], [1]])), strict=True):
            param.data.copy_(start)
        _step_both(optimizer, plain, _flat(theirs))
        _assert_equal(optimizer, plain)


def _flat(groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    return [param for group in groups for param in group["params"]]


@pytest.mark.parametrize("world", [1, 2, 3, 4, OFFSET])
@pytest.mark.parametrize("views", [False, True])
def test_statement_27_an_added_group_trains_as_if_it_had_been_there(
    pool: Pool, world: int | Ranks, views: bool
) -> None:
    pool.run(_add_group, world, views)


class Messages(logging.Handler):
    """The texts that the library logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _options_of_added_group(group: ProcessGroup, views: bool) -> None:
    messages = Messages()
    logging.getLogger("zerostep").addHandler(messages)
    zero = ZeroRedundancyOptimizer(
        _params([4, 4]), SGD, process_group=group, parameters_as_bucket_view=views, lr=0.1, momentum=0.5
    )
    added = _params([6, 6])
    zero.add_param_group({"params": added, "lr": 0.2})
    assert set(zero.optim.param_groups[1]) <= set(zero.param_groups[1])
    for key in set(zero.optim.param_groups[1]) - {"params"}:
        assert zero.param_groups[1][key] == zero.optim.param_groups[1][key]
    assert (zero.param_groups[1]["lr"], zero.param_groups[1]["momentum"]) == (0.2, 0.5)
    _set_gradients(zero._all_params, 0)
    zero.step()
    assert messages.texts == []
    added[0].requires_grad_(False)
    added[0].grad = None
    with torch.no_grad():
        for param in added:
            param.fill_(zero.rank)
    zero.step()
    assert messages.texts == ["requires_grad of some parameters changed: what each rank sends is planned anew"]
    assert (added[0] == zero.rank).all()  # not sent any more
    assert not (added[1] == zero.rank).any()


@pytest.mark.parametrize("world", [1, 2, 3, OFFSET])
@pytest.mark.parametrize("views", [False, True])
def test_statement_28_an_added_group_is_complete_and_watched(pool: Pool, world: int | Ranks, views: bool) -> None:
    pool.run(_options_of_added_group, world, views)


def _on_subgroup(group: ProcessGroup, views: bool) -> list[bool]:
    ours, theirs = _params([4, 9, 4, 1]), _params([4, 9, 4, 1])
    zero = ZeroRedundancyOptimizer(ours, AdamW, process_group=group, parameters_as_bucket_view=views, **ADAM)
    plain = AdamW(theirs, **ADAM)
    assert (zero.rank, zero.world_size, zero.global_rank) == (dist.get_rank(group), 2, dist.get_rank())
    assert zero.global_rank == zero.rank + 1 and zero.process_group is group
    assert _found(zero) == [[[1]], [[0, 2, 3]]]
    _step_both(zero, plain, theirs)
    _assert_equal(zero, plain)
    holders = []
    for to in range(2):
        zero.consolidate_state_dict(to=to)
        holders.append(bool(zero._all_state_dicts))
    with pytest.raises(ValueError, match="0 to 1"):
        zero.consolidate_state_dict(to=2)
    return holders


@pytest.mark.parametrize("views", [False, True])
def test_statement_29_ranks_are_those_of_the_group(pool: Pool, views: bool) -> None:
    assert pool.run(_on_subgroup, OFFSET, views) == [[True, False], [False, True]]


# The private names that others use.


def _repartition(zero: ZeroRedundancyOptimizer) -> None:
    """What fine-tuning schedulers do after they have edited `param_groups` in place."""
    zero._clear_cache()
    zero.optim.param_groups = zero._partition_parameters()[zero.rank]
    zero._sync_param_groups(zero.optim.param_groups, zero.param_groups)


def _edited_in_place(group: ProcessGroup, views: bool) -> None:
    ours, theirs = _params([4, 9, 4, 12, 1]), _params([4, 9, 4, 12, 1])
    make: dict[str, Any] = {"process_group": group, "parameters_as_bucket_view": views, "lr": 0.1}
    zero, plain = ZeroRedundancyOptimizer(ours[:3], SGD, **make), SGD(theirs[:3], lr=0.1)
    _step_both(zero, plain, theirs[:3])
    zero.param_groups[0]["params"].append(ours[3])
    plain.param_groups[0]["params"].append(theirs[3])
    _repartition(zero)
    assert _found(zero) == _expected([[4, 9, 4, 12]], zero.world_size)
    _step_both(zero, plain, theirs[:4])
    _assert_equal(zero, plain)
    zero.param_groups[0]["params"].pop(0)
    plain.param_groups[0]["params"].pop(0)
    _repartition(zero)
    _step_both(zero, plain, theirs[1:4])
    _assert_equal(zero, plain)
    assert_same_bits(_numbered(ours), _numbered(theirs))


def _group_appended_in_place(group: ProcessGroup, views: bool) -> None:
    ours, theirs = _params([4, 9, 4, 12, 1]), _params([4, 9, 4, 12, 1])
    make: dict[str, Any] = {"process_group": group, "parameters_as_bucket_view": views, **ADAM}
    zero, plain = ZeroRedundancyOptimizer(ours[:3], Adam, **make), Adam(theirs[:3], **ADAM)
    _step_both(zero, plain, theirs[:3])
    zero.param_groups.append({**zero.param_groups[0], "params": ours[3:], "lr": 0.3})
    plain.add_param_group({"params": theirs[3:], "lr": 0.3})
    _repartition(zero)
    assert _found(zero) == _expected([[4, 9, 4], [12, 1]], zero.world_size)
    _step_both(zero, plain, theirs)
    _assert_equal(zero, plain)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("job", [_edited_in_place, _group_appended_in_place])
def test_groups_edited_in_place_train_as_plain_after_clear_cache(pool: Pool, world: int, views: bool, job: Any) -> None:
    pool.run(job, world, views)


def _swapped_parameter(group: ProcessGroup, views: bool) -> None:
    ours, theirs = _params([4, 9, 4]), _params([4, 9, 4])
    make: dict[str, Any] = {"process_group": group, "parameters_as_bucket_view": views, "lr": 0.1}
    zero, plain = ZeroRedundancyOptimizer(ours, SGD, **make), SGD(theirs, lr=0.1)
    _step_both(zero, plain, theirs, steps=1)
    ours_new, theirs_new = _param(9, 77), _param(9, 77)
    zero.param_groups[0]["params"][1], plain.param_groups[0]["params"][1] = ours_new, theirs_new
    _repartition(zero)
    _step_both(zero, plain, plain.param_groups[0]["params"], steps=1)
    _assert_equal(zero, plain)
    assert zero._index_to_param[1] is ours_new
    assert not torch.equal(ours_new, _param(9, 77))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("views", [False, True])
def test_a_parameter_swapped_for_one_of_equal_shape_travels(pool: Pool, world: int, views: bool) -> None:
    pool.run(_swapped_parameter, world, views)


def _sync_options(group: ProcessGroup) -> None:
    source = [{"params": _params([1]), "lr": 0.5, "new": 3}, {"params": _params([2]), "lr": 0.25}]
    target: list[dict[str, Any]] = [{"params": [], "lr": 0.0}, {"params": [], "lr": 0.0, "kept": 1}]
    ZeroRedundancyOptimizer._sync_param_groups(source, target)
    assert target == [{"params": [], "lr": 0.5, "new": 3}, {"params": [], "lr": 0.25, "kept": 1}]


def test_sync_param_groups_copies_every_key_but_params(pool: Pool) -> None:
    pool.run(_sync_options, 1)


def _two_halves(group: ProcessGroup, views: bool) -> None:
    ours, theirs = _params([4, 9, 4]), _params([4, 9, 4])
    zero = ZeroRedundancyOptimizer(ours, Adam, process_group=group, parameters_as_bucket_view=views, **ADAM)
    plain = Adam(theirs, **ADAM)
    for seed in range(3):
        _set_gradients(ours, seed)
        _set_gradients(theirs, seed)
        before = [param.detach().clone() for param in ours]
        assert zero._local_step(closure=lambda: 7.5) == 7.5
        plain.step()
        for param, start, target in zip(ours, before, theirs, strict=True):
            assert torch.equal(param, target if zero._param_to_rank[param] == zero.rank else start)
        zero._sync_params()
        assert_same_bits(_numbered(ours), _numbered(theirs))
    _assert_equal(zero, plain)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("views", [False, True])
def test_local_step_and_sync_params_are_the_halves_of_a_step(pool: Pool, world: int, views: bool) -> None:
    pool.run(_two_halves, world, views)


def _duplicates(group: ProcessGroup, views: bool) -> int:
    ours, theirs = _params([4, 9, 4]), _params([4, 9, 4])
    ours_twice, theirs_twice = [*ours, ours[0]], [*theirs, theirs[0]]
    make: dict[str, Any] = {"process_group": group, "parameters_as_bucket_view": views, **ADAM}
    plain = Adam(theirs_twice, **ADAM)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero = ZeroRedundancyOptimizer(ours_twice, Adam, **make)
    _step_both(zero, plain, theirs_twice)
    assert_same_bits(_numbered(ours), _numbered(theirs))
    ours_saved, theirs_saved = _state_everywhere(zero), plain.state_dict()
    zero, plain = ZeroRedundancyOptimizer(ours_twice, Adam, **make), Adam(theirs_twice, **ADAM)
    zero.load_state_dict(theirs_saved)
    plain.load_state_dict(ours_saved)
    _step_both(zero, plain, theirs_twice)
    assert_same_bits(_numbered(ours), _numbered(theirs))
    return sum("duplicate parameters" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("views", [False, True])
def test_a_duplicate_inside_a_group_warns_and_trains_as_plain(pool: Pool, world: int, views: bool) -> None:
    assert all(pool.run(_duplicates, world, views))


def _empty_parameters(group: ProcessGroup) -> list[Shares]:
    params = _params([0, 6, 0, 4])
    zero = ZeroRedundancyOptimizer(params, SGD, process_group=group, lr=0.1)
    trainable = _found(zero)
    params[0].requires_grad_(False)
    return [trainable, _found(ZeroRedundancyOptimizer(params, SGD, process_group=group, lr=0.1))]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_statement_16_empty_parameters_have_owners_too(pool: Pool, world: int) -> None:
    assert pool.run(_empty_parameters, world) == [[_expected([[0, 6, 0, 4]], world)] * 2] * world
