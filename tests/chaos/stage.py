"""What the body of a scenario works with: a training in one of the modes, points for faults, and notes."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

import zerostep
from tests.chaos.points import Act, Fuse, armed, note_in, reduced
from tests.chaos.registry import BACKWARD, BARE, IN_DDP, OVERLAP
from tests.helpers.checkpoints import OPTIONS, SMALL_BUCKETS, Known, bare, whole_state
from tests.helpers.reference import assert_same_bits, assert_same_state_dict
from zerostep import (
    ShardedOptimizer,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

SAFE = 2  # steps that are saved before the fault
STEP = SAFE + 1  # the step of the fault
FAILED = "failed"  # what a rank tells that does not come to the end of its body
HOOKS = {"hook": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}


@dataclass
class Report:
    """What one rank has noted; `times` are the moments of what it noted."""

    notes: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a line."""
        self.notes.append(text)
        self.times.append(time.monotonic())

    @property
    def text(self) -> str:
        """All notes."""
        return "\n".join(self.notes)


class Training:
    """A model and an optimizer in one of the modes, whose gradients depend on the number of the step alone."""

    def __init__(self, model: nn.Module, optimizer: Any, mode: str) -> None:
        self.model, self.optimizer, self.mode = model, optimizer, mode

    def backward(self, step: int, factor: float = 1.0) -> None:
        """The first half of a step; in overlap mode all of it."""
        self.optimizer.zero_grad()
        (self.model(step) * factor).backward()

    def update(self) -> None:
        """The second half."""
        if self.mode not in OVERLAP:
            self.optimizer.step()

    def advance(self, step: int) -> None:
        """Do the step of this number, counted from 1."""
        self.backward(step)
        self.update()

    def run(self, *steps: int) -> None:
        """Do some steps, each with all that it leaves in flight."""
        for step in steps:
            self.advance(step)
            self.settle()

    def settle(self) -> None:
        """Wait for what a step may have left in flight."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.synchronize()

    def values(self) -> dict[str, Tensor]:
        """A copy of the model's state dict."""
        self.settle()
        return {key: value.clone() for key, value in bare(self.model).state_dict().items()}

    def whole(self) -> dict[str, Any]:
        """Model and optimizer, whole, on every rank; a collective."""
        return {"model": self.values(), "optimizer": whole_state(self.optimizer)}


def build(group: ProcessGroup, mode: str, model: nn.Module | None = None, params: Any = None, **given: Any) -> Training:
    """A training in a mode. `given` are options of the optimizer."""
    model = Known() if model is None else model
    named = list(model.named_parameters()) if params is None else params
    options = {**OPTIONS, **given}
    if mode in BARE or mode in BACKWARD:
        return Training(model, _sharded(model, params, group, mode, options), mode)
    ddp = in_ddp(group, model)
    if mode in IN_DDP:
        return Training(ddp, _sharded(ddp, params, group, mode, options), mode)
    overlaps = mode in OVERLAP
    zero = ZeroRedundancyOptimizer(named, AdamW, group, overlap_with_ddp=overlaps, **options)
    ddp.register_comm_hook(group, HOOKS[mode](reduced, ddp, zero) if overlaps else reduced)
    return Training(ddp, zero, mode)


