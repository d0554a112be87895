"""One step of `ZeroRedundancyOptimizer` on real ranks: what it changes and what it leaves alone."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.helpers.pool import OFFSET, Pool, Ranks
from tests.helpers.reference import assert_same_bits, assert_same_state_dict, batches, build, train
from tests.helpers.zero_steps import MODES, SEVERAL, make_params, numbered, set_gradients, storages_of
from zerostep import ZeroRedundancyOptimizer

CHANGED = "requires_grad of some parameters changed: what each rank sends is planned anew"


def _state(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    for to in range(zero.world_size):
        zero.consolidate_state_dict(to=to)
        if to == zero.rank:
            found = zero.state_dict()
    return found


def _step_both(zero: Optimizer, plain: Optimizer, seeds: Sequence[int]) -> None:
    """Steps with the same gradients for both on all ranks."""
    for seed in seeds:
        for optimizer in (zero, plain):
            set_gradients([param for group in optimizer.param_groups for param in group["params"]], seed)
            optimizer.step()


# Statement 20.


@dataclass(frozen=True)
class Setting:
    """One way to put DDP and the optimizer together."""

    before_ddp: bool
    gradient_views: bool
    parameter_views: bool
    two_groups: bool

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        params = list(model.parameters())
        if not self.two_groups:
            return [{"params": params}]
        return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003, "weight_decay": 0.2, "amsgrad": True}]

    def run(self, group: ProcessGroup, make: Callable[[Any], Optimizer]) -> tuple[list[float], DDP, Optimizer]:
        # Ranks start apart: what DDP brings together must reach an optimizer that was there before.
        model = build(seed=dist.get_rank(group))
        early = make(self.groups(model)) if self.before_ddp else None
        ddp = DDP(model, process_group=group, gradient_as_bucket_view=self.gradient_views)
        optimizer = early or make(self.groups(model))
        return train(ddp, optimizer, batches(20, dist.get_rank(group), 20)), ddp, optimizer


SETTINGS = [Setting(*flags) for flags in product((False, True), repeat=4)]


def _every_setting(group: ProcessGroup, kind: type[Optimizer]) -> None:
    plain_runs: dict[Setting, tuple[list[float], DDP, Optimizer]] = {}
    for setting in SETTINGS:
        other = replace(setting, parameter_views=False)  # which a plain optimizer does not have
        if other not in plain_runs:
            plain_runs[other] = other.run(group, lambda groups: kind(groups, lr=0.01))  # type: ignore[call-arg]

        def zero(groups: Any, views: bool = setting.parameter_views) -> Optimizer:
            return ZeroRedundancyOptimizer(groups, kind, group, views, lr=0.01)

        losses, ddp, optimizer = setting.run(group, zero)
        expected, plain_ddp, plain = plain_runs[other]
        assert losses == expected, setting
        assert_same_bits(ddp.named_parameters(), plain_ddp.named_parameters())
        assert isinstance(optimizer, ZeroRedundancyOptimizer)
        assert_same_state_dict(_state(optimizer), plain.state_dict())


@pytest.mark.parametrize("world", [1, 2, 3, OFFSET], ids=str)
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_statement_20_every_order_and_view(pool: Pool, world: int | Ranks, kind: type[Optimizer]) -> None:
    pool.run(_every_setting, world, kind)


def _implementations(group: ProcessGroup, options: dict[str, Any], views: bool) -> None:
    ours, theirs = make_params((7, 5), (33,), (2, 3, 4), ()), make_params((7, 5), (33,), (2, 3, 4), ())
    zero = ZeroRedundancyOptimizer(ours, AdamW, group, views, lr=0.01, **options)
    plain = AdamW(theirs, lr=0.01, **options)
    _step_both(zero, plain, range(10))
    assert_same_bits(numbered(ours), numbered(theirs))
    assert_same_state_dict(_state(zero), plain.state_dict())


@MODES
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"lr": None}], ids=["fused", "foreach", "lr"])
def test_every_implementation_of_an_optimizer_equals_plain(pool: Pool, options: dict[str, Any], views: bool) -> None:
    if "lr" in options:
        pool.run(_tensor_lr, 3, views)
    else:
        pool.run(_implementations, 3, options, views)


def _tensor_lr(group: ProcessGroup, views: bool) -> None:
    ours, theirs = make_params((7, 5), (33,), (2,)), make_params((7, 5), (33,), (2,))
    rate, plain_rate = torch.tensor(0.01), torch.tensor(0.01)
    zero, plain = ZeroRedundancyOptimizer(ours, Adam, group, views, lr=rate), Adam(theirs, lr=plain_rate)
    for seed in range(5):
        _step_both(zero, plain, [seed])
        for each in (rate, plain_rate):
            each.mul_(0.5)
    assert zero.param_groups[0]["lr"] is zero.optim.param_groups[0]["lr"] is rate
    assert_same_bits(numbered(ours), numbered(theirs))


# Statements 21 to 24.


def _owners_decide(group: ProcessGroup, views: bool) -> list[Tensor]:
    shapes = [(4, 3), (9,), (5,), (2, 2), (7,)]
    ours, theirs = make_params(*shapes), make_params(*shapes)
    zero, plain = ZeroRedundancyOptimizer(ours, Adam, group, views, lr=0.1), Adam(theirs, lr=0.1)
    for seed in range(4):
        # Every rank has other gradients; a plain optimizer is given those of the owners.
        set_gradients(ours, 100 * zero.rank + seed)
        for owner in range(zero.world_size):
            drawn = make_params(*shapes)
            set_gradients(drawn, 100 * owner + seed)
            for param, source, target in zip(ours, drawn, theirs, strict=True):
                if zero._param_to_rank[param] == owner:
                    target.grad = source.grad
        if seed >= 2:  # what is not owned need not have a gradient at all
            for param in ours:
                if zero._param_to_rank[param] != zero.rank:
                    param.grad = None
        zero.step()
        plain.step()
        assert_same_bits(numbered(ours), numbered(theirs))
    return [param.detach().clone() for param in ours]


@MODES
@SEVERAL
def test_statement_21_owners_decide_and_replicas_agree(pool: Pool, world: int | Ranks, views: bool) -> None:
    first, *others = pool.run(_owners_decide, world, views)
    for other in others:
        assert_same_bits(numbered(first), numbered(other))


def _no_gradients(group: ProcessGroup, views: bool) -> None:
    ours, theirs = make_params((4,), (3,), (2,)), make_params((4,), (3,), (2,))
    zero, plain = ZeroRedundancyOptimizer(ours, AdamW, group, views, lr=0.1), AdamW(theirs, lr=0.1)
    zero.step()
    plain.step()
    assert_same_state_dict(_state(zero), plain.state_dict())
    for params in (ours, theirs):
        set_gradients(params[:1], 0)
    zero.step()
    plain.step()
    assert_same_bits(numbered(ours), numbered(theirs))
    assert_same_state_dict(_state(zero), plain.state_dict())


@MODES
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_step_without_gradients_is_a_step(pool: Pool, world: int, views: bool) -> None:
    pool.run(_no_gradients, world, views)


class Messages(logging.Handler):
    """The texts that the library logs, with their level."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append((record.levelname, record.getMessage()))


