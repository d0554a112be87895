"""Optimizers of other packages, as they are: schedule-free ones work, those with one scale for all are refused."""

import importlib
from typing import Any

import pytest
from torch import nn
from torch.distributed import ProcessGroup

from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, assert_same_bits, build
from tests.helpers.sharding import Contest, backward, in_ddp, series, sharded, values
from tests.optim.test_named_state import check_state_dicts
from zerostep import ZeroRedundancyOptimizer

SCHEDULE_FREE = ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")
COUPLED = [
    ("prodigyopt", "Prodigy"),
    ("prodigyplus", "ProdigyPlusScheduleFree"),
    *(("dadaptation", name) for name in ("DAdaptAdam", "DAdaptLion", "DAdaptSGD", "DAdaptAdaGrad", "DAdaptAdan")),
]


def _kind(package: str, name: str) -> Any:
    return getattr(importlib.import_module(package), name)


def _train(model: nn.Module, optimizer: Any, data: list[Batch]) -> list[Any]:
    found = []
    for number, batch in enumerate(data):
        optimizer.train()
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        if number % 2:
            optimizer.eval()
        found += [(group["train_mode"], group["k"], group["weight_sum"]) for group in optimizer.param_groups]
    optimizer.eval()
    return found


def _schedule_free(group: ProcessGroup, name: str) -> bool:
    kind, data = _kind("schedulefree", name), series(group, 6)
    Contest(kind=kind, options={"lr": 0.02}, ways=("bare scatter", "wrapped all")).run(group, _train, steps=6)
    plain, ours = in_ddp(group, build()), in_ddp(group, build())
    zero = ZeroRedundancyOptimizer(ours.parameters(), kind, process_group=group, lr=0.02)
    assert _train(ours, zero, data) == _train(plain, kind(plain.parameters(), lr=0.02), data)
    assert_same_bits(values(ours), values(plain))
    (cut,) = {spec.splittable for spec in sharded(group, build(), kind)._layout.params}
    return cut


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_optimizers_equal_plain_and_are_cut(pool: Pool, name: str) -> None:
    pytest.importorskip("schedulefree")
    assert pool.run(_schedule_free, 2, name) == [True, True]


def _refused(group: ProcessGroup, package: str, name: str, options: dict[str, Any]) -> None:
    kind = _kind(package, name)
    with pytest.raises(ValueError, match=f"{name} looks at all parameters at once"):
        sharded(group, build(), kind, **options)
    with pytest.raises(ValueError, match=f"{name} looks at all parameters at once"):
        ZeroRedundancyOptimizer(build().parameters(), kind, process_group=group, **options)


@pytest.mark.parametrize("options", [{}, {"lr": 1e-6}, {"lr": 0.1, "d0": 1e-3, "weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize(("package", "name"), COUPLED)
def test_optimizers_with_one_scale_for_all_are_refused(
    pool: Pool, package: str, name: str, options: dict[str, Any]
) -> None:
    pytest.importorskip(package)
    pool.run(_refused, 2, package, name, options)


def _refused_in_groups(group: ProcessGroup, package: str, name: str) -> None:
    """Groups of one parameter each, of which a rank may own none: some constructors look at the first."""
    kind = _kind(package, name)
    for build_ours in (
        lambda model, groups: sharded(group, model, kind, groups),
        lambda model, groups: ZeroRedundancyOptimizer(groups, kind, process_group=group),
    ):
        model = build()
        with pytest.raises(ValueError, match=f"{name} looks at all parameters at once"):
            build_ours(model, [{"params": [pair]} for pair in model.named_parameters()])


@pytest.mark.parametrize(("package", "name"), COUPLED)
def test_they_are_refused_in_small_groups_too(pool: Pool, package: str, name: str) -> None:
    pytest.importorskip(package)
    pool.run(_refused_in_groups, 2, package, name)


def test_a_counter_under_a_name_is_saved_and_loaded(pool: Pool) -> None:
    pytest.importorskip("pytorch_optimizer")
    pool.run(check_state_dicts, 2, _kind("pytorch_optimizer", "MADGRAD"))