def in_ddp(group: ProcessGroup, model: nn.Module) -> DDP:
    """A model in DDP, in small buckets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about an option that there is no other name for yet
        return DDP(model, process_group=group, bucket_cap_mb=SMALL_BUCKETS, broadcast_buffers=False)


def _sharded(model: nn.Module, params: Any, group: ProcessGroup, mode: str, options: dict[str, Any]) -> Any:
    settings = {"gather": "forward" if mode.endswith("forward") else "step"}
    settings["update"] = "backward" if mode in BACKWARD else "step"
    return ShardedOptimizer(
        model, AdamW, params, process_group=group, **{"bucket_mb": SMALL_BUCKETS, **settings, **options}
    )


class Stage:
    """One rank's side of a scenario."""

    def __init__(self, group: ProcessGroup, mode: str, root: Path, victim: int = 1) -> None:
        self.group, self.mode, self.root, self.victim = group, mode, root, victim
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.report = Report()

    @property
    def is_victim(self) -> bool:
        """Whether the fault is on this rank."""
        return self.rank == self.victim

    @property
    def series(self) -> Path:
        """Where the checkpoints are."""
        return self.root / "series"

    # Training.

    def build(self, **given: Any) -> Training:
        """A training in this scenario's mode."""
        return build(self.group, self.mode, **given)

    def trained(self, **given: Any) -> Training:
        """A training with two steps, each of which is saved; what the last one was is kept for `recovered`."""
        training = self.build(**given)
        for step in range(1, SAFE + 1):
            training.advance(step)
            zerostep.save(self.series / f"step-{step}", training.optimizer, training.model, extra=step)
        whole = training.whole()
        if self.rank == 0:
            torch.save(whole, self.root / "reference.pt")
        return training

    def undisturbed(self, steps: int) -> Training:
        """A second training, without any fault."""
        training = self.build()
        for step in range(1, steps + 1):
            training.advance(step)
        return training

    def assert_like_undisturbed(self, training: Training, steps: int) -> None:
        """Fail unless a training is, in every bit, what these steps make of it."""
        assert_same(training.whole(), self.undisturbed(steps).whole())

    # Faults and notes.

    def fault(self, point: str, act: Act, call: int = 1) -> AbstractContextManager[Fuse | None]:
        """Inside, let something happen at a point, on the victim alone."""
        if not self.is_victim:
            return nullcontext()
        return armed(point, self.mode, act, call, note_in(self.root / "fired"))

    def mark(self) -> None:
        """The fault happens now, on the victim."""
        if self.is_victim:
            note_in(self.root / "fired")()

    def raises(self, call: Callable[[], object], what: str = "the call") -> str:
        """Note what a call raises; it must raise something."""
        try:
            call()
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            text = f"{type(error).__name__}: {error}"
            self.report.note(text)
            return text
        raise AssertionError(f"rank {self.rank}: {what} has raised nothing")

    def goes_on_or_raises(self, call: Callable[[], object]) -> str:
        """Note what a call raises, if it does."""
        try:
            call()
        except Exception as error:
            self.report.note(f"{type(error).__name__}: {error}")
            return self.report.notes[-1]
        return ""

    def refuses(self, training: Training) -> None:
        """Note what every way to go on says: nothing torn can be saved."""
        optimizer = training.optimizer
        self.raises(optimizer.state_dict, "state_dict() of a torn state")
        self.raises(lambda: optimizer.consolidate_state_dict(to=0), "consolidating a torn state")
        self.raises(lambda: training.advance(STEP + 1), "a step after a torn one")
        self.raises(lambda: zerostep.save(self.series / "torn", optimizer, training.model), "saving a torn state")
        assert not (self.series / "torn").exists()

    def recovers(self, training: Training) -> None:
        """Load the last checkpoint into the same objects, on all ranks, and train on as if nothing had happened."""
        training.optimizer.zero_grad()
        found = zerostep.latest(self.series, self.group)
        assert found is not None
        zerostep.load(found, training.optimizer, training.model)
        assert_same(training.whole(), reference(self.root))
        training.advance(STEP)
        self.assert_like_undisturbed(training, STEP)

    @contextmanager
    def warnings(self, on_warning: Callable[[str], object] | None = None) -> Iterator[list[str]]:
        """Note what the library logs inside; `on_warning` is called in the thread that logs."""
        found: list[str] = []

        class Noting(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                found.append(record.getMessage())
                stage.report.note(f"{record.levelname}: {record.getMessage()}")
                if on_warning is not None:
                    on_warning(record.getMessage())

        stage, handler = self, Noting(logging.WARNING)
        logger = logging.getLogger("zerostep")
        logger.addHandler(handler)
        try:
            yield found
        finally:
            logger.removeHandler(handler)

    # Ranks among themselves, beside the groups that are tested.

    def group_with(self, seconds: float) -> None:
        """Use a group with a time-out of its own from here on; a collective of the world."""
        self.group = dist.new_group(dist.get_process_group_ranks(self.group), timeout=timedelta(seconds=seconds))

    def tell(self, key: str, value: str = "") -> None:
        """Set something for the others."""
        self._store().set(f"{self.root.name}/{key}", value)

    def hear(self, key: str) -> str:
        """Wait for what another rank tells, or for the word that one has failed."""
        store, name = self._store(), f"{self.root.name}/{key}"
        while not store.check([name]):
            if store.check([f"{self.root.name}/{FAILED}"]):
                raise AssertionError("another rank has failed")
            time.sleep(0.02)  # and not `store.wait`, whose time-outs torch logs
        found: bytes = store.get(name)
        return found.decode()

    def meet(self, key: str) -> None:
        """Wait until all ranks are here, without the groups that are tested."""
        self.tell(f"{key}/{self.rank}")
        for rank in range(self.world):
            self.hear(f"{key}/{rank}")

    def tell_pid(self) -> None:
        """Let the others send signals to this rank."""
        self.tell(f"pid/{self.rank}", str(os.getpid()))

    def signal_victim(self, number: signal.Signals) -> None:
        """Send a signal to the victim."""
        os.kill(int(self.hear(f"pid/{self.victim}")), number)

    @staticmethod
    def _store() -> Any:
        return distributed_c10d._get_default_store()


def reference(root: Path) -> dict[str, Any]:
    """What was saved last before the fault."""
    found: dict[str, Any] = torch.load(root / "reference.pt", weights_only=True)
    return found


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Fail unless model and optimizer are equal in every bit."""
    assert_same_bits(ours["model"], theirs["model"])
    assert_same_state_dict(ours["optimizer"], theirs["optimizer"])


def recovered(group: ProcessGroup, mode: str, root: Path) -> None:
    """In new ranks: the last checkpoint is that of the step before the fault, it loads, and training goes on."""
    stage = Stage(group, mode, root)
    names = sorted(path.name for path in stage.series.iterdir() if not path.name.startswith("."))
    assert names == [f"step-{step}" for step in range(1, SAFE + 1)], names
    stage.recovers(stage.build())
