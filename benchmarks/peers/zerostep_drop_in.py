"""Ours under DDP: the drop-in replacement of torch's sharded optimizer."""

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from benchmarks.peers.trainer import Factory, Loop, Options, Trainer, trainable
from zerostep import ZeroRedundancyOptimizer


def build(factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Build it with its defaults."""
    model = factory()
    wrapped = DDP(model)
    return Loop(model, wrapped, ZeroRedundancyOptimizer(trainable(model), optimizer_class, **options))
