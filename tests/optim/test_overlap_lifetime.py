"""Optimizers in overlap mode that are built and dropped leave nothing behind: no sockets, no threads."""

import os
import time
from pathlib import Path

import pytest
from torch.distributed import ProcessGroup

from tests.helpers.overlap import EACH_HOOK, in_ddp, overlapped, rank_batches, train
from tests.helpers.pool import Pool

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts what Linux shows in /proc")

DEADLINE = 10.0


def _build_and_drop(group: ProcessGroup, hook: str) -> None:
    ddp = in_ddp(group)
    train(ddp, overlapped(ddp, hook), rank_batches(group, 2))


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads(at_most: int) -> int:
    """The threads of this process, when there are no more than that: one that was told to end may take a moment."""
    end = time.monotonic() + DEADLINE
    while (count := len(os.listdir("/proc/self/task"))) > at_most and time.monotonic() < end:
        os.sched_yield()
    return count


def _many(group: ProcessGroup, hook: str) -> tuple[list[int], int, int]:
    for _ in range(2):
        _build_and_drop(group, hook)
    files, threads = [_open_files()], len(os.listdir("/proc/self/task"))
    for _ in range(12):
        _build_and_drop(group, hook)
        files.append(_open_files())
    return files, threads, _threads(at_most=threads)


@EACH_HOOK
def test_optimizers_that_are_dropped_leave_no_sockets_and_no_threads(pool: Pool, hook: str) -> None:
    for files, before, after in pool.run(_many, 2, hook, deadline=120.0):
        assert files == files[:1] * 13
        assert after <= before
