"""Who owns which elements: everything is computed from parameter groups and world sizes.

No communication, no memory for parameters; imports nothing else of zerostep. Read `layout` first.

| module | what it decides |
|---|---|
| `layout_planner`, `buckets` | the layout of `ShardedOptimizer`: many buckets, in backward order |
| `ownership`, `partition` | the layout of `ZeroRedundancyOptimizer`: whole parameters; resharding of checkpoints |
| `assign` | what both use: items to the least loaded rank, elements to level the loads, slots and cuts of a bucket |
| `probe`, `trial`, `cost` | whether an optimizer class allows cutting, and what owning a parameter costs |
| `groups` | parameter groups: what users may pass, and their specs |
"""
