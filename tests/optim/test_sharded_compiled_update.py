"""`ShardedOptimizer(compile=True)`: the update of a leaf as one compiled graph, against the classes' own steps."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import ProcessGroup
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

from tests.helpers.pool import Pool
from tests.helpers.reference import ELEMENTWISE, MATRIXWISE, Case
from tests.helpers.sharding import Values, seeded, sharded, values, whole_state
from zerostep.step import leaf_program, update

CASES = {**ELEMENTWISE, **MATRIXWISE}
ROUNDING = 3e-6  # relative to the largest number of a tensor, after ten steps
DEADLINE = 120


class Weights(nn.Module):
    """Parameters that get the gradients of a series, and nothing to compute."""

    def __init__(self, matrices: bool = False) -> None:
        super().__init__()
        shapes: list[tuple[int, ...]] = (
            [(9, 17), (40, 3), (17, 7)] if matrices else [(9, 17), (17,), (1,), (40, 3), (5,)]
        )
        self.all = nn.ParameterList(torch.randn(shape) for shape in shapes)


class Run:
    """A model and ours, with gradients that depend on nothing but the step and the rank."""

    def __init__(self, group: ProcessGroup, case: Case, compiled: bool, **options: Any) -> None:
        self.model = seeded(lambda: Weights(case.model == "matrices")).to(options.pop("dtype", torch.float32))
        params = options.pop("params", lambda model: None)(self.model)
        self.optimizer = sharded(group, self.model, case.kind, params, compile=compiled, **case.options, **options)
        self._generator = torch.Generator().manual_seed(dist.get_rank(group))

    def backward(self, unused: int | None = None, scale: float = 1.0) -> None:
        loss = torch.zeros(())
        for index, param in enumerate(self.model.parameters()):
            factors = scale * torch.randn(param.shape, generator=self._generator).to(param.dtype)
            if index != unused:
                loss = loss + (param * factors).float().sum()
        loss.backward()

    def train(self, steps: int = 10, clip: float | None = None, unused: Mapping[int, int] | None = None) -> None:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.backward((unused or {}).get(step))
            if clip is not None:
                self.optimizer.clip_grad_norm_(clip)
            self.optimizer.step()
        self.optimizer.synchronize()

    @property
    def graphs(self) -> int:
        return self.optimizer.stats().compiled_graphs


@contextmanager
def backend(name: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaf_program, "BACKEND", name)
        yield


def close(actual: Tensor, expected: Tensor, name: str, rounding: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, name
    gap = (actual.double() - expected.double()).abs().max() if actual.numel() else torch.zeros(())
    size = expected.double().abs().max() if actual.numel() else torch.ones(())
    assert gap <= rounding * size, f"{name}: off by {float(gap):.3g} of {float(size):.3g}"


def assert_close(ours: Run, plain: Run, rounding: float = ROUNDING) -> None:
    """Compare parameters, options and the structure and numbers of the state."""
    _close_values(values(ours.model), values(plain.model), rounding)
    one, other = whole_state(ours.optimizer), whole_state(plain.optimizer)
    assert repr(one["param_groups"]) == repr(other["param_groups"])
    assert one["state"].keys() == other["state"].keys()
    for param, entry in one["state"].items():
        assert list(entry) == list(other["state"][param])
        for key, value in entry.items():
            expected = other["state"][param][key]
            assert type(value) is type(expected)
            if isinstance(value, Tensor):
                close(value, expected, f"{key} of {param}", rounding)


def _close_values(ours: Values, plain: Values, rounding: float) -> None:
    for name, value in ours.items():
        close(value, plain[name], name, rounding)


# ------------------------------------------------------------------------------------------------- every class


def _class(group: ProcessGroup, name: str, compiler: str, options: Mapping[str, Any]) -> None:
    case = CASES[name]
    with backend(compiler):
        ours, plain = (Run(group, case, compiled, **options) for compiled in (True, False))
        for run in (ours, plain):
            run.train()
    assert (ours.graphs > 0) == (case.kind is not Adafactor)
    assert plain.graphs == 0 and plain.optimizer.stats().compile_seconds == 0
    assert_close(ours, plain, 0.02 if case.kind is Muon else ROUNDING)


COMPILED = ["sgd_nesterov", "adamw_maximize", "nadam", "radam", "rprop", "muon"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in (*COMPILED, "adamw_convolutions")])
def test_traced_updates_equal_those_of_the_class(pool: Pool, name: str) -> None:
    pool.run(_class, 2, name, "eager", {}, deadline=DEADLINE)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_updates_equal_those_of_the_class(pool: Pool, name: str) -> None:
    pool.run(_class, 1, name, "inductor", {}, deadline=DEADLINE)


WAYS: dict[str, dict[str, Any]] = {
    "update in backward": {"update": "backward"},
    "gather in forward": {"gather": "forward"},
    "whole gradients": {"reduction": "all"},
    "whole parameters": {"partition": "parameters"},
    "fused": {"fused": True},
    "one bucket": {"bucket_mb": 5},
    "double": {"dtype": torch.float64},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_mode_can_be_compiled(pool: Pool, way: str) -> None:
    pool.run(_class, 2, "adamw", "eager", WAYS[way], deadline=DEADLINE)


def _shared_graph(group: ProcessGroup) -> None:
    case = Case(AdamW, {})
    for options in ({}, {"partition": "parameters"}):
        with backend("eager"):
            run = Run(group, case, True, **options)
            run.train(4)
        # One for leaves of any length, and at most one for a leaf of a single element.
        assert 1 <= run.graphs <= 2 and run.optimizer.stats().buckets > 2


def test_leaves_of_all_lengths_share_a_graph(pool: Pool) -> None:
    pool.run(_shared_graph, 2, deadline=DEADLINE)


# ------------------------------------------------------------------------------------------------- precision


def _masters(group: ProcessGroup, compiler: str, clip: float | None, reduce_dtype: torch.dtype | None) -> None:
    case = Case(AdamW, {})
    options = {"dtype": torch.bfloat16, "master_dtype": torch.float32, "reduce_dtype": reduce_dtype}
    with backend(compiler):
        ours, plain = (Run(group, case, compiled, **options) for compiled in (True, False))
        for run in (ours, plain):
            run.train(8, clip)
    assert ours.graphs
    # A gradient in bfloat16 that is clipped is rounded once less; parameters are rounded masters.
    rounding = 0.01 if clip is not None and reduce_dtype is None else ROUNDING
    assert_close(ours, plain, max(rounding, 0.01 if compiler == "inductor" else 0.0))
    masters = {key: entry["master"] for key, entry in whole_state(ours.optimizer)["state"].items()}
    for param, master in zip(ours.model.parameters(), masters.values(), strict=True):
        assert torch.equal(param, master.to(torch.bfloat16))


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["low sums", "wide sums"])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["as they are", "clipped"])
def test_masters(pool: Pool, clip: float | None, reduce_dtype: torch.dtype | None) -> None:
    pool.run(_masters, 2, "eager", clip, reduce_dtype, deadline=DEADLINE)


def test_masters_in_one_kernel(pool: Pool) -> None:
    pool.run(_masters, 2, "inductor", 0.5, None, deadline=DEADLINE)


# ------------------------------------------------------------------------------------------------- schedules


def _scheduled(run: Run, make: Callable[[Optimizer], LRScheduler], steps: int) -> set[int]:
    """Train with a schedule; how many graphs there were after each step from the third on."""
    scheduler, counts = make(run.optimizer), set[int]()
    for step in range(steps):
        run.train(1)
        scheduler.step()
        counts |= {run.graphs} if step > 2 else set()
    return counts


def _onecycle(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, 0.02, total_steps=20)


def _cosine(optimizer: Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, 10)


def _schedules(group: ProcessGroup, kind: type[Optimizer], make: Callable[[Optimizer], LRScheduler], most: int) -> None:
    case = Case(kind, {"lr": 0.01, **({"momentum": 0.9} if kind is SGD else {})})
    with backend("eager"):
        ours, plain = (Run(group, case, compiled) for compiled in (True, False))
        counts = _scheduled(ours, make, 15)
        _scheduled(plain, make, 15)
    assert len(counts) == 1 and max(counts) <= most
    assert_close(ours, plain)


@pytest.mark.parametrize(
    ("kind", "make"), [(AdamW, _cosine), (AdamW, _onecycle), (SGD, _onecycle)], ids=["cosine", "betas", "momentum"]
)
def test_a_schedule_compiles_nothing_again(pool: Pool, kind: type[Optimizer], make: Any) -> None:
    pool.run(_schedules, 2, kind, make, 2, deadline=DEADLINE)


def _counted(group: ProcessGroup) -> None:
    run = Run(group, Case(AdamW, {}), True)
    scheduler = _cosine(run.optimizer)
    run.train(3)
    before = counters["stats"]["unique_graphs"]
    for _ in range(6):
        scheduler.step()
        run.train(1, clip=0.1)
    assert before and counters["stats"]["unique_graphs"] == before


def test_the_compiler_is_not_called_again(pool: Pool) -> None:
    pool.run(_counted, 2, deadline=DEADLINE)


def _zero_rate(group: ProcessGroup) -> None:
    """A warm-up begins with zero, and parameters without gradient have no second moment then."""
    with backend("eager"):
        run = Run(group, Case(AdamW, {}), True)
        for rate in (0.0, 0.0, 0.0, 0.1):
            run.optimizer.param_groups[0]["lr"] = rate
            run.optimizer.zero_grad()
            run.backward(scale=0.0)
            run.optimizer.step()
    assert run.graphs and all(bool(value.isfinite().all()) for value in values(run.model).values())


def test_a_learning_rate_of_zero_is_no_division_by_zero(pool: Pool) -> None:
    pool.run(_zero_rate, 1, deadline=DEADLINE)


def _tensor_rate(group: ProcessGroup) -> None:
    rate = torch.tensor(0.01)
    with backend("eager"):
        ours = Run(group, Case(AdamW, {"lr": rate, "foreach": False}), True)
        plain = Run(group, Case(AdamW, {"lr": rate, "foreach": False}), False)
        for value in (0.01, 0.02, 0.03, 0.0):
            rate.fill_(value)
            for run in (ours, plain):
                run.train(2)
    assert ours.graphs <= 2
    assert ours.optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.0
    assert_close(ours, plain)


def test_a_learning_rate_in_a_tensor_stays_the_user_s(pool: Pool) -> None:
    pool.run(_tensor_rate, 2, deadline=DEADLINE)


# ------------------------------------------------------------------------------------------------- several of all


def _split_and_grown(group: ProcessGroup) -> None:
    with backend("eager"):
        runs = [Run(group, Case(AdamW, {}), compiled, bucket_mb=1) for compiled in (True, False)]
        for run in runs:
            run.train(6, unused={3: 1, 5: 0})
            extra = nn.Parameter(torch.ones(21))
            run.model.register_parameter("extra", extra)
            run.optimizer.add_param_group(
                {"params": [("extra", extra)], "lr": 0.1, "weight_decay": 0.0, "amsgrad": True}
            )
            run.train(4)
    assert_close(runs[0], runs[1])
    assert runs[0].graphs <= 4


def test_leaves_that_are_split_and_groups_that_are_added(pool: Pool) -> None:
    pool.run(_split_and_grown, 2, deadline=DEADLINE)


def _two_classes(model: nn.Module) -> list[dict[str, Any]]:
    matrices, others = (
        [each for each in model.named_parameters() if (each[1].dim() == 2) == flag] for flag in (True, False)
    )
    return [{"params": matrices, "optimizer_class": Muon, "lr": 0.02}, {"params": others}]


def _muon_and_adamw(group: ProcessGroup) -> None:
    with backend("eager"):
        ours, plain = (Run(group, Case(AdamW, {}), compiled, params=_two_classes) for compiled in (True, False))
        for run in (ours, plain):
            run.train(6, clip=0.5)
    assert ours.graphs >= 2
    assert_close(ours, plain, 0.02)


def test_two_classes(pool: Pool) -> None:
    pool.run(_muon_and_adamw, 2, deadline=DEADLINE)


def _resumed(group: ProcessGroup, name: str) -> None:
    case = CASES[name]
    with backend("eager"):
        whole = Run(group, case, False)
        whole.train(8)
        for first, second in ((True, False), (False, True)):
            begun = Run(group, case, first)
            begun.train(4)
            resumed = Run(group, case, second)
            resumed.model.load_state_dict(begun.model.state_dict())
            resumed.optimizer.load_state_dict(whole_state(begun.optimizer))
            resumed._generator = begun._generator
            resumed.train(4)
            assert (begun.graphs > 0, resumed.graphs > 0) == (first, second)
            assert_close(resumed, whole)


@pytest.mark.parametrize("name", ["adamw", "nadam", "sgd_momentum"])
def test_a_compiled_run_goes_on_uncompiled_and_the_other_way_round(pool: Pool, name: str) -> None:
    pool.run(_resumed, 2, name, deadline=DEADLINE)


def _verified(group: ProcessGroup) -> None:
    with backend("eager"):
        for name in ("adamw", "muon"):
            run = Run(group, CASES[name], True, verify=4)
            run.train(6)
            assert run.graphs


def test_verification_allows_for_rounding_alone(pool: Pool) -> None:
    pool.run(_verified, 2, deadline=DEADLINE)


def _clipped_in_passes(group: ProcessGroup, compiled: bool) -> Values:
    """Clipping leaves a factor to do: further passes, norms and edits must find it done."""
    with backend("eager"):
        run = Run(group, Case(SGD, {"lr": 0.1}), compiled)
        for _ in range(4):
            run.optimizer.zero_grad()
            run.backward()
            run.optimizer.clip_grad_norm_(0.1)
            assert float(run.optimizer.grad_norm()) == pytest.approx(0.1, rel=1e-4)
            run.backward()
            run.optimizer.clip_grad_norm_(0.2)
            torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.05)
            run.optimizer.clip_grad_norm_(0.1)
            run.optimizer.step()
        return values(run.model)


def _clips(group: ProcessGroup) -> None:
    _close_values(_clipped_in_passes(group, True), _clipped_in_passes(group, False), ROUNDING)


def test_whoever_reads_clipped_gradients_finds_them_clipped(pool: Pool) -> None:
    pool.run(_clips, 2, deadline=DEADLINE)


def _freed(group: ProcessGroup) -> None:
    with backend("eager"):
        run = Run(group, Case(AdamW, {}), True)
        run.train(4, clip=0.1)
        assert run.graphs
    optimizer, state = ref(run.optimizer), ref(next(iter(run.optimizer.state.values()))["exp_avg"].untyped_storage())
    del run
    gc.collect()
    assert optimizer() is None and state() is None


def test_programs_keep_nothing_alive(pool: Pool) -> None:
    pool.run(_freed, 2, deadline=DEADLINE)


# ------------------------------------------------------------------------------------------------- many leaves


class _Counting:
    """A backend that runs graphs as they are, and notes for each call how many tensors the graph writes."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, graph: Any, examples: Any) -> Callable[..., Any]:
        writes = sum("copy_" in str(node.target) for node in graph.graph.nodes)

        def run(*arguments: Any) -> Any:
            self.calls.append(writes)
            return graph.forward(*arguments)

        return run


