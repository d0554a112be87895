"""Edge cases of `save` and `load`: scripts that end, training that goes on, slow disks, failures half-way."""

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import MultiStepLR

import zerostep
from tests.helpers.checkpoints import make
from tests.helpers.pool import Pool
from tests.helpers.reference import assert_same_bits, build, train
from tests.helpers.sharding import series, sharded
from zerostep import CheckpointError, ShardedOptimizer, ZeroRedundancyOptimizer
from zerostep.checkpoint import directory, tensor_file
from zerostep.checkpoint import save as saving
from zerostep.checkpoint.reader import Reader

LAST = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import zerostep
from zerostep.checkpoint import tensor_file

rank, root, fails = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "fails"
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(root + "/store", 2), rank=rank, world_size=2)
model = nn.Linear(2000, 1000)
optimizer = zerostep.ShardedOptimizer(model, torch.optim.AdamW)
model(torch.ones(1, 2000)).sum().backward()
optimizer.step()
if fails and rank == 1:
    def fail(file, piece):
        raise OSError(28, "No space left on device")
    tensor_file._write_all = fail
tensor_file._CHUNK = 4096  # so that it is under way for long
zerostep.save(root + "/last", optimizer, model, wait=False)
"""


def _last_words(root: Path, outcome: str) -> list[str]:
    """Two ranks whose last act is a save in the background; what each has to say."""
    command = [sys.executable, "-c", LAST]
    ranks = [
        subprocess.Popen([*command, str(rank), str(root), outcome], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        return [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                rank.kill()


def test_a_script_that_ends_finishes_what_it_writes(tmp_path: Path) -> None:
    texts = _last_words(tmp_path, "works")
    assert zerostep.latest(tmp_path) == tmp_path / "last", texts


def test_a_failure_after_the_last_line_of_a_script_is_logged(tmp_path: Path) -> None:
    for text in _last_words(tmp_path, "fails"):
        assert "could not be written in the background" in text and "No space left" in text
    assert zerostep.latest(tmp_path) is None


class Extra(nn.Linear):
    """A layer with a state of its own that changes in place."""

    def __init__(self) -> None:
        super().__init__(9, 5)
        self.seen = {"n": 1}

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state


def _changes_behind_a_save(group: ProcessGroup, root: Path) -> None:
    model, rate = Extra(), torch.tensor(0.5)
    optimizer = ShardedOptimizer(model, AdamW, process_group=group, lr=rate)
    changed = threading.Event()
    with mock.patch.object(saving, "_publish", _after(changed)):
        pending = zerostep.save(root / "it", optimizer, model, wait=False)
        optimizer.param_groups[0]["lr"].fill_(0.001)
        model.seen["n"] = 99
        changed.set()
        assert pending is not None
        pending.wait()
    other = Extra()
    fresh = ShardedOptimizer(other, AdamW, process_group=group, lr=torch.tensor(1.0))
    zerostep.load(root / "it", fresh, other)
    assert float(fresh.param_groups[0]["lr"]) == 0.5
    assert other.seen == {"n": 1}


def _after(event: threading.Event) -> Callable[..., None]:
    publish = saving._publish

    def later(*args: Any) -> None:
        assert event.wait(30)
        publish(*args)

    return later


def test_a_background_save_has_the_values_of_its_moment(pool: Pool, tmp_path: Path) -> None:
    pool.run(_changes_behind_a_save, 2, tmp_path)


def _half_way(group: ProcessGroup, kind: str, root: Path) -> None:
    model, optimizer = make(group, kind)
    zerostep.save(root / "it", optimizer, model)
    read, seen = Reader.weight, list[int]()

    def bad(reader: Reader, number: int, *part: Any) -> Tensor:
        seen.append(number)
        if dist.get_rank(group) == 1 and len(seen) == 2:
            raise CheckpointError("a bad sector")
        return read(reader, number, *part)

    with mock.patch.object(Reader, "weight", bad), pytest.raises(CheckpointError, match="a bad sector"):
        zerostep.load(root / "it", optimizer, model)
    with pytest.raises(RuntimeError, match=r"failed half-way.*load the last checkpoint"):
        optimizer._check_usable()
    zerostep.load(root / "it", optimizer, model)
    optimizer._check_usable()


@pytest.mark.parametrize("kind", ["zero", "sharded"])
def test_a_load_that_fails_half_way_ends_it_for_all(pool: Pool, kind: str, tmp_path: Path) -> None:
    pool.run(_half_way, 2, kind, tmp_path)


def _unreadable(group: ProcessGroup, root: Path) -> None:
    model, optimizer = make(group, "sharded")
    optimizer.zero_grad()
    model(1).backward()
    optimizer.step()
    zerostep.save(root / "it", optimizer, model)

    def bad(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    failing = mock.patch("os.preadv", bad) if dist.get_rank(group) else nullcontext()
    with failing, pytest.raises(CheckpointError, match=r"cannot be read: .*Input/output error.*load again"):
        zerostep.load(root / "it", optimizer, model)
    optimizer._check_usable()  # nothing had been applied


def test_what_cannot_be_read_is_told_as_that(pool: Pool, tmp_path: Path) -> None:
    pool.run(_unreadable, 2, tmp_path)


def _schedule(group: ProcessGroup, root: Path) -> None:
    def pair() -> tuple[ShardedOptimizer, MultiStepLR]:
        optimizer = sharded(group, build())
        return optimizer, MultiStepLR(optimizer, [2, 4], gamma=0.1)

    optimizer, scheduler = pair()
    scheduler.step()
    extra = {"scheduler": scheduler.state_dict(), "pair": (1, float("inf")), 7: torch.tensor([1.5, 2.0])}
    zerostep.save(root / "it", optimizer, extra=extra)
    other, resumed = pair()
    found = zerostep.load(root / "it", other).extra
    assert found["pair"] == (1, float("inf")) and found[7].tolist() == [1.5, 2.0]
    resumed.load_state_dict(found["scheduler"])
    for _ in range(4):
        for each in (scheduler, resumed):
            each.step()
    assert (
        other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(optimizer.defaults["lr"] / 100)
    )


def test_what_is_extra_comes_back_as_it_was(pool: Pool, tmp_path: Path) -> None:
    pool.run(_schedule, 2, tmp_path)


def _too_much(group: ProcessGroup, root: Path) -> None:
    optimizer = sharded(group, build())
    with (
        mock.patch.object(saving, "MOST_BYTES", 1 << 16),
        pytest.raises(CheckpointError, match=r"extra takes .* bytes as text, and 16384 are all"),
    ):
        zerostep.save(root / "it", optimizer, extra=list(range(10_000)))
    assert os.listdir(root) == []


def test_more_than_a_manifest_can_hold_is_refused_when_it_is_saved(pool: Pool, tmp_path: Path) -> None:
    pool.run(_too_much, 2, tmp_path)


def _other_precision(group: ProcessGroup, root: Path) -> None:
    def pair(dtype: torch.dtype) -> tuple[nn.Module, ShardedOptimizer]:
        model = build("matrices").to(dtype)
        return model, ShardedOptimizer(
            model, SGD, process_group=group, master_dtype=torch.float32, lr=0.01, momentum=0.9
        )

    def masters(optimizer: ShardedOptimizer) -> list[Tensor]:
        return [
            shard.master.clone()
            for shard in optimizer._training.engine.buckets.shards.values()
            if shard.master is not None
        ]

    model, optimizer = pair(torch.bfloat16)
    train(model, optimizer, [(x.bfloat16(), y.bfloat16()) for x, y in series(group, 3, "matrices")])
    zerostep.save(root / "it", optimizer, model)
    other, resumed = pair(torch.float16)
    zerostep.load(root / "it", resumed, other)
    resumed._training.engine.buckets.follow_params()  # as the next step does
    for found, expected in zip(masters(resumed), masters(optimizer), strict=True):
        assert_same_bits({"master": found}, {"master": expected})


def test_masters_survive_another_precision_of_the_model(pool: Pool, tmp_path: Path) -> None:
    pool.run(_other_precision, 2, tmp_path)


def _one_rank_asks(group: ProcessGroup, root: Path, then: str) -> None:
    model, optimizer = make(group, "sharded")

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(tensor_file, "_write_all", fail):
        pending = zerostep.save(root / "it", optimizer, model, wait=False)
        assert pending is not None
        pending.wait_until_done()
    if dist.get_rank(group) == 0:
        with pytest.raises(CheckpointError, match="could not be written"):
            pending.wait()
    with pytest.raises(CheckpointError, match="could not be written"):
        if then == "save":
            zerostep.save(root / "next", optimizer, model)
        else:
            optimizer.zero_grad()
            model(1).backward()
            optimizer.step()
    zerostep.save(root / "next", optimizer, model)


@pytest.mark.parametrize("then", ["save", "step"])
def test_one_rank_may_ask_for_the_outcome_and_all_hear_of_it(pool: Pool, then: str, tmp_path: Path) -> None:
    pool.run(_one_rank_asks, 2, tmp_path, then, deadline=40)


class Nested(nn.Module):
    """Names that look like those of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.module = nn.Linear(3, 2)
        self.module.weight = nn.Parameter(torch.ones(6))

    def forward(self, factor: float) -> Tensor:
        result: Tensor = factor * (self.weight.sum() + 2 * self.module.weight.sum() + self.module.bias.sum())
        return result


