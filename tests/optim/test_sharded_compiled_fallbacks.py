"""Classes that `ShardedOptimizer(compile=True)` cannot compile: their own steps, the same bits, and one warning."""

import copy
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, AdamW, Optimizer

from tests.helpers.pool import Pool, RankError
from tests.helpers.reference import assert_same_bits
from tests.helpers.sharding import Values, seeded, sharded, values
from zerostep import ShardedOptimizer
from zerostep.step import leaf_program

DEADLINE = 60


class Simple(Optimizer):
    """Momentum, in the simplest way; subclasses do something that a graph cannot."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.9, **more: Any) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, **more})
        self.calls = 0
        self.table = {"factors": [1.0, 2.0]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        self.start(state, param)
                    self.move(param, param.grad, state, group)

    def start(self, state: dict[str, Any], param: Tensor) -> None:
        state["mean"] = torch.zeros_like(param)
        state["count"] = torch.zeros(())

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["count"] += 1
        state["mean"].mul_(group["decay"]).add_(grad)
        param.sub_(group["lr"] * state["mean"] / state["count"])


class IntCounter(Simple):
    def start(self, state: dict[str, Any], param: Tensor) -> None:
        super().start(state, param)
        state["steps"] = 0

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["steps"] += 1
        param.sub_(grad * group["lr"] / state["steps"])


class Attribute(Simple):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad * group["lr"] / self.calls)


class Table(Simple):
    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.table["factors"][0] = self.table["factors"][0] + 1.0
        param.sub_(grad * group["lr"])


class GroupOption(Simple):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["decay"] = group["decay"] * 0.5
        super().step()


class Item(Simple):
    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["count"] += 1
        param.sub_(grad * (group["lr"] / state["count"].item()))


class Branch(Simple):
    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["count"] += 1
        param.sub_(grad * (group["lr"] if state["count"] > 2 else 2 * group["lr"]))


class NewKey(Simple):
    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().move(param, grad, state, group)
        key = "odd" if "even" in state else "even"
        state.pop("odd", None), state.pop("even", None)
        state[key] = torch.zeros(())


class OtherKind(Simple):
    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * grad)
        state["count"] = torch.zeros(1) if state["count"].dim() == 0 else torch.zeros(())


class TensorAttribute(Simple):
    """Its counter is a tensor, but not one of the state."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.total = torch.zeros(())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.total = self.total + 1

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad * group["lr"] / (1 + self.total))