def _many_leaves(group: ProcessGroup, count: int) -> None:
    counting = _Counting()
    with backend(counting), pytest.MonkeyPatch.context() as patch:
        _as_on_accelerators(patch)
        ours, plain = (_many(group, count, compiled) for compiled in (True, False))
        for run in (ours, plain):
            run.train(4)
        counting.calls.clear()
        for run in (ours, plain):
            run.train(1)
    assert_close(ours, plain)
    # Eight leaves by one call, the others one by one, and what is left of a length that is no multiple of a row.
    one, several = min(counting.calls), max(counting.calls)
    assert several == leaf_program.TOGETHER * one
    assert counting.calls.count(several) == count // leaf_program.TOGETHER


def _many(group: ProcessGroup, count: int, compiled: bool) -> Run:
    run = Run.__new__(Run)
    lengths = [256 + 32 * index + 2 * (index % 3) for index in range(count)]
    run.model = nn.Module()
    run.model.all = nn.ParameterList(torch.linspace(-1, 1, length) for length in lengths)
    run.optimizer = sharded(group, run.model, AdamW, None, compile=compiled, bucket_mb=0.0005, lr=0.1)
    run._generator = torch.Generator().manual_seed(dist.get_rank(group))
    return run


def test_many_leaves_are_updated_by_few_calls(pool: Pool) -> None:
    pool.run(_many_leaves, 2, 19, deadline=DEADLINE)


