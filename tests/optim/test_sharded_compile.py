"""`ShardedOptimizer` and `torch.compile`: compiled before or after, in part or by hand, with late parameters or not."""

from collections.abc import Callable
from contextlib import nullcontext
from shutil import which
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.distributed import ProcessGroup
from torch.nn.functional import linear, mse_loss
from torch.optim import SGD

from tests.helpers.late_gathers import late_gathers
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, build, train
from tests.helpers.sharding import Contest, Ordered, gap, seeded, series, sharded, values
from zerostep import ShardedOptimizer

ALONE: dict[str, Any] = {"gather": "forward", "bucket_mb": 0.00001}


class Block(nn.Module):
    """Calls one module and reads the weight of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(9, 9)
        self.silent = nn.Linear(9, 9)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(linear(self.called(inputs), self.silent.weight, self.silent.bias))


class Blocks(nn.Module):
    """Plain layers around a block."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(9, 9)
        self.block = block()
        self.last = nn.Linear(9, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.block(torch.tanh(self.first(inputs))))
        return result


def _blocks() -> nn.Module:
    return seeded(Blocks)


def _plain() -> nn.Module:
    return seeded(lambda: Blocks(lambda: nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9))))


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _block_in_place(model: Any) -> nn.Module:
    model.block.compile(backend="eager")
    return model


def _block_replaced(model: Any) -> nn.Module:
    model.block = torch.compile(model.block, backend="eager")
    return model


class ByHand(nn.Module):
    """A forward pass in a compiled function, which calls modules and reads a weight by itself."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.function = torch.compile(self.compute, backend="eager")

    def compute(self, inputs: Tensor) -> Tensor:
        model = self.model
        hidden = torch.tanh(linear(inputs, model.first.weight, model.first.bias))
        result: Tensor = model.last(model.block(hidden))
        return result

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.function(inputs)
        return found


HOW: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),  # type: ignore[dict-item,return-value]
    "in place": _in_place,
    "a block in place": _block_in_place,
    "a block replaced": _block_replaced,
    "a function": ByHand,
}
WHEN = ("before and run", "before", "after")


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _compiled(group: ProcessGroup, how: str, when: str) -> list[int]:
    """The number of graphs after each step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    data = series(group, 10, "matrices")
    bare, twin = _blocks(), Ordered(group, _blocks())
    model = HOW[how](bare) if when != "after" else bare
    if when == "before and run":
        model(data[0][0])
    optimizer = sharded(group, bare, **ALONE)
    if when == "after":
        model = HOW[how](bare)
    counts = list[int]()
    with late_gathers():
        for batch in data:
            loss = mse_loss(model(batch[0]), batch[1])
            assert loss.isfinite()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            twin.train(batch)
            counts.append(_graphs())
        ours = [param.detach().clone() for param in bare.parameters()]
    for mine, other in zip(ours, twin.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-5, atol=1e-6)
    return counts


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("how", HOW)
def test_compiled_code_finds_the_new_parameters(pool: Pool, how: str, when: str) -> None:
    counts = pool.run(_compiled, 2, how, when)[0]
    assert counts[0] >= 1
    assert counts[5] == counts[-1], f"compiled in every step: {counts}"


def _overlapping(group: ProcessGroup, when: str) -> list[int]:
    """How many buckets were waited for inside the last steps."""
    torch._dynamo.reset()
    data = series(group, 8, "matrices")
    bare, twin = _plain(), Ordered(group, _plain())
    model: Any = torch.compile(bare, backend="eager")
    if when == "before and run":
        model(data[0][0])
    optimizer = sharded(group, bare, **ALONE)
    found = list[int]()
    with late_gathers() as waits:
        for batch in data:
            mse_loss(model(batch[0]), batch[1]).backward()
            waits.clear()
            optimizer.step()
            found.append(len(waits))
            optimizer.zero_grad()
            twin.train(batch)
        assert gap(values(bare), values(twin.model)) < 1e-5
    return found


@pytest.mark.parametrize("when", ["before and run", "before"])
def test_compiled_modules_wait_one_by_one(pool: Pool, when: str) -> None:
    assert pool.run(_overlapping, 2, when)[0] == [0] * 8


def _in_one_graph(group: ProcessGroup) -> None:
    torch._dynamo.reset()
    data = series(group, 3, "matrices")
    bare = _plain()
    model: Any = torch.compile(bare, backend="eager", fullgraph=True)
    model(data[0][0])
    optimizer = sharded(group, bare, **ALONE)
    with late_gathers():
        mse_loss(bare(data[0][0]), data[0][1]).backward()
        optimizer.step()
        with pytest.raises(torch._dynamo.exc.Unsupported, match='gather="step"'):
            model(data[1][0])
        optimizer.synchronize()
        assert model(data[1][0]).isfinite().all()


def test_a_single_graph_is_refused_with_late_parameters(pool: Pool) -> None:
    pool.run(_in_one_graph, 2)


