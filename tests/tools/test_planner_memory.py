"""Planned bytes against real leaves and optimizers, and the parts of the plan by themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from zerostep.memory.leaf import cut_leaves
from zerostep.plan.groups import all_params
from zerostep.plan.layout import Layout
from zerostep.plan.layout_planner import Settings
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.tools.errors import PlanError
from zerostep.tools.planner.comparison import Request, bytes_of_ranks, compare
from zerostep.tools.planner.forecast import Strategy
from zerostep.tools.planner.memory import TrainingJob, sharded
from zerostep.tools.planner.recipe import Recipe, Rule, dtype_named, optimizer_class, parse_options
from zerostep.tools.planner.sources import Source, load
from zerostep.tools.planner.state import StateModel

SHAPES = {
    "embed.weight": (131, 16),
    "layers.0.weight": (48, 16),
    "layers.0.bias": (48,),
    "layers.1.weight": (16, 48),
    "layers.1.scale": (36,),
    "layers.1.bias": (16,),
    "odd": (7,),
    "nothing": (0, 3),
    "something": (20,),
    "scalar": (),
    "head.weight": (131, 16),
}
ADAMW = Recipe(Rule(AdamW))
RECIPES = {
    "AdamW": ADAMW,
    "SGD": Recipe(Rule(SGD, {"momentum": 0.9})),
    "plain SGD": Recipe(Rule(SGD)),
    "Adafactor": Recipe(Rule(Adafactor)),
    "Muon": Recipe(Rule(AdamW, {"amsgrad": True}), Rule(Muon)),
}


def _source(dtype: torch.dtype = torch.float32, frozen: str = "", shapes: Any = SHAPES) -> Source:
    params = [(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))) for name, shape in shapes.items()]
    for name, param in params:
        param.requires_grad_(name != frozen)
    return Source("shapes", tuple(params))


def _request(recipe: Recipe, ranks: int, **more: Any) -> Request:
    return Request(_source(), recipe, ranks, ranks, **more)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("name", RECIPES)
def test_the_state_is_that_of_the_inner_optimizers(name: str, world: int) -> None:
    planner = RECIPES[name].planner(Settings(bucket_mb=0.002), _source(), "cuda")
    # Adafactor divides by the number of elements.
    shapes = {key: shape for key, shape in SHAPES.items() if key != "nothing" or name != "Adafactor"}
    groups = RECIPES[name].complete_groups(_source(frozen="layers.0.bias", shapes=shapes), planner)
    layout = planner.plan(groups, world)
    found = sharded(TrainingJob(planner, groups, list(shapes), 0, False), layout)
    for rank in range(world):
        assert int(found.state[rank]) == _stepped(layout, rank, planner, groups)


def _stepped(layout: Layout, rank: int, planner: Any, groups: Any) -> int:
    """The bytes of state of a rank's real inner optimizers, over real leaves, after a step."""
    params, members = all_params(groups), [list[Tensor]() for _ in groups]
    for index, bucket in enumerate(layout.buckets):
        if bucket.trainable:
            shard = torch.zeros(bucket.owned(rank).length)
            likes = [torch.empty(param.shape) for param in params]
            for leaf in cut_leaves(layout, rank, index, shard, likes):
                leaf.tensor.grad = torch.zeros_like(leaf.tensor)
                members[leaf.group].append(leaf.tensor)
    inners = InnerOptimizers(groups, members, planner.default_class, planner.defaults)
    for optimizer in inners.all:
        optimizer.step()
    entries = [entry for optimizer in inners.all for entry in optimizer.state.values()]
    return sum(value.nbytes for entry in entries for value in entry.values() if isinstance(value, Tensor))


