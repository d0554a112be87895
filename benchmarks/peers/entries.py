"""All entries by name, and what each is in a comparison."""

from collections.abc import Callable, Sequence
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
    """One row: the key on the command line, the name in tables, the part it plays, and how to build it.

    `prepare` imports what `build` will import, so that a library's own memory is not counted as the entry's.
    """

    key: str
    name: str
    role: Role
    build: Build
    prepare: Callable[[], object] = tuple


BOUND = Entry("bound", "bound: no communication", "bound", bound.build)
COMPUTE = Entry("compute", "bound: forward and backward", "bound", bound.build_compute)
WIRE = Entry("wire", "bound: bare all-reduce", "bound", bound.build_wire)
PLAIN = Entry("ddp", "DDP", "plain", ddp.build_plain)
# No peer in the sense of the bars: it is unsharded, and its fused kernels are held against ours.
TUNED = Entry("ddp-tuned", "DDP, 5 MB buckets, views, fused", "plain", ddp.build_tuned)
FORWARD = Entry("forward", "zerostep, gather=forward", "ours", Sharded("forward").build)
UNDER_DDP = Entry(
    "forward-ddp", "zerostep, gather=forward, under DDP", "ours", Sharded("forward", under_ddp=True).build
)
STEP = Entry("step", "zerostep, gather=step", "ours", Sharded("step").build)
FUSED = Entry("forward-fused", "zerostep, gather=forward, fused", "ours", Sharded("forward", fused=True).build)

COMPILED = Entry(
    "forward-compiled", "zerostep, gather=forward, compiled", "ours", Sharded("forward", compiled=True).build
)

UNDER_DDP_ALL = Entry(
    "forward-ddp-all",
    "zerostep, gather=forward, reduction=all, under DDP",
    "ours",
    Sharded("forward", under_ddp=True, reduction="all").build,
)

BACKWARD = Entry(
    "backward", "zerostep, update=backward, gather=forward", "ours", Sharded("forward", update="backward").build
)
BACKWARD_STEP = Entry(
    "backward-step", "zerostep, update=backward, gather=step", "ours", Sharded("step", update="backward").build
)

ENTRIES = (
    COMPUTE,
    WIRE,
    BOUND,
    PLAIN,
    TUNED,
    Entry("torch", "torch ZeRO", "peer", torch_zero.build),
    Entry("torch-view", "torch ZeRO, bucket view", "peer", torch_zero.build_view),
    Entry("torch-hook", "torch ZeRO, hook", "peer", partial(torch_zero.build_inside, "hook")),
    Entry("torch-interleaved", "torch ZeRO, interleaved hook", "peer", partial(torch_zero.build_inside, "interleaved")),
    Entry("fsdp2", "FSDP2, no reshard", "peer", fsdp2.build),
    Entry("deepspeed-1", "DeepSpeed ZeRO-1", "peer", partial(deepspeed_zero.build, 1), deepspeed_zero.library),
    Entry("deepspeed-2", "DeepSpeed ZeRO-2", "peer", partial(deepspeed_zero.build, 2), deepspeed_zero.library),
    Entry("fairscale", "FairScale OSS + ShardedDDP", "peer", fairscale_oss.build, fairscale_oss.library),
    Entry("drop-in", "zerostep, drop-in", "ours", zerostep_drop_in.build),
    Entry("hook", "zerostep, drop-in, hook", "ours", partial(zerostep_drop_in.build_inside, "hook")),
    Entry(
        "interleaved",
        "zerostep, drop-in, interleaved hook",
        "ours",
        partial(zerostep_drop_in.build_inside, "interleaved"),
    ),
    FORWARD,
    STEP,
    UNDER_DDP,
    UNDER_DDP_ALL,
    FUSED,
    BACKWARD,
    BACKWARD_STEP,
)
# Measured only when named: how the default bucket size was chosen, and what takes a while to compile.
NAMED = (
    *(
        Entry(
            f"forward-{size}mb",
            f"zerostep, gather=forward, {size} MB",
            "ours",
            Sharded("forward", bucket_mb=size).build,
        )
        for size in (1, 2, 10, 25)
    ),
    COMPILED,
)
ALWAYS = (WIRE, BOUND, PLAIN)  # every ratio and every difference refers to them


def entries_of(keys: Sequence[str]) -> list[Entry]:
    """Return the entries of these keys and those that are always there, in the order of the table."""
    return [entry for entry in (*ENTRIES, *NAMED) if entry.key in keys or entry in ALWAYS]
