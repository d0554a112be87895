"""The two DDP hooks under one short module name."""

from zerostep.optim.overlap_hooks import hook_with_zero_step, hook_with_zero_step_interleaved

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]