class Blocks(Optimizer):
    """Keeps a number for every block of 64 elements, and looks at its numbers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["scale"] = torch.zeros(-(-param.numel() // 64), device=param.device)


def test_state_that_grows_in_blocks_is_measured_for_every_length() -> None:
    planner = Recipe(Rule(Blocks)).planner(Settings(), _source(), "cuda")
    model = StateModel(planner, {"params": []})
    assert model.flat(torch.tensor([0, 1, 64, 65, 640]), torch.float32).tolist() == [0, 4, 4, 8, 40]


def test_state_and_masters_of_all_ranks_are_those_of_one() -> None:
    settings = Settings(master_dtype=torch.float32)
    request = Request(_source(torch.bfloat16), ADAMW, 4, 4, settings)
    found = bytes_of_ranks(request)
    elements = request.source.elements
    assert int(found[Strategy.DDP].masters.sum()) == 4 * elements
    for strategy in (Strategy.WHOLE, Strategy.SHARDED):
        assert int(found[strategy].masters.sum()) == 4 * elements
    # Moments have the dtype of the masters; each leaf has one counter.
    assert int(found[Strategy.WHOLE].state.sum()) == 8 * elements + 4 * len(SHAPES)


def test_full_sharding_is_arithmetic() -> None:
    rows = {row.strategy: row for row in compare(_request(ADAMW, 4)).rows}
    plain, full = rows[Strategy.DDP].largest, rows[Strategy.FULL].largest
    assert full.parameters == -(-plain.parameters // 4)
    assert full.gradients == -(-plain.gradients // 4)
    assert full.state == -(-plain.state // 4)
    outside = 4 * (2 * 131 * 16 + 7 + 20 + 1)
    assert full.scratch == 2 * outside


def test_ddp_keeps_buckets_beside_gradients_unless_those_are_views() -> None:
    for views, factor in ((False, 1), (True, 0)):
        request = _request(ADAMW, 2, in_ddp=True, gradients_are_views=views)
        rows = {row.strategy: row.largest for row in compare(request).rows}
        whole = 4 * request.source.elements
        assert rows[Strategy.DDP].scratch == factor * whole
        assert rows[Strategy.SHARDED_IN_DDP].scratch_at_end >= whole


def test_a_mesh_shards_inside_and_replicates_across() -> None:
    mesh = {row.strategy: row for row in compare(Request(_source(), ADAMW, 8, 2)).rows}
    two = {row.strategy: row for row in compare(Request(_source(), ADAMW, 2, 2)).rows}
    assert mesh[Strategy.SHARDED].largest == two[Strategy.SHARDED].largest
    assert mesh[Strategy.SHARDED].wire > two[Strategy.SHARDED].wire
    assert mesh[Strategy.WHOLE].largest.state < two[Strategy.WHOLE].largest.state


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    source = _source(frozen="embed.weight")
    row = compare(Request(source, ADAMW, 1, 1)).plain.largest
    assert row.parameters - row.gradients == 4 * 131 * 16
    assert row.state == 8 * source.trained_elements + 4 * (len(SHAPES) - 1)


def test_sums_in_another_dtype_travel_in_it() -> None:
    source = _source(torch.bfloat16)
    narrow, wide = (
        {row.strategy: row for row in compare(Request(source, ADAMW, 2, 2, settings, "cpu")).rows}
        for settings in (Settings(), Settings(reduce_dtype=torch.float32))
    )
    assert wide[Strategy.SHARDED].wire == pytest.approx(1.5 * narrow[Strategy.SHARDED].wire, rel=1e-3)
    assert wide[Strategy.SHARDED].largest.gradients == 2 * narrow[Strategy.SHARDED].largest.gradients


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_update_inside_backward_keeps_no_gradients(device: str) -> None:
    kept, dropped = (
        {row.strategy: row for row in compare(Request(_source(), ADAMW, 4, 4, settings, device)).rows}
        for settings in (Settings(bucket_mb=0.002), Settings(bucket_mb=0.002, update="backward"))
    )
    before, after = kept.pop(Strategy.SHARDED), dropped.pop(Strategy.SHARDED)
    assert kept == dropped
    assert (after.largest.gradients, after.largest.scratch_at_end) == (0, 0)
    # Between the sum of the first bucket and the end of backward there is less.
    assert after.largest.scratch < before.largest.gradients + before.largest.scratch
    assert (after.wire, after.imbalance, after.largest.state) == (before.wire, before.imbalance, before.largest.state)


def test_a_whole_matrix_is_not_padded_to_all_ranks() -> None:
    request = _request(RECIPES["Adafactor"], 64, settings=Settings(bucket_mb=0.0001))  # a bucket for each matrix
    rows = {row.strategy: row.largest for row in compare(request).rows}
    assert rows[Strategy.SHARDED].parameters == rows[Strategy.DDP].parameters


@pytest.mark.parametrize(
    ("shape", "elements"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
        ("llama-70b", 68_976_648_192),
    ],
)
def test_named_shapes_have_the_published_sizes(shape: str, elements: int) -> None:
    found = load(shape, torch.bfloat16)
    assert found.elements == elements
    assert {param.dtype for _, param in found.params} == {torch.bfloat16}


def test_options_are_literals_dtypes_or_text() -> None:
    given = ["lr=1e-3", "betas=(0.9, 0.95)", "nesterov=True", "dtype=torch.bfloat16", "mode=fast"]
    expected = {"lr": 1e-3, "betas": (0.9, 0.95), "nesterov": True, "dtype": torch.bfloat16, "mode": "fast"}
    assert parse_options(given) == expected


def test_classes_and_dtypes_go_by_name_or_path() -> None:
    assert optimizer_class("AdamW") is AdamW
    assert optimizer_class("torch.optim.SGD") is SGD
    assert optimizer_class(f"{__name__}:Blocks") is Blocks
    assert dtype_named("bf16", "--dtype") is torch.bfloat16
    assert dtype_named("torch.float16", "--dtype") is torch.float16


def test_an_optimizer_that_cannot_hold_the_parameters_says_so() -> None:
    for recipe, excerpt in (
        (Recipe(Rule(Muon)), "Muon cannot hold these parameters"),
        (Recipe(Rule(AdamW, {"speed": 3})), "speed"),
        (Recipe(Rule(torch.optim.LBFGS)), "all parameters at once"),
        (Recipe(Rule(dict)), "cannot hold"),  # type: ignore[arg-type]
    ):
        with pytest.raises(PlanError, match=excerpt):
            compare(_request(recipe, 2))
