"""The documents against the code: commands, links, error messages and public names.

The Python in them is run by `tests/docs/test_documented_code.py`.
"""

import importlib.util
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import zerostep
from tests.helpers.documents import (
    PAGES,
    ROOT,
    Block,
    Message,
    all_blocks,
    commands_of,
    messages,
    name_of,
    python_of,
    texts,
    without_blocks,
)
from zerostep.tools.cli import app

PYTHON = ("python", "diff")
SHELL = ("sh", "console", "")
DIRECTIVES = ("{eval-rst}", "{toctree}")  # `make docs` checks these
OTHERS = ("text", "json")

TROUBLES = ROOT / "docs" / "troubleshooting.md"
# Errors of the command line say in one line what to do, and are about what stands on that line.
COMMANDS = ("tools",)
# These check what the package itself made: their errors are defects, or come wrapped into another one's text.
INNER = (
    *("plan.layout", "plan.buckets", "plan.assign", "comm.codec", "comm.objects"),
    *("checkpoint.manifest", "checkpoint.reader", "checkpoint.tensor_file"),
)


# Blocks.


@pytest.mark.parametrize("block", all_blocks(), ids=str)
def test_every_block_is_of_a_kind_that_is_checked(block: Block) -> None:
    assert block.kind in (*PYTHON, *SHELL, *DIRECTIVES, *OTHERS), (
        f"{block.place}: nobody checks a block of kind {block.kind!r}: mark it python, diff, sh, json or text"
    )
    if block.kind == "json":
        json.loads(block.text)
    if block.kind in PYTHON:
        compile(python_of(block), block.page, "exec")


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def check_make(arguments: Sequence[str]) -> None:
    assert set(arguments) <= targets()


def check_zerostep(arguments: Sequence[str]) -> bool:
    """The command line accepts it, and it is carried out if it does not train. Whether it was."""
    name, *rest = arguments
    known: Mapping[str, Any] = getattr(get_command(app), "commands", {})
    assert name in known, f"there is no zerostep {name}"
    known[name].make_context(name, list(rest))
    if name not in ("plan", "inspect", "convert"):
        return False  # tests/tools/test_trace_command.py carries the traces out
    assert app(list(arguments), standalone_mode=False) == 0
    return True


def check_python(arguments: Sequence[str]) -> None:
    if arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None, f"there is no module {arguments[1]}"
    else:
        check_script(arguments)


def check_script(arguments: Sequence[str]) -> None:
    scripts = [argument for argument in arguments if argument.endswith(".py")]
    assert scripts
    assert all((ROOT / script).is_file() or script == "train.py" for script in scripts[:1])


def check_pip(arguments: Sequence[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert arguments[0] == "install"
    for extras in re.findall(r"\[([a-z,]+)\]", arguments[-1]):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


CHECKS: dict[str, Callable[[Sequence[str]], bool | None]] = {
    "make": check_make,
    "zerostep": check_zerostep,
    "python": check_python,
    "torchrun": check_script,
    "pip": check_pip,
}


@pytest.mark.parametrize("block", [block for block in all_blocks() if block.kind in SHELL], ids=str)
def test_commands_are_there_and_print_what_is_shown(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "tests" / "golden" / "v1" / "checkpoint", tmp_path / "checkpoints" / "step-3")
    commands = commands_of(block)
    assert commands, f"{block.place} has no commands: mark it as text"
    for command in commands:
        name, *arguments = command.words
        assert name in CHECKS, f"{block.place}: {name!r} is no command that can be checked; is it text?"
        carried_out = CHECKS[name](arguments)
        printed = capsys.readouterr().out
        if carried_out and command.output:
            assert stripped(printed) == stripped(command.output)


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_targets_of_make_in_the_text_are_there(page: Path) -> None:
    assert set(re.findall(r"`make ([a-z-]+)", page.read_text())) <= targets()


# Links.


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.*)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{name_of(page)} links to {link}, which is not there"
        assert not anchor or anchor in anchors(target), f"{name_of(page)} links to {link}, which has no such heading"


# Error messages.


def quoted() -> list[str]:
    """The messages in the tables of the page: all that stands between backticks in a first column."""
    rows = re.findall(r"^\| (`[^|]*`) \|", TROUBLES.read_text(), re.MULTILINE)
    return [fragment for row in rows for fragment in re.findall(r"`([^`]+)`", row)]


def test_quoted_messages_are_those_of_the_sources() -> None:
    known = texts()
    assert len(quoted()) > 50
    gone = [fragment for fragment in quoted() if not any(fragment in text for text in known)]
    assert gone == [], "no source has these texts of docs/troubleshooting.md"


def meets(message: Message) -> bool:
    """Whether users can meet it in a program of their own."""
    return not any(message.module == name or message.module.startswith(f"{name}.") for name in (*COMMANDS, *INNER))


def test_every_message_that_users_can_meet_is_explained() -> None:
    fragments = quoted()
    found = [message for message in messages() if meets(message)]
    assert len(found) > 50
    missing = [message.text for message in found if not any(fragment in message.text for fragment in fragments)]
    assert missing == [], "docs/troubleshooting.md does not explain these"


# Public names.


def test_the_reference_has_every_public_name() -> None:
    documented = set(
        re.findall(r"^\.\. auto\w+:: (\w+)(?:\(\))?$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    )
    assert documented == set(zerostep.__all__) - {"__version__", "integrations"}


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = {line for block in all_blocks() if block.kind == "{toctree}" for line in block.text.split()}
    assert {page.stem for page in PAGES if page.parent.name == "docs"} - {"index"} <= listed
