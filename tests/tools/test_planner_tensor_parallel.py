"""`zerostep plan --tp`: what a rank of tensor parallelism holds, and live ranks against it, to the byte."""

import json
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.optim import SGD, AdamW, Muon

pytest.importorskip("typer")

from tests.helpers.pool import Pool
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer
from zerostep.dtensors import local_of
from zerostep.plan.layout_planner import Settings
from zerostep.tools import cli
from zerostep.tools.errors import PlanError
from zerostep.tools.planner.comparison import Request, bytes_of_ranks, compare, compare_largest
from zerostep.tools.planner.forecast import Strategy
from zerostep.tools.planner.recipe import Recipe, Rule
from zerostep.tools.planner.sources import Source
from zerostep.tools.planner.tensor_parallel import load_divided

HERE = __name__
WIDTH, BUCKET_MB = 12, 0.001
EVEN, UNEVEN = 20, 21  # hidden units, for two ranks
WORDS = 80  # bytes beside the elements: ten integers about passes, steps and who has used what


class Net(nn.Module):
    """A norm, a pair of matrices and a head; a buffer and a frozen parameter beside them."""

    def __init__(self, hidden: int = EVEN) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mask", torch.ones(4, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + self.down(torch.tanh(self.up(self.norm(inputs))))
        result: Tensor = self.head(hidden).square().mean()
        return result


def uneven() -> nn.Module:
    """A net whose hidden units are no multiple of two."""
    return Net(UNEVEN)


class Tall(Net):
    """A net with a head that is larger than what a rank has of the matrices, and smaller than a whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 15)


class Numbered(nn.Module):
    """A net as a numbered block, whose matrices another optimizer class takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Net())

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.blocks(inputs)
        return result


PLAN: dict[str, Any] = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """As a training script does it."""
    parallelize_module(model, mesh["tp"], PLAN)


def divide_block(model: nn.Module, mesh: DeviceMesh) -> None:
    """The same, of a numbered block."""
    divide(model.get_submodule("blocks.0"), mesh)


