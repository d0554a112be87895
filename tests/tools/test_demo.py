"""Texts and predictions of the demo, without running it."""

import math
import sys

import pytest
import torch
from torch import nn

from zerostep.tools import cli
from zerostep.tools.demo import GPT, GPTShape, RunReport, compare_runs, largest_difference
from zerostep.tools.demo.report import Sizes
from zerostep.tools.demo.training import CHOICES, predicted

SIZES = Sizes(4, 4, 8)


def rank(*differences: float) -> list[RunReport]:
    names = ["plain DDP", "drop-in", "ShardedOptimizer", "in backward"]
    found = zip(names, [0.0, *differences, 0.0], strict=True)
    return [RunReport(name, SIZES, SIZES, 1.0, 8, 0.1, 5.0, 2.0, gap) for name, gap in found]


def test_equal_runs_pass() -> None:
    passed, lines = compare_runs([rank(0.0, 0.0), rank(0.0, 0.0)])
    assert passed
    assert all("bit-equal to plain DDP's on every rank" in line for line in lines)


def test_a_difference_at_two_ranks_is_an_error() -> None:
    passed, (first, second, third) = compare_runs([rank(0.0, 0.0), rank(0.0, 1e-7)])
    assert not passed
    assert first.startswith("drop-in") and "NOT" not in first
    assert third.startswith("in backward") and "NOT" not in third
    assert second.startswith("ShardedOptimizer") and "NOT bit-equal to plain DDP's, largest difference 1e-07" in second


def test_at_more_ranks_sums_may_have_another_order_but_nothing_more() -> None:
    assert compare_runs([rank(0.0, 1e-6)] * 3)[0]
    assert not compare_runs([rank(0.0, 0.1)] * 3)[0]
    assert not compare_runs([rank(0.0, math.inf)] * 3)[0]


def test_largest_difference() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert largest_difference([one], [one.clone()]) == 0.0
    assert largest_difference([one, one], [one, other]) == 0.5
    assert largest_difference([one], [other * math.nan]) == math.inf


@pytest.mark.parametrize("name", CHOICES)
def test_predictions_of_every_choice(name: str) -> None:
    model = GPT(GPTShape(context=16, width=32, heads=2, layers=1))
    ranks = predicted(CHOICES[name], model, 2, "cpu")
    total = sum(param.nbytes for param in model.parameters())
    for plain, dropped_in, cut, inside in ranks:
        assert plain.parameters == dropped_in.parameters == plain.gradients == dropped_in.gradients == total
        assert dropped_in.state < plain.state
        assert cut.gradients < total
        assert inside.gradients == inside.scratch_at_end == 0
        assert (inside.parameters, inside.state) == (cut.parameters, cut.state)
    whole = ranks[0][0].state
    counters = 8 * len(list(model.parameters()))
    assert whole <= sum(found[1].state for found in ranks) <= whole + counters
    held = {id(param) for _, named in CHOICES[name].parts(model.named_parameters()) for _, param in named}
    assert held == {id(param) for param in model.parameters()}


def test_muon_has_the_matrices_of_the_blocks() -> None:
    model = GPT(GPTShape(context=16, width=32, heads=2, layers=1))
    (muon, matrices), (adamw, rest) = CHOICES["muon"].parts(model.named_parameters())
    assert muon.build is torch.optim.Muon and adamw.build is torch.optim.AdamW
    assert all(isinstance(p, nn.Parameter) and p.dim() == 2 for _, p in matrices)
    assert "token.weight" in dict(rest) and "head.weight" in dict(rest)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks must be between 1 and 64, not 0"),
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--optimizer", "adam"], "--optimizer must be one of adamw, sgd, muon, adafactor, not adam"),
        (["--device", "tpu"], "--device must be cpu or cuda, not tpu"),
        (["--device", "cuda", "--ranks", "64"], "--device cuda needs a GPU for each of 64 ranks"),
        (["--steps", "many"], "Invalid value for '--steps'"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zerostep", "demo", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
