"""The optimizers and hooks that users hold: torch's interface to the steps of `zerostep.step`.

`sharded` is `ShardedOptimizer`, `zero` is `ZeroRedundancyOptimizer`, `overlap_hooks` has the two DDP hooks; `base` is
their common base, `join` the protocol for uneven inputs, which `zero_join` and `sharded_join` fill in, `view` is the
interface to checkpoints.

May import every room but `checkpoint`, `integrations` and `tools`. Read `sharded` first.
"""
