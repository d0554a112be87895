"""Proof mode of `ShardedOptimizer`: correct steps pass, and every difference is reported."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Muon, Optimizer

from tests.helpers.pool import Pool, RankError
from tests.helpers.probed_optimizers import Group, Plain, gradient_of
from tests.helpers.reference import batches, build, train
from zerostep import ShardedOptimizer, VerificationError
from zerostep.comm.exchange import HostExchange

CASES: dict[str, tuple[str, type[Optimizer], dict[str, Any]]] = {
    "adamw": ("mlp", AdamW, {"lr": 0.01}),
    "sgd, bf16 masters": ("mlp", SGD, {"lr": 0.01, "momentum": 0.9, "master_dtype": torch.float32}),
    "muon": ("matrices", Muon, {"lr": 0.01}),
    "channels last": ("convolutions", AdamW, {"lr": 0.01}),
}


def _verified(group: ProcessGroup, case: str, wrapped: bool, reduction: str, gather: str) -> bool:
    name, kind, options = CASES[case]
    bare = build(name).bfloat16() if "bf16" in case else build(name)
    model = DDP(bare, process_group=group) if wrapped else bare
    settings: dict[str, Any] = {"reduction": reduction, "gather": gather, "bucket_mb": 0.0003, "verify": 3}
    optimizer = ShardedOptimizer(model, kind, process_group=group, **settings, **options)
    data = batches(3, dist.get_rank(group), 4, name)
    if "bf16" in case:
        data = [(x if x.dtype == torch.int64 else x.bfloat16(), y.bfloat16()) for x, y in data]
    train(model, optimizer, data[:2])
    unfinished = optimizer._training.verifies
    train(model, optimizer, data[2:])
    return unfinished and not optimizer._training.verifies


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_right_passes_and_is_no_longer_watched(pool: Pool, world: int, case: str) -> None:
    for wrapped in (False, True):
        for reduction, gather in (("scatter", "forward"), ("all", "step")):
            assert all(pool.run(_verified, world, case, wrapped, reduction, gather))


@contextmanager
def _broken(method: str, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """An exchange that hands over something else than it should."""
    right = getattr(HostExchange, method)
    setattr(HostExchange, method, lambda self, memory, bucket: right(self, change(memory), bucket))
    try:
        yield
    finally:
        setattr(HostExchange, method, right)


def _wrong_on_one_rank(group: ProcessGroup, method: str) -> None:
    model = build()
    optimizer = ShardedOptimizer(model, AdamW, process_group=group, verify=True, bucket_mb=0.0003, lr=0.01)
    data = batches(3, dist.get_rank(group), 2)
    train(model, optimizer, data[:1])
    scale = 1.001 if dist.get_rank(group) == 1 else 1.0
    with _broken(method, lambda memory: memory.mul_(scale) if memory.requires_grad is False else memory):
        train(model, optimizer, data[1:])


@pytest.mark.parametrize("method", ["reduce", "gather"])
def test_a_wrong_exchange_is_found_and_the_parameter_is_named(pool: Pool, method: str) -> None:
    with pytest.raises(RankError, match=r"differs from the unsharded optimizer, first in parameter '\w+"):
        pool.run(_wrong_on_one_rank, 2, method, deadline=30)


def _spoilt(grad: Tensor, value: float) -> Tensor:
    found = grad.clone()
    found.view(-1)[::5] = value
    return found


def _not_finite(group: ProcessGroup, kind: type[Optimizer], bad: tuple[float, float], reduction: str) -> bool:
    """Some elements are not finite, on one rank or on two; nobody did anything wrong."""
    model = build()
    options: dict[str, Any] = {"bucket_mb": 0.0003, "verify": 4, "reduction": reduction, "lr": 0.01}
    optimizer = ShardedOptimizer(model, kind, process_group=group, **options)
    for number, batch in enumerate(batches(3, dist.get_rank(group), 4)):
        rank = dist.get_rank(group)
        spoiling = number == 1 and rank < 2
        params = list(model.parameters())[::2] if spoiling else []
        spoilers = [param.register_hook(lambda grad, rank=rank: _spoilt(grad, bad[rank])) for param in params]
        train(model, optimizer, [batch])
        for spoiler in spoilers:
            spoiler.remove()
    return any(not bool(param.isfinite().all()) for param in model.parameters())


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("bad", [(inf, 0.0), (nan, 0.0), (inf, -inf), (-inf, nan)], ids=str)
def test_numbers_that_are_not_finite_pass_too(
    pool: Pool, bad: tuple[float, float], kind: type[Optimizer], world: int
) -> None:
    for reduction in ("scatter", "all"):
        assert all(pool.run(_not_finite, world, kind, bad, reduction))


def _wrong_among_infinities(group: ProcessGroup, finite: float) -> None:
    """One element is infinite, and in one other the exchange is wrong."""
    model = build()
    optimizer = ShardedOptimizer(model, SGD, process_group=group, verify=True, bucket_mb=0.0003, lr=0.01)

    def spoil(memory: Tensor) -> Tensor:
        memory[memory.isfinite().nonzero()[-1]] = finite
        return memory

    model.get_parameter("words.weight").register_hook(lambda grad: _spoilt(grad, inf))
    with _broken("reduce", spoil if dist.get_rank(group) == 1 else lambda memory: memory):
        train(model, optimizer, batches(3, dist.get_rank(group), 1))


@pytest.mark.parametrize("finite", [3.0, inf, nan])
@pytest.mark.parametrize("world", [2, 3])
def test_a_wrong_sum_is_found_among_infinities(pool: Pool, world: int, finite: float) -> None:
    with pytest.raises(RankError, match="differs from the unsharded optimizer"):
        pool.run(_wrong_among_infinities, world, finite, deadline=30)


class Tires(Plain):
    """A rule over all parameters that a trial cannot see: it refuses the shapes of a trial, and begins late."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.seen = 0.0  # not an option: those are compared by all ranks
        if any(tuple(param.shape) == (6, 8) for param in self.param_groups[0]["params"]):
            raise ValueError("not this shape")

    def update(self, group: Group, params: Sequence[Tensor]) -> None:
        self.seen += sum(float(gradient_of(param).abs().mean()) for param in params if param.grad is not None)
        for param in params:
            if param.grad is not None:
                param -= group["lr"] * param.grad * (1.0 if self.seen < 4.0 else 0.5)


