"""Bad input to `ZeroRedundancyOptimizer`: every rank raises, with the fact, the value and the remedy; nothing hangs.

Each bad input is given on the only rank of one, on all ranks of two, and on one rank of two. After every error the
ranks build a good optimizer and take a step, which only works if all of them left the failed call at the same place.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join

from tests.helpers.pool import Pool
from zerostep import ZeroRedundancyOptimizer

DEADLINE = 20.0


def _weight(*shape: int) -> Tensor:
    return torch.nn.Parameter(torch.ones(shape or (2,)))


def _sparse() -> Tensor:
    return torch.zeros(3).to_sparse().requires_grad_()


def _shared() -> list[dict[str, Any]]:
    param = _weight()
    return [{"params": [param]}, {"params": [param]}]


Functional = type("Functional", (optim.SGD,), {"__module__": "torch.distributed.optim.functional_sgd"})


@dataclass(frozen=True)
class Bad:
    """An input that must be refused: how to make it, and what the error must say."""

    params: Callable[[], Any]
    error: type[Exception]
    message: tuple[str, ...]
    kind: Any = optim.SGD
    options: tuple[tuple[str, Any], ...] = (("lr", 0.5),)


_WANTED = "params must be an iterable of tensors, of (name, tensor) pairs or of dicts (parameter groups)"

CONSTRUCTIONS: dict[str, Bad] = {
    "a tensor": Bad(_weight, TypeError, (_WANTED, "got a single torch.FloatTensor", "put it into a list")),
    "not iterable": Bad(lambda: 7, TypeError, (_WANTED, "got a int")),
    "nothing": Bad(lambda: None, TypeError, (_WANTED, "got a NoneType")),
    "empty": Bad(list, ValueError, ("the parameter list is empty", "pass model.parameters()")),
    "empty generator": Bad(lambda: iter(()), ValueError, ("the parameter list is empty",)),
    "neither tensors nor dicts": Bad(lambda: [1, 2], TypeError, (_WANTED, "elements of type int")),
    "tensors and dicts": Bad(
        lambda: [_weight(), {"params": [_weight()]}], TypeError, (_WANTED, "all of one kind", "dict, torch.FloatTensor")
    ),
    "dicts and tensors": Bad(lambda: [{"params": [_weight()]}, _weight()], TypeError, ("all of one kind",)),
    "a set": Bad(lambda: {_weight()}, TypeError, (_WANTED, "got a set", "order differs between ranks")),
    "a frozenset": Bad(lambda: frozenset([_weight()]), TypeError, ("got a frozenset",)),
    "no params in a group": Bad(
        lambda: [{"lr": 0.1}], ValueError, ('every parameter group needs the key "params"', "one has only ['lr']")
    ),
    "a set in a group": Bad(lambda: [{"params": {_weight()}}], TypeError, ("ordered collection",)),
    "sparse": Bad(
        lambda: [_sparse()],
        ValueError,
        ("only dense parameters can be sharded", "torch.sparse.FloatTensor", "call .to_dense()"),
    ),
    "sparse later": Bad(lambda: [_weight(), _sparse()], ValueError, ("torch.sparse.FloatTensor",)),
    "not a leaf": Bad(lambda: [_weight() * 2], ValueError, ("non-leaf",)),
    "in two groups": Bad(_shared, ValueError, ("more than one parameter group",)),
    "no class": Bad(
        lambda: [_weight()], TypeError, ("optimizer_class must be an optimizer class", "got 'SGD'"), kind="SGD"
    ),
    "unknown keyword": Bad(lambda: [_weight()], TypeError, ("lernrate",), options=(("lernrate", 1),)),
    "negative rate": Bad(lambda: [_weight()], ValueError, ("Invalid learning rate: -1",), options=(("lr", -1),)),
    "functional": Bad(
        lambda: [_weight()],
        ValueError,
        (
            "Functional is a functional optimizer",
            "neither needed nor supported",
            "pass the ordinary class from torch.optim",
        ),
        kind=Functional,
    ),
}

Raised = tuple[str, str]


def _raised(call: Callable[[], object]) -> Raised:
    """The class and the text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def _works(group: ProcessGroup, zero: ZeroRedundancyOptimizer | None = None) -> bool:
    """All ranks are still at the same place: an optimizer steps and leaves them with equal parameters."""
    zero = zero or ZeroRedundancyOptimizer([_weight(), _weight(3)], optim.SGD, process_group=group, lr=0.5)
    params = zero._all_params
    for param in params:
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in params]
    zero.step()
    return all(torch.equal(param, old - 0.5) for param, old in zip(params, before, strict=True))


