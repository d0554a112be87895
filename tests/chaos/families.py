"""All families of scenarios: importing this fills the registry."""

from tests.chaos import checkpoints, failures, gradients, mismatch, peers, restart
from tests.chaos.registry import SCENARIOS

__all__ = ["SCENARIOS", "checkpoints", "failures", "gradients", "mismatch", "peers", "restart"]
