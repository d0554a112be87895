"""Proof mode of `ShardedOptimizer`: what is right passes, and whatever goes wrong is found and named."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Muon, Optimizer

from tests.pool import Pool, RankError
from tests.reference import batches, build, train
from zerostep import ShardedOptimizer
from zerostep.exchange import HostExchange

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
    unfinished = optimizer._running.witness is not None
    train(model, optimizer, data[2:])
    return unfinished and optimizer._running.witness is None


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
