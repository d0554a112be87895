"""The survey of optimizer classes: some of torch's own on two ranks, and the table."""

from pathlib import Path

import pytest

from benchmarks.optimizer_list import Entry, entries
from benchmarks.optimizers import CUT, EQUAL, REFUSED, Row, cells, combine, run_entry, run_or_recall, summary, table

_ADAM = Entry("torch", "torch.optim", "Adam", {"lr": 0.01})


@pytest.mark.parametrize(
    ("name", "expected"),
    [("SGD", (EQUAL, CUT, EQUAL)), ("Muon", (EQUAL, EQUAL, EQUAL)), ("LBFGS", ("differs", REFUSED, REFUSED))],
)
def test_classes_of_torch(name: str, expected: tuple[str, ...]) -> None:
    (entry,) = [each for each in entries("torch") if each.name == name]
    row = run_entry(entry, steps=3)
    assert tuple(word.split()[0] for word in row.ways.values()) == expected, row


def test_a_class_that_does_not_run_by_itself_is_said_to() -> None:
    row = run_entry(Entry("torch", "torch.optim", "Adam", {"lr": -1.0}), steps=1)
    assert not row.ways
    assert "does not run here by itself: ValueError: Invalid learning rate" in row.note


def test_all_classes_of_torch_are_listed() -> None:
    assert {"SGD", "Adam", "AdamW", "Adafactor", "LBFGS", "Muon"} <= {entry.name for entry in entries("torch")}


def test_the_worse_rank_counts() -> None:
    good, bad = {"drop-in": EQUAL, "auto": CUT}, {"drop-in": "differs by 1e-02", "auto": CUT}
    assert combine(_ADAM, [(good, ""), (bad, "a note")]) == Row(_ADAM, bad, "a note")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((EQUAL, CUT, EQUAL), ["equal", "equal", "equal"]),
        ((EQUAL, EQUAL, EQUAL), ["equal", "-", "equal"]),
        ((REFUSED, REFUSED, REFUSED), ["refused", "refused", "refused"]),
        ((EQUAL, "fails", "fails"), ["equal", "-", "fails"]),
        ((EQUAL, "differs by 1e-03", EQUAL), ["equal", "-", "differs by 1e-03"]),
    ],
)
def test_a_row_of_the_table(words: tuple[str, ...], expected: list[str]) -> None:
    ways = dict(zip(("drop-in", "auto", "parameters"), words, strict=True))
    assert cells(ways) == expected
    assert f"| `Adam` | {' | '.join(expected)} | why |" in table([Row(_ADAM, ways, "why")])


def test_the_summary_counts_classes() -> None:
    ways = {"drop-in": EQUAL, "auto": CUT, "parameters": EQUAL}
    text = summary([Row(_ADAM, ways), Row(_ADAM, {}, "does not run")])
    assert text.startswith(
        "2 classes of 1 packages; 1 run here: 1 equal in the drop-in, 1 equal when sharded by elements"
    )


def test_kept_results_are_not_tried_again(tmp_path: Path) -> None:
    kept = tmp_path / "rows"
    kept.write_text('{"class": "torch Adam", "ways": {"drop-in": "equal"}, "note": "kept"}\n')
    assert run_or_recall(_ADAM, 1, kept) == Row(_ADAM, {"drop-in": EQUAL}, "kept")
