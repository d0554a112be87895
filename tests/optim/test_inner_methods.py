"""Methods that only the inner optimizer's class has, such as `train()` and `eval()` of schedule-free optimizers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Optimizer

from tests.helpers.mode_optimizers import Averaging, MatrixAveraging, Methods
from tests.helpers.overlap import EACH_HOOK, overlapped
from tests.helpers.pool import Pool
from tests.helpers.probed_optimizers import (
    Adapts,
    ClipsAll,
    Distance,
    HiddenDistance,
    LooksAhead,
    Plain,
    SharpnessAware,
)
from tests.helpers.reference import Batch, assert_same_bits, assert_same_state_dict, build
from tests.helpers.sharding import Contest, backward, in_ddp, series, sharded, values
from zerostep import ShardedOptimizer, StepMismatchError, ZeroRedundancyOptimizer

BARE = ("bare scatter", "bare all")


def _train_and_evaluate(model: nn.Module, optimizer: Any, data: list[Batch]) -> list[Any]:
    """Losses in evaluation mode, with the option that says so, at different points of the steps."""
    found: list[Any] = []
    for number, batch in enumerate(data):
        optimizer.train()
        optimizer.zero_grad()
        backward(model, batch)
        if number % 3 == 1:
            optimizer.eval()
            optimizer.train()
        optimizer.step()
        if number % 2:
            optimizer.eval()
            with torch.no_grad():
                found.append(model(batch[0]).sum().item())
        found += [(group["train_mode"], group["k"], group["weight_sum"]) for group in optimizer.param_groups]
    return found


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [{"params": named[:2]}, {"params": named[2:], "lr": 0.02}]


def _compare(group: ProcessGroup, kind: type[Optimizer], ways: tuple[str, ...], ours: dict[str, Any]) -> None:
    contest = Contest(kind=kind, options={"lr": 0.05}, groups=_two_groups, ways=ways, ours=ours)
    contest.run(group, _train_and_evaluate, steps=7)


@pytest.mark.parametrize("kind", [Averaging, MatrixAveraging])
@pytest.mark.parametrize(
    ("ways", "ours"),
    [
        (("bare scatter", "bare all", "wrapped scatter", "wrapped all"), {}),
        (BARE, {"gather": "forward"}),
        (BARE, {"partition": "parameters", "verify": 7}),
        (BARE, {"gather": "forward", "verify": True}),
    ],
    ids=str,
)
def test_modes_of_the_sharded_optimizer_equal_plain(
    pool: Pool, kind: type[Optimizer], ways: tuple[str, ...], ours: dict[str, Any]
) -> None:
    pool.run(_compare, 2, kind, ways, ours)


def _in_backward(group: ProcessGroup) -> tuple[list[Any], dict[str, Tensor]]:
    plain, ours = build(), build()
    optimizer = sharded(group, ours, Averaging, update="backward")
    pairs: list[tuple[nn.Module, Any]] = [(in_ddp(group, plain), Averaging(plain.parameters())), (ours, optimizer)]
    for batch in series(group, 5):
        for model, each in pairs:
            each.train()
            each.zero_grad()
            backward(model, batch)
            each.step()
            each.eval()
        assert_same_bits(values(ours), values(plain))
    return [optimizer.param_groups[0]["k"]], values(ours)


def test_modes_with_updates_inside_backward(pool: Pool) -> None:
    first, second = pool.run(_in_backward, 2)
    assert first[0] == second[0] == [5]
    assert_same_bits(first[1], second[1])


def _masters(group: ProcessGroup) -> dict[str, Tensor]:
    model = build().bfloat16()
    optimizer: Any = sharded(group, model, Averaging, master_dtype=torch.float32, verify=True)
    for batch in series(group, 5):
        optimizer.train()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1].bfloat16()).backward()
        optimizer.step()
        before = values(model)
        optimizer.eval()
        optimizer.synchronize()
    assert not all(torch.equal(before[name], value) for name, value in values(model).items())
    for entry in optimizer.state.values():
        assert {value.dtype for value in entry.values()} == {torch.float32}
    return values(model)


def test_modes_change_masters_and_the_parameters_follow(pool: Pool) -> None:
    first, second = pool.run(_masters, 2)
    assert_same_bits(first, second)


def _zero(group: ProcessGroup, views: bool) -> None:
    plain, ours = in_ddp(group, build()), in_ddp(group, build())
    reference = Averaging(_two_groups(plain.module))
    optimizer = ZeroRedundancyOptimizer(
        _two_groups(ours.module), Averaging, process_group=group, parameters_as_bucket_view=views
    )
    data = series(group, 6)
    assert _train_and_evaluate(ours, optimizer, data) == _train_and_evaluate(plain, reference, data)
    assert_same_bits(values(ours), values(plain))
    for to in range(dist.get_world_size(group)):
        optimizer.consolidate_state_dict(to)
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        assert_same_state_dict(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_modes_of_the_drop_in_equal_plain(pool: Pool, world: int, views: bool) -> None:
    pool.run(_zero, world, views)


def _overlap(group: ProcessGroup, hook: str) -> None:
    plain, ours = in_ddp(group, build()), in_ddp(group, build())
    reference = Averaging(plain.module.parameters())
    optimizer: Any = overlapped(ours, hook, Averaging, lr=0.05)
    for batch in series(group, 5):
        for ddp, each in ((plain, reference), (ours, optimizer)):
            each.train()
            each.zero_grad()
            backward(ddp, batch)
            if each is reference:
                each.step()
            each.eval()
        assert_same_bits(values(ours), values(plain))


@EACH_HOOK
def test_modes_with_steps_inside_backward_equal_plain(pool: Pool, hook: str) -> None:
    pool.run(_overlap, 2, hook)


def _frozen(group: ProcessGroup, kind: type) -> dict[str, Tensor]:
    """Parameters that are trained no more still change with the mode, on all ranks."""
    model = build()
    optimizer: Any = (
        sharded(group, model, Averaging)
        if kind is ShardedOptimizer
        else ZeroRedundancyOptimizer(model.parameters(), Averaging, process_group=group)
    )
    ddp = model if kind is ShardedOptimizer else in_ddp(group, model)
    optimizer.train()
    for batch in series(group, 3):
        optimizer.zero_grad()
        backward(ddp, batch)
        optimizer.step()
    optimizer.zero_grad()
    model.requires_grad_(False)
    model.last.requires_grad_(True)
    before = values(model)
    optimizer.eval()
    assert not torch.equal(before["words.weight"], values(model)["words.weight"])
    return values(model)


@pytest.mark.parametrize("kind", [ShardedOptimizer, ZeroRedundancyOptimizer])
def test_a_mode_changes_frozen_parameters_on_all_ranks(pool: Pool, kind: type) -> None:
    first, second = pool.run(_frozen, 2, kind)
    assert_same_bits(first, second)


def _both(group: ProcessGroup, kind: Any = Methods) -> list[tuple[nn.Module, Any]]:
    first, second = build(), build()
    zero = ZeroRedundancyOptimizer(second.parameters(), kind, process_group=group)
    return [(first, sharded(group, first, kind)), (second, zero)]


def _methods(group: ProcessGroup) -> None:
    start = values(build())
    for model, optimizer in _both(group):
        assert optimizer.multiply(3.0) == 6.0
        assert_same_bits(values(model), {name: 3.0 * value for name, value in start.items()})
        assert optimizer.multiply(0.5, note=7.0) == 1.0
        assert optimizer.param_groups[0]["factor"] == 7.0
        assert not hasattr(optimizer, "size")
        assert not hasattr(optimizer, "_owned")
        with pytest.raises(AttributeError, match="has no attribute 'absent'"):
            optimizer.absent()


def test_any_public_method_is_called_on_all_ranks(pool: Pool) -> None:
    pool.run(_methods, 2)


def _absent(group: ProcessGroup) -> None:
    for _, each in _both(group, SGD):
        assert not hasattr(each, "train")
        assert not hasattr(each, "eval")
    model = build()
    named = list(model.named_parameters())
    groups = [{"params": named[:3], "optimizer_class": Averaging}, {"params": named[3:]}]
    optimizer: Any = sharded(group, model, AdamW, groups)
    optimizer.train()
    assert optimizer.param_groups[0]["train_mode"]
    assert "train_mode" not in optimizer.param_groups[1]


def test_only_methods_of_the_inner_classes_exist(pool: Pool) -> None:
    pool.run(_absent, 2)


def _failing(group: ProcessGroup) -> None:
    for _, optimizer in _both(group):
        here = dist.get_rank(group) == 1
        with pytest.raises(ArithmeticError if here else RuntimeError, match="no luck"):
            optimizer.fail(here)
        with pytest.raises(RuntimeError, match="fail\\(\\) of the inner optimizer failed"):
            optimizer.step()


def test_a_method_that_fails_on_one_rank_fails_on_all(pool: Pool) -> None:
    pool.run(_failing, 2)


def _differing(group: ProcessGroup) -> None:
    for _, optimizer in _both(group):
        with pytest.raises(ValueError, match=r"disagree on factor of group 0.*with the same arguments"):
            optimizer.multiply(2.0, note=float(dist.get_rank(group)))


def test_options_that_differ_after_a_method_are_refused(pool: Pool) -> None:
    pool.run(_differing, 2)


def _other_names(group: ProcessGroup) -> None:
    for _, optimizer in _both(group, Averaging):
        with pytest.raises(StepMismatchError, match=r"rank 0 is in eval .*, rank 1 in train"):
            optimizer.train() if dist.get_rank(group) else optimizer.eval()


def test_different_methods_on_different_ranks_are_refused(pool: Pool) -> None:
    pool.run(_other_names, 2)


def _joining(group: ProcessGroup) -> None:
    model = build()
    ddp = DDP(model, process_group=group)
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), Averaging, process_group=group)
    optimizer.train()
    with Join([ddp, optimizer]):
        backward(ddp, series(group, 1)[0])
        with pytest.raises(RuntimeError, match="would not come: call it outside"):
            optimizer.eval()


def test_methods_inside_join_are_refused(pool: Pool) -> None:
    pool.run(_joining, 2)


def _coupled(group: ProcessGroup, kind: type[Optimizer]) -> None:
    for build_optimizer in (sharded, _zero_of):
        with pytest.raises(ValueError, match=f"{kind.__name__} looks at all parameters at once.*without sharding"):
            build_optimizer(group, build(), kind)


def _zero_of(group: ProcessGroup, model: nn.Module, kind: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), kind, process_group=group)


@pytest.mark.parametrize("kind", [Distance, HiddenDistance, Adapts, ClipsAll, SharpnessAware, LooksAhead])
def test_classes_that_look_at_all_parameters_are_refused(pool: Pool, kind: type[Optimizer]) -> None:
    pool.run(_coupled, 2, kind)


def _alone(group: ProcessGroup) -> None:
    plain, ours = build(), build()
    reference, optimizer = Distance(plain.parameters(), lr=1.0), _zero_of(group, ours, Distance)
    for batch in series(group, 5):
        for model, each in ((plain, reference), (ours, optimizer)):
            each.zero_grad()
            backward(model, batch)
            each.step()
    assert_same_bits(values(ours), values(plain))
    with pytest.raises(ValueError, match="looks at all parameters at once"):
        ZeroRedundancyOptimizer(build().parameters(), Distance, process_group=group, overlap_with_ddp=True)


def test_on_one_rank_nothing_is_divided_but_by_steps_inside_backward(pool: Pool) -> None:
    pool.run(_alone, 1)


def _added(group: ProcessGroup) -> None:
    """A group may be the first whose options look at all parameters."""
    first, second = build(), build()
    optimizer = ZeroRedundancyOptimizer(first.parameters(), MayClip, process_group=group)
    with pytest.raises(ValueError, match="MayClip looks at all parameters at once"):
        optimizer.add_param_group({"params": list(second.parameters()), "together": True})
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1


def test_a_further_group_is_tried_too(pool: Pool) -> None:
    pool.run(_added, 2)


class MayClip(ClipsAll):
    """One group may look at all parameters and another not."""

    def __init__(self, params: Any, together: bool = False) -> None:
        Plain.__init__(self, params, together=together)

    def update(self, group: dict[str, Any], params: Any) -> None:
        (ClipsAll if group["together"] else Plain).update(self, group, params)


def _typed(group: ProcessGroup) -> list[bool]:
    """The calls of a program with types: mypy, which `make lint` runs over this file, must know them."""
    model = build()
    cut = ShardedOptimizer(model, Averaging, process_group=group)
    whole = ZeroRedundancyOptimizer(build().parameters(), Averaging, process_group=group)
    plain = ShardedOptimizer(build(), AdamW, process_group=group)
    for optimizer in (cut, whole):
        optimizer.train()
        optimizer.eval()
    with pytest.raises(AttributeError):
        cut.trains()  # type: ignore[attr-defined]
    return [hasattr(each, name) for each in (cut, whole, plain) for name in ("train", "eval")]


def test_type_checkers_know_the_modes_and_find_misspelt_names(pool: Pool) -> None:
    assert pool.run(_typed, 2) == [[True, True, True, True, False, False]] * 2