def _freezing(group: ProcessGroup, views: bool) -> None:
    messages = Messages()
    logging.getLogger("zerostep").addHandler(messages)
    ours, theirs = make_params(*[(4, 3)] * 5), make_params(*[(4, 3)] * 5)
    zero = ZeroRedundancyOptimizer(ours, SGD, group, views, lr=0.1, momentum=0.9, weight_decay=0.1)
    plain = SGD(theirs, lr=0.1, momentum=0.9, weight_decay=0.1)
    frozen: list[int] = []
    for number, now in enumerate([[], [], [1, 3], [1, 3], [0, 1], [], [], [0, 1, 2, 3, 4], [2]]):
        for params in (ours, theirs):
            set_gradients(params, number)
            for index, param in enumerate(params):
                param.requires_grad_(index not in now)
                param.grad = None if index in now else param.grad
        zero.step()
        plain.step()
        assert_same_bits(numbered(ours), numbered(theirs))
        assert messages.texts == ([("WARNING", CHANGED)] if now != frozen else []), number
        messages.texts.clear()
        frozen = now
    assert_same_state_dict(_state(zero), plain.state_dict())


@MODES
@pytest.mark.parametrize("world", [1, 2, 3, 4, OFFSET], ids=str)
def test_statement_22_freezing_equals_plain_and_warns(pool: Pool, world: int | Ranks, views: bool) -> None:
    pool.run(_freezing, world, views)


