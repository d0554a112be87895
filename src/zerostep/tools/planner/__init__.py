"""Predict memory per rank, bytes sent and step time from a model's shapes and its optimizer, without any ranks.

The optimizer classes and the layout are the real ones, run on meta tensors. It imports `plan`, and `step` for
the reduction itself. Read `comparison` first: it takes parameters from `sources`, optimizers from `recipe` and bytes
from `memory`; `forecast` predicts times, `report` and `picture` show the result.
"""
