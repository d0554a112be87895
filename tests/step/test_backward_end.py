"""`BackwardEnd` in real backward calls: once at the end of each, whatever runs inside it."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Lock
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from tests.helpers.pool import Pool
from zerostep.step.backward_end import BackwardEnd

ACCUMULATED, ARRIVED = "register_post_accumulate_grad_hook", "register_hook"


class Watch:
    """Expects the end of a backward call in the hook of every parameter, and notes what happens in which order."""

    def __init__(self, register: str = ACCUMULATED, /, **params: nn.Parameter) -> None:
        self.log, self.lock = list[str](), Lock()
        self.end = BackwardEnd(self.over)
        for name, param in params.items():
            getattr(param, register)(self._hook(ref(self), name))

    @staticmethod
    def _hook(watch: "ref[Watch]", name: str) -> Callable[[Tensor], None]:
        def hook(tensor: Tensor) -> None:
            target = watch()
            if target is not None:
                target.arrived(name)

        return hook

    def arrived(self, name: str) -> None:
        with self.lock:
            self.log.append(name)
            self.end.expect()

    def over(self) -> None:
        self.log.append("over")

    def take(self) -> list[str]:
        """The log, which begins anew; no backward call may be under way."""
        assert not self.end.active
        log, self.log = self.log, []
        return log


def _param(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((2,), value))


class Calls(torch.autograd.Function):
    """The identity, which calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, function: Callable[[], object]) -> Tensor:
        ctx.function = function
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            ctx.function()
        return grad, None


def _backward_of(param: nn.Parameter) -> Callable[..., None]:
    """A function, or a hook, that runs a backward call of its own."""

    def run(*args: Tensor) -> None:
        with torch.enable_grad():
            (param * 3).sum().backward()

    return run


# Calls one after another.


def test_once_after_all_gradients() -> None:
    a, b = _param(), _param()
    watch = Watch(a=a, b=b)
    seen = list[bool]()
    a.register_post_accumulate_grad_hook(lambda _: seen.append(watch.end.active))
    for _ in range(3):
        (a * b).sum().backward()
        assert sorted(watch.log[:2]) == ["a", "b"] and watch.take()[2:] == ["over"]
    assert seen == [True] * 3


def test_twice_over_one_graph_is_two_calls() -> None:
    a = _param()
    watch = Watch(a=a)
    loss = (a * a).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert watch.take() == ["a", "over"] * 2


def test_two_losses_are_as_many_calls_as_are_made() -> None:
    a, b = _param(), _param()
    watch = Watch(a=a, b=b)
    (a * 2).sum().backward()
    (b * 2).sum().backward()
    assert watch.take() == ["a", "over", "b", "over"]
    torch.autograd.backward([(a * 2).sum(), (b * 2).sum()])
    log = watch.take()
    assert sorted(log[:2]) == ["a", "b"] and log[2:] == ["over"]


def test_a_call_without_a_watched_gradient_does_not_count() -> None:
    a, other = _param(), _param()
    watch = Watch(a=a)
    (other * 2).sum().backward()
    assert watch.take() == []


def test_outside_of_a_backward_call_nothing_is_expected() -> None:
    watch = Watch()
    watch.end.expect()
    assert watch.take() == []


def test_gradients_of_chosen_inputs() -> None:
    a, b, other = _param(), _param(), _param()
    watch = Watch(a=a, b=b)
    (a * b * other).sum().backward(inputs=[b])
    assert watch.take() == ["b", "over"]
    (a * b * other).sum().backward(inputs=[other])
    assert watch.take() == []


@pytest.mark.parametrize(("register", "log"), [(ACCUMULATED, []), (ARRIVED, ["a", "over"])])
def test_gradients_that_are_only_computed(register: str, log: list[str]) -> None:
    """`torch.autograd.grad` accumulates nothing, but calls hooks on tensors."""
    a = _param()
    watch = Watch(register, a=a)
    torch.autograd.grad((a * a).sum(), a)
    assert watch.take() == log


# Calls inside one another.