def _storage_untouched(group: ProcessGroup) -> None:
    params = [
        *make_params((4, 3), (5,), (2, 2)),
        nn.Parameter(torch.randn(6, 4).t()),
        nn.Parameter(torch.randn(9)[::3]),
    ]
    params[1].requires_grad_(False)
    before = [
        (param.data_ptr(), param.stride(), storage) for param, storage in zip(params, storages_of(params), strict=True)
    ]
    zero = ZeroRedundancyOptimizer(params, Adam, group, lr=0.1)
    for seed in range(4):
        params[2].requires_grad_(seed % 2 == 0)
        set_gradients([param for param in params if param.requires_grad], seed)
        zero.step()
    added = make_params((8,))[0]
    pointer = added.data_ptr()
    zero.add_param_group({"params": [added]})
    zero.step()
    assert added.data_ptr() == pointer
    after = [
        (param.data_ptr(), param.stride(), storage) for param, storage in zip(params, storages_of(params), strict=True)
    ]
    assert after == before


@SEVERAL
def test_statement_23_without_views_no_storage_changes(pool: Pool, world: int | Ranks) -> None:
    pool.run(_storage_untouched, world)


def _one_stretch(group: ProcessGroup) -> None:
    params = make_params((4, 3), (5,), (2, 2), (7,), (3,), (6,), (2, 5), (8,))
    frozen = [params[1], params[6]]
    for param in frozen:
        param.requires_grad_(False)
    before, values = storages_of(frozen), numbered(params)
    zero = ZeroRedundancyOptimizer(params, SGD, group, parameters_as_bucket_view=True, lr=0.1)
    assert_same_bits(numbered(params), values)
    assert storages_of(frozen) == before
    _assert_one_stretch(zero)
    params[0].requires_grad_(False)
    params[6].requires_grad_(True)
    set_gradients([param for param in params if param.requires_grad], 1)
    zero.step()
    _assert_one_stretch(zero)
    assert params[0].untyped_storage().nbytes() == params[0].nbytes


def _assert_one_stretch(zero: ZeroRedundancyOptimizer) -> None:
    for rank in range(zero.world_size):
        mine = [param for param, owner in zero._param_to_rank.items() if owner == rank]
        places = sorted((param.data_ptr(), param.nbytes) for param in mine if param.requires_grad)
        assert all(first + size == second for (first, size), (second, _) in pairwise(places))
    assert len(set(storages_of(zero._all_params))) == len(zero._all_params)
    assert all(param.untyped_storage().nbytes() == param.nbytes for param in zero._all_params)


@SEVERAL
def test_statement_23_with_views_an_owner_s_parameters_are_one_stretch(pool: Pool, world: int | Ranks) -> None:
    pool.run(_one_stretch, world)


