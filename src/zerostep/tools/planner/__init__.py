"""Memory per rank, bytes on the wire and step time, before there are any ranks: from shapes and an optimizer alone.

=============== ==============================================================================================
`sources`       parameters without memory: of a model factory, a safetensors file or index, a named shape
`shapes`        the named shapes
`recipe`        the optimizer classes and their options, as groups
`state`         the bytes of state of any class, from real steps on tensors without memory
`backward`      what gradients take while backward runs
`memory`        the bytes of one rank under each strategy
`comparison`    all strategies side by side
`forecast`      how long a step takes: a ring with two constants
`report`        tables and JSON
`picture`       stacked bars
=============== ==============================================================================================
"""
