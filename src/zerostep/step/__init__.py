"""One training step: gradients are reduced while backward runs, owned parts updated, parameters gathered.

For `ShardedOptimizer` read `training_step` (the order of a step), `engine` (what happens at each point of it), then
`reduction` (gradients to their owners), `update` (inner optimizers) and `gathering` (parameters to everyone). Overlap
mode of `ZeroRedundancyOptimizer` is `overlap_pipeline`, `overlap_state` and `bucket_runner`. `labels` names the ranges
in profiles.

May import `plan`, `comm` and `memory`; not `state`, `optim` or anything behind them.
"""
