"""The only package that calls the network: every collective, and every difference between backends and torch versions.

Read protocol.py first. group.py works on the user's process group, companion.py on a Gloo group of its own, null.py
in a world of one; base.py is what the first two share. It imports no other package but errors.

How the drop-in gathers parameters (`ShardedOptimizer` uses `comm.exchange` on top of these transports):

* Host memory is sent point to point. Receives are posted before sends, and in each round every rank sends to one rank
  and receives from another: opposite messages run at the same time, while opposite broadcasts of one Gloo group
  wait for each other.
* Accelerator memory is sent by broadcasts from each owner: the one collective that every backend offers for parts of
  uneven length in stream order, without blocking the host.

All data is sent as bytes, so that every dtype works. Ranks are always ranks of the group, never of the world.

All ranks must make the same calls in the same order, from one thread per transport.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zerostep.comm.transport.calls import calling
from zerostep.comm.transport.companion import CompanionTransport
from zerostep.comm.transport.control import control_of
from zerostep.comm.transport.group import GroupTransport
from zerostep.comm.transport.ints import PendingInts
from zerostep.comm.transport.null import NullTransport
from zerostep.comm.transport.presence import Presence
from zerostep.comm.transport.protocol import TAG_DATA, BucketMemory, Message, Transport
from zerostep.comm.transport.tags import kind_of, message_tag, wire_tag
from zerostep.comm.transport.transfer import Transfer, finish_in_order

__all__ = [
    "TAG_DATA",
    "BucketMemory",
    "CompanionTransport",
    "GroupTransport",
    "Message",
    "NullTransport",
    "PendingInts",
    "Presence",
    "Transfer",
    "Transport",
    "calling",
    "connect",
    "control_of",
    "finish_in_order",
    "kind_of",
    "message_tag",
    "wire_tag",
]


def connect(
    group: dist.ProcessGroup | None, device: torch.device | None = None, presence: Presence | None = None
) -> Transport:
    """The transport of `group`, or of the whole world for `None`, for parameters on `device`.

    Its waits are told to `presence`, by default to one of its own.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "no process group exists yet: call torch.distributed.init_process_group() before building the optimizer"
        )
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the process group that it passed")
    return NullTransport() if dist.get_world_size(group) == 1 else GroupTransport(group, device, presence)
