"""The optimizer step inside backward: two DDP communication hooks, with torch's names and arguments.

Both wrap another hook, which reduces the gradients. As soon as a bucket is reduced, its owners update their parameters
and send them to everyone, and when `backward()` returns, all ranks hold the new parameters. The two differ in when
that happens: after the last bucket, or bucket by bucket while backward is still computing the others.
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
from zerostep.step.bucket_runner import BucketRunner, StreamRunner, ThreadRunner
from zerostep.step.ddp_hook import after_backward, never_raising
from zerostep.step.overlap_pipeline import ArrivedBucket
from zerostep.step.overlap_state import OverlapState

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]

Future = torch.futures.Future
Hook = Callable[[Any, GradBucket], Future[Tensor]]
Reduction = tuple[ArrivedBucket, Future[Tensor]]


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """A DDP communication hook that updates and gathers all buckets once the last one is there.

    Arguments:
        hook: the hook that reduces gradients, e.g. torch's `allreduce_hook`; it may reduce in place or return its
            result in new memory.
        ddp: the module on which the returned hook is registered.
        zero: an optimizer over the module's parameters, built with `overlap_with_ddp=True`.
        shard_buckets: accepted for compatibility and without effect: who owns which parameter is settled when the
            optimizer is built, and never depends on DDP's buckets.
    """
    overlap = _Overlap(ddp, zero)
    waiting: list[Reduction] = []

    def zero_step_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        def launch() -> Future[Tensor]:
            if bucket.index() == 0:
                waiting.clear()
            waiting.append(overlap.reduce(hook, state, bucket))
            return overlap.run(list(waiting)) if bucket.is_last() else overlap.pass_on(waiting[-1])

        return never_raising(launch)

    return zero_step_hook


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """A DDP communication hook that updates and gathers each bucket while backward computes the next ones.

    The arguments are those of `hook_with_zero_step`.
    """
    overlap = _Overlap(ddp, zero)

    def zero_step_interleaved_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return never_raising(lambda: overlap.run([overlap.reduce(hook, state, bucket)]))

    return zero_step_interleaved_hook


class _Overlap:
    """What one DDP module and one optimizer share."""

    def __init__(self, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> None:
        self._state = _checked_state(ddp, zero)
        self._zero = zero  # the state holds its optimizer weakly
        device, transport = zero.join_device, self._state.transport
        self._control = transport.companion()
        ordered = transport.stream_ordered(device)
        # In stream order one group is enough, and two are not safe. Where hosts wait, a group of our own lets our
        # messages run beside DDP's.
        self._transport = transport if ordered else self._control
        self._runner: BucketRunner = StreamRunner(device) if ordered else ThreadRunner(device)
        self._ddp = ref(ddp)
        self._refusal: Exception | None = None
        ddp.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, ddp: nn.Module, args: Any) -> None:
        self._state.refuse_edited_gradients()
        if torch.is_grad_enabled():
            self._state.refuse_changed_parameters()

    def reduce(self, hook: Hook, state: Any, bucket: GradBucket) -> Reduction:
        """Start the reduction of a bucket with the wrapped hook; on the thread of backward."""
        if bucket.index() == 0:
            self._refusal = self._begin()
        if self._refusal is not None:
            raise self._refusal
        arrived = self._state.arrive(bucket, self._is_used if self._may_be_unused() else None)
        return arrived, never_raising(lambda: hook(state, bucket))

    def _begin(self) -> Exception | None:
        """What speaks against this iteration, with all its buckets."""
        try:
            self._state.begin()
        except Exception as error:
            return error
        return None

    def _may_be_unused(self) -> bool:
        """Whether DDP allows parameters to get no gradient. A static graph may be declared late."""
        ddp = self._ddp()
        return bool(getattr(ddp, "find_unused_parameters", False) or getattr(ddp, "static_graph", False))

    def _is_used(self, param: Tensor) -> bool:
        """Whether this rank has a gradient for a parameter: what decides for an ordinary optimizer, too."""
        if torch._C._current_graph_task_id() != -1:
            return param.grad is not None
        # The shadow pass of a joined rank, outside of backward: for DDP, such a rank goes on using what was used last.
        return self._state.was_used(param)

    def pass_on(self, reduction: Reduction) -> Future[Tensor]:
        """The gradients of a bucket, for DDP; if their reduction fails, the error is raised with the last bucket."""
        arrived, future = reduction
        return future.then(lambda done: _gradients(arrived, _outcome(done)))

    def run(self, reductions: Sequence[Reduction]) -> Future[Tensor]:
        """Update and gather these buckets, in this order; the future carries the gradients of the last one."""
        if reductions[-1][0].is_last:
            after_backward(self._state.snapshot_gradients)
        return self._runner.run(lambda: self._process(reductions))

    def _process(self, reductions: Sequence[Reduction]) -> Tensor:
        for arrived, future in reductions:
            reduced = _outcome(future)
            self._state.process(arrived, reduced, self._transport, self._control)
        return _gradients(arrived, reduced)


def _outcome(future: Future[Tensor]) -> Tensor | Exception:
    """What the wrapped hook has made of a bucket."""
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
