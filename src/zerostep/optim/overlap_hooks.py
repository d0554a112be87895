"""The optimizer step inside backward: two DDP communication hooks, with torch's names and arguments.

Both wrap another hook, which reduces the gradients of a bucket. Then the owners update their parameters in it and send
them to all ranks, so that all ranks have the new parameters when `backward()` returns. One hook does that after the
last bucket, the other bucket by bucket while backward computes the next ones.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from zerostep.optim.zero import ZeroRedundancyOptimizer
from zerostep.step.bucket_runner import BucketRunner
from zerostep.step.ddp_hook import after_backward, completed, failed, in_backward_pass, may_be_unused, never_raising
from zerostep.step.overlap_pipeline import ArrivedBucket
from zerostep.step.overlap_state import OverlapState

Future = torch.futures.Future
Hook = Callable[[Any, GradBucket], Future[Tensor]]
Reduction = tuple[ArrivedBucket, Future[Tensor]]

# On an accelerator every collective takes some time, however small: so many bytes of buckets are gathered together.
_TOGETHER_BYTES = 64 << 20


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """A DDP communication hook that updates and gathers all buckets once the last one has arrived.

    Arguments:
        hook: the hook that reduces gradients, e.g. torch's `allreduce_hook`; it may reduce in place or return its
            result in new memory.
        ddp: the module on which the returned hook is registered.
        zero: an optimizer over the module's parameters, built with `overlap_with_ddp=True`.
        shard_buckets: accepted for compatibility and without effect: the owners of parameters are chosen when the
            optimizer is built, and never depend on DDP's buckets.
    """
    overlap = _Overlap(ddp, zero)
    waiting: list[Reduction] = []

    def zero_step_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        def launch() -> Future[Tensor]:
            if bucket.index() == 0:
                waiting.clear()
            waiting.append(overlap.reduce(hook, state, bucket))
            if not bucket.is_last():
                return overlap.pass_on(waiting[-1])
            batch = list(waiting)
            waiting.clear()
            return overlap.run(batch)

        return overlap.guarded(bucket, launch)

    return zero_step_hook


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """A DDP communication hook that updates and gathers each bucket while backward computes the next ones.

    On an accelerator, small buckets are gathered together with the next ones. The arguments are those of
    `hook_with_zero_step`.
    """
    overlap = _Overlap(ddp, zero)
    waiting: list[Reduction] = []

    def zero_step_interleaved_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        def launch() -> Future[Tensor]:
            if bucket.index() == 0:
                waiting.clear()
            waiting.append(overlap.reduce(hook, state, bucket))
            return overlap.advance(waiting, bucket.is_last())

        return overlap.guarded(bucket, launch)

    return zero_step_interleaved_hook


class _Overlap:
    """One DDP module together with one optimizer."""

    def __init__(self, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
        self._state = _checked_state(ddp, zero)
        self._zero = zero  # keeps it alive: the state holds its optimizer weakly
        device, transport = zero.join_device, self._state.transport
        self._control = transport.companion()
        self._ordered = ordered = transport.stream_ordered(device)
        # In stream order one process group is enough, and two may deadlock, because ranks may run their kernels in
        # different orders. Where hosts wait, a group of our own lets our messages run beside DDP's.
        self._transport = transport if ordered else self._control
        self._runner = BucketRunner(device, ordered)
        self._ddp = ref(ddp)
        self._refusal: Exception | None = None
        self._error: BaseException | None = None
        ddp.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, ddp: nn.Module, args: Any) -> None:
        self._state.refuse_edited_gradients()
        if torch.is_grad_enabled():
            self._state.refuse_changed_parameters()

    def guarded(self, bucket: GradBucket, launch: Callable[[], Future[Tensor]]) -> Future[Tensor]:
        """The future of a bucket. An error is raised at the end of backward: DDP would hide it behind one of its own.

        In the shadow pass of a joined rank there is no backward, so there the future carries it.
        """
        in_backward = in_backward_pass()
        if in_backward and bucket.is_last():
            after_backward(self._end_backward)
        try:
            return launch()
        except Exception as error:
            if not in_backward:
                return failed(error)
            self._note(error)
            return completed(bucket.buffer())

    def _note(self, error: BaseException) -> None:
        self._error = self._error or error

    def _end_backward(self) -> None:
        """DDP has finished with a backward pass."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._state.snapshot_gradients()

    def reduce(self, hook: Hook, state: Any, bucket: GradBucket) -> Reduction:
        """Start the reduction of a bucket with the wrapped hook; runs on the thread of backward."""
        if bucket.index() == 0:
            self._refusal = self._begin()
        if self._refusal is not None:
            raise self._refusal
        arrived = self._state.arrive(bucket, self._is_used if may_be_unused(self._ddp()) else None)
        return arrived, never_raising(lambda: hook(state, bucket))

    def _begin(self) -> Exception | None:
        """The error that all buckets of this iteration raise, if it must not go on."""
        try:
            self._state.begin()
        except Exception as error:
            return error
        return None

    def _is_used(self, param: Tensor) -> bool:
        """Whether this rank has a gradient for a parameter.

        In the shadow pass of a joined rank, it counts as used what was used last, as in DDP.
        """
        return param.grad is not None if in_backward_pass() else self._state.was_used(param)

    def pass_on(self, reduction: Reduction) -> Future[Tensor]:
        """The gradients of a bucket, for DDP; if their reduction fails, the error is raised with the last bucket."""
        arrived, future = reduction
        return future.then(lambda done: _gradients(arrived, _outcome(done)))

    def advance(self, waiting: list[Reduction], is_last: bool) -> Future[Tensor]:
        """Update and gather those of `waiting` whose turn has come, and take them out; the future of the last bucket.

        In stream order always one behind the reductions: an update then runs while the next bucket is reduced, and the
        gather behind it. All ranks take the same buckets.
        """
        if not self._ordered:
            return self.run([waiting.pop()])
        before = waiting[:-1]
        if before and (is_last or sum(arrived.buffer.nbytes for arrived, _ in before) >= _TOGETHER_BYTES):
            self.run(before)
            del waiting[:-1]
        # Taken out: nothing may keep DDP's memory alive between two iterations.
        return self.run([waiting.pop()]) if is_last else self.pass_on(waiting[-1])

    def run(self, reductions: Sequence[Reduction]) -> Future[Tensor]:
        """Update and gather these buckets, in this order; the future carries the gradients of the last one."""
        process = self._process if reductions[-1][0].joined else self._process_noting
        return self._runner.run(lambda: process(reductions))

    def _process_noting(self, reductions: Sequence[Reduction]) -> Tensor:
        try:
            return self._process(reductions)
        except BaseException as error:
            self._note(error)
            return reductions[-1][0].buffer

    def _process(self, reductions: Sequence[Reduction]) -> Tensor:
        self._state.check_healthy()  # before waiting for a reduction that may never end
        for batch in [reductions] if self._ordered else [[each] for each in reductions]:
            # Does not stop backward: it waits on the runner's thread, or only on the runner's stream.
            reduced = [(arrived, _outcome(future)) for arrived, future in batch]
            self._state.process(reduced, self._transport, self._control)
        return _gradients(*reduced[-1])


def _outcome(future: Future[Tensor]) -> Tensor | Exception:
    """The reduced bucket, or the error of the wrapped hook."""
    try:
        value = future.wait()
    except Exception as error:
        return error
    return value[0] if isinstance(value, (list, tuple)) else value


def _gradients(arrived: ArrivedBucket, reduced: Tensor | Exception) -> Tensor:
    return arrived.buffer if isinstance(reduced, Exception) else reduced


def _checked_state(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> OverlapState:
    state = zero.overlap_state
    if state is None:
        raise ValueError(
            "the optimizer was built for steps of its own: construct it with overlap_with_ddp=True to use it in a hook"
        )
    ours, theirs = (dist.get_process_group_ranks(group) for group in (zero.process_group, ddp.process_group))
    if ours != theirs:
        raise ValueError(
            f"the optimizer spans ranks {ours}, the DDP module ranks {theirs}: give both the same process group"
        )
    return state
