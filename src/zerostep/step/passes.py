"""Backward passes of one optimizer, which its engines have in common: one for each set of ranks.

A pass of one engine is a pass of all, on every rank, also where a batch has used none of the parameters of one. They
begin together, launch their buckets in one order, and end in the order in which they were added. So all that ranks wait
for comes in the same order on all of them, as with a single engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, Protocol
from weakref import ref

from zerostep.step.backward_end import BackwardEnd
from zerostep.step.ddp_hook import in_backward_pass
from zerostep.step.grad_ops import GradChecks
from zerostep.step.iteration import Iteration, Phase
from zerostep.step.launch_order import LaunchTurns
from zerostep.step.pass_failure import PassFailure
from zerostep.step.reduction import Reduction


class PassMember(Protocol):
    """What an engine does in a pass. The first engine is the one over all ranks of the optimizer."""

    reduction: Reduction

    @property
    def grad_ops(self) -> GradChecks:
        """What is done to its gradients."""

    @property
    def has_gradients(self) -> bool:
        """Whether some rank has a gradient of this step."""

    @property
    def reduces(self) -> bool:
        """Whether it sums gradients; not where DDP does."""

    def prepare_pass(self) -> None:
        """Raise if a pass must not begin; nothing has changed by then."""

    def open_pass(self) -> None:
        """A pass has begun: take gradients."""

    def take_leftovers(self) -> None:
        """Take gradients that no hook has seen."""

    def close_pass(self) -> BaseException | None:
        """All buckets of the pass are launched, by all engines. The error of an update inside backward."""

    def tell_update(self, failure: BaseException | None) -> None:
        """Tell all ranks how the updates inside backward have ended; only the first engine is asked to."""

    def exchange_messages(self, read: bool) -> None:
        """Learn which parameters some rank has used."""

    def after_pass(self) -> None:
        """The pass has ended for all engines."""

    def raise_failed_update(self, failure: BaseException) -> None:
        """Raise the error of an update inside backward; only the first engine is asked to."""

    def put_back(self) -> None:
        """Put stand-ins back that were taken out for DDP."""

    def unreduced(self) -> list[int]:
        """Gradients of this rank that no pass has reduced; notices those that were dropped."""

    def take_own(self, params: list[int]) -> None:
        """Take gradients that no hook has seen into the open pass."""

    def use_present(self) -> None:
        """Where gradients are whole, count those that stand in `.grad`."""


class Passes:
    """When passes begin and end. Hooks run on autograd's threads, everything else on the caller's; `lock` is for all.

    Engines are held weakly: they hold this. With `one_pass` every pass is a step; `rank` is for texts. `world_size` are
    all ranks of the optimizer: each has one loss, over which gradients are averaged, whatever the ranks of an engine.
    `counted` are their global numbers, if there are engines over fewer: norms then go over all of them.
    """

    def __init__(self, one_pass: bool, rank: int, world_size: int, counted: Collection[int] = ()) -> None:
        self.world_size, self.counted = world_size, counted
        self.lock = RLock()
        self.iteration = Iteration(one_pass=one_pass)
        self.failures = PassFailure(self.lock, self.iteration, rank)
        self.backward_end = BackwardEnd(self._backward_over)
        self._members: list[ref[Any]] = []
        self._turns: LaunchTurns | None = None
        self._any_gradient = self._paused = False

    def add(self, member: PassMember) -> bool:
        """Add an engine, between two passes; whether it is the first."""
        self._members.append(ref(member))
        if len(self._members) > 1:
            self._turns = LaunchTurns([each.reduction for each in self.members])
            for each in self.members:
                each.reduction.take_turns(self._turns)
        return len(self._members) == 1

    @property
    def members(self) -> list[PassMember]:
        """All engines that still exist, the first in front."""
        found = (each() for each in self._members)
        return [member for member in found if member is not None]

    @property
    def several(self) -> bool:
        """Whether there is more than one engine."""
        return len(self._members) > 1

    # ------------------------------------------------------------------ what has happened since the last step

    @property
    def any_gradient(self) -> bool:
        """Whether this rank has had a gradient since the last step."""
        return self._any_gradient

    def note_gradient(self) -> None:
        """This rank has a gradient."""
        self._any_gradient = True

    def forget_gradients(self) -> None:
        """A step is complete, or a state was loaded."""
        self._any_gradient = False

    @property
    def paused(self) -> bool:
        """Whether gradients only add up in `.grad`."""
        return self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, gradients add up in `.grad` and are not reduced."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # ------------------------------------------------------------------ a pass

    def enter(self) -> None:
        """A gradient has arrived in a backward call: begin a pass unless one is open; runs on autograd's thread."""
        if self.iteration.in_pass and in_backward_pass() and not self.backward_end.active:
            self.end()  # of a backward call that has failed, or of compiled autograd, which runs no callbacks
        self.backward_end.expect()
        if not self.iteration.in_pass:
            self.begin()

    def begin(self) -> None:
        """Begin a pass, before its first gradient is taken."""
        members = self.members
        for member in members:
            member.prepare_pass()
        self.iteration.begin_pass()
        for member in members:
            member.open_pass()
        if self._turns is not None:
            self._turns.begin()

    def end(self, read: bool = True) -> None:
        """Launch the rest of an open pass, and learn which parameters some rank has used.

        Without `read` the messages of other ranks are read by `settle`: a joined rank may not wait for them in DDP's
        shadow pass, because the others first wait for DDP's.
        """
        with self.lock, self.failures.noting():
            if not self.iteration.in_pass:
                return
            members = self.members
            for member in members:
                member.take_leftovers()
            members[0].reduction.end()  # of all, in turn
            failures = [member.close_pass() for member in members]
            failure = next((each for each in failures if each is not None), None)
            members[0].tell_update(failure)
            for member in members:
                member.exchange_messages(read)
            # Before the error is raised: everything of this pass was sent, and a recovery must not send it again.
            self.iteration.end_pass()
            for member in members:
                member.after_pass()
            self.failures.pass_ended(failure)
            if failure is not None:
                members[0].raise_failed_update(failure)

    def _backward_over(self) -> None:
        """A backward call is over; runs on autograd's thread."""
        if self.iteration.in_pass:
            self.end()
        else:
            with self.lock:
                for member in self.members:  # after torch.autograd.grad, or a pass inside no_sync()
                    member.put_back()

    def settle(self) -> None:
        """Before gradients are used: end an open pass, and notice gradients that were dropped or set by hand."""
        with self.lock:
            members = self.members
            if all(member.reduces for member in members):
                self.end()  # only after a failed backward call, or under compiled autograd
                own = [member.unreduced() for member in members]
                # A rank without a backward pass must launch all buckets, too: the others wait for them in theirs.
                if any(own) or self.iteration.phase is Phase.BETWEEN:
                    self._reduce_own(own)
            for member in members:
                member.use_present()

    def _reduce_own(self, own: list[list[int]]) -> None:
        """A pass of gradients that no hook has seen."""
        self.begin()
        for member, params in zip(self.members, own, strict=True):
            member.take_own(params)
        self.end()
