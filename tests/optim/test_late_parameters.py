"""`gather="forward"`: whoever reads a parameter in flight waits for it, in whatever order modules are called."""

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

from tests.helpers.late_gathers import late_gathers
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, build, train
from tests.helpers.sharding import Contest, Ordered, backward, gap, seeded, series, sharded, values
from zerostep import ShardedOptimizer

# A bucket for every parameter: none comes because a neighbour was waited for.
ALONE: dict[str, Any] = {"gather": "forward", "bucket_mb": 0.00001}


class Reader(nn.Module):
    """Reads the weight of a module that it does not call, or calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 6)
        self.silent = nn.Linear(6, 5)
        self.loose = nn.Parameter(torch.randn(5))
        self.last = nn.Linear(5, 3)
        self.calls = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        middle = self.silent(hidden) if self.calls else linear(hidden, self.silent.weight, self.silent.bias)
        result: Tensor = self.last(torch.tanh(middle + self.loose))
        return result


class Product(torch.autograd.Function):
    """A function whose arguments torch does not look at."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return inputs @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.saved_tensors[0].t(), None


def _inner(model: nn.Module) -> Any:
    return model.module if isinstance(model, DDP) else model


def _params(model: nn.Module) -> list[Tensor]:
    return list(model.parameters())


def _outputs(model: nn.Module, optimizer: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(torch.ones(2, 9))
        model.train()
        return found


def _synchronized(model: nn.Module, optimizer: Any) -> list[Tensor]:
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.synchronize()
    return [param.detach().clone() for param in model.parameters()]


def _saved(model: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(_params(model), file)
    file.seek(0)
    return list(torch.load(file, weights_only=False))


def _averaged(model: nn.Module) -> list[Tensor]:
    average = AveragedModel(_inner(build_reader()))
    average.update_parameters(_inner(model))
    return [param.detach().clone() for param in average.parameters()]


def _copied(model: nn.Module) -> list[Tensor]:
    copies: list[Tensor] = [copy.deepcopy(param) for param in model.parameters()]
    copies += [copy.copy(param) for param in model.parameters()]
    copies += [pickle.loads(pickle.dumps(param)) for param in model.parameters()]  # noqa: S301
    assert {type(each) for each in copies} == {nn.Parameter}
    return copies


def _summed_over_ranks(model: nn.Module, optimizer: Any) -> Tensor:
    group = model.process_group if isinstance(model, DDP) else optimizer.process_group
    with torch.no_grad():
        weight = _inner(model).first.weight
        dist.all_reduce(weight, group=group)
        found: Tensor = weight.clone()
        weight.mul_(1 / dist.get_world_size(group))
        return found


def _by_storage(param: Tensor) -> Tensor:
    storage = param.untyped_storage()
    return torch.empty(0).set_(storage, param.storage_offset(), param.shape, param.stride()).clone()


def _functional(model: nn.Module) -> Tensor:
    weights = {name: param for name, param in model.named_parameters() if "silent" not in name}

    def loss(weights: Any) -> Tensor:
        outputs: Tensor = torch.func.functional_call(model, weights, torch.ones(2, 9))
        return outputs.sum()

    return torch.cat([grad.flatten() for grad in torch.func.grad(loss)(weights).values()])


def build_reader() -> nn.Module:
    """The same one in every call."""
    return seeded(Reader)


Look = Callable[..., Any]
LOOKS: dict[str, Look] = {
    "a forward pass": _outputs,
    "a module by itself": lambda model, optimizer: _inner(model).first(torch.ones(2, 9)).detach(),
    "a module that was only read before": lambda model, _: _inner(model).silent(torch.ones(2, 6)).detach(),
    "synchronize": _synchronized,
    "the model's state dict": lambda model, _: [value.clone() for value in model.state_dict().values()],
    "a module's state dict": lambda model, _: [value.clone() for value in _inner(model).last.state_dict().values()],
    "variables of a state dict": lambda model, _: [v.sum() for v in model.state_dict(keep_vars=True).values()],
    "sums": lambda model, _: [param.sum() for param in model.parameters()],
    "detach": lambda model, _: [param.detach().clone() for param in model.parameters()],
    "data": lambda model, _: [param.data.clone() for param in model.parameters()],
    "numpy": lambda model, _: [torch.tensor(param.numpy(force=True)) for param in model.parameters()],
    "numbers": lambda model, _: [torch.tensor(param.tolist()) for param in model.parameters()],
    "text": lambda model, _: [torch.tensor("nan" in repr(param)) for param in model.parameters()],
    "rows": lambda model, _: [row.clone() for param in model.parameters() for row in param],
    "storage": lambda model, _: [_by_storage(param) for param in model.parameters()],
    "a list": lambda model, _: torch.cat([param.flatten() for param in model.parameters()]),
    "stacked": lambda model, _: torch.stack([_inner(model).loose, _inner(model).silent.bias]),
    "for each": lambda model, _: list(torch._foreach_mul(_params(model), 2.0)),
    "torch.ops": lambda model, _: [torch.ops.aten.sum.default(param) for param in model.parameters()],
    "out": lambda model, _: torch.mm(torch.ones(1, 5), _inner(model).silent.weight.detach()),
    "an autograd function": lambda model, _: Product.apply(torch.ones(2, 3), _inner(model).last.weight),
    "vmap": lambda model, _: torch.vmap(lambda row: row.sum())(_inner(model).first.weight),
    "gradients through the model": lambda model, _: _functional(_inner(model)),
    "copies": lambda model, _: _copied(model),
    "a file": lambda model, _: _saved(model),
    "a copy of the model": lambda model, _: list(copy.deepcopy(_inner(model)).parameters()),
    "a moving average": lambda model, _: _averaged(model),
    "a vector": lambda model, _: nn.utils.parameters_to_vector(model.parameters()).detach(),
    "a collective": _summed_over_ranks,
    "another dtype": lambda model, _: [param.double() for param in model.parameters()],
}


def _looking(group: ProcessGroup, way: str, look: str) -> int:
    contest = Contest(build=build_reader, ours=ALONE, batches="matrices")
    plain, twin = contest.plain(group)
    model, optimizer = contest.sharded(group, way)
    with late_gathers() as waits:
        for batch in series(group, 4, "matrices"):
            train(model, optimizer, [batch])
            train(plain, twin, [batch])
            _assert_equal(LOOKS[look](model, optimizer), LOOKS[look](plain, twin))
            assert optimizer.stats().steps
        optimizer.synchronize()
        assert {type(param) for param in model.parameters()} == {nn.Parameter}
    return len(waits)


def _assert_equal(ours: Any, theirs: Any) -> None:
    pairs = [(ours, theirs)] if isinstance(ours, Tensor) else list(zip(ours, theirs, strict=True))
    for number, (mine, other) in enumerate(pairs):
        assert torch.equal(mine, other), f"{number}: {mine} and {other}"


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_at_parameters_finds_the_new_ones(pool: Pool, look: str) -> None:
    assert min(pool.run(_looking, 2, "bare scatter", look)) >= 10


@pytest.mark.parametrize("way", ["wrapped scatter", "wrapped all"])
@pytest.mark.parametrize("look", ["a forward pass", "a module by itself", "detach", "a moving average"])
def test_the_same_in_ddp(pool: Pool, look: str, way: str) -> None:
    assert min(pool.run(_looking, 2, way, look)) >= 10


# Modules in any order.


def _in_any_order(group: ProcessGroup, calls: list[bool]) -> None:
    model: Any = build_reader()
    optimizer = sharded(group, model, **ALONE)
    twin = Ordered(group, build_reader())
    with late_gathers():
        for batch, call in zip(series(group, len(calls), "matrices"), calls, strict=True):
            model.calls = call
            twin.model.calls = call  # type: ignore[assignment]
            train(model, optimizer, [batch])
            twin.train(batch)
        assert_same_bits(values(model), values(twin.model))


@pytest.mark.parametrize("calls", [[False, False, True, True], [True, True, False, False], [True, False] * 3])
def test_modules_may_be_called_or_read_in_any_order(pool: Pool, calls: list[bool]) -> None:
    pool.run(_in_any_order, 2, calls)


def _waits_in_forward(group: ProcessGroup) -> tuple[list[int], int]:
    """How many buckets have come when each layer runs, and in all."""
    model: Any = seeded(lambda: nn.Sequential(*[nn.Linear(9, 9) for _ in range(4)]))
    optimizer = sharded(group, model, gather="forward", bucket_mb=9 * 10 * 4 / 2**20)
    data = torch.ones(2, 9)
    with late_gathers() as waits:
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


def _scripted(group: ProcessGroup) -> None:
    make = lambda: nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 3))  # noqa: E731
    model = torch.jit.script(seeded(make))
    optimizer = sharded(group, model, **ALONE)
    twin = Ordered(group, seeded(make))
    with late_gathers():
        for batch in series(group, 4, "matrices"):
            train(model, optimizer, [batch])
            twin.train(batch)
        assert gap(values(model), values(twin.model)) < 1e-5


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_script_is_waited_for_in_the_step(pool: Pool) -> None:
    pool.run(_scripted, 2)


