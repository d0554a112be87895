"""Optimizer state, split by parameter and joined again: between ranks, state dicts and checkpoints.

May import: plan, comm, memory, step. Read `param_state` first: it defines which state has one value per element and can
be cut with its parameter, and which is shared by all of a parameter's parts. `leaf_state` applies that to the live
state of a `ShardedOptimizer`, `consolidate` builds one state dict from all ranks, `load_state_dict` validates one and
`expected` describes the state of an optimizer that has not stepped yet.
"""
