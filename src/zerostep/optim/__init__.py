"""The optimizers and hooks that users hold: torch's interface to the steps of `zerostep.step`.

`sharded` is `ShardedOptimizer`, `zero` is `ZeroRedundancyOptimizer`, `overlap_hooks` has the two DDP hooks; `base` is
what both optimizers share, `join`, `zero_join`, `sharded_join` are for uneven inputs, `view` is what checkpoints see.

May import every room but `checkpoint`, `integrations` and `tools`. Read `sharded` first.
"""