def _as_on_accelerators(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leaf_program, "FLAT_DEVICES", frozenset())
    patch.setattr(update, "_MOST_PARTIAL_STEPS", 1)


def _other_counters(group: ProcessGroup, count: int) -> None:
    with backend("eager"), pytest.MonkeyPatch.context() as patch:
        _as_on_accelerators(patch)
        runs = [_many(group, count, compiled) for compiled in (True, False)]
        for run in runs:
            run.train(14, unused={step: 5 * step % count for step in range(1, 14)})
    assert runs[0].graphs > 1
    assert_close(runs[0], runs[1])


def test_leaves_whose_step_counters_differ_are_updated_together_in_any_number(pool: Pool) -> None:
    pool.run(_other_counters, 2, 12, deadline=DEADLINE)


def _moved_state(group: ProcessGroup) -> None:
    with backend("eager"), pytest.MonkeyPatch.context() as patch:
        _as_on_accelerators(patch)
        runs = [_many(group, 9, compiled) for compiled in (True, False)]
        for run in runs:
            run.train(3)
            for entry in run.optimizer.state.values():
                for value in entry.values():
                    value.data = value.data.clone() if value.dim() == 0 else value.data * 0.5
            run.train(3)
    assert_close(runs[0], runs[1])


def test_state_that_the_user_binds_to_other_memory_is_used(pool: Pool) -> None:
    pool.run(_moved_state, 1, deadline=DEADLINE)