def _like_a_wrapper(group: ProcessGroup, root: Path) -> None:
    model = Nested()
    optimizer = ShardedOptimizer(model, SGD, process_group=group, lr=0.01, momentum=0.9)
    model(1.0).backward()
    optimizer.step()
    zerostep.save(root / "it", optimizer, model)
    other = Nested()
    fresh = ShardedOptimizer(other, SGD, process_group=group, lr=0.01, momentum=0.9)
    zerostep.load(root / "it", fresh, other)
    state = {param: entry["momentum_buffer"].tolist() for param, entry in fresh.state.items()}
    named = dict(other.named_parameters())
    before = {param: entry["momentum_buffer"].tolist() for param, entry in optimizer.state.items()}
    for name, param in model.named_parameters():
        assert state.get(named[name]) == before.get(param)


def test_a_module_called_module_keeps_its_name(pool: Pool, tmp_path: Path) -> None:
    pool.run(_like_a_wrapper, 2, tmp_path)


def _cannot_prune(group: ProcessGroup, root: Path) -> None:
    model, optimizer = make(group, "sharded")

    def fail(*args: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    for number in range(3):
        zerostep.save(root / f"step-{number}", optimizer, model)
    with mock.patch.object(directory, "_kind", fail):
        zerostep.save(root / "step-3", optimizer, model, keep=2)
    assert zerostep.latest(root, group) == root / "step-3"


def test_what_cannot_be_removed_does_not_fail_a_save(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / ".hidden").mkdir()
    pool.run(_cannot_prune, 2, tmp_path)


class MadeUp(nn.Linear):
    """A state dict with more in it than the module holds."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "doubled"] = 2 * self.weight.detach()


def _made_up(group: ProcessGroup, root: Path) -> None:
    model = MadeUp(4, 4)
    optimizer = sharded(group, model)
    with pytest.raises(CheckpointError, match="makes up 'doubled'"):
        zerostep.save(root / "it", optimizer, model)
    zerostep.save(root / "it", optimizer)


def test_tensors_that_a_model_makes_up_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(_made_up, 2, tmp_path)


def _inside_join(group: ProcessGroup, root: Path) -> None:
    optimizer = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(8))], AdamW, group, lr=0.1)
    optimizer._join_config = optimizer._join_config._replace(enable=True)
    with pytest.raises(RuntimeError, match="inside Join"):
        zerostep.save(root / "it", optimizer)


def test_inside_join_nothing_is_saved(pool: Pool, tmp_path: Path) -> None:
    pool.run(_inside_join, 2, tmp_path)


def test_many_files_need_no_more_handles_than_one(pool: Pool, tmp_path: Path) -> None:
    pool.run(_few_handles, 2, tmp_path)


def _few_handles(group: ProcessGroup, root: Path) -> None:
    model, optimizer = make(group, "sharded")
    zerostep.save(root / "it", optimizer, model)
    gc.collect()  # sockets of earlier optimizers
    before = len(os.listdir("/proc/self/fd"))
    reader = Reader(root / "it")
    assert len(os.listdir("/proc/self/fd")) <= before
    assert reader.manifest.step == 0


def _slow_disk(group: ProcessGroup, root: Path, wait: bool) -> None:
    """Rank 1 writes only when the others have asked it for long enough to make the time-out of its group strike."""
    quick = dist.new_group(dist.get_process_group_ranks(group), timedelta(seconds=2), use_local_synchronization=True)
    model = build()
    optimizer = sharded(quick, model)
    write, start = tensor_file._write_all, time.monotonic()

    def slowly(file: Any, piece: memoryview) -> None:
        while dist.get_rank(group) == 1 and time.monotonic() < start + 4:
            time.sleep(0.1)
        write(file, piece)

    with mock.patch.object(tensor_file, "_write_all", slowly):
        pending = zerostep.save(root / "it", optimizer, model, wait=wait)
        if pending is not None:
            pending.wait()
    zerostep.load(root / "it", optimizer, model)


@pytest.mark.parametrize("wait", [True, False])
def test_ranks_may_take_longer_to_write_than_the_group_waits(pool: Pool, wait: bool, tmp_path: Path) -> None:
    pool.run(_slow_disk, 2, tmp_path, wait)
