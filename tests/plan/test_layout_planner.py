"""From the user's parameters and settings to groups with all options, and which parameters may be cut."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.helpers.reference import ELEMENTWISE, MATRIXWISE
from zerostep.plan.groups import Group, OptimizerClass, normalise
from zerostep.plan.layout import Layout, ParamSpec
from zerostep.plan.layout_planner import LayoutPlanner, Settings, model_positions


def _params() -> list[Tensor]:
    return [nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(4, 4))]


def _plan(kind: OptimizerClass, given: Any, world_size: int = 2, **settings: Any) -> tuple[Layout, list[Group]]:
    planner = LayoutPlanner(kind, {}, Settings(**settings))
    groups = [planner.complete(group) for group in normalise(given)]
    return planner.plan(groups, world_size), groups


def _splittable(kind: OptimizerClass, given: Any, **settings: Any) -> list[bool]:
    return [spec.splittable for spec in _plan(kind, given, **settings)[0].params]


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("partition", "element", ["'element'", "'auto', 'elements', 'parameters'"]),
        ("reduction", None, ["None", "'scatter', 'all'"]),
        ("gather", 1, ["1", "'step', 'forward'"]),
        ("master_dtype", torch.int32, ["torch.int32", "floating-point"]),
        ("reduce_dtype", "float32", ["'float32'", "floating-point"]),
        ("reduce_dtype", torch.complex64, ["torch.complex64", "floating-point"]),
        ("bucket_mb", 0, ["0", "positive"]),
        ("bucket_mb", -1.5, ["-1.5", "positive"]),
        ("bucket_mb", math.nan, ["nan", "positive"]),
        ("bucket_mb", "5", ["'5'", "positive"]),
        ("bucket_mb", math.inf, ["inf", "positive"]),
    ],
)
def test_a_setting_that_means_nothing_is_refused(setting: str, value: Any, told: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Settings(**{setting: value}).check()
    for text in [setting, *told]:
        assert text in str(caught.value)


def test_good_settings_are_accepted() -> None:
    Settings().check()
    Settings("elements", "all", "forward", "step", torch.float32, torch.bfloat16, 1).check()


def test_tiny_buckets_hold_a_parameter_each() -> None:
    layout, _ = _plan(optim.SGD, _params(), bucket_mb=1e-7)
    assert len(layout.buckets) == 3


def test_buckets_are_counted_in_megabytes() -> None:
    params = [nn.Parameter(torch.empty(1 << 17)) for _ in range(4)]
    assert len(_plan(optim.SGD, params, bucket_mb=2)[0].buckets) == 1
    assert len(_plan(optim.SGD, params, bucket_mb=1)[0].buckets) == 3
    assert len(_plan(optim.SGD, params, bucket_mb=0.5)[0].buckets) == 4


def _bucket_bytes(specs: list[ParamSpec], world_size: int = 2, **settings: Any) -> int:
    return LayoutPlanner(optim.SGD, {}, Settings(**settings))._bucket_bytes(specs, [4] * len(specs), world_size)


def _sized(megabytes: int, device: str, trainable: bool = True) -> ParamSpec:
    return ParamSpec(f"{device}.{megabytes}", (megabytes << 18,), "float32", device, trainable=trainable)


@pytest.mark.parametrize(("megabytes", "bucket"), [(1, 1), (4, 1), (8, 2), (20, 5), (100_000, 5)])
def test_buckets_on_the_host_are_small_whatever_the_model(megabytes: int, bucket: int) -> None:
    assert _bucket_bytes([_sized(megabytes, "cpu:0")]) == bucket << 20


def test_buckets_follow_the_model_and_not_the_groups() -> None:
    """Groups by kind, as for weight decay: what backward makes last must not be awaited first."""
    params = [torch.nn.Parameter(torch.zeros(16, 16) if place % 2 else torch.zeros(256)) for place in range(8)]
    groups = [{"params": params[0::2]}, {"params": params[1::2]}]
    positions = model_positions(params)
    layout = LayoutPlanner(optim.SGD, {}, Settings(bucket_mb=2 / 1024), positions).plan(groups, 2)
    given = params[0::2] + params[1::2]
    places = [[positions[given[slot.param]] for slot in bucket.slots] for bucket in layout.buckets]
    assert len(places) > 3
    assert [min(each) for each in places] == sorted((min(each) for each in places), reverse=True)
    assert max(max(each) - min(each) for each in places) <= 1


@pytest.mark.parametrize(("megabytes", "bucket"), [(1, 25), (8 * 25, 25), (8 * 26, 26), (8 * 100, 100), (100_000, 100)])
def test_buckets_on_an_accelerator_grow_with_the_model(megabytes: int, bucket: int) -> None:
    assert _bucket_bytes([_sized(megabytes, "cuda:0")]) == bucket << 20


@pytest.mark.parametrize(("ranks", "kibibytes"), [(2, 1024), (16, 1024), (17, 17 * 64), (1024, 64 * 1024)])
def test_parts_of_many_ranks_are_worth_a_message(ranks: int, kibibytes: int) -> None:
    assert _bucket_bytes([_sized(2, "cpu:0")], ranks) == kibibytes << 10
    assert _bucket_bytes([_sized(2, "cuda:0")], ranks) == 25 << 20
    assert _bucket_bytes([_sized(2, "cpu:0")], ranks, bucket_mb=0.5) == 1 << 19


def test_only_trained_parameters_make_buckets_larger() -> None:
    assert _bucket_bytes([_sized(8 * 40, "cuda:0"), _sized(8 * 50, "cuda:0", trainable=False)]) == 40 << 20


@pytest.mark.parametrize("device", ["cpu:0", "cuda:0"])
def test_a_size_that_was_asked_for_is_taken(device: str) -> None:
    assert _bucket_bytes([_sized(32 * 50, device)], bucket_mb=1.5) == 3 << 19


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_parameters_are_cut_where_the_class_allows(name: str) -> None:
    kind = partial(ELEMENTWISE[name].kind, **ELEMENTWISE[name].options)
    assert _splittable(ELEMENTWISE[name].kind, _params()) == _splittable(kind, _params()) == [True] * 3
    assert _splittable(kind, _params(), partition="elements") == [True] * 3
    assert _splittable(kind, _params(), partition="parameters") == [False] * 3


@pytest.mark.parametrize("name", MATRIXWISE)
def test_parameters_stay_whole_where_the_class_needs_that(name: str) -> None:
    matrices = [param for param in _params() if param.dim() == 2]
    assert _splittable(MATRIXWISE[name].kind, matrices) == [False] * 2
    assert _splittable(MATRIXWISE[name].kind, matrices, partition="elements") == [True] * 2


class _Renamed(optim.AdamW):
    pass


class _RenamedSgd(optim.SGD):
    pass


@pytest.mark.parametrize("kind", [_RenamedSgd, _Renamed])
def test_a_subclass_is_tried(kind: OptimizerClass) -> None:
    assert _splittable(kind, _params()) == [True] * 3


def test_a_group_may_name_a_class_of_its_own() -> None:
    matrix, vector, other = _params()
    given = [{"params": [matrix, other], "optimizer_class": optim.Muon, "lr": 0.5}, {"params": [vector]}]
    layout, groups = _plan(optim.AdamW, given)
    assert [(spec.splittable, spec.group) for spec in layout.params] == [(False, 0), (False, 0), (True, 1)]
    assert "ns_steps" in groups[0] and "betas" not in groups[0] and groups[0]["lr"] == 0.5
    assert "betas" in groups[1] and "ns_steps" not in groups[1]


def test_defaults_are_for_the_common_class_alone() -> None:
    matrix, vector, _ = _params()
    planner = LayoutPlanner(optim.AdamW, {"betas": (0.5, 0.6), "lr": 0.25}, Settings())
    muon = planner.complete({"params": [matrix], "optimizer_class": optim.Muon})
    adam = planner.complete({"params": [vector], "eps": 0.125})
    assert muon["lr"] == optim.Muon([matrix]).defaults["lr"]
    assert (adam["betas"], adam["lr"], adam["eps"]) == ((0.5, 0.6), 0.25, 0.125)


def test_what_a_group_says_goes_before_the_defaults() -> None:
    planner = LayoutPlanner(optim.SGD, {"lr": 0.25}, Settings())
    assert planner.complete({"params": _params(), "lr": 2.0})["lr"] == 2.0


def test_a_class_that_looks_at_all_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LBFGS looks at all parameters at once.*use it without sharding"):
        _plan(optim.LBFGS, _params())
    with pytest.raises(ValueError, match="LBFGS"):
        _plan(optim.SGD, [{"params": _params(), "optimizer_class": optim.LBFGS}])


@pytest.mark.parametrize("kind", [None, 5, "AdamW"])
def test_what_is_no_class_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=f"optimizer_class must be an optimizer class, got {kind!r}"):
        _plan(kind, _params())


def test_options_that_the_class_refuses_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        LayoutPlanner(optim.SGD, {"lr": -1.0}, Settings()).complete({"params": _params()})
    with pytest.raises(TypeError, match="unknown"):
        LayoutPlanner(optim.SGD, {"unknown": 1}, Settings()).complete({"params": _params()})


def test_what_the_user_gave_stays_as_it_was() -> None:
    params = _params()
    given = {"params": params}
    _, (completed,) = _plan(optim.AdamW, [given])
    assert list(given) == ["params"] and given["params"] is params
    assert [id(param) for param in completed["params"]] == [id(param) for param in params]
    assert all(param.grad is None and torch.equal(param, torch.ones_like(param)) for param in params)


def test_parameters_have_names_that_are_their_own() -> None:
    planner = LayoutPlanner(optim.SGD, {}, Settings())
    groups = [planner.complete({"params": _params()}) for _ in range(2)]
    names = [spec.name for spec in planner.plan(groups, 2).params]
    assert names == [f"param.{number}" for number in range(6)]
    later = planner.plan(groups[:1], 2, group_offset=2, param_offset=6)
    assert [(spec.name, spec.group) for spec in later.params] == [(f"param.{6 + i}", 2) for i in range(3)]


def test_given_names_are_kept() -> None:
    layout, _ = _plan(optim.SGD, list(nn.Linear(3, 2).named_parameters()))
    assert [spec.name for spec in layout.params] == ["weight", "bias"]
