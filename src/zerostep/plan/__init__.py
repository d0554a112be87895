"""Which rank owns which elements: parameter specs, partitioning, buckets and layouts.

Everything here is computed from parameter groups and world sizes: no communication, and no memory for parameters.
This package imports nothing else of zerostep. Read `layout` first, then `partition` (whole parameters), `buckets`
(many buckets in backward order) and `layout_planner`, which chooses between them for the sharded optimizer.
"""
