"""Ours under DDP: the drop-in replacement of torch's sharded optimizer, and its step inside backward."""

from typing import Literal

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from benchmarks.peers.trainer import Factory, Inside, Loop, Options, Trainer, trainable
from zerostep import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved


def build(factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Build it with its defaults."""
    model = factory()
    wrapped = DDP(model)
    return Loop(model, wrapped, ZeroRedundancyOptimizer(trainable(model), optimizer_class, **options))


def build_inside(
    way: Literal["hook", "interleaved"], factory: Factory, optimizer_class: type[Optimizer], options: Options
) -> Trainer:
    """Build its overlap mode."""
    model = factory()
    wrapped = DDP(model)
    optimizer = ZeroRedundancyOptimizer(trainable(model), optimizer_class, overlap_with_ddp=True, **options)
    hook = hook_with_zero_step if way == "hook" else hook_with_zero_step_interleaved
    wrapped.register_comm_hook(None, hook(allreduce_hook, wrapped, optimizer))
    return Inside(model, wrapped, optimizer)
