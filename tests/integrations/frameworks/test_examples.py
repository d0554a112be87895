"""The examples with frameworks, run as a user runs them: plain and sharded print the same, also after a resume."""

from difflib import unified_diff
from pathlib import Path

import pytest

from tests.integrations.frameworks.launch import DEADLINE, ROOT, run

EXAMPLES = ROOT / "examples" / "frameworks"
NAMES = sorted(path.name.removesuffix("_plain.py") for path in EXAMPLES.glob("*_plain.py"))
PACKAGES = {"trainer": "transformers", "fabric": "lightning"}
RANKS: dict[str, int | None] = {"ray": None}  # it starts its ranks itself
MOST_LINES, MOST_CHANGES = 60, 3

pytestmark = pytest.mark.timeout(4 * DEADLINE)


def scripts(name: str) -> tuple[Path, Path]:
    return EXAMPLES / f"{name}_plain.py", EXAMPLES / f"{name}_zerostep.py"


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_change(name: str) -> None:
    plain, sharded = (path.read_text().splitlines() for path in scripts(name))
    assert max(len(plain), len(sharded)) < MOST_LINES
    added = [line for line in unified_diff(plain, sharded, lineterm="", n=0) if line.startswith("+") and line != "+"]
    assert len(added[1:]) <= MOST_CHANGES, added


@pytest.mark.parametrize("name", NAMES)
def test_the_sharded_example_prints_what_the_plain_one_prints(name: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(name, name))
    plain, sharded = (
        [last_line(run(path, str(tmp_path / path.stem), steps, ranks=RANKS.get(name, 2))) for steps in ("2", "4")]
        for path in scripts(name)
    )
    assert plain == sharded
    assert plain[0] != plain[1]


def last_line(printed: str) -> str:
    return printed.splitlines()[-1]
