"""Imported by the fork server before it starts ranks: what they need, once for all of them.

Nothing here may start threads that a rank needs: a fork leaves them behind.
"""

import gc

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.nn.parallel
import torch.utils.data  # noqa: F401

import zerostep  # noqa: F401
from tests.helpers import checkpoints, pool, reference, sharding  # noqa: F401

gc.collect()
gc.freeze()  # a collection in a rank neither walks all of this nor copies its memory
