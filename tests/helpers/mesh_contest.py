"""`ShardedOptimizer` on a mesh against plain torch.optim on the same DTensors, with averages made by hand."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from tests.helpers.meshes import Place, batches, build, largest, local_of, loss_of, train_plain
from zerostep import ShardedOptimizer

STEPS = 5
# On accelerators torch's own default takes no list of DTensors and ordinary tensors.
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "foreach": False}
MOMENTUM: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "foreach": False}

Styles = Callable[[], dict[str, Any]]


def _mixed(model: nn.Module) -> list[dict[str, Any]]:
    """Muon for the matrices, AdamW for the rest."""
    matrices = [(name, param) for name, param in model.named_parameters() if param.dim() == 2]
    others = [(name, param) for name, param in model.named_parameters() if param.dim() != 2]
    return [
        {"params": matrices, "optimizer_class": Muon, "lr": 0.02},
        {"params": others, "optimizer_class": AdamW, **ADAMW},
    ]


class _Both:
    """Two optimizers of torch as one."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.all = []
        for group in groups:
            options = {key: value for key, value in group.items() if key not in ("params", "optimizer_class")}
            self.all.append(group["optimizer_class"](group["params"], **options))

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.all:
            optimizer.step()


def plain_optimizer(kind: Any, model: nn.Module) -> Any:
    if kind == "muon":
        return _Both(_mixed(model))
    return kind(model.named_parameters(), **(ADAMW if kind is AdamW else MOMENTUM))


def sharded(kind: Any, model: nn.Module, here: Place, **settings: Any) -> ShardedOptimizer:
    if kind == "muon":
        return ShardedOptimizer(model, AdamW, _mixed(model), process_group=here.dp, **settings)
    return ShardedOptimizer(model, kind, process_group=here.dp, **settings, **(ADAMW if kind is AdamW else MOMENTUM))


def assert_equal(ours: Any, theirs: Any, close: float = 0.0) -> None:
    for (name, mine), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert type(mine) is type(their), name
        gap = largest(local_of(mine) - local_of(their))
        assert gap <= close * max(1.0, largest(local_of(their))), f"{name} is off by {gap}"


def train(
    model: nn.Module, optimizer: ShardedOptimizer, data: list[tuple[Tensor, Tensor]], most: float | None = None
) -> list[float]:
    norms = []
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if most is not None:
            norms.append(float(optimizer.clip_grad_norm_(most)))
        optimizer.step()
    optimizer.synchronize()
    return norms


def contest(
    here: Place, kind: Any, styles: Styles, settings: dict[str, Any], close: float = 0.0, most: float | None = None
) -> None:
    """Train both for some steps, and compare all that each rank holds; with `most`, gradients are clipped."""
    model, plain = build(here, styles), build(here, styles)
    data = batches(here, STEPS)
    expected = train_plain(here, plain, plain_optimizer(kind, plain), data, most)
    found = train(model, sharded(kind, model, here, bucket_mb=0.0005, **settings), data, most)
    assert found == pytest.approx(expected, rel=1e-6)
    assert most is None or max(expected) > most, "nothing was clipped"
    assert_equal(model, plain, close)
