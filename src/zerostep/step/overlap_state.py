"""Overlap mode of `ZeroRedundancyOptimizer`: what the hooks need of the optimizer, and what it must refuse."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.optim import Optimizer

from zerostep.comm.agreement import describe_error
from zerostep.comm.transport import Transport
from zerostep.errors import StepMismatchError, TransportError
from zerostep.plan.groups import Group, all_params
from zerostep.plan.ownership import Ownership
from zerostep.step.ddp_hook import in_backward_pass
from zerostep.step.grad_snapshot import GradSnapshot
from zerostep.step.late_rows import Check, LateRows
from zerostep.step.overlap_pipeline import ArrivedBucket, GradientCallback, OverlapPipeline, ReducedBucket
from zerostep.step.place import Progress
from zerostep.step.step_status import FAILED, UPDATED

logger = logging.getLogger("zerostep")

_TOO_LATE = (
    "with overlap_with_ddp=True the parameters are updated inside backward(), with the gradients as DDP reduced them. "
    "Use overlap_with_ddp=False for it, or zerostep.ShardedOptimizer, or set_gradient_callback() for "
    "edits that need no sight of all gradients"
)


@dataclass(frozen=True)
class OverlapHost:
    """What steps inside backward need of their optimizer.

    `fail` marks the optimizer as broken and returns the error to raise; `steps` and `step_done` count steps. `late` has
    messages that the host does not wait for, and `check_late` reads one. `check_healthy` asks only for failures that
    are known; `check_usable` also for an iteration that was left half done.
    """

    transport: Transport
    owners: Callable[[], Ownership]
    check_usable: Callable[[], None]
    check_healthy: Callable[[], None]
    raise_if_save_failed: Callable[[], None]
    fail: Callable[..., RuntimeError]
    step_done: Callable[[], None]
    progress: Progress
    late: LateRows
    check_late: Check
    steps: Callable[[], int]


class OverlapState:
    """What an optimizer holds that steps inside backward."""

    def __init__(self, host: OverlapHost) -> None:
        self._host = host
        self._pipeline: OverlapPipeline | None = None
        self._leaf_of: dict[Tensor, Tensor] = {}
        self._snapshot = GradSnapshot()
        self._callback: GradientCallback | None = None
        self._half_done = False  # some buckets of an iteration are updated, and others are not
        self._move = ""

    @property
    def transport(self) -> Transport:
        """The optimizer's own transport."""
        return self._host.transport

    # ------------------------------------------------------------------ leaves

    def leaves(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with leaves in place of parameters: tensors of their own that share the parameters' memory."""
        for param in all_params(groups):
            if param not in self._leaf_of:
                self._leaf_of[param] = torch.nn.Parameter(param.detach(), requires_grad=param.requires_grad)
        return [{**group, "params": [self._leaf_of[param] for param in group["params"]]} for group in groups]

    def leaf_of(self, param: Tensor) -> Tensor:
        """The leaf of a parameter; the parameter itself if this rank does not own it."""
        return self._leaf_of.get(param, param)

    def state(self, inner: Optimizer) -> dict[Tensor, Any]:
        """The live entries of the inner optimizer's state, keyed by the user's parameters."""
        return {param: inner.state[leaf] for param, leaf in self._leaf_of.items() if leaf in inner.state}

    def prepare(self, inner: Optimizer, outer_groups: Sequence[Group], owners: Ownership) -> None:
        """Plan anew how the buckets of DDP are updated and gathered."""
        self._pipeline = OverlapPipeline(
            inner, outer_groups, self._leaf_of, owners, self._host.progress, self._host.steps
        )

    def set_callback(self, callback: GradientCallback | None) -> None:
        """Call `callback(params, gradients)` before each update."""
        self._callback = callback

    # ------------------------------------------------------------------ one iteration

    @property
    def _running(self) -> OverlapPipeline:
        assert self._pipeline is not None
        return self._pipeline

    def begin(self) -> None:
        """The first bucket of an iteration has arrived; raises if the iteration must not go on."""
        self._host.check_usable()
        self._host.late.check()
        self._host.raise_if_save_failed()
        self.refuse_changed_parameters()
        self._running.set_callback(self._callback)

    def check_healthy(self) -> None:
        """Raise if a step has failed half-way."""
        self._host.check_healthy()

    def mark_if_half_done(self) -> None:
        """Mark the optimizer as broken if a backward pass has ended in the middle, after some buckets were updated."""
        if self._half_done and not in_backward_pass():
            self._half_done = False
            self._host.fail("backward() ended before all buckets were updated")

    def forget_iteration(self) -> None:
        """A state is loaded: what an iteration has left half done is replaced."""
        self._half_done = False

    def arrive(self, bucket: GradBucket, used: Callable[[Tensor], bool] | None) -> ArrivedBucket:
        """Note a bucket whose reduction begins; runs on the thread of backward."""
        return self._running.arrive(bucket, used)

    def was_used(self, param: Tensor) -> bool:
        """Whether some rank had a gradient for a parameter in the last iteration."""
        return self._running.was_used(param)

    def process(self, batch: Sequence[ReducedBucket], transport: Transport, control: Transport) -> None:
        """Update and gather some buckets; all ranks, in the order of the buckets. Runs where the bucket runner runs."""
        self._half_done, first, last = True, batch[0][0], batch[-1][0]
        if first.index == 0:
            transport.presence.begin_step()
        try:
            self._running.process(batch, transport, control)
        except BaseException as error:
            cause = error if isinstance(error, TransportError) else describe_error(error)
            raise self._host.fail(f"the exchange of bucket {first.index} failed: {cause}") from error
        if last.is_last:
            memories = [memory for arrived, _ in batch for memory in arrived.plan.memories]
            self._end_iteration(transport, bool(memories) and not transport.exchanges_status(memories))

    def _end_iteration(self, transport: Transport, later: bool) -> None:
        """Count the step, or raise why it has failed; with `later`, other ranks learn of it in a later step."""
        self._half_done, failure = False, self._running.failure
        if later:
            row = self._running.row(UPDATED if failure is None else FAILED)
            self._host.late.add(transport.start_all_gather_ints(row), self._host.check_late)
        if failure is None:
            self._host.step_done()
            return
        transport.presence.end_step(self._host.steps(), complete=False)
        if failure.error is not None and not isinstance(failure.error, Exception):
            failure.error.add_note(f"zerostep: {self._host.fail(failure.text)}")
            raise failure.error
        if failure.untouched:
            raise RuntimeError(f"no rank has made a step: {failure.text}") from failure.error
        told = self._host.fail(failure.text, StepMismatchError if failure.mismatch else RuntimeError)
        raise told from failure.error

    def snapshot_gradients(self) -> None:
        """Remember the gradients as backward left them, to notice later edits."""
        self._snapshot.take(self._leaf_of)

    # ------------------------------------------------------------------ what cannot be done

    def refuse_changed_parameters(self) -> None:
        """Raise if `requires_grad`, dtypes or devices have changed.

        DDP would wait for frozen parameters and ignore new ones. After a cast or a move its buckets and the inner
        optimizer's leaves are of the old kind, and updates would not reach the parameters.
        """
        owners = self._host.owners()
        # Kept: DDP's hooks are lost by a cast, and stay lost when it is undone.
        self._move = self._move or owners.describe_move()
        if self._move:
            raise RuntimeError(
                f"{self._move}, which overlap_with_ddp=True cannot follow: cast or move the model first, then build "
                "the DDP module and the optimizer anew"
            )
        if owners.trainability_changed():
            raise RuntimeError(
                "requires_grad of some parameters has changed, which overlap_with_ddp=True cannot follow: build the "
                "DDP module and the optimizer anew, or use overlap_with_ddp=False"
            )

    def refuse_step(self, scaled: bool, alone: bool) -> None:
        """`step()` has nothing to do; raise if the user expects more of it, and say so if it came `alone`."""
        if scaled:
            raise RuntimeError(f"GradScaler cannot be used: {_TOO_LATE}")
        self.refuse_edited_gradients()
        if alone:  # a closure was the step
            logger.warning(
                "step() does nothing with overlap_with_ddp=True: backward() has already updated the parameters"
            )

    def refuse_edited_gradients(self) -> None:
        """Raise, once, if gradients were edited after backward: no update has used the edit."""
        edited = self._snapshot.edited()
        self._snapshot.clear()
        if edited:
            raise RuntimeError(
                f"{len(edited)} gradients were edited after backward(), as clip_grad_norm_() does: {_TOO_LATE}"
            )
