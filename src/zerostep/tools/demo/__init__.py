"""Plain DDP, the drop-in and `ShardedOptimizer` side by side: local ranks, one seed, the same data, real text.

============ ==================================================================================================
`model`      a small GPT, and the text it reads
`launch`     jobs on local ranks
`choices`    the optimizers to choose from, and what the planner predicts of their memory
`runs`       one way of training: steps, and what they cost
`training`   all ways, block by block in turn
`report`     what comes of it
============ ==================================================================================================
"""

from zerostep.tools.demo.launch import DemoError, run_ranks
from zerostep.tools.demo.model import GPT, GPTShape
from zerostep.tools.demo.report import RankReport, RunReport, largest_difference, verdict
from zerostep.tools.demo.training import Demo, Progress, run_demo

__all__ = [
    "GPT",
    "Demo",
    "DemoError",
    "GPTShape",
    "Progress",
    "RankReport",
    "RunReport",
    "largest_difference",
    "run_demo",
    "run_ranks",
    "verdict",
]
