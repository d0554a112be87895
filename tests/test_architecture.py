"""Walls between modules: private names stay private, fields are written by their own objects, plans know no processes.

The direction of imports between rooms is held by import-linter, in `make lint`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "zerostep"
MODULES = {path.relative_to(SOURCES).as_posix(): ast.parse(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}
# The import path that the drop-in promises, with the one private name that other projects use.
RE_EXPORTS = {"zero.py": {"_broadcast_object"}}
# Fields of classes of torch and of Python.
OTHERS = {"_join_config", "grad", "data", "extra"}
# Written through another name than `self`: the object that a `__new__` is making.
MAKERS = ("step/sharded_grad.py", "integrations/dcp_tensor.py")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_fields(tree: ast.Module) -> set[str]:
    """Methods and fields of the classes that a module defines."""
    names = set[str]()
    for node in (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)):
        names |= {each.name for each in node.body if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
        names |= {
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        names |= {each.attr for each in stored_attributes(node) if is_self(each.value)}
    return names - OTHERS


def stored_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


OWN = {name: own_fields(tree) for name, tree in MODULES.items()}


def is_foreign(node: ast.Attribute, module: str) -> bool:
    """Whether an attribute belongs to a class of another module."""
    elsewhere = any(node.attr in names for other, names in OWN.items() if other != module)
    return elsewhere and not is_self(node.value) and node.attr not in OWN[module]


def private_reads(module: str) -> Iterator[str]:
    """Private names of other modules of the package, imported or read as attributes."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zerostep"):
            allowed = RE_EXPORTS.get(module, set())
            yield from (alias.name for alias in node.names if is_private(alias.name) and alias.name not in allowed)
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and is_foreign(node, module):
            yield f"{ast.unparse(node)} in line {node.lineno}"


def foreign_writes(module: str) -> Iterator[str]:
    """Assignments to fields of objects that other modules define."""
    for target in stored_attributes(MODULES[module]):
        if is_foreign(target, module):
            yield f"{ast.unparse(target)} in line {target.lineno}"


@pytest.mark.parametrize("module", MODULES)
def test_no_module_reads_another_module_s_private_names(module: str) -> None:
    assert list(private_reads(module)) == []


@pytest.mark.parametrize("module", [module for module in MODULES if module not in MAKERS])
def test_no_object_writes_another_object_s_fields(module: str) -> None:
    assert list(foreign_writes(module)) == []


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("plan/")])
def test_a_plan_knows_nothing_of_processes(module: str) -> None:
    imported = [node for node in ast.walk(MODULES[module]) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [getattr(node, "module", None) or "" for node in imported]
    names += [alias.name for node in imported if isinstance(node, ast.Import) for alias in node.names]
    assert not [name for name in names if name.startswith("torch.distributed")]


@pytest.mark.parametrize("module", [module for module in MODULES if module.count("/") >= 1 and "__init__" in module])
def test_every_room_says_what_it_is_for(module: str) -> None:
    assert len((ast.get_docstring(MODULES[module]) or "").splitlines()) >= 3


def test_the_root_has_only_what_everybody_needs() -> None:
    files = {path.name for path in SOURCES.glob("*") if path.name != "__pycache__"}
    rooms = {"plan", "comm", "memory", "step", "state", "optim", "checkpoint", "integrations", "tools"}
    assert files == rooms | {
        "__init__.py",
        "version.py",
        "py.typed",
        "errors.py",
        "dtensors.py",
        "tensors.py",
        "zero.py",
        "overlap.py",
    }
