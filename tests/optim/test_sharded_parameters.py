"""Which parameters `ShardedOptimizer` can train: unused, frozen, tied, of any dtype and size, however a model runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import linear, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.utils.checkpoint import checkpoint

from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, assert_same_bits, assert_same_state_dict, build, train
from tests.helpers.sharding import (
    OPTIONS,
    WAYS,
    Contest,
    Ordered,
    backward,
    gap,
    series,
    sharded,
    sum_in_rank_order,
    values,
    whole_state,
    without_masters,
)
from zerostep import ShardedOptimizer

MOMENTUM: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


# Unused parameters.


class Branches(nn.Module):
    """Three branches, of which each pass uses some, and a layer that none uses; from nine numbers to three."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 5)
        self.first = nn.Linear(9, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

    def forward(self, inputs: Tensor, used: list[int]) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return torch.stack([self.branches[number](hidden) for number in used]).sum(0)


def _some_ranks(step: int) -> list[int]:
    """Different branches on different ranks; some are used by no rank in some steps."""
    return [(dist.get_rank() + step // 2) % 3] if step % 3 else [0]


def _now_and_then(step: int) -> list[int]:
    return [0, 1, 2] if step % 3 == 0 else [0] if step % 3 == 1 else [0, 2]


def _never(step: int) -> list[int]:
    return [0, 1]


PATTERNS = {"on some ranks": _some_ranks, "now and then": _now_and_then, "ever": _never}


def _branches(pattern: str) -> Callable[..., None]:
    def loop(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
        for number, batch in enumerate(data):
            optimizer.zero_grad()
            backward(model, batch, PATTERNS[pattern](number))
            optimizer.step()

    return loop


def _unused(group: ProcessGroup, pattern: str, gather: str) -> None:
    contest = Contest(
        build=lambda: _seeded(Branches),
        ddp={"find_unused_parameters": True},
        ours={"gather": gather},
        batches="matrices",
    )
    contest.run(group, _branches(pattern), steps=8)
    Contest(**{**vars(contest), "kind": SGD, "options": MOMENTUM}).run(group, _branches(pattern), steps=8)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("gather", ["step", "forward"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_unused_parameters_are_left_alone_as_under_ddp(pool: Pool, pattern: str, gather: str, world: int) -> None:
    pool.run(_unused, world, pattern, gather)


def _unused_of_many(group: ProcessGroup, pattern: str) -> None:
    Contest(
        build=lambda: _seeded(Branches),
        kind=SGD,
        options=MOMENTUM,
        ddp={"find_unused_parameters": True},
        batches="matrices",
        close=1e-6,
    ).run(group, _branches(pattern), steps=8)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_unused_parameters_with_more_ranks(pool: Pool, pattern: str) -> None:
    pool.run(_unused_of_many, 4, pattern)


def _spare_counts(group: ProcessGroup) -> None:
    model = _seeded(Branches)
    optimizer = sharded(group, model)
    before = model.spare.weight.detach().clone()  # type: ignore[union-attr, operator]
    _branches("now and then")(model, optimizer, series(group, 6, "matrices"))
    state = whole_state(optimizer)
    names = state["param_groups"][0]["param_names"]
    steps = {names[number]: entry["step"].item() for number, entry in state["state"].items()}
    assert torch.equal(model.spare.weight, before)  # type: ignore[union-attr, arg-type]
    assert not any(name.startswith("spare") for name in steps)
    wanted = {"first": 6.0, "branches.0": 6.0, "branches.1": 2.0, "branches.2": 4.0}
    for name, count in wanted.items():
        assert steps[f"{name}.weight"] == steps[f"{name}.bias"] == count
    fresh = sharded(group, model)
    fresh.load_state_dict(state)
    assert_same_state_dict(whole_state(fresh), state)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_parameter_counts_its_own_steps(pool: Pool, world: int) -> None:
    pool.run(_spare_counts, world)


# Shapes and dtypes.


class Tied(nn.Module):
    """A matrix that is used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(13, 7)
        self.body = nn.Linear(7, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.words.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(self.words(inputs).mean(1)))
        result: Tensor = self.head(hidden)
        return result[:, :3]


class Mixed(nn.Module):
    """Layers of four dtypes, from nine numbers to three."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 8)
        self.second = nn.Linear(8, 7).double()
        self.third = nn.Linear(7, 6).bfloat16()
        self.phases = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
        self.last = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(inputs)).double()))
        hidden = torch.tanh(self.third(hidden.bfloat16())).float()
        result: Tensor = self.last((hidden.to(torch.complex64) @ self.phases).abs())
        return result


class Few(nn.Module):
    """A single element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5]))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs[:, :3] * self.weight).float()


class WithEmpty(nn.Module):
    """Parameters without elements between others, the first and the last one too."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.empty(0, 3))
        self.first = nn.Linear(9, 5)
        self.between = nn.Parameter(torch.empty(4, 0))
        self.last = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.after = nn.Parameter(torch.empty(0))

    def forward(self, inputs: Tensor) -> Tensor:
        nothing = self.before.sum() + self.between.sum() + self.after.sum()
        result: Tensor = self.last(torch.tanh(self.first(inputs))) * self.scale + nothing
        return result


def _image(inputs: Tensor) -> Tensor:
    return inputs.view(-1, 1, 3, 3).expand(-1, 2, 3, 3)


class Strided(nn.Module):
    """Parameters whose memory is not in the order of their indices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.matrix = nn.Parameter(torch.randn(3, 20).t())
        self.gaps = nn.Parameter(torch.randn(6)[::2])

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.conv(_image(inputs))).flatten(1) @ self.matrix + self.gaps


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied weights": (Tied, "mlp"),
    "mixed dtypes": (Mixed, "matrices"),
    "a single element": (Few, "matrices"),
    "empty parameters": (WithEmpty, "matrices"),
    "strides": (Strided, "matrices"),
}


def _every_kind(group: ProcessGroup, name: str, gather: str) -> None:
    make, data = KINDS[name]
    ordered = dist.get_world_size(group) < 3
    contest = Contest(
        build=lambda: _seeded(make), ours={"gather": gather}, batches=data, close=0.0 if ordered else 1e-6
    )
    contest.run(group, lambda model, optimizer, data: train(model, optimizer, data), steps=8 if ordered else 1)


# In low precision another order of the sum makes more of a difference.
EACH_KIND = [(name, world) for name in KINDS for world in (1, 2, 4) if world < 4 or name != "mixed dtypes"]


@pytest.mark.parametrize(("name", "world"), EACH_KIND)
def test_parameters_of_every_kind_equal_plain(pool: Pool, name: str, world: int) -> None:
    pool.run(_every_kind, world, name, "forward" if world == 2 else "step")


class Lopsided(nn.Module):
    """An embedding with four fifths of all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 80)
        self.body = nn.Linear(80, 25, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.body(self.words(inputs).mean(1))
        return result[:, :3]


def _state_bytes(group: ProcessGroup, kind: type[Optimizer]) -> int:
    model = _seeded(Lopsided)
    optimizer = sharded(group, model, kind, bucket_mb=0.005, **({"lr": 0.1, "momentum": 0.9} if kind is SGD else {}))
    backward(model, series(group, 1)[0])
    optimizer.step()
    states = optimizer.state.values()
    return sum(
        value.nbytes for entry in states for value in entry.values() if isinstance(value, Tensor) and value.dim()
    )


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_state_is_shared_evenly_however_large_one_parameter_is(pool: Pool, world: int, kind: type[Optimizer]) -> None:
    loads = pool.run(_state_bytes, world, kind)
    total = 10000 * 4 * (1 if kind is SGD else 2)
    assert sum(loads) == total
    assert max(loads) <= 1.02 * total / world


# Freezing, groups.


def _freezing(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    params = list(model.parameters())
    for number, batch in enumerate(data):
        for place, param in enumerate(params):
            param.requires_grad_(not (2 <= number < 5 and place % 3 == 1) and not (number >= 6 and place == 0))
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def _frozen(group: ProcessGroup, gather: str) -> None:
    Contest(ddp={"find_unused_parameters": True}, ours={"gather": gather}).run(group, _freezing, steps=8)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("gather", ["step", "forward"])
def test_freezing_and_unfreezing_equals_plain(pool: Pool, gather: str, world: int) -> None:
    pool.run(_frozen, world, gather)


def _frozen_from_the_start(group: ProcessGroup, reduction: str) -> None:
    """What is trained only later moves when its time comes, and not before."""

    def make() -> nn.Module:
        model = build()
        for param in list(model.parameters())[::2]:
            param.requires_grad_(False)
        return model

    model, twin = make(), Ordered(group, make())
    optimizer = sharded(group, model, reduction=reduction)
    for number, batch in enumerate(series(group, 6)):
        for each in (model, twin.model):
            for param in list(each.parameters())[::2]:
                param.requires_grad_(number >= 2)
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        twin.train(batch)
    assert_same_bits(values(model), values(twin.model))
    assert_same_state_dict(whole_state(optimizer), twin.optimizer.state_dict())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["scatter", "all"])
def test_parameters_that_are_frozen_at_first_can_be_trained_later(pool: Pool, reduction: str, world: int) -> None:
    pool.run(_frozen_from_the_start, world, reduction)


def _halves(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    named = list(model.named_parameters())
    return named[::2], named[1::2]


def _adding_a_group(group: ProcessGroup, reduction: str, gather: str, own_class: bool) -> None:
    own: dict[str, Any] = {"lr": 0.003, "weight_decay": 0.2}
    model, twin = build(), build()
    optimizer = sharded(group, model, params=_halves(model)[0], reduction=reduction, gather=gather)
    plain = AdamW(_halves(twin)[0], **OPTIONS)
    late = SGD(_halves(twin)[1], lr=0.02, momentum=0.9) if own_class else None
    for number, batch in enumerate(series(group, 7)):
        if number == 3:
            further = {"optimizer_class": SGD, "lr": 0.02, "momentum": 0.9} if own_class else own
            optimizer.add_param_group({"params": _halves(model)[1], **further})
            if not own_class:
                plain.add_param_group({"params": _halves(twin)[1], **own})
        for each in (model, twin):
            each.zero_grad()
            backward(each, batch)
        sum_in_rank_order(group, twin.parameters())
        optimizer.step()
        plain.step()
        if late is not None and number >= 3:
            late.step()
    optimizer.synchronize()
    assert_same_bits(values(model), values(twin))
    if not own_class:
        assert_same_state_dict(whole_state(optimizer), plain.state_dict())


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["scatter", "all"])
def test_adding_a_group_equals_plain(pool: Pool, reduction: str, world: int) -> None:
    pool.run(_adding_a_group, world, reduction, "step", False)


@pytest.mark.parametrize("own_class", [False, True], ids=["common class", "own class"])
def test_adding_a_group_while_parameters_travel(pool: Pool, own_class: bool) -> None:
    pool.run(_adding_a_group, 2, "scatter", "forward", own_class)


class Wide(nn.Module):
    """Two layers in a row, one that is never used, and one beside them; from nine numbers to three."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 7), nn.Linear(7, 3)
        self.beside, self.spare = nn.Linear(9, 3), nn.Linear(9, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(inputs))) + self.beside(inputs)
        return result


def _adding_after_backward(group: ProcessGroup, late: str, way: str) -> list[int]:
    """A group comes between a backward pass and its step; the pass is not over, because `spare` has no gradient."""

    def named(model: nn.Module, wanted: bool) -> list[tuple[str, nn.Parameter]]:
        return [each for each in model.named_parameters() if each[0].startswith(late) == wanted]

    model, twin = _seeded(Wide), _seeded(Wide)
    reduction = way.split()[1]
    optimizer = sharded(group, model, params=named(model, False), reduction=reduction)
    plain, sent = AdamW(named(twin, False), **OPTIONS), [0]
    for number, batch in enumerate(series(group, 5, "matrices")):
        for each in (model, twin):
            each.zero_grad()
            backward(each, batch)
        sum_in_rank_order(group, twin.parameters())
        if number == 2:
            optimizer.add_param_group({"params": named(model, True), "lr": 0.003})
            plain.add_param_group({"params": named(twin, True), "lr": 0.003})
        optimizer.step()
        plain.step()
        sent.append(optimizer.stats().bytes_sent)
    assert_same_bits(values(model), values(twin))
    assert_same_state_dict(whole_state(optimizer), plain.state_dict())
    return [after - before for before, after in pairwise(sent)]


def _adding_where_one_rank_made_no_pass(group: ProcessGroup) -> tuple[str, int]:
    model = _seeded(Wide)
    early, late = _halves(model)
    optimizer = sharded(group, model, params=early)
    batch = series(group, 1, "matrices")[0]
    if dist.get_rank(group) != 1:
        backward(model, batch)
    try:
        optimizer.add_param_group({"params": late})
    except ValueError as error:
        found = str(error)
    optimizer.step()
    optimizer.add_param_group({"params": late})
    return found, len(optimizer.param_groups)


@pytest.mark.parametrize("world", [2, 3])
def test_adding_a_group_where_one_rank_made_no_pass_is_refused_by_all(pool: Pool, world: int) -> None:
    for message, groups in pool.run(_adding_where_one_rank_made_no_pass, world):
        assert "the number of backward passes since the last step" in message
        assert "after step() and before the next backward pass" in message
        assert groups == 2


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("way", ["bare scatter", "bare all"])
@pytest.mark.parametrize("late", ["beside", "first", "spare.bias"])
def test_adding_a_group_between_a_backward_pass_and_its_step(pool: Pool, late: str, way: str, world: int) -> None:
    for sent in pool.run(_adding_after_backward, world, late, way):
        # A group without gradients costs nothing: the pass before it is not made again.
        assert sent[2] == sent[1] or late != "spare.bias"


def _three_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    own: list[dict[str, Any]] = [
        {},
        {"lr": 0.002, "weight_decay": 0.3},
        {"lr": 0.02, "amsgrad": True, "maximize": True},
    ]
    return [{"params": params[number::3], **options} for number, options in enumerate(own)]


PARAMS: dict[str, Callable[[nn.Module], Any]] = {
    "tensors": lambda model: list(model.parameters()),
    "an iterator": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
    "groups": _three_groups,
    "named groups": lambda model: [
        {"params": half, "lr": lr} for half, lr in zip(_halves(model), (0.1, 0.001), strict=True)
    ],
}


def _given(group: ProcessGroup, gather: str) -> None:
    for give in PARAMS.values():
        Contest(groups=give, ours={"gather": gather}).run(group, lambda *args: train(*args))


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_may_be_given_in_every_form(pool: Pool, world: int) -> None:
    pool.run(_given, world, "step")


def _partitions(group: ProcessGroup) -> dict[str, tuple[int, int]]:
    """How many parameters are cut, with each setting, and on how many elements ranks differ."""
    found = {}
    for partition in ("parameters", "elements", "auto"):
        Contest(ours={"partition": partition}, ways=["bare scatter", "wrapped all"]).run(
            group, lambda *args: train(*args)
        )
        optimizer = sharded(group, build(), partition=partition)
        layout = optimizer._layout
        cut = sum(len(layout.fragments_of(index)) > 1 for index in range(len(layout.params)))
        found[partition] = cut, sum(spec.splittable for spec in layout.params)
    return found


def test_parameters_are_cut_where_that_is_wanted(pool: Pool) -> None:
    for found in pool.run(_partitions, 2):
        assert found["parameters"] == (0, 0)
        assert found["elements"] == found["auto"] and found["elements"][0] >= 3 and found["elements"][1] == 9


# Classes that torch does not know.


class SignSGD(Optimizer):
    """Every element moves by the learning rate, towards the sign of its averaged gradient."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    average = state.setdefault("average", torch.zeros_like(param))
                    average.lerp_(param.grad, 1 - group["beta"])
                    param.add_(average.sign(), alpha=-group["lr"])


class Decaying(Optimizer):
    """Every step changes the options of its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / group["steps"])


class Lamb(Optimizer):
    """The step of a parameter depends on the norm of all its elements."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    average = state.setdefault("average", torch.zeros_like(param))
                    average.lerp_(param.grad, 1 - group["beta"])
                    trust = param.norm().clamp(0.1, 10.0) / (average.norm() + 1e-3)
                    param.add_(average * trust, alpha=-group["lr"])


class Optimistic(Optimizer):
    """Steps ahead by the last change of the gradient, which it keeps as it was given."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    last = self.state[param].get("last", param.grad)
                    param.add_(2 * param.grad - last, alpha=-group["lr"])
                    self.state[param]["last"] = self._kept(param.grad)

    def _kept(self, grad: Tensor) -> Tensor:
        return grad


class OptimisticView(Optimistic):
    """Keeps another tensor over the same memory."""

    def _kept(self, grad: Tensor) -> Tensor:
        return grad.detach().view(grad.shape)


def _user_class(group: ProcessGroup, kind: type[Optimizer]) -> bool:
    Contest(kind=kind, options={"lr": 0.02}).run(group, lambda *args: train(*args), steps=10)
    optimizer = sharded(group, build(), kind)
    (answer,) = {spec.splittable for spec in optimizer._layout.params}
    return answer


@pytest.mark.parametrize(
    ("kind", "split"), [(SignSGD, True), (Decaying, True), (Lamb, False), (Optimistic, True), (OptimisticView, True)]
)
def test_a_class_of_the_users_own_equals_plain_and_is_cut_if_it_may_be(
    pool: Pool, kind: type[Optimizer], split: bool
) -> None:
    assert pool.run(_user_class, 2, kind) == [split, split]


def _memory_of_gradients(group: ProcessGroup) -> tuple[int, int]:
    """How many parts of gradients there are, and how many of them still have the memory of the first step."""
    model = build()
    optimizer = sharded(group, model)
    train(model, optimizer, series(group, 1))
    parts = optimizer._running.reduction.sums.values()
    first = [StorageWeakRef(part.untyped_storage()) for part in parts]
    del parts
    train(model, optimizer, series(group, 3))
    return len(first), sum(not memory.expired() for memory in first)


def test_memory_of_gradients_is_used_again(pool: Pool) -> None:
    for count, again in pool.run(_memory_of_gradients, 2):
        assert again == count - 2 > 0  # the last two arrive when backward is over


# Low precision.


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
        self.model = _seeded(lambda: Low(dtype))
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
        build=lambda: _seeded(lambda: Low(dtype)),
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
    contest = Contest(build=lambda: _seeded(lambda: Low(torch.bfloat16)), ours={"reduce_dtype": torch.float32})
    model, optimizer = contest.sharded(group, way)
    twin = _seeded(lambda: Low(torch.bfloat16))
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


# How a model runs.


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in backward; one matrix may be used in two of them."""

    def __init__(self, reentrant: bool, tied: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(9, 9)
        self.second = nn.Linear(9, 9)
        self.last = nn.Linear(9, 3)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs.requires_grad_()
        for layer in (self.first, self.second):
            hidden = torch.tanh(checkpoint(layer, hidden, use_reentrant=self.reentrant))
        result: Tensor = self.last(hidden)
        return result


def _checkpointed(group: ProcessGroup, reentrant: bool, gather: str) -> None:
    Contest(build=lambda: _seeded(lambda: Checkpointed(reentrant)), ours={"gather": gather}, batches="matrices").run(
        group, lambda *args: train(*args), steps=6
    )


@pytest.mark.parametrize("gather", ["step", "forward"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_activation_checkpointing_equals_plain(pool: Pool, reentrant: bool, gather: str) -> None:
    pool.run(_checkpointed, 2, reentrant, gather)


def _checkpointed_twice(group: ProcessGroup, reentrant: bool, reduction: str) -> None:
    """A tied matrix gets its gradient in two parts, in two backward passes of which one runs inside the other."""
    model = _seeded(lambda: Checkpointed(reentrant, tied=True))
    twin = Ordered(group, _seeded(lambda: Checkpointed(False, tied=True)), lambda named: SGD(named, **MOMENTUM))
    optimizer = sharded(group, model, SGD, reduction=reduction, **MOMENTUM)
    for batch in series(group, 5, "matrices"):
        train(model, optimizer, [batch])
        twin.train(batch)
    assert gap(values(model), values(twin.model)) < 1e-6


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["scatter", "all"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_checkpointing_around_tied_weights(pool: Pool, reentrant: bool, reduction: str, world: int) -> None:
    pool.run(_checkpointed_twice, world, reentrant, reduction)


def _compiled(group: ProcessGroup, when: str, gather: str) -> None:
    twin = Ordered(group)
    bare = build()
    model: Any = torch.compile(bare, backend="eager") if when == "before" else bare
    optimizer = sharded(group, model, gather=gather)
    if when == "after":
        model = torch.compile(bare, backend="eager")
    if when == "in place":
        bare.compile(backend="eager")
    for batch in series(group, 4):
        train(model, optimizer, [batch])
        twin.train(batch)
    optimizer.synchronize()
    assert_same_bits(values(bare), values(twin.model))


@pytest.mark.parametrize("gather", ["step", "forward"])
@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_a_compiled_model_equals_plain(pool: Pool, when: str, gather: str) -> None:
    pool.run(_compiled, 2, when, gather)


# Parameters that are still under way.


@contextmanager
def _late(optimizer: ShardedOptimizer) -> Iterator[list[int]]:
    """Parameters of other ranks come into place when they are waited for, and not a moment earlier."""
    exchanges = list(optimizer._running._exchange_for.values())
    waits: list[int] = []
    for exchange in exchanges:

        def gather(memory: Tensor, bucket: Any, real: Any = exchange.gather) -> Any:
            hidden = memory.clone()
            return _Late(real(hidden, bucket), hidden, memory, waits)

        exchange.gather = gather  # type: ignore[method-assign]
    yield waits
    for exchange in exchanges:
        del exchange.gather


class _Late:
    def __init__(self, flying: Any, hidden: Tensor, memory: Tensor, waits: list[int]) -> None:
        self.flying, self.hidden, self.memory, self.waits = flying, hidden, memory, waits

    def wait(self) -> None:
        self.flying.wait()
        self.memory.copy_(self.hidden)
        self.waits.append(1)


class Reader(nn.Module):
    """Reads the weight of a module that it does not call, and calls one of its children only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 6)
        self.silent = nn.Linear(6, 5)
        self.loose = nn.Parameter(torch.randn(5))
        self.last = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        result: Tensor = self.last(torch.tanh(linear(hidden, self.silent.weight, self.silent.bias) + self.loose))
        return result


Look = Callable[[nn.Module, ShardedOptimizer], Any]


def _outputs(model: nn.Module, optimizer: ShardedOptimizer) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.ones(2, 9))


def _first_layer(model: nn.Module, optimizer: ShardedOptimizer) -> Tensor:
    inner: Any = model.module if isinstance(model, DDP) else model
    return inner.first(torch.ones(2, 9)).detach()


def _synchronized(model: nn.Module, optimizer: ShardedOptimizer) -> list[Tensor]:
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.synchronize()
    return [param.detach().clone() for param in model.parameters()]


def _saved(model: nn.Module, optimizer: ShardedOptimizer) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def _saved_part(model: nn.Module, optimizer: ShardedOptimizer) -> list[Tensor]:
    inner: Any = model.module if isinstance(model, DDP) else model
    return [value.clone() for value in inner.last.state_dict().values()]


LOOKS: dict[str, Look] = {
    "a forward pass": _outputs,
    "a module by itself": _first_layer,
    "synchronize": _synchronized,
    "the model's state dict": _saved,
    "a module's state dict": _saved_part,
}


def _looking(group: ProcessGroup, way: str, look: str) -> int:
    # A bucket for every parameter: none comes because a neighbour was waited for.
    ours_alone = {"gather": "forward", "bucket_mb": 0.00001}
    contest = Contest(build=lambda: _seeded(Reader), ours=ours_alone, batches="matrices")
    plain, twin = contest.plain(group)
    model, optimizer = contest.sharded(group, way)
    with _late(optimizer) as waits:
        for batch in series(group, 5, "matrices"):
            train(model, optimizer, [batch])
            train(plain, twin, [batch])
            ours, theirs = LOOKS[look](model, optimizer), LOOKS[look](plain, twin)  # type: ignore[arg-type]
            _assert_equal(ours, theirs)
            model.train()
        optimizer.synchronize()
    return len(waits)


def _assert_equal(ours: Any, theirs: Any) -> None:
    pairs = [(ours, theirs)] if isinstance(ours, Tensor) else list(zip(ours, theirs, strict=True))
    for number, (mine, other) in enumerate(pairs):
        assert torch.equal(mine, other), f"{number}: {(mine - other).abs().max()} apart"


@pytest.mark.parametrize("way", ["bare scatter", "wrapped scatter", "wrapped all"])
@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_at_parameters_finds_the_new_ones(pool: Pool, look: str, way: str) -> None:
    assert min(pool.run(_looking, 2, way, look)) >= 10


def _waits_in_forward(group: ProcessGroup) -> tuple[list[int], int]:
    """How many buckets have come when each layer runs, and in all."""
    model: Any = _seeded(lambda: nn.Sequential(*[nn.Linear(9, 9) for _ in range(4)]))
    optimizer = sharded(group, model, gather="forward", bucket_mb=9 * 10 * 4 / 2**20)
    data = torch.ones(2, 9)
    with _late(optimizer) as waits:
        for _ in range(3):
            optimizer.zero_grad()
            model(data).sum().backward()
            waits.clear()
            optimizer.step()
        assert not waits  # a step that waits for nothing
        seen: list[int] = []
        for layer in model:
            layer.register_forward_pre_hook(lambda *_: seen.append(len(waits)))
        model(data)
        optimizer.synchronize()
    return seen, len(waits)


def test_each_module_waits_for_its_own_parameters_only(pool: Pool) -> None:
    seen, total = pool.run(_waits_in_forward, 2)[0]
    assert all(one < other for one, other in pairwise([*seen, total + 1])), f"{seen} of {total}"


def _loading(group: ProcessGroup) -> None:
    """What is loaded into a model is not overwritten by parameters that were still under way."""
    model = build()
    optimizer = sharded(group, model, gather="forward")
    wanted = values(build(seed=5))
    with _late(optimizer):
        train(model, optimizer, series(group, 2))
        model.load_state_dict(wanted)
        optimizer.synchronize()
        assert_same_bits(values(model), wanted)


def test_loading_a_model_waits_for_what_is_under_way(pool: Pool) -> None:
    pool.run(_loading, 2)


# What users do to parameters.


def _rebound(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        if number % 2:
            for param in model.parameters():
                param.data = param.data.clone() * 0.5
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def _set_in_place(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        if number % 2:
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.synchronize()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


def _changed_by_users(group: ProcessGroup, loop: Callable[..., None], gather: str) -> None:
    Contest(ours={"gather": gather}).run(group, loop)


@pytest.mark.parametrize("gather", ["step", "forward"])
def test_parameters_that_users_set_in_place_are_followed(pool: Pool, gather: str) -> None:
    pool.run(_changed_by_users, 2, _set_in_place, gather)


def test_parameters_that_users_bind_to_other_memory_are_followed(pool: Pool) -> None:
    pool.run(_changed_by_users, 2, _rebound, "step")


def _moved(group: ProcessGroup, way: str) -> None:
    model, optimizer = Contest().sharded(group, way)
    train(model, optimizer, series(group, 1))
    optimizer.zero_grad()
    model.double()
    with pytest.raises(ValueError, match=r"\.weight.*float32.*float64.*build the optimizer after"):
        optimizer.step()


@pytest.mark.parametrize("way", ["bare scatter", "bare all"])
def test_a_model_that_changes_its_dtype_is_refused(pool: Pool, way: str) -> None:
    pool.run(_moved, 2, way)


def _trains_through_views(group: ProcessGroup) -> None:
    """A graph that saved a parameter notices that a step has changed it, as with any optimizer."""
    model: Any = _seeded(lambda: nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)))
    optimizer = sharded(group, model)
    batch = series(group, 1, "matrices")[0]
    loss = mse_loss(model(batch[0]), batch[1])
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_from_before_the_step_is_refused(pool: Pool) -> None:
    pool.run(_trains_through_views, 1)


def _muon_shares(group: ProcessGroup) -> tuple[int, int]:
    """Whole matrices and the elements of everything else, in one optimizer: bytes of state on this rank, and in all."""
    model = _seeded(lambda: nn.Sequential(*[nn.Linear(24, 24) for _ in range(8)], nn.Linear(24, 3)))
    named = list(model.named_parameters())
    groups = [
        {"params": [n for n in named if n[1].dim() == 2], "optimizer_class": Muon, "lr": 0.02},
        {"params": [n for n in named if n[1].dim() != 2]},
    ]
    optimizer = sharded(group, model, params=groups, bucket_mb=0.01)
    model(torch.ones(1, 24)).sum().backward()
    optimizer.step()
    states = optimizer.state.values()
    mine = sum(value.nbytes for entry in states for value in entry.values() if value.dim())
    return mine, sum(param.nbytes * (1 if param.dim() == 2 else 2) for param in model.parameters())


def test_whole_matrices_are_shared_evenly_too(pool: Pool) -> None:
    results = pool.run(_muon_shares, 2)
    assert sum(mine for mine, _ in results) == results[0][1]
    assert max(mine for mine, _ in results) <= 1.02 * results[0][1] / 2