def _strides(group: ProcessGroup) -> None:
    model: nn.Module = build("convolutions")
    params = [*model.parameters(), nn.Parameter(torch.randn(6, 4).t()), nn.Parameter(torch.randn(9)[::3])]
    plain_model: nn.Module = build("convolutions")
    before = [(param.shape, param.stride()) for param in params]
    values = numbered(params)
    assert any(not param.is_contiguous() for param in model.parameters())
    zero = ZeroRedundancyOptimizer(params, Adam, group, parameters_as_bucket_view=True, lr=0.1)
    assert [(param.shape, param.stride()) for param in params][:-1] == before[:-1]
    assert params[-1].shape == before[-1][0]  # has gaps, which a flat tensor does not
    assert_same_bits(numbered(params), values)
    params[0].requires_grad_(False)
    zero.step()
    params[0].requires_grad_(True)
    plain = Adam(plain_model.parameters(), lr=0.1)
    for seed in range(3):
        for each in (params, list(plain_model.parameters())):
            set_gradients(each, seed)
        zero.step()
        plain.step()
    assert [(param.shape, param.stride()) for param in params][:-1] == before[:-1]
    assert_same_bits(model.named_parameters(), plain_model.named_parameters())


@SEVERAL
def test_statement_24_views_keep_values_and_strides(pool: Pool, world: int | Ranks) -> None:
    pool.run(_strides, world)


# Statement 26.


def _rebinding(group: ProcessGroup, views: bool, name: str) -> None:
    ours: nn.Module = build("convolutions")
    theirs: nn.Module = build("convolutions")
    zero = ZeroRedundancyOptimizer(ours.parameters(), SGD, group, views, lr=0.1)
    plain = SGD(theirs.parameters(), lr=0.1)
    _step_both(zero, plain, [0])
    for seed in range(1, 4):
        REBINDINGS[name](ours)
        REBINDINGS[name](theirs)
        _step_both(zero, plain, [seed, 10 + seed])
        assert_same_bits(ours.named_parameters(), theirs.named_parameters())


def _new_values(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = torch.full_like(param, 0.5)


def _new_memory(model: nn.Module) -> None:
    for param in list(model.parameters())[::2]:
        param.data = param.data.clone()


def _with_gaps(model: nn.Module) -> None:
    for param in model.parameters():
        room = torch.empty((*param.shape, 2))
        room[..., 0] = param.detach()
        param.data = room[..., 0]


def _turned(model: nn.Module) -> None:
    for param in model.parameters():
        if param.dim() == 4:
            other = torch.contiguous_format if not param.is_contiguous() else torch.channels_last
            param.data = param.data.contiguous(memory_format=other)


def _doubled(model: nn.Module) -> None:
    other = torch.float32 if next(model.parameters()).dtype == torch.float64 else torch.float64
    for param in model.parameters():
        param.grad = None
        param.data = param.data.to(other)


REBINDINGS: dict[str, Callable[[nn.Module], None]] = {
    "new_values": _new_values,
    "new_memory": _new_memory,
    "with_gaps": _with_gaps,
    "turned": _turned,
    "doubled": _doubled,
}


@MODES
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", REBINDINGS)
def test_statement_26_rebound_parameters_still_equal_plain(pool: Pool, name: str, world: int, views: bool) -> None:
    pool.run(_rebinding, world, views, name)


def _rebinding_on_one_rank(group: ProcessGroup, views: bool) -> list[Tensor]:
    params = make_params((4, 3), (9,), (5,), (2, 2))
    zero = ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1)
    if zero.rank == 1:
        for param in params:
            param.data = torch.randn(param.shape)
    mine = [param for param in params if zero._param_to_rank[param] == zero.rank]
    expected = [param.detach() - 0.1 for param in mine]
    for param in params:
        param.grad = torch.ones_like(param)
    zero.step()
    for param, value in zip(mine, expected, strict=True):
        assert torch.allclose(param, value)
    return [param.detach().clone() for param in params]


