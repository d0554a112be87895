"""Optimizer-state sharding for PyTorch data-parallel training: same numbers as DDP, 1/N of the memory."""

from zerostep.checkpoint.consolidate import merge_shards
from zerostep.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zerostep.sharded import ShardedOptimizer
from zerostep.version import __version__
from zerostep.zero import ZeroRedundancyOptimizer

__all__ = [
    "ShardedOptimizer",
    "ZeroRedundancyOptimizer",
    "__version__",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "merge_shards",
]
