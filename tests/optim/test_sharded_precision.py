"""Low precision under `ShardedOptimizer`: fp32 masters and fp32 sums."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import AdamW

from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, assert_same_bits, assert_same_state_dict, train
from tests.helpers.sharding import (
    OPTIONS,
    WAYS,
    Contest,
    backward,
    seeded,
    series,
    sum_in_rank_order,
    values,
    whole_state,
    without_masters,
)


class Low(nn.Module):
    """A model in a low precision, from nine numbers to three."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first = nn.Linear(9, 7)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 3)
        self.to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.norm(self.first(inputs.to(self.dtype)))))
        return result.float()


class Masters:
    """A low-precision model beside an AdamW of masters in full precision, written down plainly."""

    def __init__(self, group: ProcessGroup, dtype: torch.dtype, sum_dtype: torch.dtype) -> None:
        self.group, self.sum_dtype = group, sum_dtype
        self.model = seeded(lambda: Low(dtype))
        self.params = list(self.model.parameters())
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizer = AdamW(self.masters, **OPTIONS)

    def train(self, batch: Batch) -> None:
        self.model.zero_grad()
        backward(self.model, batch)
        for param, master in zip(self.params, self.masters, strict=True):
            assert param.grad is not None
            wide = nn.Parameter(torch.empty_like(param, dtype=self.sum_dtype))
            wide.grad = param.grad.to(self.sum_dtype)
            sum_in_rank_order(self.group, [wide])
            master.grad = wide.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)


def _masters(
    group: ProcessGroup, dtype: torch.dtype, way: str, reduce_dtype: torch.dtype | None, meddling: bool = False
) -> None:
    twin = Masters(group, dtype, reduce_dtype or dtype)
    contest = Contest(
        build=lambda: seeded(lambda: Low(dtype)),
        ours={"master_dtype": torch.float32, "reduce_dtype": reduce_dtype},
        groups=lambda model: list(model.parameters()),
    )
    model, optimizer = contest.sharded(group, way)
    for number, batch in enumerate(series(group, 20, "matrices")):
        twin.train(batch)
        train(model, optimizer, [batch])
        if meddling and number == 10:  # a user who sets parameters means them, not the masters
            with torch.no_grad():
                for each in (next(iter(model.parameters())), twin.params[0], twin.masters[0]):
                    each.fill_(0.25)
        assert_same_bits(values(model), values(twin.model))
    assert_same_state_dict(without_masters(whole_state(optimizer)), twin.optimizer.state_dict())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_in_full_precision(pool: Pool, dtype: torch.dtype, way: str, world: int) -> None:
    pool.run(_masters, world, dtype, way, None)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_masters_with_sums_in_full_precision(pool: Pool, world: int) -> None:
    pool.run(_masters, world, torch.bfloat16, "bare scatter", torch.float32)


@pytest.mark.parametrize("way", ["bare scatter", "wrapped all"])
def test_masters_follow_parameters_that_users_set_and_no_others(pool: Pool, way: str) -> None:
    pool.run(_masters, 2, torch.bfloat16, way, None, True)


def _wide_sums(group: ProcessGroup, way: str) -> None:
    """Without masters the sum is rounded once, at the end."""
    contest = Contest(build=lambda: seeded(lambda: Low(torch.bfloat16)), ours={"reduce_dtype": torch.float32})
    model, optimizer = contest.sharded(group, way)
    twin = seeded(lambda: Low(torch.bfloat16))
    plain = AdamW(twin.named_parameters(), **OPTIONS)
    rounded = 0
    for batch in series(group, 6, "matrices"):
        train(model, optimizer, [batch])
        twin.zero_grad()
        backward(twin, batch)
        for param in twin.parameters():
            assert param.grad is not None
            wide, low = nn.Parameter(param.detach().float()), nn.Parameter(param.detach().clone())
            wide.grad, low.grad = param.grad.float(), param.grad.clone()
            sum_in_rank_order(group, [wide])
            sum_in_rank_order(group, [low])
            rounded += int((low.grad != wide.grad.bfloat16()).sum())
            param.grad = wide.grad.bfloat16()
        plain.step()
        assert_same_bits(values(model), values(twin))
    assert rounded > 0 or dist.get_world_size(group) < 3, "the two precisions make no difference here"


@pytest.mark.parametrize("way", ["bare scatter", "wrapped scatter"])
def test_sums_in_full_precision(pool: Pool, way: str) -> None:
    pool.run(_wide_sums, 3, way)


def _bare_wide_all(group: ProcessGroup) -> None:
    _wide_sums(group, "bare all")


def test_sums_in_full_precision_of_whole_gradients(pool: Pool) -> None:
    pool.run(_bare_wide_all, 3)