def _construct(group: ProcessGroup, name: str, bad_ranks: tuple[int, ...]) -> tuple[Raised, bool]:
    bad = CONSTRUCTIONS[name]
    if dist.get_rank(group) in bad_ranks:
        params, kind, options = bad.params(), bad.kind, dict(bad.options)
    else:
        params, kind, options = [_weight()], optim.SGD, {"lr": 0.5}
    error = _raised(lambda: ZeroRedundancyOptimizer(params, kind, process_group=group, **options))
    return error, _works(group)


def _check_own(raised: Raised, bad: Bad) -> None:
    assert raised[0] == bad.error.__name__, raised
    for fact in bad.message:
        assert fact in raised[1]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_statement_69_a_bad_input_is_refused_with_the_reason(pool: Pool, name: str, world: int) -> None:
    found = pool.run(_construct, world, name, tuple(range(world)), deadline=DEADLINE)
    for raised, works in found:
        _check_own(raised, CONSTRUCTIONS[name])
        assert works


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_statement_72_a_bad_input_on_one_rank_is_an_error_on_all(pool: Pool, name: str, bad_rank: int) -> None:
    bad = CONSTRUCTIONS[name]
    found = pool.run(_construct, 2, name, (bad_rank,), deadline=DEADLINE)
    _check_own(found[bad_rank][0], bad)
    error, message = found[1 - bad_rank][0]
    assert error == bad.error.__name__
    assert message.startswith(f"rank {bad_rank} failed, so no rank goes on: {error}: ")
    assert bad.message[0] in message
    assert [works for _, works in found] == [True, True]


# The rows that are no errors, or Python's own.


def _missing_class(group: ProcessGroup) -> Raised:
    return _raised(lambda: ZeroRedundancyOptimizer([_weight()], process_group=group, lr=0.1))  # type: ignore[call-arg]


def test_statement_69_a_missing_class_is_python_s_own_error(pool: Pool) -> None:
    for error, message in pool.run(_missing_class, 2, deadline=DEADLINE):
        assert error == "TypeError" and "'optimizer_class'" in message


def _duplicate(group: ProcessGroup, as_views: bool) -> tuple[list[str], float]:
    param, other = _weight(), _weight(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero = ZeroRedundancyOptimizer(
            [param, other, param], optim.SGD, process_group=group, parameters_as_bucket_view=as_views, lr=0.5
        )
    param.grad = torch.ones(2)
    zero.step()
    return [str(each.message) for each in caught], param[0].item()


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_statement_69_a_duplicate_inside_a_group_only_warns(pool: Pool, world: int, as_views: bool) -> None:
    plain = _weight()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = optim.SGD([plain, _weight(3), plain], lr=0.5)
    plain.grad = torch.ones(2)
    optimizer.step()
    for messages, value in pool.run(_duplicate, world, as_views, deadline=DEADLINE):
        assert any("duplicate parameters" in message for message in messages)
        assert value == plain[0].item()


def _mixed_dtypes(group: ProcessGroup, as_views: bool) -> list[Tensor]:
    params: list[Tensor] = [
        torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.half)
    ]
    zero = ZeroRedundancyOptimizer(params, optim.SGD, process_group=group, parameters_as_bucket_view=as_views, lr=0.5)
    for param in params:
        param.grad = torch.ones_like(param)
    zero.step()
    return params