def _with_another_group(group: ProcessGroup) -> None:
    """Parameters of a group that was added later are waited for by code that was compiled before."""
    torch._dynamo.reset()
    bare: Any = _plain()
    model: Any = torch.compile(bare, backend="eager")
    twin = Ordered(group, _plain(), lambda named: SGD([param for _, param in named], lr=0.1))
    bare.last.requires_grad_(False)
    twin.model.last.requires_grad_(False)
    optimizer = sharded(group, bare, SGD, [*bare.first.parameters(), *bare.block.parameters()], lr=0.1, **ALONE)
    with late_gathers():
        for number, batch in enumerate(series(group, 8, "matrices")):
            if number == 4:
                bare.last.requires_grad_(True)
                twin.model.last.requires_grad_(True)
                optimizer.add_param_group({"params": list(bare.last.parameters())})
            train(model, optimizer, [batch])
            twin.train(batch)
        assert gap(values(bare), values(twin.model)) < 1e-6


def test_a_group_that_is_added_later(pool: Pool) -> None:
    pool.run(_with_another_group, 2)


# With plain DDP as the measure, and stand-ins in `.grad`.


def _equal_to_ddp(group: ProcessGroup, backend: str, gather: str, way: str) -> None:
    """Several passes in a step, evaluation between them, and shapes that change."""
    torch._dynamo.reset()
    contest = Contest(build=_plain, kind=SGD, options={"lr": 0.1, "momentum": 0.9}, ddp={"bucket_cap_mb": 25})
    (plain, twin), (bare, optimizer) = contest.plain(group), contest.sharded(group, way)
    model: Any = torch.compile(bare, backend=backend)
    data = series(group, 6, "matrices")
    with late_gathers():
        for number in range(0, len(data), 2):
            for net, each in ((model, optimizer), (plain, twin)):
                each.zero_grad()
                for batch in data[number : number + 2]:
                    rows = slice(number // 2 + 2 if backend != "inductor" else 4)  # each shape takes the compiler long
                    mse_loss(net(batch[0][rows]), batch[1][rows]).backward()
            with torch.no_grad():
                inputs = data[number][0]
                torch.testing.assert_close(model(inputs), plain(inputs))
            optimizer.step()
            twin.step()
            with torch.no_grad():
                torch.testing.assert_close(model(inputs), plain(inputs))
        assert gap(values(bare), values(plain)) < 1e-5


@pytest.mark.parametrize("gather", ["step", "forward"])
@pytest.mark.parametrize("way", ["bare scatter", "wrapped scatter"])
def test_evaluation_between_compiled_passes_equals_ddp(pool: Pool, way: str, gather: str) -> None:
    pool.run(_equal_to_ddp, 2, "aot_eager", gather, way)


@pytest.mark.skipif(which("g++") is None, reason="needs a C++ compiler")
def test_the_same_with_generated_code(pool: Pool) -> None:
    pool.run(_equal_to_ddp, 2, "inductor", "forward", "bare scatter", deadline=300.0)


def _bit_for_bit(group: ProcessGroup, when: str, gather: str) -> None:
    twin = Ordered(group)
    bare = build()
    model: Any = torch.compile(bare, backend="eager") if when == "before" else bare
    optimizer: ShardedOptimizer = sharded(group, model, gather=gather)
    if when == "after":
        model = torch.compile(bare, backend="eager")
    if when == "in place":
        bare.compile(backend="eager")
    for batch in series(group, 4):
        train(model, optimizer, [batch])
        twin.train(batch)
    assert_same_bits(values(bare), values(twin.model))


@pytest.mark.parametrize("gather", ["step", "forward"])
@pytest.mark.parametrize("when", ["before", "after", "in place"])
def test_a_compiled_model_equals_plain(pool: Pool, when: str, gather: str) -> None:
    pool.run(_bit_for_bit, 2, when, gather)


def _compiled_backward(model: nn.Module, optimizer: Any, data: Any) -> None:
    """Compiled autograd runs no final callbacks: the pass ends with the next one, or in the step."""
    plain = not isinstance(optimizer, ShardedOptimizer)
    compiler = torch.compile(backend="eager")
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        for inputs, targets in (first, second):
            loss = mse_loss(model(inputs), targets)
            with nullcontext() if plain else compiled_autograd._enable(compiler):
                loss.backward()
        optimizer.step()


def _compiled_autograd(group: ProcessGroup) -> None:
    Contest(
        build=lambda: seeded(WithSpare),
        kind=SGD,
        options={"lr": 0.1, "weight_decay": 0.1},
        ddp={"find_unused_parameters": True},
        ways=["bare scatter", "bare all"],
        batches="matrices",
        close=2e-6,
    ).run(group, _compiled_backward)


class WithSpare(Blocks):
    """Blocks and a layer that is never used, so that no pass is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


def test_passes_of_compiled_autograd_add_up(pool: Pool) -> None:
    pool.run(_compiled_autograd, 2, deadline=90.0)
