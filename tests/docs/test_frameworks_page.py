"""docs/frameworks.md against the examples and the tests: its tables of results, and the lines that a user changes."""

import ast
import re
from difflib import unified_diff
from pathlib import Path

import pytest

from tests.helpers.documents import ROOT, Block, blocks_of
from tests.integrations.frameworks.allowed import allowed

PAGE = ROOT / "docs" / "frameworks.md"
EXAMPLES = ROOT / "examples" / "frameworks"
KINDS = {"`ShardedOptimizer`": "sharded", "`ZeroRedundancyOptimizer`": "zero", "`overlap_with_ddp=True`": "overlap"}
# The columns with results, and what the tests call them.
FEATURES = {
    **{name: name for name in ("train", "clip", "accumulate", "bf16", "save", "resume")},
    "on three ranks": "three",
    "on one": "one",
}
REFUSED = {("overlap", "clip")}
NOT_RUN = "-"
COMPLETE = ("Trainer", "Accelerate", "Lightning", "Fabric")
Row = dict[str, str]


def tables() -> list[list[Row]]:
    """All tables of the page; each row by the titles of its columns."""
    found = []
    for text in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE):
        titles, _, *rows = ([cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in text.splitlines())
        found.append([dict(zip(["", *titles[-len(row) + 1 :]], row, strict=True)) for row in rows])
    return found


RESULTS = tables()[0]
PROOFS = tables()[1]


def framework_of(row: Row) -> str:
    return row[""].split(", ")[0]


def kind_of(row: Row) -> str:
    return KINDS[row[""].split(", ")[1]]


def shown(kind: str, feature: str) -> str:
    if (kind, feature) in REFUSED:
        return "refused"
    return "0.0" if allowed(kind, feature) == 0.0 else "1e-6"


@pytest.mark.parametrize("row", RESULTS, ids=lambda row: row[""])
def test_results_are_what_the_tests_allow(row: Row) -> None:
    assert set(FEATURES) | {"changed lines", "end"} <= set(row)
    for title, feature in FEATURES.items():
        assert row[title].split(" (")[0] in (shown(kind_of(row), feature), NOT_RUN), title
    assert row["end"] in ("clean", NOT_RUN)


def test_every_framework_has_every_class() -> None:
    rows = [(framework_of(row), kind_of(row)) for row in RESULTS]
    assert len(set(rows)) == len(rows) >= 12
    for framework in COMPLETE:
        assert {kind for name, kind in rows if name == framework} == set(KINDS.values())
    assert {framework_of(row) for row in RESULTS if NOT_RUN in row.values()}.isdisjoint(COMPLETE)


def changes(framework: str) -> tuple[list[str], list[str]]:
    """The lines that only the plain example has, and those that only the sharded one has."""
    before, after = (EXAMPLES / f"{framework.lower()}_{which}.py" for which in ("plain", "zerostep"))
    texts = before.read_text().splitlines(), after.read_text().splitlines()
    lines = list(unified_diff(texts[0], texts[1], lineterm="", n=0))[2:]
    plain, ours = ([line[1:].strip() for line in lines if line.startswith(sign)] for sign in "-+")
    return plain, [line for line in ours if line not in ("", "import zerostep")]


@pytest.mark.parametrize("row", RESULTS, ids=lambda row: row[""])
def test_the_number_of_changed_lines_is_that_of_the_example(row: Row) -> None:
    assert row["changed lines"].split(" ")[0] == str(len(changes(framework_of(row))[1]))


# The tests that show it.


def files_of(row: Row) -> dict[str, Path]:
    found = re.findall(r"\[(\w[\w ]*)\]\(([^)]+)\)", row["where"])
    return {name: (PAGE.parent / path).resolve() for name, path in found}


def functions_in(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", PROOFS, ids=lambda row: f"{row['']}, {row['where'].count('[')}")
def test_every_test_that_is_named_is_there(row: Row) -> None:
    names = set(re.findall(r"`(test_\w+)`", row["shown by"]))
    assert names and files_of(row)
    for file in files_of(row).values():
        assert names <= functions_in(file), f"{file.name} has no {sorted(names - functions_in(file))}"


def test_every_result_has_a_test_that_shows_it() -> None:
    proved = {(framework, what) for row in PROOFS for framework in files_of(row) for what in row[""].split(", ")}
    wanted = {(framework_of(row), what) for row in RESULTS for what in (*FEATURES, "end") if row[what] != NOT_RUN}
    assert proved == wanted


# The lines that a user changes.


def diffs() -> list[Block]:
    return [block for block in blocks_of(PAGE) if re.search(r"^[+-] ", block.text, re.MULTILINE)]


def example_of(block: Block) -> str:
    """The framework whose examples have all lines of a block, which begin with `+`, `-` or two spaces."""
    for framework in dict.fromkeys(framework_of(row) for row in RESULTS):
        plain, ours = changes(framework)
        common = (EXAMPLES / f"{framework.lower()}_plain.py").read_text()
        texts = {"+": ours, "-": plain, " ": [line.strip() for line in common.splitlines()]}
        if all(line[2:].strip() in texts[line[0]] for line in block.text.splitlines()):
            return framework
    raise AssertionError(f"{block.place}: no example in {EXAMPLES.name} has all of these lines")


def test_the_lines_to_change_are_those_of_the_examples() -> None:
    assert [example_of(block) for block in diffs()] == list(COMPLETE)


@pytest.mark.parametrize("block", diffs(), ids=str)
def test_no_line_that_changes_is_left_out(block: Block) -> None:
    plain, ours = changes(example_of(block))
    for sign, expected in (("-", plain), ("+", ours)):
        assert [line[2:].strip() for line in block.text.splitlines() if line.startswith(sign)] == expected
