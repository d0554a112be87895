"""DDP with torch's own sharded optimizer: with and without parameters in buckets, and its step inside backward."""

from typing import Literal

from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from benchmarks.peers.trainer import Factory, Inside, Loop, Options, Trainer, trainable


def build(factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Build it with its defaults."""
    model = factory()
    wrapped = DDP(model)
    return Loop(model, wrapped, ZeroRedundancyOptimizer(trainable(model), optimizer_class, **options))


def build_view(factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Build it with parameters that are views of one bucket per owner."""
    model = factory()
    wrapped = DDP(model)
    optimizer = ZeroRedundancyOptimizer(trainable(model), optimizer_class, parameters_as_bucket_view=True, **options)
    return Loop(model, wrapped, optimizer)


def build_inside(
    way: Literal["hook", "interleaved"], factory: Factory, optimizer_class: type[Optimizer], options: Options
) -> Trainer:
    """Build its overlap mode, as its documentation shows it."""
    model = factory()
    wrapped = DDP(model)
    optimizer = ZeroRedundancyOptimizer(trainable(model), optimizer_class, overlap_with_ddp=True, **options)
    hook = ddp_zero_hook.hook_with_zero_step if way == "hook" else ddp_zero_hook.hook_with_zero_step_interleaved
    wrapped.register_comm_hook(None, hook(allreduce_hook, wrapped, optimizer))
    return Inside(model, wrapped, optimizer)
