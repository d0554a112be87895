"""Which optimizers may cut parameters: what is known, and what the probe finds out about unknown classes."""

import logging
import math
import struct
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from tests.helpers.probed_optimizers import (
    UNKNOWN,
    ClipsAll,
    ClipsEach,
    Distance,
    Group,
    HiddenDistance,
    IgnoresTiny,
    KeepsRows,
    Lars,
    MatricesTogether,
    NeedsAccelerator,
    NeedsClosure,
    NeedsRate,
    Noise,
    OwnDistance,
    Params,
    Plain,
    SameAdamW,
    SignSgd,
    UnseenNoise,
    finite_norm,
    gradient_of,
)
from tests.helpers.reference import ELEMENTWISE, MATRIXWISE, Case
from zerostep.plan import probe, trial
from zerostep.plan.probe import is_elementwise, is_separable


def _ids(kinds: Iterable[type]) -> list[str]:
    return [kind.__name__ for kind in kinds]


def _recipe(case: Case) -> probe._Candidate:
    return probe._Candidate(case.kind, case.options)


def _never(*_: object) -> bool:
    raise AssertionError("a known class was tried")


@pytest.mark.parametrize("kind", UNKNOWN, ids=_ids(UNKNOWN))
def test_the_probe_sees_who_treats_every_element_by_itself(kind: type[Optimizer]) -> None:
    assert is_elementwise(kind, {}) is UNKNOWN[kind][0]


@pytest.mark.parametrize("kind", UNKNOWN, ids=_ids(UNKNOWN))
def test_the_probe_sees_who_treats_every_parameter_by_itself(kind: type[Optimizer]) -> None:
    assert is_separable(kind, {}) is UNKNOWN[kind][1]


@pytest.mark.parametrize("case", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_known_elementwise_classes_are_not_tried(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_probe_once", _never)
    assert is_elementwise(case.kind, case.options)
    assert is_separable(case.kind, case.options)


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "SparseAdam", "LBFGS"])
def test_known_atomic_classes_are_not_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_probe_once", _never)
    kind = getattr(optim, name)
    assert not is_elementwise(kind, {})
    assert is_separable(kind, {}) is (name != "LBFGS")


def test_every_elementwise_class_that_is_known_is_compared_with_torch() -> None:
    assert {case.kind for case in ELEMENTWISE.values()} == set(probe._ELEMENTWISE)


