"""DDP with torch's own sharded optimizer, with and without parameters in buckets."""

from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from benchmarks.peers.trainer import Factory, Loop, Options, Trainer, trainable


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
