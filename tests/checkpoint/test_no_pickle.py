"""Saving, loading, stepping and consolidating never unpickle anything."""

import pickle
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

import zerostep
from tests.helpers.checkpoints import KINDS, advance, assert_trained, make, whole_state
from tests.helpers.pool import run_fresh
from tests.helpers.reference import assert_same_state_dict


class Unpickling:
    """Counts what pickle does while it is armed. An audit hook is for the life of a process."""

    def __init__(self) -> None:
        self.armed, self.events = False, list[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.armed and event == "pickle.find_class":
            self.events.append(f"{event} {args}")

    def during(self, work: Callable[[], object]) -> list[str]:
        """What happens while `work` runs; also loads that find no class."""

        def refuse(*args: Any, **kwargs: Any) -> Any:
            self.events.append("pickle.loads")
            raise AssertionError("something is unpickled")

        self.events.clear()
        self.armed = True
        try:
            with (
                mock.patch.object(pickle, "loads", refuse),
                mock.patch.object(pickle, "load", refuse),
                mock.patch.object(dist.distributed_c10d, "_unpickler", refuse),
            ):
                work()
        finally:
            self.armed = False
        return list(self.events)


def _audited(group: ProcessGroup, root: Path) -> dict[str, list[str]]:
    unpickling = Unpickling()
    report = {}
    for kind in KINDS:
        model, optimizer = make(group, kind)

        def life(kind: str = kind, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            advance(model, optimizer, 1)
            zerostep.save(root / kind / "one", optimizer, model, extra=[1])
            advance(model, optimizer, 2)
            pending = zerostep.save(root / kind / "two", optimizer, model, wait=False, keep=2)
            assert pending is not None
            advance(model, optimizer, 3)
            pending.wait()
            found = zerostep.latest(root / kind, group)
            assert found == root / kind / "two"
            zerostep.load(found, optimizer, model)
            assert_same_state_dict(whole_state(optimizer), whole_state(optimizer))

        report[kind] = unpickling.during(life)
        assert_trained(model, optimizer, 2)
    raw = pickle.dumps(nn.Module)
    report["control"] = unpickling.during(lambda: pickle.Unpickler(BytesIO(raw)).load())  # noqa: S301
    with pytest.raises(AssertionError, match="something is unpickled"):
        unpickling.during(lambda: dist.all_gather_object([None, None], 1, group=group))
    return report


def test_no_save_load_step_or_consolidation_unpickles_anything(tmp_path: Path) -> None:
    for outcome in run_fresh(_audited, 2, tmp_path):
        assert outcome.error is None, outcome.error
        control = outcome.result.pop("control")
        assert len(control) == 1
        assert "Module" in control[0]
        assert outcome.result == {kind: [] for kind in KINDS}
