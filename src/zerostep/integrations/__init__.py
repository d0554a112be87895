"""Adapters between zerostep's optimizers and other libraries: torch's distributed checkpoints, and training frameworks.

May import everything but tools; each adapter works through `OptimizerView` and public methods alone, and none imports
the framework that it is for. Read `dcp` first: `dcp_state` lets `torch.distributed.checkpoint` save and load an
optimizer. `accelerate.enable` and `transformers.enable` are one line each beside Accelerate and Trainer.
"""

from zerostep.integrations import accelerate, dcp, transformers

__all__ = ["accelerate", "dcp", "transformers"]
