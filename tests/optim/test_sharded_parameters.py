"""Parameters of `ShardedOptimizer`: unused, frozen, tied, empty, added later, of every shape."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, AdamW, Optimizer

from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, assert_same_bits, assert_same_state_dict, build, train
from tests.helpers.sharding import (
    MOMENTUM,
    OPTIONS,
    Contest,
    Ordered,
    backward,
    seeded,
    series,
    sharded,
    sum_in_rank_order,
    values,
    whole_state,
)

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
        build=lambda: seeded(Branches),
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
        build=lambda: seeded(Branches),
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
    model = seeded(Branches)
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
    contest = Contest(build=lambda: seeded(make), ours={"gather": gather}, batches=data, close=0.0 if ordered else 1e-6)
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
    model = seeded(Lopsided)
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

    model, twin = seeded(Wide), seeded(Wide)
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
    model = seeded(lambda: nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 3)))
    early, late = ([(f"{name}.{n}", p) for n, p in part.named_parameters()] for name, part in model.named_children())
    optimizer = sharded(group, model, params=early, bucket_mb=1)  # so few buckets that no rank waits in backward
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
