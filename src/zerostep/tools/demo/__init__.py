"""Train one model with plain DDP, the drop-in and `ShardedOptimizer` on local ranks, and compare cost and result.

Seed and data are the same for all. Its model, launcher and comparison of parameters serve benchmarks and examples too.
It imports the public optimizers, `plan` and `tools.planner`. Read `training` first, then `runs`, one way of training
with what its steps cost.
"""

from zerostep.tools.demo.launch import run_ranks
from zerostep.tools.demo.model import GPT, GPTShape
from zerostep.tools.demo.report import RunReport, compare_runs, largest_difference
from zerostep.tools.demo.training import Demo, Progress, run_demo

__all__ = [
    "GPT",
    "Demo",
    "GPTShape",
    "Progress",
    "RunReport",
    "compare_runs",
    "largest_difference",
    "run_demo",
    "run_ranks",
]
