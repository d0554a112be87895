"""Pipeline stages: each has an optimizer of its own, on ranks of its own, in one job with the others.

Two stages on two replicas each, over torch's own schedules, against plain optimizers with gradients averaged by hand,
and against the model in one piece.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits
from tests.helpers.sharding import Values, gap, sum_in_rank_order
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer

STEPS, ROWS, MICRO, WIDTH = 4, 8, 4, 11
MOST_NORM = 0.05
OPTIONS: dict[str, Any] = {"lr": 0.02}
BUCKETS = 0.0005  # megabytes: several buckets in each stage


class Block(nn.Module):
    """A small block with a norm; used once in every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.second(torch.tanh(self.first(self.norm(inputs))))


def blocks() -> list[nn.Module]:
    """The blocks of the whole model, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return [Block() for _ in range(4)]


def data(replica: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of one replica."""
    generator = torch.Generator().manual_seed(replica)
    return [
        (torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator))
        for _ in range(STEPS)
    ]


@dataclass
class Pipeline:
    """This rank's part of the model in a schedule, and the replicas of that part."""

    model: nn.Module
    schedule: Any
    mesh: DeviceMesh
    names: list[str]

    @property
    def replicas(self) -> ProcessGroup:
        """The ranks with the same stages."""
        return self.mesh["dp"].get_group()

    def run(self, inputs: Tensor, targets: Tensor) -> None:
        """All micro-batches of a batch, forward and backward."""
        first, last = self.mesh["pp"].get_local_rank() == 0, self.mesh["pp"].get_local_rank() == 1
        self.schedule.step(*([inputs] if first else []), **({"target": targets} if last else {}))

    def values(self) -> Values:
        """The parameters of this rank, by their names in the whole model."""
        found = [param.detach().clone() for param in self.model.parameters()]
        return dict(zip(self.names, found, strict=True))


def pipeline(kind: type, interleaved: bool = False) -> Pipeline:
    """Two stages, or four of which each rank has two that are not neighbours, in two replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    position, group, whole = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), blocks()
    numbers = [position, position + 2] if interleaved else [2 * position, 2 * position + 1]
    parts = nn.ModuleList(whole[number] for number in numbers)
    names = [f"{number}.{name}" for number in numbers for name, _ in whole[number].named_parameters()]
    device = torch.device("cpu")
    if interleaved:
        stages = [
            PipelineStage(part, number, 4, device, group=group) for number, part in zip(numbers, parts, strict=True)
        ]
        return Pipeline(parts, kind(stages, MICRO, loss_fn=mse_loss), mesh, names)
    model = nn.Sequential(*parts)
    return Pipeline(model, kind(PipelineStage(model, position, 2, device, group=group), MICRO, mse_loss), mesh, names)


# Trainings.


def with_plain(line: Pipeline, clip: bool) -> None:
    """Plain AdamW, with the replicas' mean of the gradients."""
    optimizer = AdamW(line.model.parameters(), **OPTIONS)
    for batch in data(dist.get_rank(line.replicas)):
        optimizer.zero_grad()
        line.run(*batch)
        sum_in_rank_order(line.replicas, line.model.parameters())
        if clip:
            clip_grad_norm_(line.model.parameters(), MOST_NORM)
        optimizer.step()


def with_sharded(line: Pipeline, clip: bool, pause: bool = True, **options: Any) -> ShardedOptimizer:
    """Ours, reducing once in a step or in the pass of each micro-batch."""
    optimizer = ShardedOptimizer(
        line.model, AdamW, process_group=line.mesh["dp"], bucket_mb=BUCKETS, **{**OPTIONS, **options}
    )
    for batch in data(dist.get_rank(line.replicas)):
        optimizer.zero_grad()
        quiet: AbstractContextManager[None] = optimizer.no_sync() if pause else nullcontext()
        with quiet:
            line.run(*batch)
        if clip:
            optimizer.clip_grad_norm_(MOST_NORM)
        optimizer.step()
    optimizer.synchronize()
    return optimizer


def with_drop_in(line: Pipeline, clip: bool) -> None:
    """The drop-in, which leaves gradients to the user."""
    optimizer = ZeroRedundancyOptimizer(line.model.parameters(), AdamW, process_group=line.replicas, **OPTIONS)
    for batch in data(dist.get_rank(line.replicas)):
        optimizer.zero_grad()
        line.run(*batch)
        sum_in_rank_order(line.replicas, line.model.parameters())
        if clip:
            clip_grad_norm_(line.model.parameters(), MOST_NORM)
        optimizer.step()


def in_one_piece(clip: bool = False) -> tuple[Values, float]:
    """The whole model on this process, with the batches of all replicas; and the last norm of its gradients."""
    model, norm = nn.Sequential(*blocks()), 0.0
    optimizer = AdamW(model.parameters(), **OPTIONS)
    for batches in zip(data(0), data(1), strict=True):
        optimizer.zero_grad()
        mse_loss(model(torch.cat([each[0] for each in batches])), torch.cat([each[1] for each in batches])).backward()
        if clip:
            norm = clip_grad_norm_(model.parameters(), MOST_NORM).item()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}, norm


# Tests.


def _assert_equal(ours: Pipeline, plain: Pipeline, clip: bool) -> None:
    """To the bit; with clipping to the rounding of a norm, which is summed in another order."""
    if clip:
        assert gap(ours.values(), plain.values()) < 1e-6
        return
    assert_same_bits(ours.values(), plain.values())
    whole, _ = in_one_piece()
    assert gap(ours.values(), {name: whole[name] for name in ours.names}) < 1e-5


