"""`ShardedOptimizer` on a CUDA device: Gloo and NCCL ranks on one GPU, late kernels, hosts that never wait."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Muon, Optimizer

from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, assert_same_state_dict
from zerostep import ShardedOptimizer
from zerostep.comm.exchange import StreamExchange
from zerostep.comm.transport import GroupTransport, Transfer
from zerostep.plan.buckets import padded_size
from zerostep.plan.layout import Bucket, Slot, Span

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

STEPS = 8
DEADLINE = 60
LATE = 20_000_000  # cycles: about ten milliseconds
VERY_LATE = 20 * LATE
MAX_NORM = 0.01
SMALL_BUCKETS = 0.02  # megabytes: about two layers
DEVICE = torch.device("cuda", 0)

Group = dict[str, Any]


# What is trained, and how.


def _layers(*widths: int, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    found: list[nn.Module] = []
    for wide, next_wide in pairwise(widths):
        found += [nn.Linear(wide, next_wide, bias=bias), nn.Tanh()]
    return nn.Sequential(*found[:-1]).to(DEVICE)


class _Late(nn.Module):
    """What comes behind it comes late, in both directions."""

    def forward(self, inputs: Tensor) -> Tensor:
        torch.cuda._sleep(LATE)
        result = inputs * 1.0
        if result.requires_grad:
            result.register_hook(lambda grad: torch.cuda._sleep(LATE))
        return result


def _with_late_kernels() -> nn.Module:
    layers = list(MODELS["even"]().children())
    return nn.Sequential(*layers[:4], _Late(), *layers[4:])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "even": lambda: _layers(48, 48, 48, 48, 48, 48, 4),
    "odd": lambda: _layers(48, 37, 11, 53, 7, 3),
    "gain": lambda: _gain(),
    "late": lambda: _with_late_kernels(),
    "matrices": lambda: _layers(48, 37, 48, 11, 4, bias=False),
}


def _inputs(group: ProcessGroup, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    return [torch.randn(4, 48, generator=generator).to(DEVICE) for _ in range(steps)]


@dataclass(frozen=True)
class Recipe:
    """A model, an optimizer class, its options, and perhaps another class for matrices."""

    kind: type[Optimizer]
    options: Group
    model: str = "even"
    matrices: Group = field(default_factory=dict)

    def build(self) -> nn.Module:
        return MODELS[self.model]()

    def groups(self, model: nn.Module) -> list[Group]:
        named = list(model.named_parameters())
        if not self.matrices:
            return [{"params": named}]
        flat, release_scratch = (
            [each for each in named if each[1].dim() == 2],
            [each for each in named if each[1].dim() != 2],
        )
        return [{"params": flat, **self.matrices}, {"params": release_scratch}]

    def plain(self, model: nn.Module) -> list[Optimizer]:
        """One for each class."""
        found = []
        for group in self.groups(model):
            kind = group.pop("optimizer_class", self.kind)
            found.append(kind([group], **(self.options if kind is self.kind else {})))
        return found


ADAMW = Recipe(AdamW, {"lr": 0.01, "weight_decay": 0.1})
RECIPES = {
    "sgd": Recipe(SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": ADAMW,
    "adamw fused": Recipe(AdamW, {"lr": 0.01, "fused": True}),
    "adamw of odd sizes": Recipe(AdamW, {"lr": 0.01}, "odd"),
    "adamw, late": Recipe(AdamW, {"lr": 0.01}, "late"),
    "muon": Recipe(Muon, {"lr": 0.02}, "matrices"),
    "muon and adamw": Recipe(AdamW, {"lr": 0.01}, matrices={"optimizer_class": Muon, "lr": 0.02}),
}


@dataclass(frozen=True)
class Way:
    """One way to put a model and the optimizer together."""

    wrapped: bool = False
    reduction: str = "scatter"
    gather: str = "step"

    def ours(self, group: ProcessGroup, recipe: Recipe, **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
        bare = recipe.build()
        model = _ddp(group, bare) if self.wrapped else bare
        found: Group = {"bucket_mb": SMALL_BUCKETS, "reduction": self.reduction, "gather": self.gather, **options}
        groups = recipe.groups(bare)
        return model, ShardedOptimizer(model, recipe.kind, groups, process_group=group, **found, **recipe.options)


WAYS = [Way(*each) for each in product((False, True), ("scatter", "all"), ("step", "forward"))]
STEP_WAYS = [way for way in WAYS if way.gather == "step"]


def _ddp(group: ProcessGroup, model: nn.Module) -> DDP:
    return DDP(model, process_group=group, bucket_cap_mb=SMALL_BUCKETS)


def _backward(model: nn.Module, inputs: Tensor) -> None:
    model(inputs).square().sum().backward()


def _train(model: nn.Module, optimizers: Sequence[Optimizer], inputs: Tensor) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    _backward(model, inputs)
    for optimizer in optimizers:
        optimizer.step()


# How it is compared.


def _values(model: nn.Module) -> dict[str, Tensor]:
    torch.cuda.synchronize()
    found = model.module if isinstance(model, DDP) else model
    return {name: param.detach().cpu() for name, param in found.named_parameters()}


def _assert_same(story: object, ours: nn.Module, twin: nn.Module) -> None:
    try:
        assert_same_bits(_values(ours), _values(twin))
    except AssertionError as error:
        raise AssertionError(f"{story}: {error}") from None


def _assert_close(story: object, ours: nn.Module, twin: nn.Module) -> None:
    expected = _values(twin)
    for name, value in _values(ours).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7, msg=lambda text: f"{story}: {text}")


def _whole_state(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The state of plain optimizers in host memory, as if they were one."""
    state: dict[int, Any] = {}
    groups: list[Group] = []
    for optimizer in optimizers:
        found, first = optimizer.state_dict(), sum(len(group["params"]) for group in groups)
        for number, entry in found["state"].items():
            state[first + number] = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in entry.items()}
        groups += [{**each, "params": [first + number for number in each["params"]]} for each in found["param_groups"]]
    return {"state": state, "param_groups": groups}


