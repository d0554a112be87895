"""All entries by name, and what each is in a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from benchmarks.peers import (
    bound,
    ddp,
    deepspeed_zero,
    fairscale_oss,
    fsdp2,
    torch_zero,
    zerostep_drop_in,
)
from benchmarks.peers.trainer import Build
from benchmarks.peers.zerostep_sharded import Sharded

Role = Literal["bound", "plain", "peer", "ours"]


@dataclass(frozen=True)
class Entry:
    """One row: the key on the command line, the name in tables, the part it plays, and how to build it."""

    key: str
    name: str
    role: Role
    build: Build


BOUND = Entry("bound", "bound: no communication", "bound", bound.build)
PLAIN = Entry("ddp", "DDP", "plain", ddp.build_plain)
# No peer in the sense of the bars: it is unsharded, and its fused kernels are held against ours.
TUNED = Entry("ddp-tuned", "DDP, 5 MB buckets, views, fused", "plain", ddp.build_tuned)
FORWARD = Entry("forward", "zerostep, gather=forward", "ours", Sharded("forward").build)
UNDER_DDP = Entry(
    "forward-ddp", "zerostep, gather=forward, under DDP", "ours", Sharded("forward", under_ddp=True).build
)
STEP = Entry("step", "zerostep, gather=step", "ours", Sharded("step").build)
FUSED = Entry("forward-fused", "zerostep, gather=forward, fused", "ours", Sharded("forward", fused=True).build)

ENTRIES = (
    BOUND,
    PLAIN,
    TUNED,
    Entry("torch", "torch ZeRO", "peer", torch_zero.build),
    Entry("torch-view", "torch ZeRO, bucket view", "peer", torch_zero.build_view),
    Entry("fsdp2", "FSDP2, no reshard", "peer", fsdp2.build),
    Entry("deepspeed-1", "DeepSpeed ZeRO-1", "peer", partial(deepspeed_zero.build, 1)),
    Entry("deepspeed-2", "DeepSpeed ZeRO-2", "peer", partial(deepspeed_zero.build, 2)),
    Entry("fairscale", "FairScale OSS + ShardedDDP", "peer", fairscale_oss.build),
    Entry("drop-in", "zerostep, drop-in", "ours", zerostep_drop_in.build),
    FORWARD,
    STEP,
    UNDER_DDP,
    FUSED,
)
ALWAYS = (BOUND, PLAIN)  # every ratio and every difference refers to them


def entries_of(keys: Sequence[str]) -> list[Entry]:
    """Return the entries of these keys and those that are always there, in the order of the table."""
    return [entry for entry in ENTRIES if entry.key in keys or entry in ALWAYS]
