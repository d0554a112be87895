"""Parameter groups with a process group of their own: experts that fewer ranks hold than the rest of the model."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, AdamW

from tests.helpers.experts import (
    ALONE,
    NEIGHBOURS,
    PAIRS,
    Mixture,
    Pattern,
    Use,
    always,
    average,
    average_all,
    groups_of,
    loss,
    ours,
    own_group,
    plain,
    tensors,
    true_norm,
    uneven,
)
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits
from zerostep import ShardedOptimizer

ADAM: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
MOMENTUM: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
KINDS = {"adamw": (AdamW, ADAM), "sgd": (SGD, MOMENTUM)}
Sets = tuple[tuple[int, ...], ...]


def models(own: ProcessGroup, number: int, dtype: torch.dtype = torch.float32) -> tuple[Mixture, Mixture]:
    """Ours, whose experts begin with other values on each rank, and one by hand, with those that are sent."""
    first = dist.get_process_group_ranks(own)[0]
    return Mixture(number, dist.get_rank()).to(dtype), Mixture(number, first).to(dtype)


def _training(group: ProcessGroup, kind: str, sets: Sets, pattern: Pattern, settings: dict[str, Any]) -> None:
    own, number = own_group(sets)
    model, reference = models(own, number)
    optimizer_class, options = KINDS[kind]
    optimizer = ours(group, own, model, optimizer_class, options, **settings)
    by_hand, rank = plain(reference, optimizer_class, options), dist.get_rank(group)
    for step in range(STEPS):
        use = pattern(step, rank)
        optimizer.zero_grad()
        found = loss(model, step, rank, use)
        found.backward()
        optimizer.step()
        by_hand.zero_grad()
        expected = loss(reference, step, rank, use)
        expected.backward()
        average_all(reference, group, own)
        by_hand.step()
        assert found.item() == expected.item()
    optimizer.synchronize()
    assert_same_bits(tensors(model), tensors(reference))
    assert optimizer.stats().steps == STEPS


STEPS = 6  # more than the patterns of `uneven`
SETTINGS: dict[str, dict[str, Any]] = {
    "gather=step": {},
    "gather=forward": {"gather": "forward"},
    "update=backward": {"update": "backward"},
    "update=backward, gather=forward": {"update": "backward", "gather": "forward"},
    "one bucket": {"bucket_mb": 1.0},
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*(("adamw", settings) for settings in SETTINGS), *((kind, "gather=forward") for kind in KINDS if kind != "adamw")],
)
def test_training_equals_one_by_hand_to_the_bit(pool: Pool, kind: str, settings: str) -> None:
    pool.run(_training, 4, kind, PAIRS, always, SETTINGS[settings])


@pytest.mark.parametrize("settings", SETTINGS)
def test_ranks_whose_experts_get_no_tokens_keep_the_order(pool: Pool, settings: str) -> None:
    pool.run(_training, 4, "adamw", PAIRS, uneven, SETTINGS[settings])


@pytest.mark.parametrize(
    ("settings", "pattern"), [*((settings, uneven) for settings in SETTINGS), ("gather=forward", always)]
)
def test_every_rank_may_have_experts_of_its_own(pool: Pool, settings: str, pattern: Pattern) -> None:
    pool.run(_training, 4, "adamw", ALONE, pattern, SETTINGS[settings])


def _two_kinds(group: ProcessGroup, settings: dict[str, Any]) -> None:
    """The early expert in pairs, the late one in other pairs, so that each rank shares something with two others."""
    (early, one), (late, other) = own_group(PAIRS), own_group(NEIGHBOURS)
    rank = dist.get_rank(group)
    model, reference = (Mixture(one, rank, other) for _ in range(2))
    groups = [
        {"params": list(model.expert(1).parameters()), "process_group": late},
        {"params": [param for _, param in model.shared]},
        {"params": [model.expert(0).weight], "process_group": early},
        {"params": [model.expert(0).bias], "process_group": early, "lr": 0.01},
    ]
    chosen: dict[str, Any] = {"process_group": group, "bucket_mb": 0.0003, **settings, **MOMENTUM}
    optimizer = ShardedOptimizer(model, SGD, groups, **chosen)
    reference.load_state_dict(model.state_dict())
    others = [param for param in reference.parameters() if param is not reference.expert(0).bias]
    theirs: list[dict[str, Any]] = [{"params": others}, {"params": [reference.expert(0).bias], "lr": 0.01}]
    by_hand = SGD(theirs, **MOMENTUM)
    for step in range(STEPS):
        use = uneven(step, rank)
        for each, each_optimizer in ((model, optimizer), (reference, by_hand)):
            each_optimizer.zero_grad()
            loss(each, step, rank, use).backward()
        optimizer.step()
        average([param for _, param in reference.shared], group, 4)
        average(list(reference.expert(0).parameters()), early, 4)
        average(list(reference.expert(1).parameters()), late, 4)
        by_hand.step()
    optimizer.synchronize()
    assert_same_bits(tensors(model), tensors(reference))


@pytest.mark.parametrize("settings", SETTINGS)
def test_two_kinds_of_experts_in_sets_of_ranks_that_overlap(pool: Pool, settings: str) -> None:
    pool.run(_two_kinds, 4, SETTINGS[settings])


def _masters(group: ProcessGroup) -> None:
    own, number = own_group()
    model, reference = models(own, number, torch.bfloat16)
    optimizer = ours(group, own, model, AdamW, ADAM, master_dtype=torch.float32, reduce_dtype=torch.float32)
    rank, masters = dist.get_rank(group), Mixture(number, dist.get_process_group_ranks(own)[0])
    masters.load_state_dict(reference.state_dict())
    by_hand = plain(masters, AdamW, ADAM)
    for step in range(5):
        for each in (model, reference):
            each.zero_grad()
            each(torch.full((4, 12), 0.1 * (rank + step), dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        for master, low in zip(masters.parameters(), reference.parameters(), strict=True):
            master.grad = low.grad.float()  # type: ignore[union-attr]
        average_all(masters, group, own)
        by_hand.step()
        with torch.no_grad():
            for master, low in zip(masters.parameters(), reference.parameters(), strict=True):
                low.copy_(master)
    assert_same_bits(tensors(model), tensors(reference))


def test_masters_of_experts(pool: Pool) -> None:
    pool.run(_masters, 4)


def _accumulation(group: ProcessGroup, paused: bool) -> None:
    own, number = own_group()
    model, reference = models(own, number)
    optimizer = ours(group, own, model, SGD, MOMENTUM)
    by_hand, rank = plain(reference, SGD, MOMENTUM), dist.get_rank(group)
    for step in range(0, 9, 3):
        optimizer.zero_grad()
        by_hand.zero_grad()
        for number in range(step, step + 3):
            use = uneven(number, rank)
            with optimizer.no_sync() if paused and number < step + 2 else nullcontext():
                loss(model, number, rank, use).backward()
            loss(reference, number, rank, use).backward()
        optimizer.step()
        average_all(reference, group, own)
        by_hand.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        # Each pass is averaged by itself, and the sums are added: another order than the reference's.
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0 if paused else 1e-6)


@pytest.mark.parametrize("paused", [True, False], ids=["no_sync", "several passes"])
def test_gradients_add_up_over_passes(pool: Pool, paused: bool) -> None:
    pool.run(_accumulation, 4, paused)


def _clipping(group: ProcessGroup, norm_type: float, gather: str) -> None:
    own, number = own_group()
    model, reference = models(own, number)
    optimizer = ours(group, own, model, SGD, MOMENTUM, gather=gather)
    by_hand, rank = plain(reference, SGD, MOMENTUM), dist.get_rank(group)
    for step in range(5):
        use = uneven(step, rank) if norm_type == 2.0 else (True, rank in (1, 3))
        optimizer.zero_grad()
        loss(model, step, rank, use).backward()
        by_hand.zero_grad()
        loss(reference, step, rank, use).backward()
        average_all(reference, group, own)
        expected = true_norm(reference, group, own, norm_type)
        limit = expected * (0.5 if step % 2 else 2.0)
        assert optimizer.grad_norm(norm_type).item() == pytest.approx(expected, rel=1e-6)
        assert optimizer.clip_grad_norm_(limit, norm_type).item() == pytest.approx(expected, rel=1e-6)
        for param in reference.parameters():
            if param.grad is not None:
                param.grad.mul_(min(1.0, limit / (expected + 1e-6)))
        optimizer.step()
        by_hand.step()
    optimizer.synchronize()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)  # the norm is summed in another order


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf"), float("-inf"), -1.0])
def test_one_clip_counts_every_element_of_the_job_once(pool: Pool, norm_type: float) -> None:
    pool.run(_clipping, 4, norm_type, "step")


def test_clipping_with_late_parameters(pool: Pool) -> None:
    pool.run(_clipping, 4, 2.0, "forward")


def _scaler(group: ProcessGroup, gather: str, order: int) -> list[float]:
    """A number that is not finite in the expert of rank 1 makes all ranks skip, and only then."""
    own, number = own_group()
    model, _ = models(own, number)
    groups = groups_of(model, own, **MOMENTUM)[::order]
    settings: dict[str, Any] = {"gather": gather}
    optimizer = ShardedOptimizer(model, SGD, groups, process_group=group, bucket_mb=0.0003, **settings)
    scaler, rank = GradScaler("cpu", init_scale=8.0, growth_interval=1000), dist.get_rank(group)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        found = loss(model, step, rank, (rank != 0, True))
        if step == 1 and rank == 1:
            found = found + model.expert(0).weight.sum() * float("inf")
        before = tensors(model)
        scaler.scale(found).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        changed = any(not torch.equal(before[name], value) for name, value in tensors(model).items())
        assert changed == (step != 1)
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("order", [1, -1], ids=["experts last", "experts first"])
@pytest.mark.parametrize("gather", ["step", "forward"])
def test_what_a_scaler_finds_in_an_expert_all_ranks_know(pool: Pool, gather: str, order: int) -> None:
    assert pool.run(_scaler, 4, gather, order) == [[8.0, 4.0, 4.0, 4.0]] * 4


def _without_backward(group: ProcessGroup) -> None:
    """A step on gradients set by hand, and one of a rank that has none of its own."""
    own, number = own_group()
    model, reference = models(own, number)
    optimizer, by_hand = ours(group, own, model, SGD, MOMENTUM), plain(reference, SGD, MOMENTUM)
    for step in range(3):
        for each in (model, reference):
            for index, param in enumerate(each.parameters()):
                param.grad = torch.full_like(param, 0.25 * (step + index + dist.get_rank(group)))
        optimizer.step()
        average_all(reference, group, own)
        by_hand.step()
        optimizer.zero_grad()
        by_hand.zero_grad()
    assert_same_bits(tensors(model), tensors(reference))


def test_gradients_that_were_set_by_hand(pool: Pool) -> None:
    pool.run(_without_backward, 4)


def _zeroed_and_dropped(group: ProcessGroup) -> None:
    own, number = own_group()
    model, reference = models(own, number)
    optimizer, by_hand = ours(group, own, model, SGD, MOMENTUM), plain(reference, SGD, MOMENTUM)
    rank = dist.get_rank(group)
    for step in range(5):
        for each in (model, reference):
            each.zero_grad(set_to_none=step % 2 == 0)
            loss(each, step, rank, (True, True)).backward()
        if step == 3:  # those of all but the experts
            for each in (model, reference):
                for _, param in each.shared:
                    param.grad = None
        optimizer.step()
        average_all(reference, group, own)
        by_hand.step()
    assert_same_bits(tensors(model), tensors(reference))


def test_gradients_are_dropped_and_zeroed(pool: Pool) -> None:
    pool.run(_zeroed_and_dropped, 4)


def _verified(group: ProcessGroup) -> None:
    own, number = own_group()
    model, _ = models(own, number)
    optimizer, rank = ours(group, own, model, AdamW, ADAM, verify=6), dist.get_rank(group)
    for step in range(8):
        optimizer.zero_grad()
        loss(model, step, rank, uneven(step, rank)).backward()
        optimizer.step()
    report = optimizer.audit()
    assert report.parameters == len(list(model.parameters()))


def test_verification_and_audit(pool: Pool) -> None:
    pool.run(_verified, 4)


def _audited(group: ProcessGroup) -> str:
    own, number = own_group()
    model, _ = models(own, number)
    optimizer, rank = ours(group, own, model, SGD, MOMENTUM), dist.get_rank(group)
    loss(model, 0, rank, (True, True)).backward()
    optimizer.step()
    if rank == 2:
        with torch.no_grad():
            model.expert(0).bias.data[0] += 1.0
    with pytest.raises(RuntimeError) as caught:
        optimizer.audit()
    return str(caught.value)


def test_an_audit_that_finds_experts_apart_fails_on_all_ranks(pool: Pool) -> None:
    texts = pool.run(_audited, 4)
    assert all("experts.early0.bias" in text for text in texts), texts


class Longer(Mixture):
    """With a further layer."""

    def __init__(self, number: int, seed: int) -> None:
        super().__init__(number, seed)
        self.extra = nn.Linear(12, 12, bias=False)
        nn.init.constant_(self.extra.weight, 0.1)


def _added(group: ProcessGroup) -> None:
    own, number = own_group()
    model, reference = (Longer(number, number) for _ in range(2))
    rest = [(name, param) for name, param in model.shared if not name.startswith("extra")]
    groups = [{"params": rest}, {"params": model.own, "process_group": own}]
    optimizer = ShardedOptimizer(model, SGD, groups, process_group=group, bucket_mb=0.0003, **MOMENTUM)
    further: dict[str, Any] = {"lr": 0.3, "momentum": 0.5}
    optimizer.add_param_group({"params": [("extra.weight", model.extra.weight)], **further})
    others = [param for name, param in reference.named_parameters() if not name.startswith("extra")]
    by_hand = SGD([{"params": others}, {"params": [reference.extra.weight], **further}], **MOMENTUM)
    for step in range(3):
        for each in (model, reference):
            each.zero_grad()
            each.extra(each(torch.full((3, 12), 0.1 * (step + dist.get_rank(group))))).square().mean().backward()
        optimizer.step()
        average_all(reference, group, own)
        by_hand.step()
    assert_same_bits(tensors(model), tensors(reference))


def test_a_group_of_all_ranks_is_added(pool: Pool) -> None:
    pool.run(_added, 4)


class Stacked(nn.Module):
    """Experts as one tensor, of which this rank holds a part, as an ordinary parameter or as a DTensor over `mesh`."""

    def __init__(self, number: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            self.first, whole = nn.Linear(12, 12), torch.randn(4, 12, 12)
        local = whole[2 * number : 2 * number + 2].clone()
        self.experts = nn.Parameter(local if mesh is None else DTensor.from_local(local, mesh, [Shard(0)]))

    def forward(self, inputs: Tensor, use: Use) -> Tensor:
        mine = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        hidden = torch.tanh(self.first(inputs))
        return hidden + sum(torch.tanh(hidden @ mine[each]) for each in (0, 1) if use[each])


def _stacked(group: ProcessGroup) -> None:
    """The mesh of the experts lies inside the ranks of the optimizer, which count every element of it once."""
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")), dist.get_rank(group)
    number, own = mesh["ep"].get_local_rank(), mesh["edp"].get_group()
    model, reference = Stacked(number, mesh["ep"]), Stacked(number, None)
    params = [{"params": list(model.first.parameters())}, {"params": [model.experts], "process_group": mesh["edp"]}]
    optimizer = ShardedOptimizer(model, AdamW, params, process_group=group, bucket_mb=0.0003, **ADAM)
    by_hand = AdamW(reference.parameters(), **ADAM)
    shared = list(reference.first.parameters())
    for step in range(4):
        for each, each_optimizer in ((model, optimizer), (reference, by_hand)):
            each_optimizer.zero_grad()
            loss(each, step, rank, (True, rank != 0)).backward()
        average(shared, group, 4)
        average([reference.experts], own, 4)
        found = torch.tensor([param.grad.double().square().sum() for param in shared]).sum() / 4  # type: ignore[union-attr]
        found += reference.experts.grad.double().square().sum() / 2  # type: ignore[union-attr]
        dist.all_reduce(found, group=group)
        assert optimizer.grad_norm().item() == pytest.approx(found.sqrt().item(), rel=1e-6)
        optimizer.step()
        by_hand.step()
    assert isinstance(model.experts, DTensor)
    assert_same_bits({"experts": model.experts.to_local()}, {"experts": reference.experts})
    assert_same_bits(tensors(model.first), tensors(reference.first))


def test_experts_that_are_sharded_over_a_mesh_inside_the_optimizer_s_ranks(pool: Pool) -> None:
    pool.run(_stacked, 4)
