"""Uneven inputs for `ShardedOptimizer`: a rank that has joined goes on with its share of the work.

Events are a backward pass of a bare module, a norm, and a step. The shadow of a joined rank takes part in a backward
pass with zeros, clips, and steps on its own part. It needs gradients from a live rank only where those are whole.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack, unpack
from weakref import finalize

from torch.distributed.algorithms.join import Joinable

from zerostep.comm.mesh import Ranks
from zerostep.errors import InterruptedPassError
from zerostep.optim.join import BACKWARD, CLIP, JOINED, STEP, JoinProtocol, JoinShadow, on_device
from zerostep.plan.groups import Group
from zerostep.step.training_step import TrainingStep
from zerostep.step.used_mask import pack_mask, union_of_masks


class ShardedJoin(JoinProtocol):
    """The messages of one optimizer: backward passes and norms are events, too.

    `in_ddp` is whether DDP runs the backward passes, and has a shadow of its own for them.
    """

    def __init__(
        self, optimizer: Joinable, step: TrainingStep, groups: Callable[[], list[Group]], in_ddp: bool, ranks: Ranks
    ) -> None:
        super().__init__(
            optimizer, ranks.control, groups, lambda rank: step.whole_gradients_of(ranks.positions[rank], in_ddp)
        )
        self._engine = step.engine

    def backward(self) -> None:
        """On a live rank: a backward pass begins."""
        if self.active():
            self._begin(BACKWARD)

    def clip(self, max_norm: float, norm_type: float) -> None:
        """On a live rank: the norm of all gradients is about to be computed, and clipped."""
        self._begin(CLIP, max_norm, norm_type)

    def _announce(self) -> None:
        try:
            super()._announce()
        except RuntimeError as error:  # another rank has no inputs, and the user wants an error for that
            raise InterruptedPassError(str(error)) from error

    def _row(self, kind: int, *values: float) -> list[int]:
        # The kind, two numbers of a norm, the passes that the sums are from, and a mask of the parameters that have a
        # gradient now, when the user has dropped others.
        used = pack_mask([index in self._engine.sums.used for index in range(len(self._engine.buckets.params))])
        passes = self._engine.iteration.passes if kind in (STEP, CLIP) else 0
        return [kind, *unpack("<qq", pack("<dd", *(values or (0.0, 0.0)))), passes, *used]


class ShardedJoinHook(JoinShadow):
    """The optimizer's part in torch's `Join` on a joined rank. `leave` ends the context on the optimizer."""

    def __init__(self, protocol: ShardedJoin, step: TrainingStep, in_ddp: bool, leave: Callable[[], None]) -> None:
        super().__init__(protocol)
        self._step, self._in_ddp, self._leave_context = step, in_ddp, leave
        # A context that an exception has ended calls none of its hooks, but drops them.
        finalize(self, leave)
        self._joined = False

    def main_hook(self) -> None:
        """Shadow the live ranks until they have stepped, beside the shadows of other joinables."""
        if not self._joined:
            self._joined = True
            self._step.engine.stop_announcing()
        step = self._submit(JOINED)
        if not self._step.engine.blocks_host:
            # In stream order one thread launches everything.
            step.result()

    def _do(self, event: list[int]) -> None:
        kind, max_norm, norm_type, passes, *mask = event
        engine = self._step.engine
        params = engine.buckets.params
        used = [index for index, flag in enumerate(union_of_masks([mask], len(params))) if flag]
        # DDP's own shadow, which brings the zeros of this rank, runs in another thread.
        engine.failures.await_passes(passes)
        with on_device(params[0].device):
            if kind == BACKWARD:
                engine.shadow_backward(used)
                return
            engine.keep_only(used)
            if kind == CLIP:
                self._step.clip(*unpack("<dd", pack("<qq", max_norm, norm_type)))
            else:
                with self._protocol.received():
                    self._step.shadow_step(self._in_ddp)

    def _leave(self) -> None:
        self._leave_context()
