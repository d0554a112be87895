"""What `torch.distributed.checkpoint` would do to a sharded optimizer if it were let in by itself.

It takes an optimizer without state on this rank for a new one, and makes state by a step of its own; it takes the state
dict of each rank for the whole. The first is wrong and may wait for ever, the second is wrong.
"""

from __future__ import annotations

import sys

__all__ = ["ADVICE", "refuse_dcp"]

ADVICE = "give zerostep.dcp_state(optimizer) to torch.distributed.checkpoint's save and load"


def refuse_dcp(kind: str) -> None:
    """Raise if the caller of the function that calls this one is part of `torch.distributed.checkpoint`.

    That depends on nothing that ranks do not share, so all ranks raise, before anything has changed.
    """
    module = sys._getframe(2).f_globals.get("__name__", "")
    if module == "torch.distributed.checkpoint" or module.startswith("torch.distributed.checkpoint."):
        raise RuntimeError(
            f"torch.distributed.checkpoint cannot handle a {kind} by itself, for every rank has another part of its "
            f'state: {ADVICE}, as in dcp.save({{"optim": zerostep.dcp_state(optimizer)}}, checkpoint_id=path)'
        )
