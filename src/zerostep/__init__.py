"""Optimizer-state sharding for PyTorch data-parallel training: same numbers as DDP, 1/N of the memory."""

from zerostep import integrations
from zerostep.checkpoint.export import consolidate
from zerostep.checkpoint.load import Checkpoint, latest, load
from zerostep.checkpoint.reshard import reshard
from zerostep.checkpoint.save import save
from zerostep.comm.background import PendingSave
from zerostep.errors import AuditError, CheckpointError, StepMismatchError, TransportError, VerificationError
from zerostep.integrations.dcp import dcp_state
from zerostep.optim.overlap_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from zerostep.optim.sharded import ShardedOptimizer
from zerostep.optim.zero import ZeroRedundancyOptimizer
from zerostep.state.audit import AuditReport
from zerostep.step.stats import Stats
from zerostep.version import __version__

__all__ = [
    "AuditError",
    "AuditReport",
    "Checkpoint",
    "CheckpointError",
    "PendingSave",
    "ShardedOptimizer",
    "Stats",
    "StepMismatchError",
    "TransportError",
    "VerificationError",
    "ZeroRedundancyOptimizer",
    "__version__",
    "consolidate",
    "dcp_state",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "integrations",
    "latest",
    "load",
    "reshard",
    "save",
]
