"""The Python in README.md and in docs/, run on real ranks, block by block.

Each block runs by itself; names that it does not define come from `GIVEN`, made anew for each block. Of a diff, the
result is run.
"""

import ast
import builtins
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

import zerostep
from tests.helpers.documents import PAGES, Block, blocks_of, name_of, python_of
from tests.helpers.pool import SIZE, Pool

Names = dict[str, Any]
KINDS = ("python", "diff")
OFFLINE = ("consolidate(", "reshard(")  # for one process


def model(given: "Given") -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    in_ddp = "register_comm_hook" in given.source and "DDP(" not in given.source
    return DistributedDataParallel(made) if in_ddp else made


def batches(given: "Given") -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(dist.get_rank())
    return [(torch.randn(3, 8, generator=random), torch.randn(3, 4, generator=random)) for _ in range(4)]


def optimizer(given: "Given") -> Any:
    made = zerostep.ShardedOptimizer(given("model"), torch.optim.AdamW, lr=1e-3)
    given.names["optimizer"] = made
    given("train_one_step")()
    return made


def scheduler(given: "Given") -> Any:
    return torch.optim.lr_scheduler.StepLR(given("optimizer"), 10)


def train_one_step(given: "Given") -> Callable[[], None]:
    def train() -> None:
        inputs, targets = given("batches")[0]
        given("optimizer").zero_grad()
        given("loss")(given("model")(inputs), targets).backward()
        given("optimizer").step()

    return train


def matrices(given: "Given") -> list[Tensor]:
    return [param for param in given("model").parameters() if param.dim() == 2]


def rest(given: "Given") -> list[Tensor]:
    return [param for param in given("model").parameters() if param.dim() != 2]


GIVEN: dict[str, Callable[["Given"], Any]] = {
    "torch": lambda _: torch,
    "nn": lambda _: nn,
    "dist": lambda _: dist,
    "DDP": lambda _: DistributedDataParallel,
    "zerostep": lambda _: zerostep,
    "model": model,
    "batches": batches,
    "loss": lambda _: nn.functional.mse_loss,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "train_one_step": train_one_step,
    "matrices": matrices,
    "rest": rest,
    "root": lambda _: Path.cwd(),
    "path": lambda _: Path.cwd() / "checkpoint",
    "step": lambda _: 100,
    "steps": lambda _: 200,
    "batch": lambda _: 7,
}


class Given:
    """The names that a block uses and does not define, each made once."""

    def __init__(self, source: str) -> None:
        self.source, self.names = source, Names()

    def __call__(self, name: str) -> Any:
        if name not in self.names:
            self.names[name] = GIVEN[name](self)
        return self.names[name]


class Reader(ast.NodeVisitor):
    """Follows a block in the order in which it runs: what is read before it is defined is free."""

    def __init__(self, defined: set[str]) -> None:
        self.defined, self.free = defined, set[str]()

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.defined.add(node.id)
        elif node.id not in self.defined:
            self.free.add(node.id)

    def visit_alias(self, node: ast.alias) -> None:
        self.defined.add(node.asname or node.name.partition(".")[0])

    def visit_Assign(self, node: ast.Assign) -> None:
        self._visit_all(node.value, *node.targets)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._visit_all(node.value, ast.Expr(ast.parse(ast.unparse(node.target), mode="eval").body))

    def visit_For(self, node: ast.For) -> None:
        self._visit_all(node.iter, node.target, *node.body, *node.orelse)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.defined |= {node.name or "_"}
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._visit_all(*node.generators, node.elt)

    visit_SetComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._visit_all(*node.generators, node.key, node.value)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._visit_all(node.iter, node.target, *node.ifs)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.defined.add(node.name)
        self._visit_inside(node.args, node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_inside(node.args, [ast.Expr(node.body)])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.defined.add(node.name)
        self._visit_all(*node.bases)
        self._visit_inside(ast.arguments([], [], kwonlyargs=[], kw_defaults=[], defaults=[]), node.body)

    def _visit_all(self, *nodes: ast.AST) -> None:
        for node in nodes:
            self.visit(node)

    def _visit_inside(self, arguments: ast.arguments, body: list[ast.stmt]) -> None:
        own = {each.arg for each in ast.walk(arguments) if isinstance(each, ast.arg)}
        inside = Reader(self.defined | own)
        inside._visit_all(*body)
        self.free |= inside.free


def free_names(source: str) -> set[str]:
    """What a block reads and has not defined before: `model = DDP(model)` needs a model."""
    reader = Reader({*dir(builtins), "__name__"})
    reader.visit(ast.parse(source))
    return reader.free


def run_blocks(group: ProcessGroup, blocks: list[Block], folder: Path) -> None:
    """Run all blocks of a page, each with what it needs and in a directory of its own."""
    before = Path.cwd()
    try:
        for block in blocks:
            place = folder / str(block.line)
            place.mkdir(exist_ok=True)
            os.chdir(place)
            run_block(block)
            gc.collect()
    finally:
        os.chdir(before)


def run_block(block: Block) -> None:
    source = python_of(block)
    given = Given(source)
    wanted = free_names(source)
    unknown = wanted - set(GIVEN)
    assert not unknown, f"{block.place} uses {sorted(unknown)}, which it neither defines nor is given"
    if '"step-1200"' in source:
        zerostep.save("step-1200", given("optimizer"), given("model"))
    if any(function in source for function in OFFLINE) and dist.get_rank():
        return
    names: Names = {"__name__": "block", **{name: given(name) for name in sorted(wanted)}}
    exec(compile(source, block.page, "exec"), names)
    for value in names.values():
        if isinstance(value, (zerostep.ShardedOptimizer, zerostep.ZeroRedundancyOptimizer)):
            value._saves.finish()


CASES = [(page, [block for block in blocks_of(page) if block.kind in KINDS]) for page in PAGES]


@pytest.mark.parametrize("blocks", [pytest.param(b, id=name_of(page)) for page, b in CASES if b])
def test_blocks_run(pool: Pool, blocks: list[Block], tmp_path: Path) -> None:
    pool.run(run_blocks, SIZE, blocks, tmp_path)


def test_a_block_is_given_what_it_does_not_define() -> None:
    assert free_names("model = DDP(model)\nfor x, y in batches:\n    model(x)\n") == {"model", "DDP", "batches"}
    assert free_names("import torch\ndef f(x):\n    return torch.relu(x) + step\nprint(f(1))\n") == {"step"}
    assert free_names("model = 1\nprint(model, [x for x in (1, 2)], lambda y: y)\n") == set()
    assert free_names("step += 1\nclass A(nn.Module):\n    def f(self):\n        return rest\n") == {
        "step",
        "nn",
        "rest",
    }
