"""Experts with a process group of their own: state dicts, errors on one rank, and what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from tests.helpers.experts import ALONE, PAIRS, Mixture, average_all, groups_of, loss, ours, own_group, plain, tensors
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, assert_same_state_dict
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer

ADAM: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
MOMENTUM: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


def train(model: nn.Module, optimizer: Any, steps: range, before_step: Any = lambda: None) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, dist.get_rank(), (dist.get_rank() != step % 4, True)).backward()
        before_step()
        optimizer.step()


def own_state(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """The state of all but the experts, and of those that this rank has, on every rank."""
    for to in range(optimizer.world_size):
        optimizer.consolidate_state_dict(to=to)
        if to == optimizer.rank:
            found = optimizer.state_dict()
    return found


# State.


def _state(group: ProcessGroup, sets: Any, reverse: bool) -> None:
    own, number = own_group(sets)
    first = dist.get_process_group_ranks(own)[0]
    model, reference = Mixture(number, first), Mixture(number, first)
    order = -1 if reverse else 1
    groups = groups_of(model, own, **ADAM)[::order]
    optimizer = ShardedOptimizer(model, AdamW, groups, process_group=group, bucket_mb=0.0003)
    theirs = [{k: v for k, v in each.items() if k != "process_group"} for each in groups_of(reference, None, **ADAM)]
    by_hand = AdamW(theirs[::order])
    train(model, optimizer, range(3))
    train(reference, by_hand, range(3), lambda: average_all(reference, group, own))
    saved = own_state(optimizer)
    assert all("process_group" not in each for each in saved["param_groups"])
    assert_same_state_dict(saved, by_hand.state_dict())
    assert set(optimizer.state) <= set(model.parameters())
    # Into a new one, which goes on as if nothing had happened.
    resumed = Mixture(number, 77)
    again = ShardedOptimizer(resumed, AdamW, groups_of(resumed, own, **ADAM)[::order], process_group=group)
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(saved)
    train(resumed, again, range(3, 6))
    by_hand.load_state_dict(saved)
    train(reference, by_hand, range(3, 6), lambda: average_all(reference, group, own))
    assert_same_bits(tensors(resumed), tensors(reference))
    stats = again.stats()
    assert stats.elements == sum(param.numel() for param in model.parameters()) and stats.world_size == 4
    assert stats.owned_elements < stats.elements and stats.state_bytes > 0


@pytest.mark.parametrize("reverse", [False, True], ids=["experts last", "experts first"])
@pytest.mark.parametrize("sets", [PAIRS, ALONE], ids=["pairs", "alone"])
def test_state_dicts_have_the_experts_of_the_rank(pool: Pool, sets: Any, reverse: bool) -> None:
    pool.run(_state, 4, sets, reverse)


def _bad_state(group: ProcessGroup) -> None:
    own, number = own_group()
    model = Mixture(number, 0)
    optimizer = ours(group, own, model, AdamW, ADAM)
    train(model, optimizer, range(1))
    saved, before = own_state(optimizer), tensors(model)
    index = saved["param_groups"][1]["params"][0]
    lost = {**saved, "state": {key: value for key, value in saved["state"].items() if key != index}}
    with pytest.raises(ValueError, match=r"no state for 1 of the 4 parameters of group 1, the first is 'experts.early"):
        optimizer.load_state_dict(lost)
    saved["state"][index]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="has shape"):
        optimizer.load_state_dict(saved)
    assert_same_bits(tensors(model), before)
    train(model, optimizer, range(1, 2))


def test_a_state_dict_that_does_not_fit_changes_nothing(pool: Pool) -> None:
    pool.run(_bad_state, 4)


def _mesh(group: ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    own, number = mesh["edp"], mesh["ep"].get_local_rank()
    model, reference = (Mixture(number, number) for _ in range(2))
    optimizer, by_hand = ours(group, own, model, SGD, MOMENTUM), plain(reference, SGD, MOMENTUM)
    train(model, optimizer, range(3))
    train(reference, by_hand, range(3), lambda: average_all(reference, group, own.get_group()))
    assert_same_bits(tensors(model), tensors(reference))


def test_ranks_may_be_given_as_a_mesh(pool: Pool) -> None:
    pool.run(_mesh, 4)


class Counting(nn.Linear):
    """A layer with a buffer, and a parameter that is in no group."""

    count: torch.Tensor

    def __init__(self, value: float) -> None:
        super().__init__(4, 4)
        self.register_buffer("count", torch.tensor(value))
        self.frozen = nn.Parameter(torch.tensor(value), requires_grad=False)


def _buffers(group: ProcessGroup) -> list[float]:
    own, number = own_group()
    layer, expert = Counting(float(dist.get_rank())), Counting(dist.get_rank() + 10.0)
    model = nn.ModuleDict({"all": layer, f"expert{number}": expert})
    groups = [{"params": list(layer.parameters())}, {"params": [expert.weight, expert.bias], "process_group": own}]
    ShardedOptimizer(model, SGD, groups, process_group=group, lr=0.1)
    return [float(each) for each in (layer.count, layer.frozen, expert.count, expert.frozen)]


def test_what_lies_beside_experts_comes_from_their_first_rank(pool: Pool) -> None:
    assert pool.run(_buffers, 4) == [[0.0, 0.0, 10.0 + rank % 2, 10.0 + rank % 2] for rank in range(4)]


# Errors on one rank.


def _failing_update(group: ProcessGroup, settings: dict[str, Any]) -> None:
    own, number = own_group()
    model, reference = (Mixture(number, number) for _ in range(2))
    optimizer, by_hand = ours(group, own, model, AdamW, ADAM, **settings), plain(reference, AdamW, ADAM)
    train(model, optimizer, range(2))
    train(reference, by_hand, range(2), lambda: average_all(reference, group, own))
    saved, weights = own_state(optimizer), tensors(model)
    inner = optimizer._divisions[1].part.inners.all[0]
    if dist.get_rank() == 1:

        def fail(*args: Any) -> None:
            raise ArithmeticError("a bad day")

        inner.step = fail  # type: ignore[method-assign, assignment]
    with pytest.raises((ArithmeticError, RuntimeError), match=r"a bad day|rank 1"):
        train(model, optimizer, range(2, 3))
        optimizer.synchronize()
        train(model, optimizer, range(3, 4))  # where nothing has waited for the status of the others
    with pytest.raises(RuntimeError, match=r"load the last checkpoint"):
        optimizer.consolidate_state_dict()
    if dist.get_rank() == 1:
        del inner.step
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name])
    train(model, optimizer, range(2, 5))
    train(reference, by_hand, range(2, 5), lambda: average_all(reference, group, own))
    optimizer.synchronize()
    assert_same_bits(tensors(model), tensors(reference))


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("gather", ["step", "forward"])
def test_an_error_in_an_expert_s_update_ends_the_step_of_all(pool: Pool, gather: str, update: str) -> None:
    pool.run(_failing_update, 4, {"gather": gather, "update": update})


def _failing_backward(group: ProcessGroup) -> None:
    own, number = own_group()
    model = Mixture(number, number)
    optimizer = ours(group, own, model, AdamW, ADAM)
    train(model, optimizer, range(1))
    saved = own_state(optimizer)
    where = model.expert(1).weight if dist.get_rank() % 2 else model.middle.weight

    def fail(grad: Any) -> None:
        raise ArithmeticError("a bad day")

    handle = where.register_hook(fail)
    with pytest.raises(ArithmeticError):
        train(model, optimizer, range(1, 2))
    handle.remove()
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(1, 4))


def test_a_state_can_be_loaded_after_backward_has_failed(pool: Pool) -> None:
    pool.run(_failing_backward, 4)


def _other_options(group: ProcessGroup) -> str:
    own, number = own_group()
    model = Mixture(number, number)
    optimizer = ours(group, own, model, SGD, MOMENTUM)
    optimizer.param_groups[1]["lr"] = 0.1 + dist.get_rank()
    with pytest.raises(RuntimeError) as caught:
        train(model, optimizer, range(1))
    return str(caught.value)


def test_options_of_experts_must_be_equal_on_all_ranks(pool: Pool) -> None:
    assert all("lr of group 1" in text for text in pool.run(_other_options, 4))


def _other_shapes(group: ProcessGroup) -> str:
    own, number = own_group()
    model = Mixture(number, number)
    if dist.get_rank() == 3:
        model.expert(1).bias = nn.Parameter(torch.zeros(5))
    with pytest.raises(ValueError) as caught:
        ours(group, own, model, SGD, MOMENTUM)
    return str(caught.value)


def test_all_ranks_raise_if_some_disagree_on_their_experts(pool: Pool) -> None:
    texts = pool.run(_other_shapes, 4)
    assert all("the ranks disagree on parameter 3 ('experts.late1.bias')" in text for text in texts), texts


def _other_ranks(group: ProcessGroup) -> str:
    pairs, _ = own_group()
    alone, number = own_group(ALONE)
    with pytest.raises(ValueError) as caught:
        ours(group, alone if dist.get_rank() == 2 else pairs, Mixture(number, number), SGD, MOMENTUM)
    return str(caught.value)


def test_ranks_must_name_the_same_group(pool: Pool) -> None:
    texts = pool.run(_other_ranks, 4)
    assert all("rank 0 has given its parameter groups [1] a process_group with rank 2" in text for text in texts), texts


# Refusals.


def _refused(group: ProcessGroup) -> dict[str, str]:
    own, number = own_group()
    smaller = dist.new_group([0, 1, 2, 3])
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])

    def message(build: Any) -> str:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            build()
        return str(caught.value)

    def build(given: Any = own, **settings: Any) -> ShardedOptimizer:
        return ours(group, given, Mixture(number, number), SGD, MOMENTUM, **settings)

    def in_ddp() -> None:
        model = Mixture(0, 0)
        ShardedOptimizer(DDP(model, process_group=group), SGD, groups_of(model, own, **MOMENTUM))

    def called_in_ddp() -> None:
        model = Mixture(0, 0)
        optimizer = ours(group, own, model, SGD, MOMENTUM)
        ddp = DDP(model, process_group=group)
        assert optimizer is not None
        ddp(torch.zeros(2, 12))

    def all_own() -> None:
        model = Mixture(number, number)
        params = [{"params": list(model.parameters()), "process_group": own}]
        ShardedOptimizer(model, SGD, params, process_group=smaller, lr=0.1)

    def join() -> None:
        with Join([build()]):
            pass

    def drop_in() -> None:
        ZeroRedundancyOptimizer(groups_of(Mixture(number, number), own, **MOMENTUM), SGD, process_group=group, lr=0.1)

    def clip() -> None:
        model = Mixture(number, number)
        optimizer = ours(group, own, model, SGD, MOMENTUM)
        loss(model, 0, dist.get_rank(), (number == 0, number == 0)).backward()
        assert optimizer is not None
        clip_grad_norm_(model.parameters(), 1.0)

    def unscaled() -> None:
        model, scaler = Mixture(number, number), GradScaler("cpu", init_scale=2.0)
        optimizer = ours(group, own, model, SGD, MOMENTUM)
        for _, param in model.shared:
            param.requires_grad_(False)
        scaler.scale(loss(model, 0, dist.get_rank(), (True, True))).backward()
        scaler.unscale_(optimizer)

    elsewhere = next(each for each in (dist.new_group(list(ranks)) for ranks in PAIRS) if dist.get_rank(each) < 0)
    return {
        "bare": message(in_ddp),
        "bare too": message(called_in_ddp),
        "scatter": message(lambda: build(reduction="all")),
        "audit": message(lambda: build(audit_every=2)),
        "dimension": message(lambda: build(mesh)),
        "kind": message(lambda: build("experts")),
        "elsewhere": message(lambda: build(elsewhere)),
        "mesh": message(lambda: build(process_group=mesh)),
        "subset": message(lambda: build(smaller, process_group=own)),
        "none left": message(all_own),
        "adding": message(lambda: build().add_param_group({"params": [], "process_group": own})),
        "join": message(join),
        "drop-in": message(drop_in),
        "torch's clip": message(clip),
        "scaler": message(unscaled),
    }


EXPECTED = {
    "bare": "pass the module without DistributedDataParallel",
    "bare too": "pass the module without DistributedDataParallel",
    "scatter": 'use reduction="scatter"',
    "audit": "call audit() on all ranks",
    "dimension": "is a mesh of 2 dimensions",
    "kind": "got a str",
    "elsewhere": "must be a process group that this rank is a member of",
    "mesh": "not a mesh (replicate, shard)",
    "subset": "must be some of the optimizer's own",
    "none left": "none is left for the ranks of the optimizer",
    "adding": "cannot be added later",
    "join": "Join cannot be used with a process_group",
    "drop-in": "use ShardedOptimizer",
    "torch's clip": "use the optimizer's own clip_grad_norm_()",
    "scaler": "train parameters of the other groups, too",
}


def test_what_is_refused(pool: Pool) -> None:
    for texts in pool.run(_refused, 4):
        assert texts.keys() == EXPECTED.keys()
        for name, part in EXPECTED.items():
            assert part in texts[name], f"{name}: {texts[name]}"
