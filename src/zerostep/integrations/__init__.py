"""Adapters between zerostep's optimizers and the checkpoint formats of other libraries.

May import everything but tools; each adapter works through `OptimizerView` and public methods alone. Read `dcp` first:
`dcp_state` lets `torch.distributed.checkpoint` save and load an optimizer.
"""
