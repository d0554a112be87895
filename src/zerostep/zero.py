"""`ZeroRedundancyOptimizer` under the module name that torch uses."""

from zerostep.optim.zero import ZeroRedundancyOptimizer, _broadcast_object

__all__ = ["ZeroRedundancyOptimizer", "_broadcast_object"]
