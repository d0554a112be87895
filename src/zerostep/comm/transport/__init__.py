"""The one door to the network: every collective, and every difference between backends and torch versions.

Two facts about a backend are needed, and both are asked for, not derived from its name: which devices the process
group serves, and whether the memory to move is host memory.

* Host memory moves point to point. Receives are posted before sends and partners are taken in shifted pairs: two
  opposite broadcasts in one group run one after the other, two opposite messages run at the same time.
* Accelerator memory moves by broadcasts from each owner: the one collective that every backend offers for parts of
  uneven length, in stream order, without a word between the hosts.

Everything travels as bytes, so that no dtype is refused. Ranks are always ranks of the group, never of the world.

Order is the contract: all ranks make the same calls in the same order, from one thread per transport.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zerostep.comm.transport.companion import CompanionTransport
from zerostep.comm.transport.group import GroupTransport
from zerostep.comm.transport.null import NullTransport
from zerostep.comm.transport.protocol import BucketMemory, EvenParts, Message, Transport
from zerostep.comm.transport.transfer import Transfer
from zerostep.errors import TransportError

__all__ = [
    "BucketMemory",
    "CompanionTransport",
    "EvenParts",
    "GroupTransport",
    "Message",
    "NullTransport",
    "Transfer",
    "Transport",
    "TransportError",
    "connect",
]


def connect(group: dist.ProcessGroup | None, device: torch.device | None = None) -> Transport:
    """The transport of `group`, or of the whole world for `None`, for parameters on `device`."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "no process group exists yet: call torch.distributed.init_process_group() before building the optimizer"
        )
    found = group if group is not None else dist.group.WORLD
    assert found is not None
    if dist.get_rank(found) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the process group that it passed")
    return NullTransport() if dist.get_world_size(found) == 1 else GroupTransport(found, device)
