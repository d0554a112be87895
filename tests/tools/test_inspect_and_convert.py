"""`zerostep inspect` and `zerostep convert` on the command line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import ProcessGroup

pytest.importorskip("typer")

import zerostep
from tests.helpers.pool import Pool
from tests.helpers.reference import build, train
from tests.helpers.sharding import series, sharded, whole_state
from zerostep.tools import cli


def _save(group: ProcessGroup, path: Path) -> dict[str, Any]:
    model = build()
    optimizer = sharded(group, model)
    train(model, optimizer, series(group, 2))
    zerostep.save(path, optimizer, model, extra={"epoch": 3})
    return {"state": whole_state(optimizer), "model": model.state_dict(), "rank": dist.get_rank(group)}


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("commands") / "step-2"
    return path, pool.run(_save, 2, path)[0]


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["zerostep", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


Saved = tuple[Path, dict[str, Any]]


def test_inspect_tells_what_is_there(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "inspect", saved[0]) == 0
    out = capsys.readouterr().out
    for text in (
        "step 2, 2 ranks",
        "by name",
        "AdamW",
        "extra: epoch",
        "exp_avg (float32)",
        "rank-1.safetensors",
        "intact",
    ):
        assert text in out
    assert "\x1b" not in out


def test_inspect_as_json(saved: Saved, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, "inspect", saved[0], "--json", "--no-verify") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["world_size"], found["verified"]) == (2, 2, False)
    assert sum(file["elements"] for file in found["files"]) == found["elements"]
    assert found["state"]["exp_avg (float32)"] == 4 * found["elements"]


def test_inspect_names_what_is_damaged(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in saved[0].iterdir():
        data = bytearray(file.read_bytes())
        if file.name == "rank-1.safetensors":
            data[-1] ^= 1
        (damaged / file.name).write_bytes(data)
    assert _run(monkeypatch, "inspect", damaged) == 1
    out = capsys.readouterr().out
    assert "DAMAGED" in out and "rank-1.safetensors is damaged" in out and "intact" not in out


@pytest.mark.parametrize("form", ["plain", "zero"])
def test_convert_to_a_state_dict(
    saved: Saved, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "optimizer.pt"
    assert _run(monkeypatch, "convert", saved[0], out, "--to", form) == 0
    found, expected = torch.load(out, weights_only=True), saved[1]["state"]
    assert all(torch.equal(found["state"][n]["exp_avg"], expected["state"][n]["exp_avg"]) for n in expected["state"])
    assert str(out) in capsys.readouterr().out


def test_convert_to_weights(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model.safetensors"
    assert _run(monkeypatch, "convert", saved[0], out, "--to", "model") == 0
    found = load_file(out)
    assert all(torch.equal(found[key], value) for key, value in saved[1]["model"].items())


def test_convert_to_another_number_of_ranks(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "step-2-on-5"
    assert _run(monkeypatch, "convert", saved[0], out, "--to", "5-ranks") == 0
    capsys.readouterr()
    assert _run(monkeypatch, "inspect", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 5


@pytest.mark.parametrize(
    ("arguments", "excerpt"),
    [
        (["inspect", "nowhere"], "nowhere is not a checkpoint"),
        (["convert", "nowhere", "out.pt", "--to", "plain"], "nowhere is not a checkpoint"),
        (["convert", "nowhere", "out.pt", "--to", "cheese"], "--to takes plain, zero, model or a number"),
        (["convert", "nowhere", "out.txt", "--to", "plain"], "must end in .pt"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    excerpt: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _run(monkeypatch, *arguments) == 2
    err = capsys.readouterr().err
    assert excerpt in err and err.count("\n") == 1