@pytest.mark.parametrize("case", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_the_probe_agrees_with_what_is_known_of_elementwise_classes(case: Case) -> None:
    assert probe._probe_elements(_recipe(case))
    assert probe._probe_parameters(_recipe(case))


@pytest.mark.parametrize("case", MATRIXWISE.values(), ids=MATRIXWISE)
def test_the_probe_agrees_with_what_is_known_of_atomic_classes(case: Case) -> None:
    assert not probe._probe_elements(_recipe(case))
    assert probe._probe_parameters(_recipe(case))


def test_the_probe_agrees_that_lbfgs_couples_parameters() -> None:
    assert not probe._probe_elements(probe._Candidate(optim.LBFGS, {}))
    assert not probe._probe_parameters(probe._Candidate(optim.LBFGS, {}))


@pytest.mark.parametrize("kind", [ClipsEach, IgnoresTiny], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("limit", [1e-5, 1e-3, 0.1, 10.0, 1e3, 1e5, 1e7])
def test_a_limit_of_any_size_is_noticed(kind: type[Optimizer], limit: float) -> None:
    assert not is_elementwise(kind, {"limit": limit})


@pytest.mark.parametrize("rate", [0.0, 1e-30, torch.tensor(0.0)], ids=str)
def test_a_learning_rate_that_hides_the_update_does_not_hide_the_rule(rate: Any) -> None:
    assert not is_elementwise(Lars, {"lr": rate})
    assert not is_separable(ClipsAll, {"lr": rate})


@pytest.mark.parametrize("rate", [10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-5, 1e-8])
@pytest.mark.parametrize("kind", [Distance, HiddenDistance, OwnDistance], ids=lambda kind: kind.__name__)
def test_a_step_size_that_grows_late_is_noticed_at_any_learning_rate(kind: type[Optimizer], rate: float) -> None:
    assert not is_elementwise(kind, {"lr": rate})
    assert is_separable(kind, {"lr": rate}) is (kind is OwnDistance)


@pytest.mark.parametrize("start", [1e-4, 1e-10, 1e-20])
def test_a_step_size_for_all_is_noticed_before_it_moves_a_parameter(start: float) -> None:
    assert not is_separable(Distance, {"d": start})


def test_options_decide() -> None:
    assert is_elementwise(ClipsEach, {"limit": None})
    assert not is_elementwise(ClipsEach, {"limit": 1.0})


def test_what_a_group_says_goes_before_the_options_of_all() -> None:
    assert is_elementwise(ClipsEach, {"limit": 1.0}, {"limit": None})
    assert not is_elementwise(ClipsEach, {"limit": None}, {"limit": 1.0})
    assert not is_separable(ClipsAll, {}, {"lr": 0.5})


def test_a_group_may_hold_more_than_the_constructor_takes() -> None:
    (group,) = SameAdamW([torch.zeros(3, requires_grad=True)], lr=0.1).param_groups
    group["initial_lr"] = 0.1
    group.pop("params")
    assert is_elementwise(SameAdamW, {"lr": 0.1}, group)
    assert is_separable(SameAdamW, {"lr": 0.1}, group)


def test_separability_may_depend_on_the_group() -> None:
    class Clips(Plain):
        def update(self, group: Group, params: Params) -> None:
            if group.get("together"):
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            super().update(group, params)

    assert is_separable(Clips, {}, {"together": False})
    assert not is_separable(Clips, {}, {"together": True})


def test_options_count_that_no_group_holds() -> None:
    class Hides(Plain):
        def __init__(self, params: Iterable[Any], hidden: float | None = None) -> None:
            super().__init__(params)
            self.hidden = hidden

        def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
            return gradient if self.hidden is None else gradient / finite_norm(gradient)

    assert is_elementwise(Hides, {}, {"lr": 0.5})
    assert not is_elementwise(Hides, {"hidden": 1.0}, {"lr": 0.5})


@pytest.mark.parametrize("option", ["foreach", "maximize", "amsgrad"])
def test_options_reach_the_optimizer(option: str) -> None:
    seen = []

    def build(params: Iterable[Any], **options: Any) -> Optimizer:
        seen.append(options)
        return SameAdamW(params, **options)

    assert is_elementwise(build, {option: True})
    assert seen
    assert all(options == {option: True} for options in seen)


def test_a_partial_of_a_known_class_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_probe_once", _never)
    assert is_elementwise(partial(optim.AdamW, lr=0.1), {"weight_decay": 0.1})
    assert is_elementwise(partial(partial(optim.SGD, lr=0.1), momentum=0.9), {})
    assert not is_elementwise(partial(optim.Adafactor, lr=0.1), {})
    assert not is_separable(partial(optim.LBFGS, lr=0.1), {})


def test_keywords_of_a_partial_are_options_that_later_ones_replace() -> None:
    assert is_elementwise(partial(ClipsEach, limit=None), {})
    assert not is_elementwise(partial(ClipsEach, limit=1.0), {})
    assert is_elementwise(partial(ClipsEach, limit=1.0), {"limit": None})


def test_a_partial_with_arguments_is_tried_as_it_is() -> None:
    def build(limit: float | None, params: Iterable[Any]) -> Optimizer:
        return ClipsEach(params, limit)

    assert is_elementwise(partial(build, None), {})
    assert not is_elementwise(partial(build, 1.0), {})


def test_functions_are_tried() -> None:
    assert is_elementwise(lambda params, **options: optim.AdamW(params, **options), {"lr": 0.1})
    assert not is_elementwise(lambda params, **options: Lars(params, **options), {"lr": 0.1})


def test_an_object_that_cannot_be_hashed_is_tried() -> None:
    class Maker:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, params: Iterable[Any]) -> Optimizer:
            return SignSgd(params)

    assert is_elementwise(Maker(), {})


@pytest.mark.parametrize("kind", [Noise, SignSgd, Lars, NeedsAccelerator], ids=lambda kind: kind.__name__)
def test_random_numbers_stay_as_they_were(kind: type[Optimizer]) -> None:
    before = torch.get_rng_state()
    probe._probe_elements(probe._Candidate(kind, {}))
    probe._probe_parameters(probe._Candidate(kind, {}))
    assert torch.equal(torch.get_rng_state(), before)


def test_answers_do_not_depend_on_the_state_of_the_random_numbers() -> None:
    with torch.random.fork_rng(devices=[]):
        for seed in range(3):
            torch.default_generator.manual_seed(seed)
            assert not probe._probe_elements(probe._Candidate(Noise, {}))
            assert probe._probe_parameters(probe._Candidate(Noise, {}))


def test_options_of_the_user_stay_as_they_were() -> None:
    class Halves(Plain):
        def update(self, group: Group, params: Params) -> None:
            super().update(group, params)
            group["lr"].mul_(0.5)
            group["betas"][0].mul_(0.5)
            group["seen"].append(1)

    rate, beta, seen = torch.tensor(0.25), torch.tensor(0.5), list[int]()
    options = {"lr": rate, "betas": (beta, beta), "seen": seen}
    for ask in (is_elementwise, is_separable):
        assert ask(Halves, options)
        assert ask(Halves, {}, options)
    assert (rate.item(), beta.item(), seen) == (0.25, 0.5, [])
    assert options["lr"] is rate


def test_instances_share_no_options() -> None:
    class Halves(Plain):
        def update(self, group: Group, params: Params) -> None:
            super().update(group, params)
            group["size"].mul_(0.5)

        def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
            size: Tensor = self.param_groups[0]["size"]
            return gradient * size

    assert is_elementwise(Halves, {"size": torch.tensor(1.0)})


def test_the_learning_rate_keeps_its_kind() -> None:
    class Watches(Plain):
        kinds: ClassVar[set[tuple[type, float]]] = set()

        def update(self, group: Group, params: Params) -> None:
            self.kinds.add((type(group["lr"]), float(group["lr"])))

    is_elementwise(Watches, {"lr": torch.tensor(0.75)})
    assert {kind for kind, _ in Watches.kinds} == {Tensor}
    assert len(Watches.kinds) > 3
    Watches.kinds.clear()
    is_elementwise(Watches, {"lr": 0.75})
    assert {kind for kind, _ in Watches.kinds} == {float}
    assert (float, 0.75) in Watches.kinds


@pytest.mark.parametrize("rate", [None, "none"])
def test_optimizers_may_do_without_a_learning_rate(rate: str | None) -> None:
    class Own(Plain):
        def __init__(self, params: Iterable[Any]) -> None:
            super().__init__(params, None)
            if rate == "none":
                del self.param_groups[0]["lr"]

        def update(self, group: Group, params: Params) -> None:
            assert group.get("lr") is None
            for param in params:
                param -= 0.1 * gradient_of(param)

    assert is_elementwise(Own, {})


class Counted(Plain):
    built: ClassVar[int] = 0

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **options)
        Counted.built += 1


