"""One step of `ShardedOptimizer`, from noticing what changed since the last one to the comparison with a reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zerostep.comm.agreement import describe_error
from zerostep.comm.background import BackgroundSaves
from zerostep.errors import InterruptedPassError, StepMismatchError, TransportError
from zerostep.memory.leaf import Leaf
from zerostep.plan.groups import Group
from zerostep.plan.layout_planner import Settings
from zerostep.step.engine import Engine
from zerostep.step.grad_sources import GradSource
from zerostep.step.place import Progress
from zerostep.step.step_part import StepPart
from zerostep.step.step_status import PeerFailedError
from zerostep.step.weak import weakly
from zerostep.tensors import recorded_event


class TrainingStep:
    """Runs steps over engines, inner optimizers and the user's parameter groups, which the user may replace.

    `parts` has one for each set of ranks that divides parameters; the first is of all ranks, and what ranks tell each
    other of a step goes by it. On a rank that has joined, the thread of its join hook calls `run`.
    """

    def __init__(
        self,
        parts: Sequence[StepPart],
        groups: Callable[[], Sequence[Group]],
        saves: BackgroundSaves,
        settings: Settings,
        progress: Progress,
        holds_all: Callable[[], bool],
    ) -> None:
        self._progress, self._parts, self._engine = progress, list(parts), parts[0].engine
        self._groups, self._saves, self._health, self._settings = groups, saves, progress.health, settings
        self._has_state = False
        self._engine.attach_first(weakly(self.check_usable), holds_all, weakly(self._begin_update))
        for part in parts:
            part.engine.attach(weakly(part.hook_trainable), part.inners, weakly(part.pull_options))

    @property
    def count(self) -> int:
        """Steps so far."""
        return self._engine.iteration.steps

    @property
    def has_state(self) -> bool:
        """Whether the inner optimizers may hold state, from a step or from what was loaded."""
        return self._has_state

    @property
    def loads(self) -> int:
        """How often this rank has loaded a state dict by itself; the same on all ranks, or one was left out."""
        return self._health.loads

    @property
    def rank(self) -> int:
        """This rank among all ranks of the optimizer, for texts."""
        return self._engine.presence.rank

    def run(self, joining: bool, joined: bool = False) -> None:
        """One step. With `gather="forward"` parameters may still be in flight at its end, but not in a join context.

        With `joined` it is a step of the others, on a rank that has no inputs left.
        """
        with self._present():
            self._run(joining, joined)

    def calling_closure(self) -> AbstractContextManager[None]:
        """Inside, the user's closure is called; the other ranks are told if it fails on this one alone."""
        return self._progress.calling_closure()

    @contextmanager
    def _present(self) -> Iterator[None]:
        """Tell the stall report when a step begins and ends."""
        presence, before = self._engine.presence, self.count
        presence.begin_step()
        try:
            yield
        finally:
            presence.end_step(self.count, complete=self.count > before)
        device = self._engine.buckets.params[0].device
        if device.type != "cpu" and not self._engine.blocks_host:
            presence.device_mark(recorded_event(device).query)

    def _run(self, joining: bool, joined: bool) -> None:
        self.check_usable()
        self._saves.raise_if_failed()
        if self._settings.update == "step":
            self._follow_params()
        with self._engine.lock, self._failing():
            self._engine.settle()
            if self._settings.update == "step":
                for part in self._parts:
                    part.step_reference()
                self._update(joined)
            for part in self._parts:
                part.engine.read_messages()
            # In a join context DDP broadcasts all parameters at the end, whatever is still in flight.
            if self._settings.gather == "step" or joining:
                self._engine.status.read()
                self._wait_for_gathers()
        self._engine.end_step()
        self._progress.end_step(self._groups())
        self._has_state = True
        self._compare_with_reference()

    def _update(self, joined: bool) -> None:
        # All parts, even if one has failed: other ranks wait for their sums and gathers.
        failures = [part.engine.update(part.inners) for part in self._parts]
        failure = next((each for each in failures if each is not None), None)
        self._engine.tell(failure, joined)
        for part in self._parts:
            part.engine.launch_behind_status()
            part.pull_options()
        if failure is not None:
            told = self._health.mark_broken(
                f"the local update of step {self.count + 1} failed on rank {self.rank}: {describe_error(failure)}"
            )
            failure.add_note(f"zerostep: {told}")
            self._wait_for_gathers()
            raise failure

    def _wait_for_gathers(self) -> None:
        for part in self._parts:
            part.engine.gathers.wait()

    def _begin_update(self) -> None:
        """With `update="backward"`: the first gradient of a pass is there; runs on autograd's thread."""
        self.check_usable()
        self._saves.raise_if_failed()
        self._follow_params()
        self._has_state = True

    def take_gradients_from(self, source: GradSource) -> None:
        """Replace the source of gradients, between two passes."""
        self._parts[0].take_gradients_from(source)

    def _follow_params(self) -> None:
        """Notice what the user did to parameters and options since the last step."""
        self.read_status()
        self.synchronize()
        for part in self._parts:
            part.follow_params()
        self._progress.begin_step(self._groups())

    def add_leaves(self, leaves: Sequence[Leaf]) -> None:
        """Give new leaves to the inner optimizers of their groups."""
        self._parts[0].add_leaves(leaves)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """After an error in a step, parameters and state belong to no step."""
        try:
            yield
        except InterruptedPassError:
            raise  # nothing was sent or changed
        except BaseException as error:
            if not self._health.broken:
                self._raise_failed(error, self.count + 1)
            raise

    def _raise_failed(self, error: BaseException, step: int) -> None:
        """Mark the optimizer as broken and raise; an error of the user's own code is left to the caller to raise."""
        ours = isinstance(error, (PeerFailedError, StepMismatchError, TransportError))
        phase = "an exchange with other ranks failed: " if isinstance(error, TransportError) else ""
        cause = f"{phase}{error}" if ours else describe_error(error)
        told = self._health.mark_broken(
            f"step {step} failed on rank {self.rank}: {cause}",
            StepMismatchError if isinstance(error, StepMismatchError) else RuntimeError,
        )
        if ours:
            raise told from error
        error.add_note(f"zerostep: {told}")

    def read_status(self) -> None:
        """Read how the last step has ended on all ranks, unless it was read before; raises if one has failed.

        With `gather="forward"` nothing has waited for it at the end of the step.
        """
        if self._health.broken:
            return
        try:
            for part in self._parts:
                part.engine.status.read()
        except (PeerFailedError, StepMismatchError, TransportError) as error:
            # With update="backward" the update comes before the step() that counts it.
            self._raise_failed(error, self.count + (self._settings.update == "backward"))

    def synchronize(self) -> None:
        """Return when all parameters are in place."""
        try:
            self._wait_for_gathers()
        except BaseException as error:
            if not self._health.broken:
                self._raise_failed(error, self.count)
            raise

    def check_usable(self) -> None:
        """Raise if a step or a backward pass has failed half-way."""
        if self._engine.failures.error is not None and not self._health.broken:
            self._health.mark_broken(
                f"the backward pass of step {self.count + 1} failed on rank {self.rank}: "
                f"{describe_error(self._engine.failures.error)}"
            )
        errors = [part.engine.gathers.error for part in self._parts]
        error = next((each for each in errors if each is not None), None)
        if error is not None and not self._health.broken:
            self._health.mark_broken(f"the gather of step {self.count} failed on rank {self.rank}: {error}")
        self._health.check()
        self.read_status()

    def ensure_complete(self) -> None:
        """Make sure that parameters and state belong to one step, on this rank and its peers."""
        self.check_usable()
        self.synchronize()

    def clip(self, max_norm: float, norm_type: float) -> Tensor:
        """The norm of all gradients, which are scaled down to `max_norm` unless that is infinite."""
        total = self._total_norm(norm_type)
        if max_norm != math.inf:
            factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
            # On an accelerator one is a factor, too: whether it is would have to be waited for.
            if factor.device.type != "cpu" or factor.item() != 1.0:
                for part in self._parts:
                    part.engine.grad_ops.scale(factor)
        return total

    def _total_norm(self, norm_type: float) -> Tensor:
        first, *others = [part.engine.grad_ops for part in self._parts]
        return first.total_norm(norm_type, others)

    # ------------------------------------------------------------------ other methods of the inner optimizers

    def begin_method(self) -> None:
        """Before a method of the inner optimizers other than `step`: parameters and options as the user has them."""
        self.check_usable()
        self._saves.raise_if_failed()
        for part in self._parts:
            part.engine.finish()
        self._follow_params()

    def run_method(self, call: Callable[[Optimizer], Any]) -> Any:
        """Call a method of every inner optimizer, of a reference optimizer's, too; what it returned for the first."""
        results = [result for part in self._parts for result in part.run_method(call)]
        return next((result for result in results if result is not None), None)

    def send_all(self) -> None:
        """Send the owned part of every bucket to everyone and wait for all; a collective."""
        for part in self._parts:
            part.engine.send_all()

    def recover(self) -> None:
        """Drain pending messages of all parts after a failed step so that training can restart from a checkpoint."""
        for part in self._parts:
            part.engine.abandon()
        for part in self._parts:
            part.engine.recover()

    def loaded(self, has_state: bool, count: int | None = None) -> None:
        """All state and options are new; `count` is the number of steps that made them, if it is known."""
        for part in self._parts:
            part.loaded()
        self._health.mark_recovered()
        self._engine.presence.restart(self.count if count is None else count)
        self._engine.iteration.restart(count)
        self._has_state = has_state

    # ------------------------------------------------------------------ verification

    @property
    def verifies(self) -> bool:
        """Whether an unsharded optimizer runs beside this one."""
        return any(part.verifies for part in self._parts)

    def _compare_with_reference(self) -> None:
        if self.verifies:
            self.synchronize()
        for part in self._parts:
            part.compare_with_reference()

    # ------------------------------------------------------------------ on a joined rank, in place of the user's calls

    @property
    def engine(self) -> Engine:
        """The engine that the steps run on."""
        return self._engine

    def shadow_step(self, in_ddp: bool) -> None:
        """A joined rank's step, in place of the user's."""
        self.run(joining=True, joined=True)
        if not in_ddp and self._settings.reduction == "all":
            for param in self._engine.buckets.params:
                param.grad = None

    def whole_gradients_of(self, position: int, in_ddp: bool) -> list[Tensor]:
        """The parameters whose whole gradients a joined rank needs from a live one to step on what it owns.

        `position` is its rank among those that divide the state.
        """
        if not in_ddp or self._settings.reduction == "scatter":
            return []
        layout, params = self._engine.buckets.layout, self._engine.buckets.params
        return [params[fragment.param] for fragment in layout.fragments(position)]