class ObjectAttribute(Simple):
    """Its counter is in an object of its own."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.clock = SimpleNamespace(time=0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.clock.time += 1

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad * group["lr"] / (1 + self.clock.time))


class TensorElsewhere(Simple):
    """It reads a tensor of the module that defines it."""

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad * group["lr"] / (1 + GLOBAL))


GLOBAL = torch.tensor(2.0)


class Dice(Simple):
    """It draws numbers that a trace would keep."""

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["count"] += 1
        param.sub_(grad * group["lr"] * (1.0 if random.random() < 2.0 else 0.0))


class Nothing(Simple):
    """It leaves out what looks like no parameter."""

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if type(param) is nn.Parameter:
            param.sub_(grad * group["lr"])


class Named(Simple):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["all"] = {"count": torch.ones(())}  # type: ignore[index]


REFUSED: dict[type[Optimizer], str] = {
    IntCounter: "changes the state 'steps', which is not a tensor",
    Attribute: "changes attributes of the optimizer",
    Table: "changes attributes of the optimizer",
    GroupOption: "changes the option 'decay' of the group",
    Item: "reads a tensor on the host",
    Branch: "decides by the values of tensors",
    NewKey: "adds or removes the state",
    OtherKind: "another shape or kind",
    Named: "belongs to no parameter",
    TensorAttribute: "keeps a tensor or an object in the attribute",
    ObjectAttribute: "keeps a tensor or an object in the attribute 'clock'",
    TensorElsewhere: "reads tensors that are not of its state",
    Dice: "draws Python's random numbers",
    Nothing: "does not change the parameter",
}


# ---------------------------------------------------------------------- what can be compiled all the same


class OutOfPlace(Simple):
    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["count"] = state["count"] + 1
        before, state["mean"] = state["mean"], group["decay"] * state["mean"] + grad
        param.sub_(group["lr"] * (before + state["mean"]) / state["count"])


class KeepsGradient(Simple):
    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * (grad + state["mean"]))
        state["mean"] = param.clone()
        state["mean"].add_(grad)


class Swaps(Simple):
    """The old parameter becomes state."""

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        old = param.clone()
        param.add_(state["mean"], alpha=0.5).sub_(group["lr"] * grad)
        state["mean"] = old


class ByLength(Simple):
    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(group["lr"] * grad * (2.0 if param.numel() > 60 else 3.0))


class Constants(Simple):
    """Tensors that a step makes of numbers are constants."""

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad * torch.tensor(0.5) * torch.as_tensor([0.25]) * group["lr"]).clamp_(min=torch.tensor(-5.0))


class Lists(Simple):
    """It works on lists of tensors, numbers among them."""

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        torch._foreach_add_([state["count"]], 1)
        torch._foreach_mul_([state["mean"]], group["decay"])
        torch._foreach_add_([state["mean"]], [grad])
        torch._foreach_sub_([param], torch._foreach_div([state["mean"] * group["lr"]], [state["count"]]))


class Norms(Simple):
    """A number of its state depends on elements."""

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["count"].mul_(group["decay"]).add_(grad.norm())
        param.sub_(group["lr"] * grad / state["count"])


class ByShape(Simple):
    """Vectors and matrices are updated in different ways, each element by itself."""

    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.mul_(1.0 - (0.1 if param.dim() == 2 else 0.0) - (0.2 if param.shape[0] == 40 else 0.0))
        param.sub_(group["lr"] * grad)


class OfTrained(Simple):
    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if isinstance(param, nn.Parameter) and param.requires_grad:
            param.sub_(grad * group["lr"])


class ByOption(Simple):
    def move(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["mean"].mul_(group["decay"]).add_(grad)
        if group["lr"] > 0.05 and group["decay"] != 0:
            param.sub_(group["lr"] * state["mean"])
        else:
            param.sub_(group["lr"] * grad)


COMPILED = [Simple, ByShape, Lists, Norms, Constants, OfTrained, OutOfPlace, KeepsGradient, Swaps, ByLength, ByOption]


# ------------------------------------------------------------------------------------------------------------------


class Weights(nn.Module):
    """Parameters of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(shape) for shape in [(9, 17), (17,), (40, 3), (5,)])


@contextmanager
def backend(name: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaf_program, "BACKEND", name)
        yield


@contextmanager
def warned() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zerostep")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def _trained(
    group: ProcessGroup, kind: Callable[..., Optimizer], change: Callable[[dict[str, Any], int], None], **options: Any
) -> tuple[Values, ShardedOptimizer]:
    model = seeded(Weights)
    optimizer = sharded(group, model, kind, **{"partition": "elements", **options})
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    for step in range(6):
        change(optimizer.param_groups[0], step)
        optimizer.zero_grad()
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return values(model), optimizer


def _nothing(group: dict[str, Any], step: int) -> None:
    pass


def _lower(group: dict[str, Any], step: int) -> None:
    group["lr"] = 0.1 / (step + 1)
    group["decay"] = 0.0 if step == 5 else 0.9 - 0.1 * step


def _refused(group: ProcessGroup, kind: type[Optimizer], reason: str) -> None:
    with backend("eager"), warned() as texts:
        ours, optimizer = _trained(group, kind, _nothing, compile=True)
    plain, _ = _trained(group, kind, _nothing)
    assert_same_bits(ours, plain)
    assert optimizer.stats().compiled_graphs == 0
    about = [text for text in texts if "compile=True" in text]
    assert len(about) == 1 and kind.__name__ in about[0] and reason in about[0], texts


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_class_that_cannot_be_traced_steps_by_itself(pool: Pool, kind: type[Optimizer]) -> None:
    pool.run(_refused, 2, kind, REFUSED[kind], deadline=DEADLINE)