def _tries(ask: Callable[[Any, dict[str, Any]], bool], options: dict[str, Any]) -> bool:
    before = Counted.built
    assert ask(Counted, options)
    return Counted.built > before


@pytest.mark.parametrize("ask", [is_elementwise, is_separable])
def test_an_optimizer_is_tried_once(ask: Callable[[Any, dict[str, Any]], bool]) -> None:
    probe._results.clear()
    options = {"lr": 0.1, "betas": (0.9, 0.95), "dtype": torch.float32, "kind": None}
    assert _tries(ask, options)
    assert not _tries(ask, dict(reversed(options.items())))
    assert not ask(ClipsAll, {})
    assert ask(Counted, options)


@pytest.mark.parametrize(("first", "second"), [(0.1, 0.2), (1, True), (1, 1.0), ((1, 2), [1, 2]), ("1", 1)])
def test_other_options_are_another_question(first: object, second: object) -> None:
    probe._results.clear()
    assert _tries(is_elementwise, {"size": first})
    assert _tries(is_elementwise, {"size": second})
    assert not _tries(is_elementwise, {"size": first})


def test_another_group_is_another_question() -> None:
    probe._results.clear()
    for group in ({}, {"size": 1}, {"size": 2}, {"size": torch.tensor(1)}, {"size": torch.tensor(1)}):
        before = Counted.built
        assert is_elementwise(Counted, {}, group)
        assert Counted.built > before
    assert len(probe._results) == 3
    before = Counted.built
    assert is_elementwise(Counted, {}, {"size": 1})
    assert Counted.built == before