@MODES
@SEVERAL
def test_statement_26_rebinding_on_one_rank_leaves_replicas_equal(pool: Pool, world: int | Ranks, views: bool) -> None:
    first, *others = pool.run(_rebinding_on_one_rank, world, views)
    for other in others:
        assert_same_bits(numbered(first), numbered(other))


def _several_devices(group: ProcessGroup, views: bool, devices: Sequence[str]) -> None:
    places = [torch.device(devices[n % 2]) for n in range(6)]
    ours = [nn.Parameter(p.detach().to(d)) for p, d in zip(make_params(*[(5, 3)] * 6), places, strict=True)]
    theirs = [nn.Parameter(p.detach().to(d)) for p, d in zip(make_params(*[(5, 3)] * 6), places, strict=True)]
    zero = ZeroRedundancyOptimizer(ours, Adam, group, views, lr=0.1)
    plain = Adam(theirs, lr=0.1)
    for seed in range(3):
        for params in (ours, theirs):
            drawn = make_params(*[(5, 3)] * 6)
            set_gradients(drawn, seed)
            for param, source in zip(params, drawn, strict=True):
                assert source.grad is not None
                param.grad = source.grad.to(param.device)
        zero.step()
        plain.step()
    assert [param.device for param in ours] == places
    assert_same_bits(numbered(ours), numbered(theirs))


@MODES
@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_statement_30_parameters_on_several_devices(pool: Pool, views: bool) -> None:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    pool.run(_several_devices, 2, views, [f"{kind.type}:0", f"{kind.type}:1"])


# Dtypes, sizes, worlds.


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16)


def _mixed(group: ProcessGroup, views: bool, kind: type[Optimizer]) -> None:
    def draw() -> list[nn.Parameter]:
        found = [make_params((4, 3), (n + 1,), dtype=dtype) for n in range(3) for dtype in DTYPES]
        return [param for pair in found for param in pair]

    ours, theirs = draw(), draw()
    zero = ZeroRedundancyOptimizer(ours, kind, group, views, lr=0.01)
    plain = kind(theirs, lr=0.01)  # type: ignore[call-arg]
    _step_both(zero, plain, range(6))
    assert_same_bits(numbered(ours), numbered(theirs))
    assert_same_state_dict(_state(zero), plain.state_dict())


@MODES
@SEVERAL
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_mixed_dtypes_equal_plain(pool: Pool, world: int | Ranks, views: bool, kind: type[Optimizer]) -> None:
    pool.run(_mixed, world, views, kind)


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one": [(5,)],
    "scalar": [(), (2,)],
    "empty_first": [(0,), (4, 3)],
    "empty_last": [(4, 3), (0, 7)],
    "empty_between": [(4,), (0,), (3,), (2, 0, 2), (5,), ()],
    "only_empty": [(0,), (0, 3)],
}


def _sizes(group: ProcessGroup, views: bool, name: str) -> None:
    ours, theirs = make_params(*SHAPES[name]), make_params(*SHAPES[name])
    zero, plain = ZeroRedundancyOptimizer(ours, Adam, group, views, lr=0.1), Adam(theirs, lr=0.1)
    _step_both(zero, plain, range(3))
    for params in (ours, theirs):
        params[0].requires_grad_(False)
        params[0].grad = None
    zero.step()
    plain.step()
    for params in (ours, theirs):
        params[0].requires_grad_(True)
    _step_both(zero, plain, range(3, 6))
    assert_same_bits(numbered(ours), numbered(theirs))
    assert_same_state_dict(_state(zero), plain.state_dict())
    zero.load_state_dict(plain.state_dict())
    _step_both(zero, plain, range(6, 9))
    assert_same_bits(numbered(ours), numbered(theirs))
    assert_same_state_dict(_state(zero), plain.state_dict())


@MODES
@pytest.mark.parametrize("world", [1, 2, 3, 4, OFFSET], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_few_and_empty_parameters_equal_plain(pool: Pool, name: str, world: int | Ranks, views: bool) -> None:
    pool.run(_sizes, world, views, name)
