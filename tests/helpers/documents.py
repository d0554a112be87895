"""Code blocks, commands and links of the documents, and the error messages in the sources."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "zerostep"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<info>[^`]*)$")
_GAP = "..."


@dataclass(frozen=True)
class Block:
    """A fenced block: `kind` is the first word after the fence, `line` the number of the fence's line."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        """The page and the line of the block."""
        return f"{self.page}:{self.line}"

    def __str__(self) -> str:
        return self.place


def name_of(page: Path) -> str:
    """A page's path inside the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page; `ValueError` for one that does not end."""
    return list(_parse(name_of(page), page.read_text().splitlines()))


def all_blocks() -> list[Block]:
    """All fenced blocks of all pages."""
    return [block for page in PAGES for block in blocks_of(page)]


def _parse(page: str, lines: list[str]) -> Iterator[Block]:
    numbered = iter(enumerate(lines, start=1))
    for number, line in numbered:
        fence = _FENCE.match(line)
        if fence is None:
            continue
        body = list[str]()
        for _, inside in numbered:
            if inside.strip() == fence["marks"]:
                break
            body.append(inside.removeprefix(fence["indent"]))
        else:
            raise ValueError(f"{page}:{number}: this block does not end")
        kind = (fence["info"].split() or [""])[0]
        yield Block(page, number, kind, "\n".join(body) + "\n")


def without_blocks(page: Path) -> str:
    """A page's text without its fenced blocks."""
    text = page.read_text()
    for block in blocks_of(page):
        text = text.replace(block.text, "\n")
    return text


def python_of(block: Block) -> str:
    """The code that a reader has after following the block, on the lines where it stands in the page."""
    text = _applied(block) if block.kind == "diff" else block.text
    return "\n" * block.line + text


def _applied(block: Block) -> str:
    """A diff, applied: without the lines that go, and without the column of marks."""
    lines = block.text.splitlines()
    strange = [line for line in lines if line[:2].strip() not in ("", "+", "-")]
    if strange:
        raise ValueError(f"{block.place}: {strange[0]!r} is no line of a diff: begin it with '+ ', '- ' or two spaces")
    return "\n".join("" if line.startswith("-") else line[2:] for line in lines) + "\n"


@dataclass(frozen=True)
class Command:
    """A command of a shell block, and what the block shows of its output."""

    words: tuple[str, ...]
    output: str


def commands_of(block: Block) -> list[Command]:
    """In a console block a command stands behind a prompt, and its output follows; in others a line is a command."""
    lines = re.sub(r"\\\n\s*", " ", block.text).splitlines()
    if block.kind != "console":
        return [Command(words, "") for line in lines if (words := _words(line))]
    places = [place for place, line in enumerate(lines) if line.startswith("$ ")]
    if not places or places[0] != 0:
        raise ValueError(f"{block.place}: a console block begins with a prompt, '$ ', and a command")
    ends = [*places[1:], len(lines)]
    return [Command(_words(lines[a][2:]), "\n".join(lines[a + 1 : b])) for a, b in zip(places, ends, strict=True)]


def _words(line: str) -> tuple[str, ...]:
    """A command without comments and without the variables that are set for it."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return tuple(words)


# What the sources say.


@dataclass(frozen=True)
class Message:
    """The text of an error as it stands in the sources, with three dots for what is put in."""

    module: str
    line: int
    text: str


def texts() -> set[str]:
    """Every text in the sources of the package."""
    found = set[str]()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Constant, ast.JoinedStr)):
                found.add(_text(node))
    return found


def messages() -> list[Message]:
    """The texts of all errors that are raised where they are made; those without words of ours are left out."""
    return [message for path in sorted(SOURCES.rglob("*.py")) for message in _raised(path)]


def _raised(path: Path) -> Iterator[Message]:
    module = path.relative_to(SOURCES).with_suffix("").as_posix().replace("/", ".")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = _text(node.exc.args[0])
            if text.replace(_GAP, "").strip():
                yield Message(module, node.lineno, text)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else _GAP
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    return _GAP
