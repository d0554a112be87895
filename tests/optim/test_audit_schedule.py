"""When an audit is made and when its rows are looked at: the bodies of the tests on accelerators, in host memory."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import audited
from tests.helpers.audited import EVERY, WAYS, WITH_MASTERS
from tests.helpers.pool import Pool
from zerostep import AuditError
from zerostep.state import audit
from zerostep.state.audit import LOOKED_AT_AFTER, Audits
from zerostep.step.health import Health


@pytest.mark.parametrize("way", WAYS)
def test_a_bit_of_a_parameter(pool: Pool, way: str) -> None:
    for text in pool.run(audited.found_by_hand, 2, "cpu", way, "layers.5.bias"):
        assert "the audit after step 2 found that rank 0 and rank 1 differ in parameter 'layers.5.bias'" in text


@pytest.mark.parametrize("way", [*WAYS, *WITH_MASTERS])
def test_in_host_memory_it_raises_in_the_step(pool: Pool, way: str) -> None:
    for text, step in pool.run(audited.found_regularly, 2, "cpu", way):
        assert f"the audit after step {EVERY} found that rank 0 and rank 1 differ in parameter 'frozen'" in text
        assert step == EVERY


@pytest.mark.parametrize("way", ["overlap", "zero bf16", "bare scatter forward bf16"])
@pytest.mark.parametrize("world", [1, 2])
def test_nothing_is_found_where_nothing_is_wrong(pool: Pool, world: int, way: str) -> None:
    pool.run(audited.nothing_found, world, "cpu", way)


@pytest.mark.parametrize("way", ["zero", "bare scatter"])
def test_what_the_last_steps_have_found(pool: Pool, tmp_path: Path, way: str) -> None:
    for text in pool.run(audited.found_at_the_end, 2, "cpu", way, tmp_path / "saved", "save"):
        assert "the audit after step 3 found that rank 0 and rank 1 differ in parameter 'frozen'" in text


@pytest.mark.parametrize("way", WITH_MASTERS)
def test_a_master_that_its_parameter_does_not_come_from(pool: Pool, way: str) -> None:
    for text in pool.run(audited.wrong_master, 2, "cpu", way):
        assert "on rank 1, which owns them, 1 elements of parameter" in text


@pytest.mark.parametrize("way", ["zero", "bare scatter bf16"])
def test_a_load_replaces_what_an_audit_was_about(pool: Pool, tmp_path: Path, way: str) -> None:
    assert pool.run(audited.loaded_meanwhile, 2, "cpu", way, tmp_path / "saved") == [10, 10]


# On an accelerator rows arrive later: the same steps look at them on all ranks, however far each device is.


class _Later:
    """Rows that are under way; looking at them says from which step they are."""

    on_host = False

    def __init__(self, step: int, log: list[str]) -> None:
        self._step, self._log = step, log

    def wait(self) -> None:
        self._log.append(f"wait {self._step}")

    def compare(self) -> None:
        raise AuditError(f"found after step {self._step}")


class _Schedule:
    """Audits whose rows are under way, of which each finds something."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
        self.health, self.log, self.step = Health(), list[str](), 0
        self._audits = Audits(every, self.health)
        start: Any = lambda subject: _Later(subject, self.log)  # noqa: E731
        monkeypatch.setattr(audit, "start_audit", start)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            subject: Any = lambda: self.step  # noqa: E731
            self._audits.after_step(self.step, subject)

    def finish(self) -> None:
        self._audits.finish()


@pytest.mark.parametrize("every", [1, 2, 3, 5, 10])
def test_rows_are_looked_at_a_fixed_number_of_steps_later(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    schedule = _Schedule(monkeypatch, every)
    schedule.run(every + LOOKED_AT_AFTER - 1)
    assert schedule.log == []
    with pytest.raises(AuditError, match=f"after step {every}"):
        schedule.run(1)
    assert schedule.log == [f"wait {every}"]
    schedule.finish()  # what came behind it has found the same


def test_whoever_needs_the_state_waits_for_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = _Schedule(monkeypatch, 1)
    schedule.run(2)
    with pytest.raises(AuditError, match="after step 1"):
        schedule.finish()
    schedule.finish()


def test_a_load_ends_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = _Schedule(monkeypatch, 1)
    schedule.run(1)
    schedule.health.mark_recovered()
    schedule.finish()
    assert schedule.log == []


def test_rows_of_a_communicator_that_was_aborted_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = _Schedule(monkeypatch, 1)
    schedule.run(1)
    schedule.health.mark_broken("rank 1 has failed")
    with pytest.raises(RuntimeError, match="rank 1 has failed"):
        schedule.finish()
