"""`zerostep plan` on the command line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("typer")

from zerostep.tools import cli

SMALL = ("--model", "gpt2", "--ranks", "2")
FORECAST = ("--bandwidth", "25", "--flops", "100e12")


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["zerostep", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def test_plain_output_has_whole_lines_and_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, *SMALL, *FORECAST, "--no-shard-gradients", "--master-dtype", "float64") == 0
    out, err = capsys.readouterr()
    assert out.isascii() and not err
    assert "gpt2: 124,439,808 parameters, float32" in out
    for name in ("DDP", "ZeroRedundancyOptimizer", "ShardedOptimizer in DDP", "ShardedOptimizer", "FSDP-style"):
        assert any(line.startswith(f"{name} ") for line in out.splitlines())
    assert "4,096" in out and "25 GB/s" in out


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_colour_unless_it_does_not_want_any(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_color: bool
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    assert _run(monkeypatch, *SMALL) == 0
    out = capsys.readouterr().out
    assert ("\x1b[36m" in out) is (not no_color)


def test_json_has_bytes_and_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, *SMALL, *FORECAST, "--json", "--optimizer", "SGD", "--option", "momentum=0.9") == 0
    found = json.loads(capsys.readouterr().out)
    plain = found["strategies"]["DDP"]["largest"]
    assert plain["parameters"] == plain["gradients"] == plain["state"] == 4 * 124_439_808
    assert plain["total"] == sum(plain[part] for part in ("parameters", "gradients", "state", "scratch"))
    assert found["optimizer"] == "SGD(momentum=0.9)"
    assert found["strategies"]["ShardedOptimizer"]["wire_bytes"] == pytest.approx(4 * 124_439_808, rel=1e-3)
    assert set(found["forecast"]["seconds"]) == {"2", "8", "64", "512", "4096"}


def test_updates_inside_backward(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = dict[str, Any]()
    for update in ("step", "backward"):
        assert _run(monkeypatch, *SMALL, "--json", "--update", update) == 0
        found[update] = json.loads(capsys.readouterr().out)
        assert found[update]["settings"]["update"] == update
    first, second = (each["strategies"]["ShardedOptimizer"] for each in found.values())
    assert second["largest"]["gradients"] == 0 and second["wire_bytes"] == first["wire_bytes"]
    assert second["largest"]["total"] < first["largest"]["total"]
    assert _run(monkeypatch, *SMALL, "--update", "backward") == 0
    assert "AdamW, updated inside backward" in capsys.readouterr().out


def test_a_mesh_is_forecast_in_whole_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, "--model", "gpt2", "--mesh", "3x16", *FORECAST, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["shards"]) == (48, 16)
    assert set(found["forecast"]["seconds"]) == {"48", "64", "512", "4096"}


def test_pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    png, svg = tmp_path / "memory.png", tmp_path / "memory.svg"
    for path in (png, svg):
        assert _run(monkeypatch, *SMALL, "--plot", str(path)) == 0
    with Image.open(png) as picture:
        assert picture.width > 1000
    text = svg.read_text()
    assert all(word in text for word in ("ZeroRedundancyOptimizer", "communication scratch", "gpt2, AdamW"))


def test_help_has_examples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    assert "Examples:" in out and "zerostep plan --model llama-7b --ranks 8" in out


@pytest.mark.parametrize(
    ("arguments", "excerpt"),
    [
        ((), "--model"),
        (("--model", "gpt5"), "gpt5 is none that is known"),
        (("--model", "gpt2", "--ranks", "0"), "--ranks must be at least 1, not 0"),
        (("--model", "gpt2", "--mesh", "8"), "--mesh 8 is not RxS"),
        (("--model", "gpt2", "--mesh", "0x8"), "--mesh 0x8 is not RxS"),
        (("--model", "gpt2", "--optimizer", "Adom"), "--optimizer Adom is no optimizer class"),
        (("--model", "gpt2", "--optimizer", "nowhere.at:all"), "no module named 'nowhere'"),
        (("--model", "gpt2", "--option", "momentum"), "is not name=value"),
        (("--model", "gpt2", "--option", "speed=3"), "speed"),
        (("--model", "gpt2", "--optimizer", "Muon"), "Muon cannot hold these parameters"),
        (("--model", "gpt2", "--dtype", "int8"), "--dtype int8 is no floating-point dtype"),
        (("--model", "gpt2", "--master-dtype", "wide"), "--master-dtype wide is no floating-point dtype"),
        (("--model", "gpt2", "--partition", "rows"), "rows"),
        (("--model", "gpt2", "--update", "forward"), "forward"),
        (("--model", "gpt2", "--update", "backward", "--no-shard-gradients"), "takes a module without DDP"),
        (("--model", "gpt2", "--bucket-mb", "-1"), "bucket_mb must be a positive number"),
        (("--model", "gpt2", "--bandwidth", "5"), "add --flops"),
        (("--model", "gpt2", "--flops", "5"), "add --bandwidth"),
        (("--model", "gpt2", "--bandwidth", "0", "--flops", "1"), "--bandwidth must be a positive number, not 0"),
        (("--model", "gpt2", "--bandwidth", "1", "--flops", "1", "--latency", "-1"), "--latency"),
        (("--model", "gpt2", "--bandwidth", "1", "--flops", "1", "--error", "100"), "--error must be at least 0"),
        (("--model", "gpt2", "--plot", "out.gif"), "out.gif is neither .png nor .svg"),
        (("--model", "gpt2", "--plot", "nowhere/out.png"), "cannot be written"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], excerpt: str
) -> None:
    assert _run(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("zerostep: ") and err.count("\n") == 1 and excerpt in err


def _documented() -> list[tuple[str, str]]:
    """The commands of the page about planning, and what it says that they print."""
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```console\n$ ")[1:]]
    commands = [block.replace("\\\n", "").partition("\n") for block in blocks]
    return [(command, output) for command, _, output in commands]


@pytest.mark.parametrize(("command", "output"), _documented())
def test_the_page_about_planning_is_true(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, output: str
) -> None:
    assert command.startswith("zerostep plan ")
    assert _run(monkeypatch, *command.split()[2:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in printed] == output.splitlines()