def _attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)


def _evaluated(group: ProcessGroup) -> None:
    """Torch's fast path for evaluation reads parameters of modules that it does not call."""
    model = seeded(_attention)
    optimizer = sharded(group, model, **ALONE)
    inputs = torch.ones(2, 3, 8)
    with late_gathers(), torch.no_grad():
        for _ in range(2):
            with torch.enable_grad():
                model.train()(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found = model.eval()(inputs)
            assert torch.equal(found, copy.deepcopy(model)(inputs))


def test_evaluation_takes_the_path_it_would_take_without_sharding(pool: Pool) -> None:
    pool.run(_evaluated, 2)


# What does not wait, and what is written.


def _touched(group: ProcessGroup) -> None:
    model = build_reader()
    optimizer = sharded(group, model, **ALONE)
    with late_gathers() as waits:
        train(model, optimizer, series(group, 1, "matrices"))
        for zero_grad in (optimizer.zero_grad, model.zero_grad):
            zero_grad()
        for param in model.parameters():
            assert param.grad is None
            param.grad = grad = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
            assert param.grad is grad
            del param.grad
            assert param.is_leaf
            assert isinstance(param, nn.Parameter)
            assert param.numel() == param.shape.numel()
            param.requires_grad = True
            param.requires_grad_(True)
            param.register_hook(lambda grad: grad).remove()
            assert param.requires_grad
            assert {param: 1}[param]
        assert not waits
        assert all(type(param) is not nn.Parameter for param in model.parameters())
        optimizer.synchronize()


def test_gradients_and_shapes_are_read_without_waiting(pool: Pool) -> None:
    pool.run(_touched, 2)


def _copy_into(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(wanted[name])


def _bind(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        param.data = wanted[name].clone()


def _for_each(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(_params(model), list(wanted.values()))


WRITES: dict[str, Callable[[nn.Module, dict[str, Tensor]], Any]] = {
    "load_state_dict": lambda model, wanted: model.load_state_dict(wanted),
    "copy": _copy_into,
    "data": _bind,
    "for each": _for_each,
}


def _written(group: ProcessGroup, write: str) -> None:
    model = build()
    optimizer = sharded(group, model, gather="forward")
    wanted = values(build(seed=5))
    with late_gathers():
        train(model, optimizer, series(group, 2))
        WRITES[write](model, wanted)
        optimizer.synchronize()
        assert_same_bits(values(model), wanted)
        train(model, optimizer, series(group, 1))
        assert all(bool(value.isfinite().all()) for value in values(model).values())


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_is_not_overwritten_by_what_was_under_way(pool: Pool, write: str) -> None:
    pool.run(_written, 2, write)


# Threads, lifetimes, classes.


def _two_threads(group: ProcessGroup) -> None:
    model = build_reader()
    optimizer = sharded(group, model, gather="forward", bucket_mb=1.0)
    entered, goes_on = threading.Event(), threading.Event()

    def before_wait() -> None:
        entered.set()
        assert goes_on.wait(30)

    sums = list[Tensor]()
    threads = [threading.Thread(target=lambda: sums.append(_params(model)[0].sum())) for _ in range(2)]
    with late_gathers(before_wait):
        train(model, optimizer, series(group, 1, "matrices"))
        threads[0].start()
        assert entered.wait(30)
        threads[1].start()
        threads[1].join(0.3)  # it waits with the first one: without that it would be done, with what it must not see
        goes_on.set()
        for thread in threads:
            thread.join()
    assert [bool(each.isfinite()) for each in sums] == [True, True]


def test_two_threads_wait_for_one_parameter(pool: Pool) -> None:
    pool.run(_two_threads, 2)


def _dropped(group: ProcessGroup) -> None:
    model = build_reader()
    optimizer = sharded(group, model, **ALONE)
    twin = Ordered(group, build_reader())
    with late_gathers() as waits:
        for batch in series(group, 2, "matrices"):
            train(model, optimizer, [batch])
            twin.train(batch)
        engine = weakref.ref(optimizer._training.engine)
        waits.clear()
        gc.disable()
        try:
            del optimizer
            assert engine() is None
        finally:
            gc.enable()
        assert not waits
        assert_same_bits(values(model), values(twin.model))
        assert {type(param) for param in model.parameters()} == {nn.Parameter}


def test_late_parameters_outlive_their_optimizer(pool: Pool) -> None:
    pool.run(_dropped, 2)


def _freed(group: ProcessGroup) -> None:
    """After the wait, nothing but the garbage collector's absence is needed to free a model."""
    model = build_reader()
    optimizer = sharded(group, model, **ALONE)
    with late_gathers():
        train(model, optimizer, series(group, 1, "matrices"))
        optimizer.synchronize()
    optimizer.zero_grad()
    params = [weakref.ref(param) for param in model.parameters()]
    gc.disable()
    try:
        del optimizer, model
        assert [param() for param in params] == [None] * len(params)
    finally:
        gc.enable()


def test_a_model_is_freed_without_the_garbage_collector(pool: Pool) -> None:
    pool.run(_freed, 2)


class Named(nn.Parameter):
    """A parameter class of a user."""

    label = "mine"


class Final(nn.Parameter):
    """One that cannot be derived from."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("final")


def _classes(group: ProcessGroup, kind: type[nn.Parameter]) -> int:
    model: Any = build_reader()
    twin = Ordered(group, build_reader())
    model.first.weight = kind(model.first.weight.detach())
    optimizer = sharded(group, model, **ALONE)
    with late_gathers() as waits:
        for batch in series(group, 3, "matrices"):
            optimizer.zero_grad()
            backward(model, batch)
            twin.train(batch)
            optimizer.synchronize()
            waits.clear()
            optimizer.step()
            at_once = len(waits)
            assert isinstance(model.first.weight, kind)
            assert torch.equal(model.first.weight.detach(), twin.model.first.weight)  # type: ignore[union-attr,arg-type]
            assert type(model.first.weight) is kind
        assert_same_bits(values(model), values(twin.model))
    return at_once


def test_a_class_of_a_user_comes_back(pool: Pool) -> None:
    assert pool.run(_classes, 2, Named) == [0, 0]


def test_a_class_that_cannot_be_late_is_waited_for_in_the_step(pool: Pool) -> None:
    assert min(pool.run(_classes, 2, Final)) >= 1
