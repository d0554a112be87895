"""Optimizer-state sharding for PyTorch data-parallel training: same numbers as DDP, 1/N of the memory."""

from zerostep.checkpoint.convert import reshard
from zerostep.checkpoint.errors import CheckpointError
from zerostep.checkpoint.export import consolidate
from zerostep.checkpoint.loading import Checkpoint, latest, load
from zerostep.checkpoint.pending import PendingSave
from zerostep.checkpoint.saving import save
from zerostep.checkpoint.state_dicts import merge_shards
from zerostep.integrations.dcp import dcp_state
from zerostep.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from zerostep.sharded import ShardedOptimizer
from zerostep.version import __version__
from zerostep.zero import ZeroRedundancyOptimizer

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "PendingSave",
    "ShardedOptimizer",
    "ZeroRedundancyOptimizer",
    "__version__",
    "consolidate",
    "dcp_state",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "latest",
    "load",
    "merge_shards",
    "reshard",
    "save",
]