class Model(nn.Module):
    """Three layers; chosen ones are checkpointed."""

    def __init__(self, checkpointed: str, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
        self._checkpointed, self._use_reentrant = checkpointed, use_reentrant

    def forward(self, values: Tensor) -> Tensor:
        for name, layer in self.layers.items():
            again = name in self._checkpointed
            values = checkpoint(layer, values, use_reentrant=self._use_reentrant) if again else layer(values)
        return values

    def watched(self) -> Watch:
        return Watch(**{name: next(layer.parameters()) for name, layer in self.layers.items()})


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("checkpointed", ["a", "b", "c", "ab", "bc", "ac", "abc"])
def test_checkpointing(checkpointed: str, use_reentrant: bool) -> None:
    """Each reentrant segment is a backward call; in a model of nothing else, no gradient arrives in the outer one."""
    model = Model(checkpointed, use_reentrant)
    watch = model.watched()
    for _ in range(2):
        model(torch.ones(2, requires_grad=True)).sum().backward()
        assert watch.take() == ["c", "b", "a", "over"]


def test_reentrant_segments_side_by_side() -> None:
    model = Model("", use_reentrant=True)
    watch, values = model.watched(), torch.ones(2, requires_grad=True)
    parts = [checkpoint(layer, values, use_reentrant=True) for layer in model.layers.values()]
    (parts[0] + parts[1] * parts[2]).sum().backward()
    log = watch.take()
    assert sorted(log[:3]) == ["a", "b", "c"] and log[3:] == ["over"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # the outer one runs first
def test_reentrant_segments_inside_reentrant_segments() -> None:
    model = Model("abc", use_reentrant=True)
    watch = model.watched()
    checkpoint(model, torch.ones(2, requires_grad=True), use_reentrant=True).sum().backward()
    assert watch.take() == ["c", "b", "a", "over"]


def test_a_call_inside_a_function_is_part_of_the_outer_one() -> None:
    a, b, c = _param(), _param(), _param()
    watch = Watch(a=a, b=b, c=c)
    (Calls.apply(a * 2, _backward_of(b)) * c).sum().backward()
    assert watch.take() == ["c", "b", "a", "over"]


def test_a_call_inside_a_function_with_the_only_gradients() -> None:
    a, other = _param(), _param()
    watch = Watch(a=a)
    for _ in range(2):
        Calls.apply(other * 2, _backward_of(a)).sum().backward()
        assert watch.take() == ["a", "over"]


@pytest.mark.parametrize("watched", ["ab", "b"])
@pytest.mark.parametrize("kind", ["leaf", "leaf, accumulated", "intermediate"])
def test_a_call_inside_a_hook_is_part_of_the_outer_one(kind: str, watched: str) -> None:
    params = {"a": _param(), "b": _param()}
    watch = Watch(**{name: params[name] for name in watched})
    doubled = params["a"] * 2
    hooked = doubled if kind == "intermediate" else params["a"]
    getattr(hooked, ACCUMULATED if kind == "leaf, accumulated" else ARRIVED)(_backward_of(params["b"]))
    doubled.sum().backward()
    log = watch.take()
    expected = [*watched, "over"]
    if kind != "intermediate" and watched == "b":
        expected = ["b"]  # nothing runs in the outer call afterwards: the optimizer's next method ends the pass
    assert sorted(log) == sorted(expected) and log[-1:] == expected[-1:]


@pytest.mark.parametrize("depth", [2, 5, 20])
def test_calls_deep_inside_one_another(depth: int) -> None:
    a, b = _param(), _param()
    watch = Watch(a=a, b=b)

    def inside(level: int) -> None:
        values = torch.ones(2, requires_grad=True)
        if level:
            Calls.apply(b * values if level == depth else values, lambda: inside(level - 1)).sum().backward()
        else:
            (a * values).sum().backward()

    inside(depth)
    assert watch.take() == ["a", "b", "over"]


# Errors.


def _fail(*args: Any) -> None:
    raise ArithmeticError("on purpose")


@contextmanager
def _failing() -> Iterator[None]:
    with pytest.raises(ArithmeticError, match="on purpose"):
        yield


def test_a_call_that_fails_is_not_expected_to_end() -> None:
    a, b = _param(), _param()
    watch = Watch(a=a, b=b)
    loss = (Calls.apply(a * 2, _fail) * b).sum()
    with _failing():
        loss.backward(retain_graph=True)
    assert watch.take() == ["b"]
    (a * b).sum().backward()
    assert watch.take()[2:] == ["over"]


def test_a_call_that_fails_inside_another_one() -> None:
    a, b, c = _param(), _param(), _param()
    watch = Watch(a=a, b=b, c=c)

    def inside() -> None:
        (Calls.apply(a * 2, _fail) * b).sum().backward()

    with _failing():
        (Calls.apply(a * 2, inside) * c).sum().backward()
    assert watch.take() == ["c", "b"]
    (a * 2).sum().backward()
    assert watch.take() == ["a", "over"]


def test_an_outer_call_that_goes_on_after_a_failed_one_inside() -> None:
    a, b = _param(), _param()
    watch = Watch(a=a, b=b)

    def inside() -> None:
        with _failing():
            (Calls.apply(a * 2, _fail) * b).sum().backward()

    Calls.apply(a * 2, inside).sum().backward()
    assert watch.take() == ["b", "a", "over"]


def test_an_outer_call_that_fails_after_one_inside() -> None:
    a, other = _param(), _param()
    watch = Watch(a=a)
    failing = Calls.apply(other * 2, _fail)
    loss = Calls.apply(failing * 2, _backward_of(a)).sum()
    with _failing():
        loss.backward(retain_graph=True)
    assert watch.take() == ["a"]
    (a * 2).sum().backward()
    assert watch.take() == ["a", "over"]


class FailingWatch(Watch):
    """Fails at the end of a call."""

    def over(self) -> None:
        super().over()
        _fail()


def test_an_error_of_the_action_comes_out_of_backward() -> None:
    a = _param()
    watch = FailingWatch(a=a)
    for _ in range(2):
        with _failing():
            (a * 2).sum().backward()
        assert watch.take() == ["a", "over"]


def test_an_optimizer_that_goes_in_the_middle_of_a_call() -> None:
    a, b = _param(), _param()
    watches = [Watch(a=a)]
    log, end = watches[0].log, ref(watches[0].end)
    doubled = b * 2
    doubled.register_hook(lambda _: watches.clear())
    (doubled * a).sum().backward()
    gc.collect()
    assert (log, end(), watches) == (["a"], None, [])


# Threads, DDP, compiled autograd.


def _in_threads(*targets: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(targets)) as threads:
        for done in [threads.submit(target) for target in targets]:
            done.result(timeout=60)


def test_calls_in_one_thread_after_another() -> None:
    a, b = _param(), _param()
    watch = Watch(a=a, b=b)
    for param in (a, b):
        _in_threads(_backward_of(param))
    assert watch.take() == ["a", "over", "b", "over"]


def test_calls_in_several_threads_at_once_end_with_the_last() -> None:
    params = {name: _param() for name in "abcd"}
    watch, meeting = Watch(**params), Barrier(len(params), timeout=60)

    def meet(param: Tensor) -> None:
        meeting.wait()

    for param in params.values():
        param.register_post_accumulate_grad_hook(meet)
    _in_threads(*(_backward_of(param) for param in params.values()))
    log = watch.take()
    assert sorted(log[:4]) == list("abcd") and log[4:] == ["over"]


class _Gradients:
    """Notes what stands in `.grad` when a backward call is over."""

    def __init__(self, model: nn.Module) -> None:
        self._params = list(model.parameters())
        self.seen, self.end = list[list[float]](), BackwardEnd(self.over)

    def over(self) -> None:
        self.seen.append([param.grad.sum().item() for param in self._params if param.grad is not None])


def _tripled(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer() * 3)
    return done


def _after_ddp(group: ProcessGroup, options: dict[str, Any], register: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    gradients, ddp = _Gradients(model), DDP(model, process_group=group, **options)
    ddp.register_comm_hook(None, _tripled)
    for param in model.parameters():
        nn.init.ones_(param)
        getattr(param, register)(lambda _: gradients.end.expect())
    for _ in range(3):
        model.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
    # Both gradients sum up to four; DDP writes its hook's result to `.grad` in the last callback of the call.
    assert gradients.seen == [[12.0, 12.0]] * 3


@pytest.mark.parametrize("register", [ACCUMULATED, ARRIVED])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=str,
)
def test_after_the_callback_of_ddp(pool: Pool, options: dict[str, Any], register: str) -> None:
    pool.run(_after_ddp, 1, options, register)


def test_compiled_autograd_leaves_nothing_expected() -> None:
    """It runs no callbacks: the next call of the optimizer's methods ends the pass."""
    a = _param()
    watch = Watch(a=a)
    with compiled_autograd._enable(lambda graph: graph):
        (a * a).sum().backward()
    assert watch.take() == ["a"]
    (a * a).sum().backward()
    assert watch.take() == ["a", "over"]