@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_statement_71_mixed_dense_dtypes_train_and_sparse_parameters_do_not(
    pool: Pool, world: int, as_views: bool
) -> None:
    for params in pool.run(_mixed_dtypes, world, as_views, deadline=DEADLINE):
        assert [param.tolist() for param in params] == [[0.5] * 3] * 3
        assert [param.dtype for param in params] == [torch.float32, torch.float64, torch.half]
    for raised, _ in pool.run(_construct, world, "sparse", tuple(range(world)), deadline=DEADLINE):
        assert raised[0] == "ValueError"


# Process groups.


def test_without_a_process_group_the_remedy_is_named() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) before"):
        ZeroRedundancyOptimizer([_weight()], optim.SGD, lr=0.1)


def _outsider(group: ProcessGroup) -> Raised:
    foreign: Any = dist.GroupMember.NON_GROUP_MEMBER
    return _raised(lambda: ZeroRedundancyOptimizer([_weight()], optim.SGD, process_group=foreign, lr=0.1))


def test_a_rank_outside_the_group_is_refused(pool: Pool) -> None:
    assert pool.run(_outsider, 1) == [("ValueError", "rank 0 is not a member of the process group that it passed")]


# Ranks that differ.

LISTS: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any], tuple[str, ...]]] = {
    "order": (
        lambda: [_weight(2), _weight(3)],
        lambda: [_weight(3), _weight(2)],
        {},
        ("parameter 0 ('param.0')", "rank 0 has 'param.0', shape (2,)", "but rank 1 has 'param.0', shape (3,)"),
    ),
    "shape": (
        lambda: [_weight(2), _weight(2, 3)],
        lambda: [_weight(2), _weight(3, 2)],
        {},
        ("parameter 1 ('param.1')", "shape (2, 3)", "shape (3, 2)"),
    ),
    "dtype": (
        lambda: [_weight()],
        lambda: [torch.nn.Parameter(torch.ones(2, dtype=torch.float16))],
        {},
        ("parameter 0", "float32", "float16"),
    ),
    "count": (
        lambda: [_weight(), _weight()],
        lambda: [_weight()],
        {},
        ("parameter 1 ('param.1')", "shape (2,)"),
    ),
    "count, more later": (
        lambda: [_weight()],
        lambda: [_weight(), _weight()],
        {},
        ("the ranks disagree on", "shape (2,)"),
    ),
    "trainability": (lambda: [_weight()], lambda: [torch.ones(2)], {}, ("trainable", "frozen")),
    "groups": (
        lambda: [{"params": [_weight()]}, {"params": [_weight()]}],
        lambda: [_weight(), _weight()],
        {},
        ("parameter 1", "in group 1", "in group 0"),
    ),
    "names": (
        lambda: [("a", _weight())],
        lambda: [("b", _weight())],
        {},
        ("rank 0 has 'a'", "rank 1 has 'b'"),
    ),
    "a listed twice": (
        lambda: [_weight(), _weight()],
        lambda: [_weight()] * 2,
        {},
        ("parameter 1", "trainable", "frozen"),
    ),
    "options": (
        lambda: [_weight()],
        lambda: [_weight()],
        {"lr": 0.25},
        ("the options of group 0", "lr=0.5", "lr=0.25"),
    ),
    "class": (lambda: [_weight()], lambda: [_weight()], {"optimizer_class": optim.Rprop}, ("the ranks disagree on",)),
}


