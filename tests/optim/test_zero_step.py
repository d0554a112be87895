"""One step on real ranks: what it changes, what it leaves alone, what it sends, and whom it refuses."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer, lr_scheduler

from tests.helpers.pool import OFFSET, Pool, Ranks
from tests.helpers.reference import Batch, assert_same_bits, assert_same_state_dict, batches, build, train
from zerostep import ZeroRedundancyOptimizer
from zerostep.comm.transport.group import TAG_DATA

MODES = pytest.mark.parametrize("views", [False, True], ids=["copied", "views"])
SEVERAL = pytest.mark.parametrize("world", [2, 3, 4, OFFSET], ids=str)
CHANGED = "requires_grad of some parameters changed: what each rank sends is planned anew"


def _params(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(tuple(shape), generator=generator, dtype=dtype)) for shape in shapes]


def _set_gradients(params: Sequence[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)


def _numbered(params: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(number): param.detach().clone() for number, param in enumerate(params)}


def _state(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    for to in range(zero.world_size):
        zero.consolidate_state_dict(to=to)
        if to == zero.rank:
            found = zero.state_dict()
    return found


def _storages(params: Sequence[Tensor]) -> list[int]:
    return [param.untyped_storage().data_ptr() for param in params]


def _step_both(zero: Optimizer, plain: Optimizer, seeds: Sequence[int]) -> None:
    """Steps with the same gradients for both on all ranks."""
    for seed in seeds:
        for optimizer in (zero, plain):
            _set_gradients([param for group in optimizer.param_groups for param in group["params"]], seed)
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
    for setting in SETTINGS:

        def zero(groups: Any, views: bool = setting.parameter_views) -> Optimizer:
            return ZeroRedundancyOptimizer(groups, kind, group, views, lr=0.01)

        losses, ddp, optimizer = setting.run(group, zero)
        expected, plain_ddp, plain = setting.run(group, lambda groups: kind(groups, lr=0.01))  # type: ignore[call-arg]
        assert losses == expected, setting
        assert_same_bits(ddp.named_parameters(), plain_ddp.named_parameters())
        assert isinstance(optimizer, ZeroRedundancyOptimizer)
        assert_same_state_dict(_state(optimizer), plain.state_dict())


@pytest.mark.parametrize("world", [1, 2, 3, OFFSET], ids=str)
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_statement_20_every_order_and_view(pool: Pool, world: int | Ranks, kind: type[Optimizer]) -> None:
    pool.run(_every_setting, world, kind)


def _implementations(group: ProcessGroup, options: dict[str, Any], views: bool) -> None:
    ours, theirs = _params((7, 5), (33,), (2, 3, 4), ()), _params((7, 5), (33,), (2, 3, 4), ())
    zero = ZeroRedundancyOptimizer(ours, AdamW, group, views, lr=0.01, **options)
    plain = AdamW(theirs, lr=0.01, **options)
    _step_both(zero, plain, range(10))
    assert_same_bits(_numbered(ours), _numbered(theirs))
    assert_same_state_dict(_state(zero), plain.state_dict())


@MODES
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"lr": None}], ids=["fused", "foreach", "lr"])
def test_every_implementation_of_an_optimizer_equals_plain(pool: Pool, options: dict[str, Any], views: bool) -> None:
    if "lr" in options:
        pool.run(_tensor_lr, 3, views)
    else:
        pool.run(_implementations, 3, options, views)


def _tensor_lr(group: ProcessGroup, views: bool) -> None:
    ours, theirs = _params((7, 5), (33,), (2,)), _params((7, 5), (33,), (2,))
    rate, plain_rate = torch.tensor(0.01), torch.tensor(0.01)
    zero, plain = ZeroRedundancyOptimizer(ours, Adam, group, views, lr=rate), Adam(theirs, lr=plain_rate)
    for seed in range(5):
        _step_both(zero, plain, [seed])
        for each in (rate, plain_rate):
            each.mul_(0.5)
    assert zero.param_groups[0]["lr"] is zero.optim.param_groups[0]["lr"] is rate
    assert_same_bits(_numbered(ours), _numbered(theirs))


# Statements 21 to 24.


def _owners_decide(group: ProcessGroup, views: bool) -> list[Tensor]:
    shapes = [(4, 3), (9,), (5,), (2, 2), (7,)]
    ours, theirs = _params(*shapes), _params(*shapes)
    zero, plain = ZeroRedundancyOptimizer(ours, Adam, group, views, lr=0.1), Adam(theirs, lr=0.1)
    for seed in range(4):
        # Every rank has other gradients; a plain optimizer is given those of the owners.
        _set_gradients(ours, 100 * zero.rank + seed)
        for owner in range(zero.world_size):
            drawn = _params(*shapes)
            _set_gradients(drawn, 100 * owner + seed)
            for param, source, target in zip(ours, drawn, theirs, strict=True):
                if zero._param_to_rank[param] == owner:
                    target.grad = source.grad
        if seed >= 2:  # what is not owned need not have a gradient at all
            for param in ours:
                if zero._param_to_rank[param] != zero.rank:
                    param.grad = None
        zero.step()
        plain.step()
        assert_same_bits(_numbered(ours), _numbered(theirs))
    return [param.detach().clone() for param in ours]


@MODES
@SEVERAL
def test_statement_21_owners_decide_and_replicas_agree(pool: Pool, world: int | Ranks, views: bool) -> None:
    first, *others = pool.run(_owners_decide, world, views)
    for other in others:
        assert_same_bits(_numbered(first), _numbered(other))


def _no_gradients(group: ProcessGroup, views: bool) -> None:
    ours, theirs = _params((4,), (3,), (2,)), _params((4,), (3,), (2,))
    zero, plain = ZeroRedundancyOptimizer(ours, AdamW, group, views, lr=0.1), AdamW(theirs, lr=0.1)
    zero.step()
    plain.step()
    assert_same_state_dict(_state(zero), plain.state_dict())
    for params in (ours, theirs):
        _set_gradients(params[:1], 0)
    zero.step()
    plain.step()
    assert_same_bits(_numbered(ours), _numbered(theirs))
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
    ours, theirs = _params(*[(4, 3)] * 5), _params(*[(4, 3)] * 5)
    zero = ZeroRedundancyOptimizer(ours, SGD, group, views, lr=0.1, momentum=0.9, weight_decay=0.1)
    plain = SGD(theirs, lr=0.1, momentum=0.9, weight_decay=0.1)
    frozen: list[int] = []
    for number, now in enumerate([[], [], [1, 3], [1, 3], [0, 1], [], [], [0, 1, 2, 3, 4], [2]]):
        for params in (ours, theirs):
            _set_gradients(params, number)
            for index, param in enumerate(params):
                param.requires_grad_(index not in now)
                param.grad = None if index in now else param.grad
        zero.step()
        plain.step()
        assert_same_bits(_numbered(ours), _numbered(theirs))
        assert messages.texts == ([("WARNING", CHANGED)] if now != frozen else []), number
        messages.texts.clear()
        frozen = now
    assert_same_state_dict(_state(zero), plain.state_dict())


@MODES
@pytest.mark.parametrize("world", [1, 2, 3, 4, OFFSET], ids=str)
def test_statement_22_freezing_equals_plain_and_warns(pool: Pool, world: int | Ranks, views: bool) -> None:
    pool.run(_freezing, world, views)


def _storage_untouched(group: ProcessGroup) -> None:
    params = [*_params((4, 3), (5,), (2, 2)), nn.Parameter(torch.randn(6, 4).t()), nn.Parameter(torch.randn(9)[::3])]
    params[1].requires_grad_(False)
    before = [
        (param.data_ptr(), param.stride(), storage) for param, storage in zip(params, _storages(params), strict=True)
    ]
    zero = ZeroRedundancyOptimizer(params, Adam, group, lr=0.1)
    for seed in range(4):
        params[2].requires_grad_(seed % 2 == 0)
        _set_gradients([param for param in params if param.requires_grad], seed)
        zero.step()
    added = _params((8,))[0]
    pointer = added.data_ptr()
    zero.add_param_group({"params": [added]})
    zero.step()
    assert added.data_ptr() == pointer
    after = [
        (param.data_ptr(), param.stride(), storage) for param, storage in zip(params, _storages(params), strict=True)
    ]
    assert after == before


@SEVERAL
def test_statement_23_without_views_no_storage_changes(pool: Pool, world: int | Ranks) -> None:
    pool.run(_storage_untouched, world)


def _storage_shared(group: ProcessGroup) -> None:
    params = _params((4, 3), (5,), (2, 2), (7,), (3,), (6,), (2, 5), (8,))
    frozen = [params[1], params[6]]
    for param in frozen:
        param.requires_grad_(False)
    before, values = _storages(frozen), _numbered(params)
    zero = ZeroRedundancyOptimizer(params, SGD, group, parameters_as_bucket_view=True, lr=0.1)
    assert_same_bits(_numbered(params), values)
    assert _storages(frozen) == before
    _assert_shared(zero)
    params[0].requires_grad_(False)
    params[6].requires_grad_(True)
    _set_gradients([param for param in params if param.requires_grad], 1)
    zero.step()
    _assert_shared(zero)
    assert params[0].untyped_storage().nbytes() == params[0].nbytes


def _assert_shared(zero: ZeroRedundancyOptimizer) -> None:
    for rank in range(zero.world_size):
        mine = [param for param, owner in zero._param_to_rank.items() if owner == rank]
        assert len(set(_storages([param for param in mine if param.requires_grad]))) <= 1
    trainable = set(_storages([param for param in zero._all_params if param.requires_grad]))
    frozen = _storages([param for param in zero._all_params if not param.requires_grad])
    assert len(set(frozen)) == len(frozen) and trainable.isdisjoint(frozen)


@SEVERAL
def test_statement_23_with_views_owners_share_a_storage(pool: Pool, world: int | Ranks) -> None:
    pool.run(_storage_shared, world)


def _strides(group: ProcessGroup) -> None:
    model: nn.Module = build("convolutions")
    params = [*model.parameters(), nn.Parameter(torch.randn(6, 4).t()), nn.Parameter(torch.randn(9)[::3])]
    plain_model: nn.Module = build("convolutions")
    before = [(param.shape, param.stride()) for param in params]
    values = _numbered(params)
    assert any(not param.is_contiguous() for param in model.parameters())
    zero = ZeroRedundancyOptimizer(params, Adam, group, parameters_as_bucket_view=True, lr=0.1)
    assert [(param.shape, param.stride()) for param in params][:-1] == before[:-1]
    assert params[-1].shape == before[-1][0]  # has gaps, which a flat tensor does not
    assert_same_bits(_numbered(params), values)
    params[0].requires_grad_(False)
    zero.step()
    params[0].requires_grad_(True)
    plain = Adam(plain_model.parameters(), lr=0.1)
    for seed in range(3):
        for each in (params, list(plain_model.parameters())):
            _set_gradients(each, seed)
        zero.step()
        plain.step()
    assert [(param.shape, param.stride()) for param in params][:-1] == before[:-1]
    assert_same_bits(model.named_parameters(), plain_model.named_parameters())


@SEVERAL
def test_statement_24_views_keep_values_and_strides(pool: Pool, world: int | Ranks) -> None:
    pool.run(_strides, world)


# Statement 25.

TALK = ("broadcast", "all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "reduce", "barrier", "send")


@dataclass
class Traffic:
    """What a rank sends: bytes by message, and the names of other calls."""

    data: list[tuple[int, int]] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @contextmanager
    def counted(self) -> Iterator[None]:
        isend = dist.isend

        def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if kwargs["tag"] == TAG_DATA:
                self.data.append((kwargs["group_dst"], tensor.nbytes))
            else:
                self.words.append(tensor.nbytes)
            return isend(tensor, *args, **kwargs)

        with patch.object(dist, "isend", counting):
            patches = [patch.object(dist, name, side_effect=self._noting(name)) for name in TALK]
            for each in patches:
                each.start()
            try:
                yield
            finally:
                for each in patches:
                    each.stop()

    def _noting(self, name: str) -> Callable[..., Any]:
        call = getattr(dist, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            self.other.append(name)
            return call(*args, **kwargs)

        return noting


def _count(zero: ZeroRedundancyOptimizer) -> Traffic:
    traffic = Traffic()
    with traffic.counted():
        zero.step()
    return traffic


def _transfers(group: ProcessGroup, views: bool) -> None:
    singles = _params(*[(n % 7 + 1, 11) for n in range(300)])
    params = [*singles, *_params(*[(5,)] * 40, dtype=torch.float64)]
    zero = ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1, momentum=0.9)
    for seed, trainable in enumerate([params, params[100:], singles[:1], params]):
        for param in params:
            param.requires_grad_(any(param is each for each in trainable))
            param.grad = None
        _set_gradients(trainable, seed)
        traffic = _count(zero)
        owned = [param for param in trainable if zero._param_to_rank[param] == zero.rank]
        spans = [sum(p.nbytes for p in owned if p.dtype == dtype) for dtype in (torch.float32, torch.float64)]
        peers = [rank for rank in range(zero.world_size) if rank != zero.rank]
        # One message to each other rank for each dtype, with exactly the trainable bytes, and one small word.
        assert sorted(traffic.data) == sorted((peer, span) for peer in peers for span in spans if span)
        assert traffic.words == [16] * len(peers) and traffic.other == []


@MODES
@SEVERAL
def test_statement_25_one_transfer_per_dtype_and_owner_without_what_is_frozen(
    pool: Pool, world: int | Ranks, views: bool
) -> None:
    pool.run(_transfers, world, views)


def _large_transfers(group: ProcessGroup, views: bool) -> None:
    params = [nn.Parameter(torch.zeros(100_000 if n % 4 else 200_000)) for n in range(48)]
    zero = ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1)
    traffic = _count(zero)
    owned = [param.nbytes for param, rank in zero._param_to_rank.items() if rank == zero.rank]
    for peer in range(zero.world_size):
        sent = [nbytes for to, nbytes in traffic.data if to == peer]
        assert sum(sent) == (0 if peer == zero.rank else sum(owned))
        # Without views a parameter of 512 KiB or more goes alone; smaller ones fill messages of 2 MiB.
        assert len(sent) <= (1 if views else 1 + sum(owned) // (512 << 10))
        assert views or max(sent, default=0) <= 2 << 20


@MODES
@pytest.mark.parametrize("world", [2, 3])
def test_statement_25_only_bytes_make_more_messages(pool: Pool, world: int, views: bool) -> None:
    pool.run(_large_transfers, world, views)


def _no_transfers(group: ProcessGroup, views: bool) -> None:
    params = _params((4,), (3,))
    for param in params:
        param.requires_grad_(False)
    traffic = _count(ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1))
    assert traffic == Traffic()


@MODES
def test_statement_25_nothing_is_sent_where_all_is_frozen(pool: Pool, views: bool) -> None:
    pool.run(_no_transfers, 3, views)


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
    params = _params((4, 3), (9,), (5,), (2, 2))
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
        assert_same_bits(_numbered(first), _numbered(other))


def _several_devices(group: ProcessGroup, views: bool, devices: Sequence[str]) -> None:
    places = [torch.device(devices[n % 2]) for n in range(6)]
    ours = [nn.Parameter(p.detach().to(d)) for p, d in zip(_params(*[(5, 3)] * 6), places, strict=True)]
    theirs = [nn.Parameter(p.detach().to(d)) for p, d in zip(_params(*[(5, 3)] * 6), places, strict=True)]
    zero = ZeroRedundancyOptimizer(ours, Adam, group, views, lr=0.1)
    plain = Adam(theirs, lr=0.1)
    for seed in range(3):
        for params in (ours, theirs):
            drawn = _params(*[(5, 3)] * 6)
            _set_gradients(drawn, seed)
            for param, source in zip(params, drawn, strict=True):
                assert source.grad is not None
                param.grad = source.grad.to(param.device)
        zero.step()
        plain.step()
    assert [param.device for param in ours] == places
    assert_same_bits(_numbered(ours), _numbered(theirs))


@MODES
@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_statement_30_parameters_on_several_devices(pool: Pool, views: bool) -> None:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    pool.run(_several_devices, 2, views, [f"{kind.type}:0", f"{kind.type}:1"])


# Statement 31.

Variant = Callable[[list[tuple[str, nn.Parameter]]], dict[str, Any]]


def _same(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {"params": named, "optimizer_class": SGD, "lr": 0.1}


def _permuted(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": [named[0], named[2], named[1], *named[3:]]}


def _other_shape(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": [*named[:3], ("d", nn.Parameter(torch.ones(4, 3)))]}


def _other_dtype(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": [*named[:3], ("d", nn.Parameter(torch.ones(3, 4).double()))]}


def _fewer(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": named[:3]}


def _more(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": [*named, ("e", nn.Parameter(torch.ones(2)))]}


def _other_name(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": [*named[:2], ("x", named[2][1]), named[3]]}


def _frozen(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    named[1][1].requires_grad_(False)
    return _same(named)


def _other_split(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "params": [{"params": named[:2]}, {"params": named[2:]}]}


def _other_lr(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "lr": 0.25}


def _other_class(named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {**_same(named), "optimizer_class": MySGD}


class MySGD(SGD):
    """A class of its own."""


B = r"parameter 1 \('b'\)"
C = r"parameter 2 \('c'\)"
D = r"parameter 3 \('d'\)"
DISAGREEMENTS: dict[str, tuple[Variant, str]] = {
    "permuted": (_permuted, rf"{B}: rank 0 has 'b', shape \(3, 4\).* but {{other}} has 'c', shape \(3, 4\)"),
    "shape": (_other_shape, rf"{D}: rank 0 has 'd', shape \(3, 4\).* but {{other}} has 'd', shape \(4, 3\)"),
    "dtype": (_other_dtype, rf"{D}: rank 0 has .* float32, .* but {{other}} has .* float64"),
    "fewer": (_fewer, rf"{D}: rank 0 has 'd', shape \(3, 4\).* but {{other}} has nothing"),
    "more": (_more, r"parameter 4: rank 0 has nothing, but {other} has 'e', shape \(2,\)"),
    "name": (_other_name, rf"{C}: rank 0 has 'c', .* but {{other}} has 'x'"),
    "requires_grad": (_frozen, rf"{B}: rank 0 has .* trainable, .* but {{other}} has .* frozen"),
    "groups": (_other_split, rf"{C}: rank 0 has .* in group 0.* but {{other}} has .* in group 1"),
    "lr": (_other_lr, r"the options of group 0: rank 0 has .*lr=0\.1[,}}].* but {other} has .*lr=0\.25[,}}]"),
    "class": (_other_class, r"the optimizer class: rank 0 has SGD, but {other} has MySGD"),
}


def _refused(group: ProcessGroup, name: str, odd: int, views: bool) -> str:
    rank = dist.get_rank(group)
    # Values differ from rank to rank, so that a single transfer would show.
    named = [(letter, nn.Parameter(torch.full((3, 4), 10.0 * rank + n))) for n, letter in enumerate("abcd")]
    params = [param for _, param in named]
    before, storages = _numbered(params), _storages(params)
    make = DISAGREEMENTS[name][0] if rank == odd else _same
    with pytest.raises(ValueError, match="the ranks disagree on") as caught:
        ZeroRedundancyOptimizer(process_group=group, parameters_as_bucket_view=views, **make(named))
    assert_same_bits(_numbered(params), before)
    assert _storages(params) == storages
    # The group is in order: the next attempt finds nothing left over.
    for param in params:
        param.requires_grad_(True)
    again = ZeroRedundancyOptimizer(process_group=group, parameters_as_bucket_view=views, **_same(named))
    _set_gradients(params, 0)
    again.step()
    return str(caught.value)


@MODES
@pytest.mark.parametrize("world", [2, 4, OFFSET], ids=str)
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_statement_31_different_lists_are_refused(pool: Pool, name: str, world: int | Ranks, views: bool) -> None:
    size = world if isinstance(world, int) else len(world)
    text, *others = pool.run(_refused, world, name, size - 1, views)
    assert set(others) == {text}
    _assert_matches(DISAGREEMENTS[name][1].format(other=f"rank {size - 1}"), text)


def _assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"the ranks disagree on {pattern}.*; build the optimizer from the same"):
        raise ValueError(text)


@pytest.mark.parametrize("name", ["permuted", "requires_grad", "lr", "class"])
def test_statement_31_rank_0_may_be_the_odd_one(pool: Pool, name: str) -> None:
    text, *others = pool.run(_refused, 3, name, 0, False)
    assert set(others) == {text} and "ranks 1, 2 have" in text


def _unnamed(group: ProcessGroup, views: bool) -> str:
    rank = dist.get_rank(group)
    params = [nn.Parameter(torch.full(shape, float(rank))) for shape in ((3, 4), (4, 3), (2, 6))]
    before = _numbered(params)
    given = params if rank else [params[0], params[2], params[1]]
    with pytest.raises(ValueError, match="the ranks disagree on") as caught:
        ZeroRedundancyOptimizer(given, SGD, group, views, lr=0.1)
    assert_same_bits(_numbered(params), before)
    return str(caught.value)


@MODES
def test_statement_31_another_order_of_unnamed_parameters_shows_in_the_shapes(pool: Pool, views: bool) -> None:
    for text in pool.run(_unnamed, 2, views):
        assert "parameter 1 ('param.1'): rank 0 has 'param.1', shape (2, 6)" in text
        assert "but rank 1 has 'param.1', shape (4, 3)" in text


def _other_group_added(group: ProcessGroup, views: bool) -> str:
    params = _params((4,), (4,))
    zero = ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1)
    before = _numbered(params)
    added = _params((3 if zero.rank else 2,))
    with pytest.raises(ValueError, match="the ranks disagree on") as caught:
        zero.add_param_group({"params": added})
    assert_same_bits(_numbered(params), before)
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 1
    _set_gradients(params, 0)
    zero.step()
    zero.add_param_group({"params": _params((5,))})
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 2
    return str(caught.value)


@MODES
def test_statement_31_holds_for_added_groups(pool: Pool, views: bool) -> None:
    for text in pool.run(_other_group_added, 2, views):
        assert "parameter 2 ('param.2'): rank 0 has 'param.2', shape (2,)" in text


def _one_rank_fails(group: ProcessGroup) -> str:
    rank = dist.get_rank(group)
    with pytest.raises(ValueError, match="Invalid learning rate") as caught:
        ZeroRedundancyOptimizer(_params((4,), (3,)), SGD, group, lr=-1.0 if rank == 1 else 0.1)
    return str(caught.value)


def test_statement_31_an_error_of_one_rank_is_everyones(pool: Pool) -> None:
    own = "Invalid learning rate: -1.0"
    quoted = f"rank 1 failed, so no rank goes on: ValueError: {own}"
    assert pool.run(_one_rank_fails, 3) == [quoted, own, quoted]


# Dtypes, sizes, worlds.

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16)


def _mixed(group: ProcessGroup, views: bool, kind: type[Optimizer]) -> None:
    def draw() -> list[nn.Parameter]:
        found = [_params((4, 3), (n + 1,), dtype=dtype) for n in range(3) for dtype in DTYPES]
        return [param for pair in found for param in pair]

    ours, theirs = draw(), draw()
    zero = ZeroRedundancyOptimizer(ours, kind, group, views, lr=0.01)
    plain = kind(theirs, lr=0.01)  # type: ignore[call-arg]
    _step_both(zero, plain, range(6))
    assert_same_bits(_numbered(ours), _numbered(theirs))
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
    ours, theirs = _params(*SHAPES[name]), _params(*SHAPES[name])
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
    assert_same_bits(_numbered(ours), _numbered(theirs))
    assert_same_state_dict(_state(zero), plain.state_dict())
    zero.load_state_dict(plain.state_dict())
    _step_both(zero, plain, range(6, 9))
    assert_same_bits(_numbered(ours), _numbered(theirs))
    assert_same_state_dict(_state(zero), plain.state_dict())


@MODES
@pytest.mark.parametrize("world", [1, 2, 3, 4, OFFSET], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_few_and_empty_parameters_equal_plain(pool: Pool, name: str, world: int | Ranks, views: bool) -> None:
    pool.run(_sizes, world, views, name)


# Schedulers, closures, scaling.

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1.0 / (n + 1)]),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.05], total_steps=13),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


def _scheduled(group: ProcessGroup, name: str, views: bool) -> None:
    def run(make: Callable[[Any], Optimizer]) -> tuple[list[Any], dict[str, Tensor]]:
        ddp = DDP(build(), process_group=group)
        params = list(ddp.parameters())
        optimizer = make([{"params": params[:4]}, {"params": params[4:], "lr": 0.02}])
        scheduler = SCHEDULERS[name](optimizer)
        seen = []
        for batch in batches(4, dist.get_rank(group), 12):
            seen += train(ddp, optimizer, [batch])
            loss = [torch.tensor(seen[0]).item() + len(seen)] if name == "plateau" else []
            scheduler.step(*loss)
            seen += [entry["lr"] for entry in optimizer.param_groups]
            seen += [entry["betas"] for entry in optimizer.param_groups]
        return seen, _numbered(params)

    seen, params = run(lambda groups: ZeroRedundancyOptimizer(groups, Adam, group, views, lr=0.05))
    expected, plain_params = run(lambda groups: Adam(groups, lr=0.05))
    assert seen == expected
    assert_same_bits(params, plain_params)


@MODES
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_statement_4_schedulers_act_on_all_ranks_as_on_plain(pool: Pool, name: str, world: int, views: bool) -> None:
    pool.run(_scheduled, world, name, views)


def _closures(group: ProcessGroup, views: bool) -> None:
    def run(make: Callable[[Any], Optimizer]) -> tuple[list[float], dict[str, Tensor]]:
        ddp = DDP(build(), process_group=group)
        optimizer = make(ddp.parameters())
        return [_step_with_closure(ddp, optimizer, batch) for batch in _batches(group)], _numbered(
            list(ddp.parameters())
        )

    losses, params = run(lambda params: ZeroRedundancyOptimizer(params, Adam, group, views, lr=0.05))
    expected, plain_params = run(lambda params: Adam(params, lr=0.05))
    assert losses == expected
    assert_same_bits(params, plain_params)


def _batches(group: ProcessGroup) -> list[Batch]:
    return batches(6, dist.get_rank(group), 10)


def _step_with_closure(ddp: DDP, optimizer: Optimizer, batch: Batch) -> float:
    def closure() -> float:
        optimizer.zero_grad()
        loss = mse_loss(ddp(batch[0]), batch[1])
        loss.backward()
        return loss.item()

    return optimizer.step(closure)


@MODES
@pytest.mark.parametrize("world", [1, 2, 3])
def test_statement_6_closures_across_ranks_equal_plain(pool: Pool, world: int, views: bool) -> None:
    pool.run(_closures, world, views)


def _lbfgs(group: ProcessGroup, views: bool) -> tuple[list[float], list[Tensor]]:
    model = build()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), LBFGS, group, views, lr=0.1, max_iter=3)
    inputs, targets = batches(7, 0, 1)[0]  # all ranks evaluate the same loss, each as often as its shard wants

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(5)]
    return losses, [param.detach().clone() for param in model.parameters()]


@MODES
@pytest.mark.parametrize("world", [2, 3])
def test_statement_6_lbfgs_solves_over_shards(pool: Pool, world: int, views: bool) -> None:
    (losses, first), *others = pool.run(_lbfgs, world, views)
    assert losses[-1] < losses[0]
    for _, other in others:
        assert_same_bits(_numbered(first), _numbered(other))


def _scaled(group: ProcessGroup, views: bool) -> list[float]:
    rank = dist.get_rank(group)

    def run(make: Callable[[Any], Optimizer]) -> tuple[list[float], dict[str, Tensor], list[bool]]:
        ddp = DDP(build(), process_group=group)
        optimizer = make(ddp.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        scales, moved = [], []
        for number, (inputs, targets) in enumerate(batches(8, rank, 8)):
            before = _numbered(list(ddp.parameters()))
            optimizer.zero_grad()
            loss = mse_loss(ddp(inputs), targets)
            # Only one rank overflows; DDP brings that to all.
            scaler.scale(loss * float("inf") if number in (2, 5) and rank == 0 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved.append(any(not torch.equal(param, before[str(n)]) for n, param in enumerate(ddp.parameters())))
        return scales, _numbered(list(ddp.parameters())), moved

    scales, params, moved = run(lambda params: ZeroRedundancyOptimizer(params, AdamW, group, views, lr=0.01))
    expected, plain_params, plain_moved = run(lambda params: AdamW(params, lr=0.01))
    assert scales == expected and moved == plain_moved == [number not in (2, 5) for number in range(8)]
    assert_same_bits(params, plain_params)
    return scales


@MODES
@pytest.mark.parametrize("world", [1, 2, 3])
def test_statement_14_scaled_steps_are_skipped_on_all_ranks_alike(pool: Pool, world: int, views: bool) -> None:
    first, *others = pool.run(_scaled, world, views)
    assert all(other == first for other in others)


# Copies and memory.


def _copied_model(group: ProcessGroup, views: bool) -> None:
    model: nn.Module = build("convolutions")
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, group, views, lr=0.1)
    _set_gradients(list(model.parameters()), 0)
    zero.step()
    twin = copy.deepcopy(model)
    assert_same_bits(twin.named_parameters(), model.named_parameters())
    assert [param.stride() for param in twin.parameters()] == [param.stride() for param in model.parameters()]
    own = _storages(list(twin.parameters()))
    assert len(set(own)) == len(own) and set(own).isdisjoint(_storages(list(model.parameters())))
    before = _numbered(list(twin.parameters()))
    _set_gradients(list(model.parameters()), 1)
    zero.step()
    assert_same_bits(_numbered(list(twin.parameters())), before)
    other = ZeroRedundancyOptimizer(twin.parameters(), SGD, group, views, lr=0.1)
    _set_gradients(list(twin.parameters()), 1)
    other.step()
    assert_same_bits(twin.named_parameters(), model.named_parameters())


@MODES
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_model_can_be_copied(pool: Pool, world: int, views: bool) -> None:
    pool.run(_copied_model, world, views)


def _peak(call: Callable[[], object]) -> int:
    """The most bytes of host memory that torch holds at a time for `call`, beyond what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    result = profile.profiler
    assert result is not None
    events = [event for event in result.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def _scratch(group: ProcessGroup, views: bool, count: int, size: int) -> tuple[int, int]:
    params = [nn.Parameter(torch.zeros(size)) for _ in range(count)]
    zero = ZeroRedundancyOptimizer(params, SGD, group, views, lr=0.1)
    zero.step()
    return _peak(lambda: torch.ones(5000)), _peak(zero.step)


def _peaks(pool: Pool, world: int, views: bool, count: int, size: int) -> list[int]:
    found = pool.run(_scratch, world, views, count, size)
    assert all(20_000 <= probe < 30_000 for probe, _ in found)  # the measurement works
    return [peak for _, peak in found]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_scratch_for_small_parameters_is_the_own_part_and_a_few_messages(pool: Pool, world: int) -> None:
    count, size = 144, 100_000
    own, most = count * size * 4 // world, 8 << 21  # eight messages of 2 MiB at a time
    assert own + most < count * size * 4
    for peak in _peaks(pool, world, False, count, size):
        assert own < peak < own + most + 50_000


@pytest.mark.parametrize("world", [2, 3, 4])
def test_large_parameters_need_no_scratch(pool: Pool, world: int) -> None:
    assert max(_peaks(pool, world, False, 12, 200_000)) < 50_000


@pytest.mark.parametrize("world", [2, 3, 4])
def test_views_need_no_scratch(pool: Pool, world: int) -> None:
    assert max(_peaks(pool, world, True, 240, 1000)) < 50_000
