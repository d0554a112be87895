"""Forward passes under `ShardedOptimizer`: checkpointing, compilation, parameters under way or set by users."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.helpers.pool import Pool
from tests.helpers.reference import Batch, assert_same_bits, build, train
from tests.helpers.sharding import MOMENTUM, Contest, Ordered, backward, gap, seeded, series, sharded, values
from zerostep import ShardedOptimizer

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
    Contest(build=lambda: seeded(lambda: Checkpointed(reentrant)), ours={"gather": gather}, batches="matrices").run(
        group, lambda *args: train(*args), steps=6
    )


@pytest.mark.parametrize("gather", ["step", "forward"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_activation_checkpointing_equals_plain(pool: Pool, reentrant: bool, gather: str) -> None:
    pool.run(_checkpointed, 2, reentrant, gather)


def _checkpointed_twice(group: ProcessGroup, reentrant: bool, reduction: str) -> None:
    """A tied matrix gets its gradient in two parts, in two backward passes of which one runs inside the other."""
    model = seeded(lambda: Checkpointed(reentrant, tied=True))
    twin = Ordered(group, seeded(lambda: Checkpointed(False, tied=True)), lambda named: SGD(named, **MOMENTUM))
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
    exchanges: list[Any] = optimizer._training.engine.buckets.exchanges
    waits: list[int] = []
    for exchange in exchanges:

        def gather(memory: Tensor, bucket: Any, real: Any = exchange.gather) -> Any:
            hidden = memory.clone()
            return _Late(real(hidden, bucket), hidden, memory, waits)

        exchange.gather = gather
    yield waits
    for exchange in exchanges:
        del exchange.gather


class _Late:
    def __init__(self, in_flight: Any, hidden: Tensor, memory: Tensor, waits: list[int]) -> None:
        self.in_flight, self.hidden, self.memory, self.waits = in_flight, hidden, memory, waits

    def wait(self) -> None:
        self.in_flight.wait()
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
    contest = Contest(build=lambda: seeded(Reader), ours=ours_alone, batches="matrices")
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
    model: Any = seeded(lambda: nn.Sequential(*[nn.Linear(9, 9) for _ in range(4)]))
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
    model: Any = seeded(lambda: nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)))
    optimizer = sharded(group, model)
    batch = series(group, 1, "matrices")[0]
    loss = mse_loss(model(batch[0]), batch[1])
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_from_before_the_step_is_refused(pool: Pool) -> None:
    pool.run(_trains_through_views, 1)