def _traced(
    group: ProcessGroup, kind: type[Optimizer], change: Callable[[dict[str, Any], int], None], partition: str
) -> None:
    with backend("eager"), warned() as texts:
        ours, optimizer = _trained(group, kind, change, compile=True, partition=partition)
    plain, _ = _trained(group, kind, change, partition=partition)
    assert texts == []
    assert optimizer.stats().compiled_graphs > 0
    for name, value in ours.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("change", [_nothing, _lower], ids=["constant", "changing"])
@pytest.mark.parametrize("kind", COMPILED, ids=lambda kind: kind.__name__)
def test_a_class_that_is_written_in_another_way_is_compiled(
    pool: Pool, kind: type[Optimizer], change: Callable[[dict[str, Any], int], None]
) -> None:
    for partition in ("elements", "parameters"):
        pool.run(_traced, 2, kind, change, partition, deadline=DEADLINE)


def _broken_compiler(graph: Any, examples: Any) -> Any:
    raise OSError("there is no C++ compiler here")


def _no_compiler(group: ProcessGroup) -> None:
    with backend(_broken_compiler), warned() as texts:
        ours, optimizer = _trained(group, SGD, _nothing, compile=True, lr=0.1, momentum=0.9)
    plain, _ = _trained(group, SGD, _nothing, lr=0.1, momentum=0.9)
    assert_same_bits(ours, plain)
    assert optimizer.stats().compiled_graphs == 0
    assert len(texts) == 1 and "SGD" in texts[0] and "there is no C++ compiler here" in texts[0], texts


def test_a_compiler_that_fails_costs_nothing_but_a_warning(pool: Pool) -> None:
    pool.run(_no_compiler, 2, deadline=DEADLINE)


def _changing(group: ProcessGroup) -> None:
    """An option that is no number changes in every step."""

    def change(options: dict[str, Any], step: int) -> None:
        options["label"] = f"step {step}"

    with backend("eager"), warned() as texts, pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerostep.step.compiled_update._MOST_CONSTANTS", 3)
        ours, optimizer = _trained(group, Simple, change, compile=True, label="")
    plain, _ = _trained(group, Simple, change, label="")
    assert 0 < optimizer.stats().compiled_graphs <= 4 and len(texts) == 1 and "change from step to step" in texts[0]
    for name, value in ours.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-6, atol=1e-6)


def test_options_that_change_in_every_step_end_compilation(pool: Pool) -> None:
    pool.run(_changing, 2, deadline=DEADLINE)


def _traces_change_nothing(group: ProcessGroup) -> None:
    """After a trace that fails, tensors and numbers are as they were: the step that follows is the ordinary one."""
    optimizer = Table([nn.Parameter(torch.ones(3))])
    table = copy.deepcopy(optimizer.table)
    with backend("eager"), warned():
        _, ours = _trained(group, Table, _nothing, compile=True)
    _, plain = _trained(group, Table, _nothing)
    one, other = (each._inners.all[0].table for each in (ours, plain))  # type: ignore[attr-defined]
    assert one == other != table


def test_a_failed_trace_leaves_nested_attributes_alone(pool: Pool) -> None:
    pool.run(_traces_change_nothing, 1, deadline=DEADLINE)


# ------------------------------------------------------------------------------------------------------ the option


def _bad_value(group: ProcessGroup, value: Any) -> None:
    with pytest.raises(ValueError, match="compile must be True or False"):
        sharded(group, seeded(Weights), AdamW, compile=value)


@pytest.mark.parametrize("value", ["inductor", 1, None])
def test_other_values_are_refused(pool: Pool, value: Any) -> None:
    pool.run(_bad_value, 2, value, deadline=DEADLINE)


def _disagree(group: ProcessGroup) -> None:
    sharded(group, seeded(Weights), AdamW, compile=dist.get_rank(group) == 0)


def test_ranks_must_agree_on_it(pool: Pool) -> None:
    with pytest.raises(RankError, match="the settings"):
        pool.run(_disagree, 2, deadline=DEADLINE)