@contextmanager
def _noted() -> Iterator[list[object]]:
    """The leaves that are updated by compiled programs inside."""
    found, original = list[object](), leaf_program.LeafProgram.run

    def run(program: leaf_program.LeafProgram, *arguments: Any) -> None:
        found.append(arguments)
        original(program, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaf_program.LeafProgram, "run", run)
        yield found


def _empty_state(group: ProcessGroup) -> None:
    with backend("eager"):
        runs = [Run(group, CASES["adamw"], compiled) for compiled in (True, False)]
        for run in runs:
            empty = run.optimizer.state_dict()
            run.train(3)
            run.optimizer.load_state_dict(empty)
            run.train(1)
        with _noted() as calls:
            for run in runs:
                run.train(2)
        assert calls
    assert_close(runs[0], runs[1])


def test_a_state_without_entries_can_be_loaded(pool: Pool) -> None:
    pool.run(_empty_state, 1, deadline=DEADLINE)


def _numpy_rate(group: ProcessGroup) -> None:
    kinds: list[type[float]] = [float, np.float64]
    with backend("eager"):
        runs = [Run(group, CASES["adamw"], compiled=True) for _ in kinds]
        for run, kind in zip(runs, kinds, strict=True):
            for step in range(12):
                run.optimizer.param_groups[0]["lr"] = kind(0.1 / (step + 1))
                run.train(1)
    assert 0 < runs[0].graphs == runs[1].graphs
    _close_values(values(runs[0].model), values(runs[1].model), 0.0)


def test_a_learning_rate_of_numpy_is_a_number(pool: Pool) -> None:
    pool.run(_numpy_rate, 1, deadline=DEADLINE)