def _nccl(group: ProcessGroup) -> ProcessGroup:
    """The same ranks. NCCL refuses two of them on one GPU of one host, so each says that it is a host of its own."""
    os.environ.setdefault("NCCL_HOSTID", f"rank-{dist.get_rank()}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    ranks = dist.get_process_group_ranks(group)
    found = dist.new_group(ranks, backend="nccl", use_local_synchronization=True)
    assert found is not None
    return found


# -------------------------------------------------------------------------------------- parity, several Gloo ranks


def _lockstep(group: ProcessGroup, recipe: str) -> None:
    chosen = RECIPES[recipe]
    twin = _ddp(group, chosen.build())
    plain = chosen.plain(twin.module)
    replicas = {way: way.ours(group, chosen) for way in WAYS}
    for number, inputs in enumerate(_inputs(group)):
        _train(twin, plain, inputs)
        for way, (model, optimizer) in replicas.items():
            _train(model, [optimizer], inputs)
            if number in (0, STEPS - 1):
                optimizer.synchronize()
                _assert_same(f"{way}, step {number}", model, twin)
    for _, optimizer in replicas.values():
        optimizer.consolidate_state_dict(to=0)
        if optimizer.rank == 0:
            assert_same_state_dict(optimizer.state_dict(), _whole_state(plain))


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("world", [1, 2])
def test_equals_plain_ddp_with_several_ranks_on_one_gpu(pool: Pool, world: int, recipe: str) -> None:
    pool.run(_lockstep, world, recipe, deadline=DEADLINE)


def _lockstep_nccl(group: ProcessGroup, recipe: str) -> None:
    _lockstep(_nccl(group), recipe)


@pytest.mark.parametrize("recipe", ["sgd", "adamw fused", "muon", "muon and adamw"])
@pytest.mark.parametrize("world", [1, 2])
def test_equals_plain_ddp_on_nccl(pool: Pool, world: int, recipe: str) -> None:
    pool.run(_lockstep_nccl, world, recipe, deadline=DEADLINE)


# ----------------------------------------------------------------------------------------------------- alignment


class _Gain(nn.Module):
    """A single number, and behind it a norm and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.first, self.norm, self.last = nn.Linear(48, 1024), nn.LayerNorm(1024), nn.Linear(1024, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(self.norm(self.gain * self.first(inputs)))
        return found


def _gain() -> nn.Module:
    torch.manual_seed(0)
    return _Gain().to(DEVICE)


def _behind_a_number(group: ProcessGroup) -> None:
    recipe = Recipe(SGD, {"lr": 1e-4, "momentum": 0.9}, "gain")
    for way in WAYS:
        twin = _ddp(group, recipe.build())
        plain = recipe.plain(twin.module)
        model, optimizer = way.ours(group, recipe, bucket_mb=5)
        for inputs in _inputs(group):
            _train(twin, plain, inputs)
            _train(model, [optimizer], inputs)
        optimizer.synchronize()
        _assert_same(way, model, twin)
        assert all(param.data_ptr() % 16 == 0 for param in model.parameters()), way


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_stay_where_fast_kernels_like_them(pool: Pool, world: int) -> None:
    """Misaligned, a norm sums in another order, and a matrix of low precision is multiplied many times more slowly."""
    pool.run(_behind_a_number, world, deadline=DEADLINE)


# ------------------------------------------------------------------------------------------------- late kernels


def _on_side_stream(group: ProcessGroup, step_there: bool) -> None:
    recipe = RECIPES["adamw, late"]
    for way in WAYS:
        model, optimizer = way.ours(group, recipe)
        twin = _ddp(group, recipe.build())
        plain = recipe.plain(twin.module)
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        for inputs in _inputs(group, 4):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                optimizer.zero_grad()
                _backward(model, inputs)
                if step_there:
                    optimizer.step()
            main.wait_stream(side)
            if not step_there:
                optimizer.step()
            _train(twin, plain, inputs)
        optimizer.synchronize()
        _assert_same(way, model, twin)


@pytest.mark.parametrize("step_there", [True, False], ids=["step beside", "step on the main stream"])
@pytest.mark.parametrize("world", [1, 2])
def test_late_kernels_on_a_stream_beside_the_main_one(pool: Pool, world: int, step_there: bool) -> None:
    pool.run(_on_side_stream, world, step_there, deadline=DEADLINE)


# ---------------------------------------------------------------------------------------- collectives in stream order


@dataclass(frozen=True)
class _Event:
    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class _LateTransport(GroupTransport):
    """Collectives come late, on a stream of their own; what they write is garbage until then."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group, DEVICE)
        self._side = torch.cuda.Stream()

    def start_reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], memory: Tensor) -> Transfer:
        return self._late(partial(super().start_reduce_scatter, output, parts, memory), output)

    def start_all_gather(self, parts: Sequence[Tensor], memory: Tensor) -> Transfer:
        return self._late(partial(super().start_all_gather, parts, memory), memory)

    def start_all_reduce(self, memory: Tensor) -> Transfer:
        return self._late(partial(super().start_all_reduce, memory), memory)

    def _late(self, start: Callable[[], Transfer], memory: Tensor) -> Transfer:
        before = memory.clone()
        memory.fill_(99)  # on the caller's own stream: whoever goes on without waiting reads this
        self._side.wait_stream(torch.cuda.current_stream())
        for each in (before, memory):
            each.record_stream(self._side)
        with torch.cuda.stream(self._side):
            torch.cuda._sleep(LATE // 10)
            memory.copy_(before)
            start().wait()
            return Transfer(_Event(self._side.record_event()), memory, "")


def _transport(nccl: ProcessGroup, late: bool) -> GroupTransport:
    return _LateTransport(nccl) if late else GroupTransport(nccl, DEVICE)


@contextmanager
def _through(transport: GroupTransport) -> Iterator[None]:
    """A world of one has nothing to send. Here it sends it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerostep.step.engine.connect_exchange", lambda ranks, device: StreamExchange(transport))
        yield


def _bucket(lengths: Sequence[int]) -> Bucket:
    cuts = tuple(accumulate(lengths, initial=0))
    return Bucket("float32", "cuda:0", True, (Slot(0, Span(0, cuts[-1])),), cuts)


# Even, padded, uneven, empty.
LENGTHS: dict[int, list[tuple[int, ...]]] = {
    1: [(1,), (13,), (70_001,)],
    2: [(5, 5), (7, 6), (35_001, 35_000), (1, 0), (2, 11), (0, 7), (30_001, 1), (1, 30_001)],
}


def _exchange(group: ProcessGroup, late: bool) -> None:
    exchange, rank, world = (
        StreamExchange(_transport(_nccl(group), late)),
        dist.get_rank(group),
        dist.get_world_size(group),
    )
    for lengths, dtype in product(LENGTHS[world], (torch.float32, torch.bfloat16, torch.int64, torch.complex64)):
        bucket = _bucket(lengths)
        owned = bucket.owned(rank)
        memory = torch.full((padded_size(bucket),), 77, device=DEVICE, dtype=dtype)
        memory[: bucket.size] = torch.arange(bucket.size, device=DEVICE) % 10
        numbers = memory[: bucket.size].clone()
        torch.cuda._sleep(LATE // 10)
        memory.mul_(1 + rank)
        reducing, meeting = exchange.reduce(memory, bucket), exchange.start_all_gather_ints([rank, -(2**63), 2**63 - 1])
        part = reducing.finish() + 0
        memory.fill_(0)
        memory[owned.start : owned.stop] = 3 * numbers[owned.start : owned.stop]
        exchange.gather(memory, bucket).wait()
        whole = memory[: bucket.size] + 0
        assert meeting.wait() == [[each, -(2**63), 2**63 - 1] for each in range(world)]
        total = numbers * (world * (world + 1) // 2)
        assert_same_bits(
            {"part": part, "whole": whole}, {"part": total[owned.start : owned.stop], "whole": 3 * numbers}
        )


@pytest.mark.parametrize("late", [False, True], ids=["prompt", "late"])
@pytest.mark.parametrize("world", [1, 2])
def test_an_exchange_in_stream_order(pool: Pool, world: int, late: bool) -> None:
    pool.run(_exchange, world, late, deadline=DEADLINE)


def _in_stream_order(group: ProcessGroup, recipe: str, late: bool) -> None:
    chosen, nccl = RECIPES[recipe], _nccl(group)
    twin, series = _ddp(nccl, chosen.build()), _inputs(group, 5)
    plain = chosen.plain(twin.module)
    for inputs in series:
        _train(twin, plain, inputs)
    for way in WAYS:
        with _through(_transport(nccl, late)):
            model, optimizer = way.ours(nccl, chosen)
        engine: Any = optimizer._engine
        assert isinstance(engine.shared, StreamExchange)
        for inputs in series:
            # Nothing between a step and the next pass, which must find the new parameters by stream order alone.
            _train(model, [optimizer], inputs)
        optimizer.synchronize()
        _assert_same(way, model, twin)


@pytest.mark.parametrize("late", [False, True], ids=["prompt", "late"])
@pytest.mark.parametrize("recipe", ["sgd", "adamw fused", "muon and adamw"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_whole_step_in_stream_order_equals_plain(pool: Pool, world: int, recipe: str, late: bool) -> None:
    pool.run(_in_stream_order, world, recipe, late, deadline=DEADLINE)


# --------------------------------------------------------------------------------------------- hosts that never wait


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _never_waits(group: ProcessGroup, recipe: str, through: bool) -> None:
    chosen, nccl = RECIPES[recipe], _nccl(group)
    for way in WAYS:
        if through:
            with _through(GroupTransport(nccl, DEVICE)):
                model, optimizer = way.ours(nccl, chosen)
        else:
            model, optimizer = way.ours(nccl, chosen)
        series = _inputs(group, 4)
        for inputs in series[:3]:
            _train(model, [optimizer], inputs)
        for inputs in series[3:]:
            optimizer.zero_grad()
            _backward(model, inputs)
            torch.cuda.synchronize()
            torch.cuda._sleep(VERY_LATE)
            done = torch.cuda.Event()
            done.record()
            with _waiting_forbidden():
                optimizer.step()
            assert not done.query(), f"{way}: the host has waited for the device"
        torch.cuda.synchronize()
    with _waiting_forbidden(), pytest.raises(RuntimeError, match="synchroniz"):
        optimizer.clip_grad_norm_(1.0)  # it has to: the mode is on


@pytest.mark.parametrize(("world", "through"), [(1, False), (1, True), (2, True)])
@pytest.mark.parametrize("recipe", ["sgd", "adamw", "adamw fused", "muon and adamw"])
def test_the_host_does_not_wait_for_the_device_in_a_step(pool: Pool, recipe: str, world: int, through: bool) -> None:
    pool.run(_never_waits, world, recipe, through, deadline=DEADLINE)


# ------------------------------------------------------------------------------------------------- low precision


class _Masters:
    """A plain optimizer over float32 copies of low-precision parameters."""

    def __init__(self, model: nn.Module, kind: type[Optimizer], options: Group) -> None:
        self._params = list(model.parameters())
        self._masters = [nn.Parameter(param.detach().float()) for param in self._params]
        self._optimizer = kind(self._masters, **options)

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        self._optimizer.step()
        for param, master in zip(self._params, self._masters, strict=True):
            param.copy_(master)
            param.grad = None


def _low_precision(group: ProcessGroup, recipe: str, through: bool) -> None:
    chosen = RECIPES[recipe]
    group = _nccl(group) if through else group
    for way in WAYS:
        twin = _ddp(group, chosen.build().bfloat16())
        plain = _Masters(twin.module, chosen.kind, chosen.options)
        bare = chosen.build().bfloat16()
        model = _ddp(group, bare) if way.wrapped else bare
        options: Group = {"reduction": way.reduction, "gather": way.gather, **chosen.options}
        make = partial(ShardedOptimizer, model, chosen.kind, process_group=group, bucket_mb=SMALL_BUCKETS)
        if through:
            with _through(_transport(group, True)):
                optimizer = make(master_dtype=torch.float32, **options)
        else:
            optimizer = make(master_dtype=torch.float32, **options)
        for inputs in _inputs(group):
            _backward(twin, inputs.bfloat16())
            plain.step()
            _train(model, [optimizer], inputs.bfloat16())
        optimizer.synchronize()
        _assert_same(way, model, twin)
        assert all(value.dtype == torch.bfloat16 for value in _values(model).values())


@pytest.mark.parametrize("recipe", ["sgd", "adamw fused"])
@pytest.mark.parametrize("world", [1, 2])
def test_masters_of_bfloat16_parameters(pool: Pool, world: int, recipe: str) -> None:
    pool.run(_low_precision, world, recipe, False, deadline=DEADLINE)


@pytest.mark.parametrize("world", [1, 2])
def test_masters_of_bfloat16_parameters_in_stream_order(pool: Pool, world: int) -> None:
    pool.run(_low_precision, world, "adamw fused", True, deadline=DEADLINE)


def _scaled(group: ProcessGroup, model: nn.Module, optimizer: Optimizer, unscale: bool) -> list[float]:
    """Train with a loss scale; in the third step, the last rank meets a number that is not finite."""
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    scales = []
    for number, inputs in enumerate(_inputs(group)):
        optimizer.zero_grad()
        last = dist.get_rank(group) == dist.get_world_size(group) - 1
        found = inputs * torch.inf if number == 2 and last else inputs
        scaler.scale(model(found).square().sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def _scaling(group: ProcessGroup, recipe: str, unscale: bool) -> None:
    chosen = RECIPES[recipe]
    twin = _ddp(group, chosen.build())
    expected = _scaled(group, twin, chosen.plain(twin.module)[0], unscale)
    assert expected[2] < expected[1] < expected[-1], "no number was found that is not finite"
    for way in WAYS:
        model, optimizer = way.ours(group, chosen)
        assert _scaled(group, model, optimizer, unscale) == expected, way
        optimizer.synchronize()
        _assert_same(way, model, twin)


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled first"])
@pytest.mark.parametrize("recipe", ["adamw", "adamw fused"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_loss_scale_and_an_infinity_on_one_rank(pool: Pool, world: int, recipe: str, unscale: bool) -> None:
    pool.run(_scaling, world, recipe, unscale, deadline=DEADLINE)


# ------------------------------------------------------------------------------------------------------- clipping


def _clipped(group: ProcessGroup, norm_type: float, foreach: bool | None) -> None:
    recipe = RECIPES["sgd"]
    for way, by_torch in product(WAYS, (False, True)):
        twin = _ddp(group, recipe.build())
        plain = recipe.plain(twin.module)[0]
        model, optimizer = way.ours(group, recipe)
        for inputs in _inputs(group, 4):
            plain.zero_grad()
            _backward(twin, inputs)
            expected = clip_grad_norm_(twin.parameters(), MAX_NORM, norm_type)
            plain.step()
            optimizer.zero_grad()
            _backward(model, inputs)
            if by_torch:
                found = clip_grad_norm_(model.parameters(), MAX_NORM, norm_type, foreach=foreach)
            else:
                found = optimizer.clip_grad_norm_(MAX_NORM, norm_type)
            optimizer.step()
            assert expected > MAX_NORM, "nothing is clipped"
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
        optimizer.synchronize()
        _assert_close((way, by_torch), model, twin)


@pytest.mark.parametrize("foreach", [None, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("world", [1, 2])
def test_clipping_by_the_optimizer_and_by_torch(pool: Pool, world: int, norm_type: float, foreach: bool | None) -> None:
    pool.run(_clipped, world, norm_type, foreach, deadline=DEADLINE)


# --------------------------------------------------------------------------------------------------------- memory


def _gradient_memory(group: ProcessGroup) -> tuple[int, int, int]:
    """Bytes of parameters, of one bucket, and of what a backward pass leaves behind."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(24))).to(DEVICE)
    optimizer = ShardedOptimizer(model, AdamW, process_group=group, bucket_mb=1)
    inputs = torch.randn(4, 512, device=DEVICE)
    for _ in range(3):  # libraries take their workspaces in the first passes
        optimizer.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        _backward(model, inputs)
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated()
        optimizer.step()
    whole = sum(param.numel() * param.element_size() for param in model.parameters())
    return whole, 1 << 20, after - before


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_take_their_share_of_device_memory_and_a_few_buckets(pool: Pool, world: int) -> None:
    for whole, bucket, left in pool.run(_gradient_memory, world, deadline=DEADLINE):
        assert whole // world <= left + 2 * bucket, "less than a share: what was measured?"
        assert left <= whole // world + 3 * bucket + (64 << 10), f"{left} bytes of {whole}"


# ------------------------------------------------------------------------------------------------ several devices


class _TwoPlaces(nn.Module):
    """The first half in host memory, the second on the device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.here = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48))
        self.there = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4)).to(DEVICE)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.there(self.here(inputs.cpu()).to(DEVICE))
        return found


def _average(group: ProcessGroup, model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(1.0 / dist.get_world_size(group))
        dist.all_reduce(param.grad, group=group)


def _two_places(group: ProcessGroup, clip: str) -> None:
    # Left alone, torch picks the implementation by the kinds of device among the parameters of each optimizer.
    options: Group = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    for way in [way for way in WAYS if not way.wrapped]:
        model, twin = _TwoPlaces(), _TwoPlaces()
        plain = SGD(twin.parameters(), **options)
        settings: Group = {"reduction": way.reduction, "gather": way.gather, "bucket_mb": SMALL_BUCKETS}
        optimizer = ShardedOptimizer(model, SGD, process_group=group, **settings, **options)
        for inputs in _inputs(group, 5):
            plain.zero_grad()
            _backward(twin, inputs)
            _average(group, twin)
            optimizer.zero_grad()
            _backward(model, inputs)
            if clip:
                clip_grad_norm_(twin.parameters(), MAX_NORM)
                _ = (
                    optimizer.clip_grad_norm_(MAX_NORM)
                    if clip == "ours"
                    else clip_grad_norm_(model.parameters(), MAX_NORM)
                )
            plain.step()
            optimizer.step()
        optimizer.synchronize()
        (_assert_close if clip else _assert_same)(way, model, twin)
        optimizer.consolidate_state_dict(to=0)


@pytest.mark.parametrize("clip", ["", "ours", "torch"], ids=["as they are", "clipped", "clipped by torch"])
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_in_host_memory_and_on_the_device(pool: Pool, world: int, clip: str) -> None:
    pool.run(_two_places, world, clip, deadline=DEADLINE)
