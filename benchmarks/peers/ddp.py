"""Plain DDP with the unsharded optimizer: as it comes, and tuned by hand."""

from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from benchmarks.peers.trainer import Factory, Loop, Options, Trainer, trainable

TUNED_BUCKET_MB = 5


def build_plain(factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Build DDP and the optimizer with their defaults."""
    model = factory()
    return Loop(model, DDP(model), optimizer_class(trainable(model), **options))


def build_tuned(factory: Factory, optimizer_class: type[Optimizer], options: Options) -> Trainer:
    """Build DDP with small buckets and no copies out of them, and the fused optimizer."""
    model = factory()
    wrapped = DDP(model, bucket_cap_mb=TUNED_BUCKET_MB, gradient_as_bucket_view=True)
    return Loop(model, wrapped, optimizer_class(trainable(model), **{**options, "fused": True}))