def _against_plain(group: ProcessGroup, kind: type, clip: bool, interleaved: bool = False, **options: Any) -> Values:
    ours, plain = pipeline(kind, interleaved), pipeline(kind, interleaved)
    with_sharded(ours, clip, **options)
    with_plain(plain, clip)
    _assert_equal(ours, plain, clip)
    return ours.values()


def _assert_stages(found: list[Values]) -> None:
    """Replicas are equal, and every stage has trained parameters of its own."""
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[2], found[3])
    assert not set(found[0]) & set(found[2])
    assert len(found[0]) + len(found[2]) == len(in_one_piece()[0])


WAYS = [
    *((ScheduleGPipe, "step", False), (ScheduleGPipe, "forward", True)),
    *((Schedule1F1B, "step", True), (Schedule1F1B, "forward", False)),
]


@pytest.mark.parametrize(("kind", "gather", "clip"), WAYS)
def test_stages_that_reduce_once_a_step_equal_plain_ones(pool: Pool, kind: type, gather: str, clip: bool) -> None:
    _assert_stages(pool.run(_against_plain, 4, kind, clip, gather=gather))


@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble])
@pytest.mark.parametrize("gather", ["step", "forward"])
def test_two_stages_on_a_rank_share_an_optimizer(pool: Pool, kind: type, gather: str) -> None:
    _assert_stages(pool.run(_against_plain, 4, kind, False, True, gather=gather))


def _each_pass(group: ProcessGroup, kind: type, clip: bool, interleaved: bool = False, **options: Any) -> Values:
    ours, plain = pipeline(kind, interleaved), pipeline(kind, interleaved)
    optimizer = with_sharded(ours, clip, pause=False, **options)
    with_plain(plain, clip)
    # Each micro-batch is averaged by itself, so that a sum has another order.
    assert gap(ours.values(), plain.values()) < 1e-5
    assert optimizer.stats().steps == STEPS
    return ours.values()


@pytest.mark.parametrize(("kind", "gather", "clip"), WAYS)
def test_stages_that_reduce_every_micro_batch_equal_plain_ones(pool: Pool, kind: type, gather: str, clip: bool) -> None:
    _assert_stages(pool.run(_each_pass, 4, kind, clip, gather=gather))


def test_two_stages_on_a_rank_reduce_every_micro_batch(pool: Pool) -> None:
    _assert_stages(pool.run(_each_pass, 4, ScheduleInterleaved1F1B, False, True))


def _updates_in_backward(group: ProcessGroup) -> Values:
    return _against_plain(group, Schedule1F1B, False, update="backward")


def test_stages_are_updated_inside_the_pass_that_step_makes(pool: Pool) -> None:
    _assert_stages(pool.run(_updates_in_backward, 4))


def _added_by_hand(group: ProcessGroup) -> None:
    model = Block()
    optimizer = ShardedOptimizer(model, AdamW, process_group=group)
    mse_loss(model(torch.ones(2, WIDTH)), torch.ones(2, WIDTH)).backward()
    assert model.first.weight.grad is not None
    with pytest.raises(RuntimeError, match=r"inside no_sync\(\) \(tried: add_\)"):
        model.first.weight.grad.add_(torch.ones(17, WIDTH))
    optimizer.step()


def test_a_schedule_that_adds_up_gradients_itself_is_told_of_no_sync(pool: Pool) -> None:
    pool.run(_added_by_hand, 2)  # as zero-bubble schedules do, in whose middle other ranks would be left waiting


def _whole_gradients(group: ProcessGroup) -> Values:
    return _each_pass(group, Schedule1F1B, clip=True, reduction="all")


def test_stages_with_whole_gradients(pool: Pool) -> None:
    _assert_stages(pool.run(_whole_gradients, 4))


def _drop_in(group: ProcessGroup, kind: type, clip: bool) -> Values:
    ours, plain = pipeline(kind), pipeline(kind)
    with_drop_in(ours, clip)
    with_plain(plain, clip)
    assert_same_bits(ours.values(), plain.values())
    return ours.values()


@pytest.mark.parametrize(("kind", "clip"), [(ScheduleGPipe, False), (Schedule1F1B, True)])
def test_the_drop_in_on_stages_equals_plain(pool: Pool, kind: type, clip: bool) -> None:
    _assert_stages(pool.run(_drop_in, 4, kind, clip))


def _clip_all_stages(optimizer: ShardedOptimizer, stages: ProcessGroup, most: float) -> float:
    """Clip by the norm of all stages together, as docs/parallelism.md has it."""
    own = optimizer.grad_norm()
    total = own**2
    dist.all_reduce(total, group=stages)
    optimizer.clip_grad_norm_(float(most * own / total.sqrt()))
    return float(total.sqrt())


def _one_norm(group: ProcessGroup) -> tuple[Values, float]:
    line, total = pipeline(Schedule1F1B), 0.0
    optimizer = ShardedOptimizer(line.model, AdamW, process_group=line.mesh["dp"], bucket_mb=BUCKETS, **OPTIONS)
    for batch in data(dist.get_rank(line.replicas)):
        optimizer.zero_grad()
        with optimizer.no_sync():
            line.run(*batch)
        total = _clip_all_stages(optimizer, line.mesh["pp"].get_group(), MOST_NORM)
        optimizer.step()
    return line.values(), total


def test_stages_can_be_clipped_by_the_norm_of_the_whole_model(pool: Pool) -> None:
    found = pool.run(_one_norm, 4)
    whole, total = in_one_piece(clip=True)
    for values, norm in found:
        assert norm == pytest.approx(total, rel=1e-5)
        assert gap(values, {name: whole[name] for name in values}) < 1e-5
    assert total > 2 * MOST_NORM, "nothing was clipped"
