"""Parameter groups: accepted forms, refusals, options, and the specs made of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zerostep.plan.groups import all_params, copy_options, normalise, options, param_specs, refuse_sparse, subgroup


def _params(count: int) -> list[Tensor]:
    return [torch.nn.Parameter(torch.zeros(place + 1)) for place in range(count)]


def _same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("wrap", [list, tuple, iter, lambda params: (each for each in params)])
def test_any_iterable_of_tensors_is_one_group(wrap: Callable[[list[Tensor]], Any]) -> None:
    params = _params(3)
    (group,) = normalise(wrap(params))
    assert _same(group["params"], params)


@pytest.mark.parametrize("wrap", [list, tuple, iter])
def test_the_parameters_of_a_group_may_be_any_iterable(wrap: Callable[[list[Tensor]], Any]) -> None:
    params = _params(3)
    (group,) = normalise([{"params": wrap(params), "lr": 0.1}])
    assert isinstance(group["params"], list) and _same(group["params"], params)
    assert group["lr"] == 0.1


def test_groups_are_fresh_dicts() -> None:
    params = _params(2)
    given: dict[str, Any] = {"params": params}
    (group,) = normalise([given])
    assert group is not given and group["params"] is not params


def test_a_single_tensor_is_left_to_torch() -> None:
    (param,) = _params(1)
    assert normalise([{"params": param}])[0]["params"] is param


def test_pairs_are_kept_for_torch() -> None:
    pairs = [("first", torch.zeros(1)), ("second", torch.zeros(2))]
    assert normalise(iter(pairs)) == [{"params": pairs}]


_WANTED = r"iterable of tensors, of \(name, tensor\) pairs or of dicts \(parameter groups\)"


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (torch.zeros(2), TypeError, _WANTED + ".*got a single torch.*Tensor: put it into a list"),
        (torch.nn.Parameter(torch.zeros(2)), TypeError, "got a single torch.FloatTensor"),
        ({torch.zeros(2)}, TypeError, "in a fixed order; got a set, whose order differs between ranks"),
        (frozenset(), TypeError, "got a frozenset"),
        (7, TypeError, _WANTED + "; got a int"),
        (None, TypeError, "got a NoneType"),
        ({"params": []}, TypeError, "got a dict"),
        ([], ValueError, "the parameter list is empty: pass model.parameters"),
        (iter(()), ValueError, "the parameter list is empty"),
        ([1, 2], TypeError, _WANTED + ", all of one kind; got elements of type int"),
        ("ab", TypeError, "got elements of type str"),
        ([torch.zeros(1), {"params": []}], TypeError, "all of one kind; got elements of type dict, torch"),
        ([torch.zeros(1), ("name", torch.zeros(1))], TypeError, "all of one kind; got elements of type torch.*tuple"),
        ([(torch.zeros(1), "name")], TypeError, "got elements of type tuple"),
        ([("a", "b")], TypeError, "got elements of type tuple"),
        ([{"lr": 1, "b": 2}], ValueError, r"""needs the key "params"; one has only \['b', 'lr'\]"""),
        ([{}], ValueError, 'needs the key "params"'),
    ],
)
def test_what_is_no_list_of_parameters_is_refused(params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        normalise(params)


def test_sparse_parameters_are_refused_by_type() -> None:
    refuse_sparse([torch.zeros(2), torch.zeros(2, dtype=torch.float16)])
    with pytest.raises(ValueError, match=r"only dense parameters.*got torch.sparse.FloatTensor: call .to_dense\(\)"):
        refuse_sparse([torch.zeros(2), torch.zeros(2).to_sparse()])


def test_options_are_all_but_the_parameters_and_their_names() -> None:
    assert options({"params": [], "param_names": [], "lr": 1, "extra": 2}) == {"lr": 1, "extra": 2}


def test_options_are_copied_by_position() -> None:
    lr = torch.tensor(0.5)
    source: list[dict[str, Any]] = [{"params": [1], "lr": lr}, {"params": [2], "lr": 3, "new": 4}]
    target: list[dict[str, Any]] = [{"params": [5], "lr": 6, "own": 7}, {"params": [8]}]
    copy_options(source, target)
    assert target == [{"params": [5], "lr": lr, "own": 7}, {"params": [8], "lr": 3, "new": 4}]
    assert target[0]["lr"] is lr


def test_options_of_fewer_groups_are_not_copied() -> None:
    with pytest.raises(ValueError):
        copy_options([{"params": []}], [])


def test_a_share_is_a_copy_with_fewer_parameters() -> None:
    params = _params(3)
    group = {"params": params, "param_names": ["a", "b", "c"], "lr": 1}
    found = subgroup(group, [2, 0])
    assert _same(found["params"], [params[2], params[0]])
    assert found["param_names"] == ["c", "a"] and found["lr"] == 1
    assert len(group["params"]) == 3  # type: ignore[arg-type]
    assert "param_names" not in subgroup({"params": params}, [1])


def test_parameters_are_numbered_through_the_groups() -> None:
    params = _params(3)
    assert _same(all_params([{"params": params[:2]}, {"params": []}, {"params": params[2:]}]), params)


def test_specs_say_what_the_parameters_are() -> None:
    frozen = torch.zeros(2, 3, dtype=torch.bfloat16)
    first, second = param_specs([{"params": _params(1)}, {"params": [frozen], "param_names": ["head.weight"]}])
    assert (first.name, first.shape, first.dtype, first.device) == ("param.0", (1,), "float32", "cpu:0")
    assert (first.group, first.trainable, first.splittable) == (0, True, False)
    assert (second.name, second.shape, second.dtype) == ("head.weight", (2, 3), "bfloat16")
    assert (second.group, second.trainable) == (1, False)


def test_devices_are_numbered_by_first_use() -> None:
    host, other = torch.zeros(1), torch.zeros(1, device="meta")
    assert [spec.device for spec in param_specs([{"params": [other, host, other]}])] == ["meta:0", "cpu:0", "meta:0"]


def test_a_parameter_listed_twice_travels_once() -> None:
    (param,) = _params(1)
    assert [spec.trainable for spec in param_specs([{"params": [param, param]}])] == [True, False]
