"""`audit()` and `audit_every`: one changed bit on one rank is found, with the name of the tensor and of the rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

import zerostep
from tests.helpers.checkpoint_setups import SETUPS, WAYS
from tests.helpers.pool import Pool
from zerostep import AuditError, AuditReport, ShardedOptimizer

MODES = pytest.mark.parametrize("way", ["elements", "parameters", "forward", "wrapped", "zero", "view", "hook"])


def _flip(tensor: Tensor, element: int = -1) -> None:
    """Change the lowest bit of one element, as faulty memory would: no version counter sees it."""
    tensor.data.view(-1).view(torch.uint8).view(tensor.numel(), -1)[element, 0] ^= 1


def _text(act: Callable[[], object]) -> str:
    with pytest.raises(AuditError) as caught:
        act()
    return str(caught.value)


def _healthy(group: ProcessGroup, way: str) -> AuditReport:
    setup = SETUPS["adamw"]
    pair = setup.make(group, way, audit_every=2)
    pair[1].audit()
    setup.train(pair, group, 5)
    report = pair[1].audit()
    assert isinstance(report, AuditReport)
    setup.train(pair, group, 1)
    return report


@MODES
@pytest.mark.parametrize("world", [1, 3])
def test_nothing_is_found_where_nothing_is_wrong(pool: Pool, way: str, world: int) -> None:
    for report in pool.run(_healthy, world, way):
        model = SETUPS["adamw"].build(0)
        assert report.parameters == len(list(model.parameters())) and report.seconds > 0
        assert report.bytes == sum(param.nbytes for param in model.parameters())


def _flipped(group: ProcessGroup, way: str, faulty: int, name: str) -> str:
    setup = SETUPS["adamw"]
    pair = setup.make(group, way)
    setup.train(pair, group)
    pair[1].audit()
    if dist.get_rank(group) == faulty:
        _flip(next(param for found, param in pair[0].named_parameters() if found.endswith(name)))
    return _text(pair[1].audit)


@MODES
@pytest.mark.parametrize("faulty", [0, 1, 2])
def test_a_bit_of_a_parameter(pool: Pool, way: str, faulty: int) -> None:
    """Of its owner, or of another rank."""
    name = next(name for name, _ in SETUPS["adamw"].build(0).named_parameters())
    others = [rank for rank in range(3) if rank != faulty]
    for text in pool.run(_flipped, 3, way, faulty, name):
        who = f"rank {faulty} differs from ranks {others[0]}, {others[1]}, which agree,"
        assert text.startswith(f"the audit after step 2 found that {who} in parameter '{name}': look for")
        assert "load the last checkpoint" in text


@pytest.mark.parametrize("way", ["elements", "zero"])
def test_two_ranks_have_no_majority(pool: Pool, way: str) -> None:
    name = next(name for name, _ in SETUPS["adamw"].build(0).named_parameters())
    for text in pool.run(_flipped, 2, way, 1, name):
        assert f"rank 0 and rank 1 differ in parameter '{name}'" in text


def _regular(group: ProcessGroup, way: str) -> tuple[str, int]:
    """An audit every three steps finds it at the third, unless a step has overwritten it by then."""
    setup = SETUPS["adamw"]
    model = setup.build(0)
    model.register_parameter("frozen", nn.Parameter(torch.ones(5), requires_grad=False))
    pair = WAYS[way](group, model, list(model.named_parameters()), AdamW, lr=0.01, audit_every=3)
    setup.train(pair, group, 1)
    if dist.get_rank(group) == 1:
        _flip(model.get_parameter("frozen"))
    setup.train(pair, group, 1)
    # What is raised inside backward comes out of DDP as a RuntimeError that quotes it.
    with pytest.raises(RuntimeError if way == "hook" else AuditError) as caught:
        setup.train(pair, group, 3)
    return str(caught.value), pair[1].optimizer_view().step


@MODES
def test_an_audit_every_so_many_steps(pool: Pool, way: str) -> None:
    for text, step in pool.run(_regular, 2, way):
        assert "the audit after step 3 found that rank 0 and rank 1 differ in parameter 'frozen'" in text
        assert step == 3


# Masters, options, replicas.


def _master(group: ProcessGroup) -> str:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(torch.bfloat16)
    optimizer = ShardedOptimizer(model, AdamW, process_group=group, lr=0.1, master_dtype=torch.float32)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()
    assert optimizer.audit().bytes > sum(param.nbytes for param in model.parameters())
    if dist.get_rank(group) == 1:
        shard = next(iter(optimizer._training.engine.buckets.shards.values()))
        assert shard.master is not None
        shard.master[0] *= 2
    return _text(optimizer.audit)


def test_a_master_that_its_parameter_does_not_come_from(pool: Pool) -> None:
    for text in pool.run(_master, 2):
        assert "on rank 1, which owns them, 1 elements of parameter" in text
        assert "are not what their masters round to" in text


def _values_set_by_hand(group: ProcessGroup) -> None:
    """A program may set parameters on all ranks: masters follow."""
    model = nn.Linear(8, 8).to(torch.bfloat16)
    optimizer = ShardedOptimizer(model, AdamW, process_group=group, lr=0.1, master_dtype=torch.float32)
    with torch.no_grad():
        model.weight.fill_(0.5)
    optimizer.audit()


def test_parameters_set_by_hand(pool: Pool) -> None:
    pool.run(_values_set_by_hand, 2)


def _option(group: ProcessGroup, way: str) -> str:
    pair = SETUPS["adamw"].make(group, way)
    if dist.get_rank(group) == 0:
        pair[1].param_groups[0]["lr"] *= 1.0001
    return _text(pair[1].audit)


@pytest.mark.parametrize("way", ["elements", "zero", "hook"])
def test_an_option_of_one_rank(pool: Pool, way: str) -> None:
    for text in pool.run(_option, 2, way):
        assert "rank 0 and rank 1 differ in the options of group 0" in text


def _replica(group: ProcessGroup, key: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    setup = SETUPS["adamw"]
    model = setup.build(0)
    optimizer = ShardedOptimizer(model, AdamW, process_group=mesh, lr=0.1)
    setup.train((model, optimizer), group)
    assert optimizer.audit().bytes > 2 * sum(param.nbytes for param in model.parameters())
    if dist.get_rank(group) == 3:
        _flip(next(iter(optimizer.state.values()))[key])
    return _text(optimizer.audit)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_the_state_of_one_replica(pool: Pool, key: str) -> None:
    for text in pool.run(_replica, 4, key):
        assert "rank 1 and rank 3 differ in the state of parameter" in text


# Wrong uses.


def _in_a_join_context(group: ProcessGroup, way: str) -> str:
    setup = SETUPS["adamw"]
    model, optimizer = setup.make(group, way, audit_every=1)
    joined: list[Any] = [model, optimizer] if way in ("wrapped", "zero") else [optimizer]
    with Join(joined):
        setup.train((model, optimizer), group, 1 + dist.get_rank(group))
        if dist.get_rank(group) == 1:
            with pytest.raises(RuntimeError) as caught:
                optimizer.audit()
    optimizer.audit()
    return str(caught.value) if dist.get_rank(group) == 1 else ""


@pytest.mark.parametrize("way", ["elements", "zero", "wrapped"])
def test_inside_join_it_is_refused(pool: Pool, way: str) -> None:
    assert "save, load or audit outside" in pool.run(_in_a_join_context, 2, way)[1]


def _wrong(group: ProcessGroup, way: str, every: Any) -> None:
    with pytest.raises(ValueError, match="audit_every must be a number of steps"):
        SETUPS["adamw"].make(group, way, audit_every=every)
    with pytest.raises(ValueError, match="disagree on audit_every"):
        SETUPS["adamw"].make(group, way, audit_every=2 + dist.get_rank(group))


@pytest.mark.parametrize("way", ["elements", "zero"])
@pytest.mark.parametrize("every", [0, -1, True, 2.0])
def test_a_number_of_steps_that_is_none(pool: Pool, way: str, every: Any) -> None:
    pool.run(_wrong, 2, way, every)


def test_the_names_can_be_imported() -> None:
    assert issubclass(zerostep.AuditError, RuntimeError)
