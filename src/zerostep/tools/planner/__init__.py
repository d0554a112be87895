"""Predict memory per rank, bytes sent and step time from a model's shapes and its optimizer, without any ranks.

The optimizer classes and the layout are the real ones, run on meta tensors. It imports `plan`, and `step` for the
constants of the reduction. Read `comparison` first.

=============== ==============================================================================================
`sources`       parameters on the meta device: of a model factory, a safetensors file or index, a named shape
`shapes`        the parameters of the named models
`recipe`        optimizer classes and their options, as parameter groups
`state`         the bytes of state of any optimizer class, from real steps on meta tensors
`backward`      the memory of gradients while backward runs
`memory`        the bytes of one rank under each strategy
`comparison`    all strategies side by side
`forecast`      the time of a step: rings with a latency and a bandwidth
`report`        tables and JSON
`picture`       stacked bars
=============== ==============================================================================================
"""