def _first_difference(group: ProcessGroup) -> int:
    """The first step at which the sharded and the unsharded run differ, each alone."""
    runs = []
    for plainly in (True, False):
        bare, values = build(), list[list[Tensor]]()
        model = DDP(bare, process_group=group) if plainly else bare
        optimizer = Tires(bare.parameters()) if plainly else _tires(group, bare, 0)
        for batch in batches(3, dist.get_rank(group), 40):
            train(model, optimizer, [batch])
            values.append([param.detach().clone() for param in bare.parameters()])
        runs.append(values)
    same = [all(map(torch.equal, one, other)) for one, other in zip(*runs, strict=True)]
    return same.index(False) + 1


def _tires(group: ProcessGroup, model: nn.Module, verify: int) -> ShardedOptimizer:
    return ShardedOptimizer(model, Tires, process_group=group, bucket_mb=0.0003, verify=verify)


def _alarm(group: ProcessGroup) -> tuple[int, str]:
    expected, model = _first_difference(group), build()
    optimizer = _tires(group, model, 40)
    with pytest.raises(VerificationError) as caught:
        train(model, optimizer, batches(3, dist.get_rank(group), 40))
    return expected, str(caught.value)


def test_the_first_step_is_reported_at_which_separate_runs_differ(pool: Pool) -> None:
    for step, said in pool.run(_alarm, 2):
        assert step > 4
        assert f"step {step} differs from the unsharded optimizer" in said