def _differ(group: ProcessGroup, name: str) -> tuple[Raised, bool, bool]:
    first, second, changes, _ = LISTS[name]
    other = dist.get_rank(group) == dist.get_world_size(group) - 1
    params = second() if other else first()
    arguments = {"optimizer_class": optim.SGD, "lr": 0.5, **(changes if other else {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raised = _raised(lambda: ZeroRedundancyOptimizer(params, process_group=group, **arguments))
    entries = [each["params"] if isinstance(each, dict) else [each] for each in params]
    tensors = [each[1] if isinstance(each, tuple) else each for entry in entries for each in entry]
    untouched = all(bool((tensor == 1).all()) for tensor in tensors)
    return raised, untouched, _works(group)


@pytest.mark.parametrize("name", LISTS)
def test_statement_31_ranks_with_different_lists_learn_the_first_difference(pool: Pool, name: str) -> None:
    found = pool.run(_differ, 2, name, deadline=DEADLINE)
    assert len({raised for raised, _, _ in found}) == 1, "all ranks raise the same"
    (error, message), untouched, works = found[0]
    assert error == "ValueError" and untouched and works
    for fact in (
        "the ranks disagree on",
        *LISTS[name][3],
        "build the optimizer from the same parameters, in the same order and with the same options, on every rank",
    ):
        assert fact in message


def test_statement_31_the_rank_that_differs_is_named(pool: Pool) -> None:
    for (error, message), untouched, works in pool.run(_differ, 3, "shape", deadline=DEADLINE):
        assert error == "ValueError" and untouched and works
        assert "rank 0 has 'param.1', shape (2, 3)" in message and "but rank 2 has 'param.1', shape (3, 2)" in message


# Groups added later.

GROUPS: dict[str, Bad] = {
    "no dict": Bad(lambda: [_weight()], TypeError, ("a parameter group must be a dict", "got a list")),
    "no params": Bad(lambda: {"lr": 0.1}, ValueError, ('needs the key "params"',)),
    "a set": Bad(lambda: {"params": {_weight()}}, TypeError, ("ordered collection",)),
    "sparse": Bad(lambda: {"params": [_sparse()]}, ValueError, ("only dense parameters",)),
    "not a leaf": Bad(lambda: {"params": [_weight() * 2]}, ValueError, ("non-leaf",)),
    "not tensors": Bad(lambda: {"params": [1]}, TypeError, ("int",)),
}


def _add(group: ProcessGroup, name: str, bad_ranks: tuple[int, ...]) -> tuple[Raised, tuple[int, int], bool, bool]:
    zero = ZeroRedundancyOptimizer([_weight(), _weight(3)], optim.SGD, process_group=group, lr=0.5)
    bad = dist.get_rank(group) in bad_ranks
    raised = _raised(lambda: zero.add_param_group(GROUPS[name].params() if bad else {"params": [_weight(4)]}))
    sizes = len(zero.param_groups), len(zero.optim.param_groups)
    before = _works(group, zero)
    zero.add_param_group({"params": [_weight(5)]})
    return raised, sizes, before, _works(group, zero)


@pytest.mark.parametrize(("world", "bad_ranks"), [(1, (0,)), (2, (0, 1)), (2, (0,)), (2, (1,))])
@pytest.mark.parametrize("name", GROUPS)
def test_statement_72_a_bad_group_is_an_error_on_all_ranks_and_leaves_no_trace(
    pool: Pool, name: str, world: int, bad_ranks: tuple[int, ...]
) -> None:
    found = pool.run(_add, world, name, bad_ranks, deadline=DEADLINE)
    for rank, (raised, sizes, before, after) in enumerate(found):
        if rank in bad_ranks:
            _check_own(raised, GROUPS[name])
        else:
            assert raised[0] == GROUPS[name].error.__name__
            assert f"rank {bad_ranks[0]} failed, so no rank goes on" in raised[1]
        assert sizes == (1, 1) and before and after


def _add_twice(group: ProcessGroup) -> Raised:
    param = _weight()
    zero = ZeroRedundancyOptimizer([param], optim.SGD, process_group=group, lr=0.5)
    raised = _raised(lambda: zero.add_param_group({"params": [param]}))
    assert len(zero.param_groups) == 1 and _works(group, zero)
    return raised


@pytest.mark.parametrize("world", [1, 2])
def test_statement_69_a_parameter_added_again_is_refused(pool: Pool, world: int) -> None:
    for error, message in pool.run(_add_twice, world, deadline=DEADLINE):
        assert error == "ValueError" and "more than one parameter group" in message


def _add_differently(group: ProcessGroup) -> tuple[Raised, bool]:
    zero = ZeroRedundancyOptimizer([_weight()], optim.SGD, process_group=group, lr=0.5)
    raised = _raised(lambda: zero.add_param_group({"params": [_weight(2 + zero.rank)]}))
    return raised, _works(group, zero)


def test_statement_31_different_groups_added_later_are_an_error_on_all_ranks(pool: Pool) -> None:
    for (error, message), works in pool.run(_add_differently, 2, deadline=DEADLINE):
        assert error == "ValueError" and works
        assert "parameter 1" in message and "shape (2,)" in message and "shape (3,)" in message


# Checkpoints.


def _trained(group: ProcessGroup) -> ZeroRedundancyOptimizer:
    zero = ZeroRedundancyOptimizer([_weight(), _weight(3)], optim.SGD, process_group=group, lr=0.5, momentum=0.9)
    assert _works(group, zero)
    return zero


def _to(group: ProcessGroup, to: Any) -> tuple[Raised, bool]:
    zero = _trained(group)
    raised = _raised(lambda: zero.consolidate_state_dict(to=to))
    zero.consolidate_state_dict(to=0)
    return raised, zero.rank != 0 or len(zero.state_dict()["state"]) == 2


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("to", [-1, 2, 7, "0", None, 0.0])
def test_statement_70_a_recipient_outside_the_group_is_refused(pool: Pool, world: int, to: Any) -> None:
    for (error, message), works in pool.run(_to, world, to, deadline=DEADLINE):
        assert error == "ValueError" and works
        assert message == f"`to` must be a rank of the group, 0 to {world - 1}; got {to!r}"


def _to_alone(group: ProcessGroup, to: Any) -> Raised:
    zero = _trained(group)
    return _raised(lambda: zero.consolidate_state_dict(to=to))


def test_statement_70_a_recipient_outside_the_group_costs_no_communication(pool: Pool) -> None:
    (raised,) = pool.run(_to_alone, 1, 3, deadline=DEADLINE)
    assert raised[0] == "ValueError"
    assert [error for error, _ in pool.run(_to_on_one_rank, 2, deadline=DEADLINE)] == ["ValueError", "no call"]


def _to_on_one_rank(group: ProcessGroup) -> Raised:
    zero = _trained(group)
    return _raised(lambda: zero.consolidate_state_dict(to=2)) if zero.rank == 0 else ("no call", "")


def _impatient_to(group: ProcessGroup) -> Raised:
    ranks = dist.get_process_group_ranks(group)
    impatient = dist.new_group(ranks, timeout=timedelta(seconds=1))
    zero = _trained(impatient)
    return _raised(lambda: zero.consolidate_state_dict(to=0 if zero.rank else 2))


def test_statement_72_a_recipient_refused_on_one_rank_ends_the_others_by_the_time_out(pool: Pool) -> None:
    first, second = pool.run(_impatient_to, 2, deadline=DEADLINE)
    assert first[0] == "ValueError"
    assert second[0] not in ("", "ValueError"), second


def _to_each_its_own(group: ProcessGroup) -> tuple[Raised, bool]:
    zero = _trained(group)
    raised = _raised(lambda: zero.consolidate_state_dict(to=zero.rank))
    return raised, _works(group)


def test_statement_72_different_recipients_are_an_error_on_all_ranks(pool: Pool) -> None:
    for (error, message), works in pool.run(_to_each_its_own, 2, deadline=DEADLINE):
        assert error == "ValueError" and works
        assert "the ranks disagree on where the values go: rank 0 has rank 0, but rank 1 has rank 1" in message


def _unconsolidated(group: ProcessGroup) -> tuple[Raised, Raised]:
    zero = _trained(group)
    before = _raised(zero.state_dict)
    zero.consolidate_state_dict(to=0)
    return before, _raised(zero.state_dict)


@pytest.mark.parametrize("world", [1, 2])
def test_statement_69_state_that_was_not_consolidated_here_is_not_shown(pool: Pool, world: int) -> None:
    for rank, (before, after) in enumerate(pool.run(_unconsolidated, world, deadline=DEADLINE)):
        for error, message in [before] + [after] * (rank > 0):
            assert error == "RuntimeError"
            assert "has not been consolidated on this rank" in message
            assert f"call consolidate_state_dict(to={rank}) on all ranks first" in message
        assert rank > 0 or after == ("", "no error")


def _state_dict(shapes: list[list[tuple[int, ...]]], **changes: Any) -> dict[str, Any]:
    """What a plain optimizer with parameters of these shapes, group by group, would have saved."""
    optimizer = optim.SGD([{"params": [_weight(*shape) for shape in group]} for group in shapes], lr=0.1, momentum=0.5)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return {**optimizer.state_dict(), **changes}


_GOOD: list[list[tuple[int, ...]]] = [[(2,), (3,)]]
_BUFFER = {"momentum_buffer": torch.ones(2)}

STATES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "groups": (
        lambda: _state_dict([[(2,)], [(3,)]]),
        ("the state dict has 2 parameter groups, the optimizer has 1",),
    ),
    "group sizes": (
        lambda: _state_dict([[(2,), (3,), (4,)]]),
        ("group 0 of the state dict has 3 parameters, the optimizer's has 2",),
    ),
    "shape": (
        lambda: _state_dict([[(2,), (4,)]]),
        ("state 'momentum_buffer' of parameter 1 has shape (4,), the parameter has shape (3,)",),
    ),
    "unknown index": (
        lambda: _state_dict(_GOOD, state={9: _BUFFER}),
        ("state for parameter 9, which is in none of its groups",),
    ),
    "no groups": (lambda: {"state": {}}, ('needs the keys "state" and "param_groups"', "['state']")),
    "no state": (lambda: {"param_groups": []}, ('needs the keys "state" and "param_groups"',)),
    "no params": (
        lambda: _state_dict(_GOOD, param_groups=[{"lr": 1}]),
        ('group 0 of the state dict has no key "params"',),
    ),
    "no dict": (lambda: [1], ("got list",)),
    "taken apart": (lambda: _state_dict(_GOOD, state={0: None}), ("the state of parameter 0 is None, not a dict",)),
}


def _load(group: ProcessGroup, name: str, bad_ranks: tuple[int, ...]) -> tuple[Raised, bool]:
    zero = _trained(group)
    before = {param: state["momentum_buffer"].clone() for param, state in zero.state.items()}
    rates = [entry["lr"] for entry in zero.param_groups + zero.optim.param_groups]
    raised = ("", "no error")
    if zero.rank in bad_ranks:
        raised = _raised(lambda: zero.load_state_dict(STATES[name][0]()))
    assert [entry["lr"] for entry in zero.param_groups + zero.optim.param_groups] == rates
    assert list(zero.state) == list(before)
    assert all(torch.equal(zero.state[param]["momentum_buffer"], old) for param, old in before.items())
    zero.step()
    zero.load_state_dict(_state_dict(_GOOD))
    return raised, zero.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(("world", "bad_ranks"), [(1, (0,)), (2, (0, 1)), (2, (1,))])
@pytest.mark.parametrize("name", STATES)
def test_statement_69_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(
    pool: Pool, name: str, world: int, bad_ranks: tuple[int, ...]
) -> None:
    for rank, (raised, loaded) in enumerate(pool.run(_load, world, name, bad_ranks, deadline=DEADLINE)):
        assert loaded
        assert raised[0] == ("ValueError" if rank in bad_ranks else "")
        for fact in STATES[name][1]:
            assert rank not in bad_ranks or fact in raised[1]


# Join contexts.


def _bad_joins(group: ProcessGroup) -> tuple[Raised, Raised]:
    other = dist.new_group(dist.get_process_group_ranks(group))
    joinables = [ZeroRedundancyOptimizer([_weight()], optim.SGD, process_group=each, lr=0.5) for each in (group, other)]
    return _raised(lambda: Join([])), _raised(lambda: Join(list(joinables)))


@pytest.mark.parametrize("world", [1, 2])
def test_statement_69_join_refuses_no_joinables_and_several_groups(pool: Pool, world: int) -> None:
    for nothing, several in pool.run(_bad_joins, world, deadline=DEADLINE):
        assert nothing[0] == several[0] == "ValueError"
        assert "process group" in several[1]
