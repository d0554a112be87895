"""Classes that cannot be built where this rank owns no parameter of some group: refused, on all ranks, by name."""

from typing import Any

import pytest
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from tests.helpers.pool import Pool
from tests.helpers.probed_optimizers import Distance, Plain
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer


class LooksAtFirst(Plain):
    """Looks at a parameter of every group in its constructor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        if lr < 0:
            raise ArithmeticError("a negative rate")
        self.devices = [group["params"][0].device for group in self.param_groups]


class CoupledAndLooks(Distance):
    """The same in a class that is to be refused anyway."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.devices = [group["params"][0].device for group in self.param_groups]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """One parameter in each: a rank of two or more owns none of some group."""
    return [{"params": [pair]} for pair in model.named_parameters()]


def _build(group: ProcessGroup, sharding: bool, kind: type[Optimizer], error: str, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    with pytest.raises(Exception, match=error) as caught:
        if sharding:
            ShardedOptimizer(model, kind, _groups(model), partition="parameters", process_group=group, **options)
        else:
            ZeroRedundancyOptimizer(_groups(model), kind, process_group=group, **options)
    assert isinstance(caught.value, ValueError if not options else (ArithmeticError, RuntimeError))


@pytest.mark.parametrize("sharding", [True, False], ids=["sharded", "zero"])
@pytest.mark.parametrize(
    ("kind", "error", "options"),
    [
        (LooksAtFirst, r"LooksAtFirst cannot be built on a rank that owns no parameter of some group", {}),
        (CoupledAndLooks, r"CoupledAndLooks looks at all parameters at once", {}),
        (LooksAtFirst, r"a negative rate", {"lr": -1.0}),
    ],
    ids=["needs members", "coupled", "other error"],
)
def test_all_ranks_are_told_what_the_class_lacks(
    pool: Pool, sharding: bool, kind: type[Optimizer], error: str, options: dict[str, Any]
) -> None:
    pool.run(_build, 2, sharding, kind, error, options)


def _build_whole(group: ProcessGroup) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    ShardedOptimizer(model, LooksAtFirst, partition="elements", process_group=group)
    ZeroRedundancyOptimizer(model.parameters(), LooksAtFirst, process_group=group)


def test_with_parameters_for_every_rank_it_is_built(pool: Pool) -> None:
    pool.run(_build_whole, 2)