def styles(model: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    """A plan that depends on the model and the mesh."""
    return {**PLAN, "norm": SequenceParallel()}


def divided() -> nn.Module:
    """A net that its factory divides."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(Net(), mesh, PLAN)


def broken(model: nn.Module, mesh: DeviceMesh) -> None:
    """Fails."""
    raise KeyError("up")


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in source.params}


@pytest.mark.parametrize(("model", "plan"), [("Net", "PLAN"), ("Net", "divide"), ("Net", "styles"), ("divided", None)])
def test_a_model_is_divided_as_the_user_says(model: str, plan: str | None) -> None:
    first, second = load_divided(f"{HERE}:{model}", None, 2, plan and f"{HERE}:{plan}")
    assert _shapes(first) == _shapes(second)
    found = _shapes(first)
    assert (found["up.weight"], found["up.bias"], found["down.weight"]) == ((10, WIDTH), (10,), (WIDTH, 10))
    assert (found["down.bias"], found["norm.weight"], found["head.weight"]) == ((WIDTH,), (WIDTH,), (5, WIDTH))
    assert first.whole_elements == sum(param.numel() for param in Net().parameters())
    assert first.whole_elements - first.elements == 10 * WIDTH + 10 + 10 * WIDTH
    assert first.trained_elements == first.elements - 3 and first.buffer_bytes == 64
    assert all(param.is_meta and type(param) is nn.Parameter for _, param in first.params)
    assert not dist.is_initialized()


def test_ranks_of_uneven_parts_have_shapes_of_their_own() -> None:
    first, second = load_divided(f"{HERE}:uneven", torch.bfloat16, 2, f"{HERE}:PLAN")
    assert [_shapes(each)["up.weight"] for each in (first, second)] == [(11, WIDTH), (10, WIDTH)]
    assert {param.dtype for _, param in second.params} == {torch.bfloat16}


RECIPES = {
    "AdamW": Recipe(Rule(AdamW, {"lr": 0.1})),
    "SGD": Recipe(Rule(SGD, {"lr": 0.1, "momentum": 0.9})),
    "Muon": Recipe(Rule(AdamW, {"lr": 0.1}), Rule(Muon, {"lr": 0.02})),
}


def _requests(sources: list[Source], ranks: int, recipe: str = "AdamW") -> list[Request]:
    settings = Settings(bucket_mb=BUCKET_MB)
    return [Request(source, RECIPES[recipe], ranks, ranks, settings, "cpu", tp=len(sources)) for source in sources]


def test_the_plan_is_that_of_the_rank_with_most() -> None:
    requests = _requests(load_divided(f"{HERE}:uneven", None, 2, f"{HERE}:PLAN"), 2)
    both, first, second = compare_largest(requests), compare(requests[0]), compare(requests[1])
    for row in both.rows:
        assert row.largest == first.row(row.strategy).largest
        assert row.smallest == second.row(row.strategy).smallest
        assert row.wire == first.row(row.strategy).wire
    assert compare_largest(requests[::-1]).rows == both.rows


@pytest.mark.parametrize(("model", "tp"), [("gpt2", 4), ("llama-7b", 8), ("llama-70b", 8)])
def test_named_models_are_divided_as_megatron_divides_them(model: str, tp: int) -> None:
    first, *_, last = load_divided(model, None, tp, None)
    replicated = sum(param.numel() for name, param in first.params if "norm" in name or "ln_" in name)
    biases = sum(param.numel() for name, param in first.params if name.endswith("c_proj.bias") or "wpe" in name)
    assert tp * first.elements >= first.whole_elements + (tp - 1) * (replicated + biases)
    assert first.elements / ((first.whole_elements - replicated - biases) / tp + replicated + biases) < 1.001
    assert last.elements <= first.elements


# The command.


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["zerostep", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


def test_the_command_counts_ranks_of_both_dimensions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", f"{HERE}:Net", "--tp", "2", "--tp-plan", f"{HERE}:PLAN", "--device", "cpu")
    assert _run(monkeypatch, *given, "--ranks", "8") == 0
    out = capsys.readouterr().out
    assert "8 ranks, 4 of data x 2 of tensor parallelism" in out
    assert "is not in wire" in out
    assert _run(monkeypatch, *given, "--mesh", "2x4", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tp"], found["ranks"], found["shards"]) == (2, 8, 4)


REFUSED = {
    "no parameter of the model is a DTensor": ("--model", f"{HERE}:Net", "--tp", "2"),
    "cannot divide the tensors": ("--model", "model.safetensors", "--tp", "2"),
    "divided as Megatron does": ("--model", "gpt2", "--tp", "2", "--tp-plan", f"{HERE}:PLAN"),
    "groups of --tp 3": ("--model", "gpt2", "--ranks", "8", "--tp", "3"),
    "groups of --tp 0": ("--model", "gpt2", "--ranks", "8", "--tp", "0"),
    "--tp must be at least 1": ("--model", "gpt2", "--mesh", "1x2", "--tp", "0"),
    "fails with KeyError": ("--model", f"{HERE}:Net", "--tp", "2", "--tp-plan", f"{HERE}:broken"),
    "is a int": ("--model", f"{HERE}:Net", "--tp", "2", "--tp-plan", f"{HERE}:WIDTH"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_divided_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert _run(monkeypatch, *REFUSED[text]) == 2
    error = capsys.readouterr().err.strip()
    assert text in error and len(error.splitlines()) == 1
    assert not dist.is_initialized()


def _inside_a_job(group: ProcessGroup) -> None:
    with pytest.raises(PlanError, match="without a process group"):
        load_divided("gpt2", None, 2, None)


def test_a_process_with_a_process_group_is_refused(pool: Pool) -> None:
    pool.run(_inside_a_job, 1)


# Live ranks.


def _live(group: ProcessGroup, factory: str, plan: str, recipe: str) -> tuple[int, int, int, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = globals()[factory]()
    globals()[plan](model, mesh)
    common, groups = RECIPES[recipe].common, RECIPES[recipe].groups(list(model.named_parameters()))
    options: dict[str, Any] = dict(common.options)
    optimizer = ShardedOptimizer(model, common.build, groups, process_group=mesh["dp"], bucket_mb=BUCKET_MB, **options)
    for _ in range(2):
        sent = optimizer.stats().bytes_sent
        optimizer.zero_grad()
        model(torch.ones(3, WIDTH)).backward()
        optimizer.step()
    stats = optimizer.stats()
    return mesh["tp"].get_local_rank(), mesh["dp"].get_local_rank(), stats.state_bytes, stats.bytes_sent - sent


@pytest.mark.parametrize(
    ("factory", "plan", "recipe"),
    [
        ("Net", "divide", "AdamW"),
        ("Net", "divide", "SGD"),
        ("uneven", "divide", "AdamW"),
        ("uneven", "divide", "SGD"),
        ("Numbered", "divide_block", "Muon"),
    ],
)
def test_live_ranks_have_the_state_and_send_the_bytes_of_the_plan(
    pool: Pool, factory: str, plan: str, recipe: str
) -> None:
    requests = _requests(load_divided(f"{HERE}:{factory}", None, 2, f"{HERE}:{plan}"), 2, recipe)
    found = pool.run(_live, 4, factory, plan, recipe)
    for tp, request in enumerate(requests):
        shares, wire = bytes_of_ranks(request)[Strategy.SHARDED], compare(request).row(Strategy.SHARDED).wire
        own = {dp: (state, sent) for coordinate, dp, state, sent in found if coordinate == tp}
        assert {dp: state for dp, (state, _) in own.items()} == {dp: shares.memory(dp).state for dp in range(2)}
        assert sum(sent for _, sent in own.values()) == 2 * (wire + WORDS)


def _live_drop_in(group: ProcessGroup, factory: str) -> tuple[int, int, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = globals()[factory]()
    divide(model, mesh)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, process_group=mesh["dp"].get_group(), lr=0.1)
    model(torch.ones(3, WIDTH)).backward()
    optimizer.step()
    values = [value for entry in optimizer.optim.state.values() for value in entry.values()]
    held = sum(local_of(value).nbytes for value in values if isinstance(value, Tensor))
    return mesh["tp"].get_local_rank(), mesh["dp"].get_local_rank(), held


@pytest.mark.parametrize("factory", ["Net", "uneven", "Tall"])
def test_owners_of_whole_parameters_have_the_state_of_the_plan(pool: Pool, factory: str) -> None:
    requests = _requests(load_divided(f"{HERE}:{factory}", None, 2, f"{HERE}:PLAN"), 2)
    expected = [bytes_of_ranks(request)[Strategy.WHOLE] for request in requests]
    for tp, dp, held in pool.run(_live_drop_in, 4, factory):
        assert held == expected[tp].memory(dp).state