@pytest.mark.parametrize(
    "value",
    [torch.tensor(0.1), (torch.tensor(0.1), 0.9), {"a": 1}, object()],
    ids=["tensor", "tuple", "dict", "object"],
)
def test_nothing_is_remembered_of_options_whose_content_may_change(value: object) -> None:
    probe._results.clear()
    assert _tries(is_elementwise, {"size": value})
    assert _tries(is_elementwise, {"size": value})
    assert not probe._results


def _said(caplog: pytest.LogCaptureFixture, level: int) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno == level)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NeedsAccelerator, "RuntimeError: this kernel is for CUDA tensors"),
        (NeedsClosure, "closure"),
        (NeedsRate, "missing 1 required positional argument: 'lr'"),
        (MatricesTogether, "ValueError: matrices only"),
    ],
)
def test_who_cannot_be_tried_is_told_how_to_declare_it(
    kind: type[Optimizer], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    probe._results.clear()
    with caplog.at_level(logging.DEBUG, "zerostep"):
        assert not is_elementwise(kind, {})
    said = _said(caplog, logging.WARNING)
    assert kind.__name__ in said
    assert reason in said
    assert 'partition="elements"' in said


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Lars, "differently when they are cut"),
        (KeepsRows, "state"),
        (UnseenNoise, "random"),
        (SignSgd, "every element by itself"),
    ],
)
def test_the_reason_of_an_answer_is_logged_quietly(
    kind: type[Optimizer], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    probe._results.clear()
    with caplog.at_level(logging.DEBUG, "zerostep"):
        is_elementwise(kind, {})
    assert reason in _said(caplog, logging.DEBUG)
    assert not _said(caplog, logging.WARNING)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(ClipsAll, "couples"), (Noise, "random"), (NeedsAccelerator, "this kernel is for CUDA tensors")],
)
def test_the_reason_is_logged_for_parameters_too(
    kind: type[Optimizer], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    probe._results.clear()
    with caplog.at_level(logging.DEBUG, "zerostep"):
        is_separable(kind, {})
    assert reason in _said(caplog, logging.DEBUG)
    assert kind.__name__ in _said(caplog, logging.DEBUG)


def test_options_that_cannot_be_copied_are_a_reason_not_to_cut() -> None:
    class Stubborn:
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("one of a kind")

    assert not is_elementwise(Plain, {"thing": Stubborn()})


def test_the_default_device_and_dtype_do_not_matter() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert probe._probe_elements(probe._Candidate(SameAdamW, {}))
            assert not probe._probe_elements(probe._Candidate(Lars, {}))
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_is_compiled() -> None:
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    class Compiled(Plain):
        rule: ClassVar[Any] = staticmethod(torch.compile(lambda gradient: gradient * 0.5, backend=backend))

        def direction(self, param: Tensor, gradient: Tensor) -> Tensor:
            result: Tensor = self.rule(gradient)
            return result

    assert is_elementwise(Compiled, {})
    assert is_separable(Compiled, {})
    assert not compiled


def test_the_pieces_cross_the_bounds_of_parameters() -> None:
    lengths = [math.prod(shape) for shapes in trial._PIECES for shape in shapes]
    sizes = [math.prod(shape) for shape in trial._SHAPES]
    assert sum(lengths) == sum(sizes)
    assert len(trial._PIECES) > 1
    cuts, bounds = ({sum(numbers[:n]) for n in range(1, len(numbers))} for numbers in (lengths, sizes))
    assert not cuts & bounds
    assert any(length % 16 for length in lengths)


def _number(bits: int) -> Tensor:
    return torch.frombuffer(bytearray(struct.pack("<I", bits)), dtype=torch.float32)


def test_numbers_are_compared_by_their_bits_and_all_nans_are_one() -> None:
    assert trial._same(_number(0x7FC00000), _number(0xFFC00001))
    assert not trial._same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not trial._same(torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]))
    assert not trial._same(torch.tensor([1.0]), torch.tensor(1.0))
    assert not trial._same(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert trial._same(torch.tensor(3), torch.tensor(3))
    assert trial._same(math.nan, math.nan)
    assert not trial._same(1, True)
    assert not trial._same([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 3.0])])
