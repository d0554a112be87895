"""A rank that waits for long says who has not come; a rank that fails says so to the others."""

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import zerostep
from tests.helpers.pool import Crew, Pool, run_fresh
from zerostep.comm import stall_watch
from zerostep.comm.stall_watch import check_stall_seconds, stall_limit, watch
from zerostep.comm.transport import Presence, connect
from zerostep.errors import TransportError

LIMIT = 1.0
PATIENCE = timedelta(seconds=40)
CALLS = ["step", "add_param_group", "save", "load", "latest", "consolidate_state_dict"]


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


class Heard(logging.Handler):
    """What was logged; the first text is told to the other ranks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self.arrived = threading.Event()
        logging.getLogger("zerostep").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        if not self.arrived.is_set():
            _store().clone().set("heard", "1")
        self.arrived.set()


class Training:
    """A model, its optimizer, and everything that ranks do together."""

    def __init__(self, group: dist.ProcessGroup, sharded: bool, limit: float, directory: str = "") -> None:
        torch.manual_seed(0)
        self.model, self.directory, self.group = nn.Linear(4, 4), Path(directory), group
        self.optimizer: Any
        if sharded:
            self.optimizer = zerostep.ShardedOptimizer(
                self.model, torch.optim.Adam, process_group=group, stall_seconds=limit
            )
        else:
            self.optimizer = zerostep.ZeroRedundancyOptimizer(
                self.model.named_parameters(), torch.optim.Adam, process_group=group, stall_seconds=limit
            )

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).sum().backward()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.optimizer.step()

    def call(self, name: str) -> None:
        calls: dict[str, Callable[[], object]] = {
            "step": lambda: self.train(1),
            "add_param_group": lambda: self.optimizer.add_param_group(
                {"params": [("more", nn.Parameter(torch.ones(3)))]}
            ),
            "save": lambda: zerostep.save(self.directory / "one", self.optimizer),
            "load": lambda: zerostep.load(self.directory / "zero", self.optimizer),
            "latest": lambda: zerostep.latest(self.directory, self.group),
            "consolidate_state_dict": lambda: self.optimizer.consolidate_state_dict(),
        }
        calls[name]()


def _alone(group: dist.ProcessGroup, sharded: bool, name: str, directory: str) -> list[str]:
    """Rank 0 makes a call; rank 1 follows when rank 0 has said who is missing."""
    os.environ["ZEROSTEP_STALL_SECONDS"] = str(LIMIT / 4)  # of `latest`, which has no optimizer
    heard, training = Heard(), Training(group, sharded, LIMIT, directory)
    training.train(2)
    if name == "load":
        zerostep.save(training.directory / "zero", training.optimizer)
    if dist.get_rank(group) == 1:
        _store().wait(["heard"], PATIENCE)
    training.call(name)
    del os.environ["ZEROSTEP_STALL_SECONDS"]
    return heard.texts


@pytest.mark.parametrize("sharded", [False, True], ids=["drop-in", "sharded"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_one_rank_only_is_reported(pool: Pool, sharded: bool, name: str, tmp_path: Path) -> None:
    first, second = pool.run(_alone, 2, sharded, name, str(tmp_path))
    assert second == []
    assert len(first) == 1, first
    assert "rank 0 has waited for" in first[0]
    assert ("in step 3" if name == "step" else f"in {name}") in first[0]
    assert "Not there: rank 1: outside of zerostep, after step 2" in first[0]


def _unequal(group: dist.ProcessGroup, how: str) -> list[str]:
    heard, training = Heard(), Training(group, True, LIMIT)
    if how != "first step":
        training.train(2)
    if how == "everybody" or dist.get_rank(group) == 1:
        time.sleep(0.6 * LIMIT if how == "below the limit" else 2 * LIMIT)  # the disturbance itself
    training.train(2)
    return heard.texts


@pytest.mark.parametrize("how", ["below the limit", "first step", "everybody"])
def test_nothing_is_said_of_slow_ranks(pool: Pool, how: str) -> None:
    assert pool.run(_unequal, 2, how) == [[], []]


def _stopped(group: dist.ProcessGroup) -> list[str]:
    heard, training = Heard(), Training(group, True, LIMIT)
    training.train(2)
    if dist.get_rank(group) == 1:
        _store().set("here", "1")
        _store().wait(["go"], PATIENCE)
    training.train(1)
    return heard.texts


def test_a_stopped_process_gives_no_sign_of_life() -> None:
    crew = Crew(2, ((0, 1),))
    try:
        crew.send((0, 1), _stopped)
        crew.store.wait(["job0/here"], PATIENCE)
        pid = crew.workers[1].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        crew.store.wait(["job0/heard"], PATIENCE)
        os.kill(pid, signal.SIGCONT)
        crew.store.set("job0/go", "1")
        first, _ = crew.results((0, 1), 60.0)
    finally:
        crew.kill()
    assert "in step 3, reduce of bucket 0, receiving from rank 1" in first[0]
    assert "Not there: rank 1: no sign of life; it was there for step 2" in first[0]


def _chain(group: dist.ProcessGroup) -> str:
    """Rank 1 is killed; rank 0 waits for it, and rank 2 for rank 0 alone."""
    transport = connect(group).companion()
    watch(transport.presence, "a test", 20.0)
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError) as caught:
        transport.start_receive(torch.zeros(5), 1 if transport.rank == 0 else 0).wait()
    if transport.rank == 0:
        os._exit(3)  # its connections close without any message
    return str(caught.value)


def test_the_rank_that_was_lost_first_is_named() -> None:
    outcomes = run_fresh(_chain, 3)
    assert [outcome.exitcode for outcome in outcomes[:2]] == [3, -signal.SIGKILL]
    assert outcomes[2].error is None
    assert outcomes[2].result.startswith("receiving from rank 0 failed: ")
    assert "rank 0 stopped because it lost rank 1" in outcomes[2].result


def _failed_peer(group: dist.ProcessGroup, on_device: bool) -> tuple[list[str], str]:
    """Rank 1 has failed; rank 0 waits for it, or its device does."""
    heard, training = Heard(), Training(group, False, 30.0)
    training.train(1)
    error = ""
    if dist.get_rank(group) == 1:
        training.optimizer._transport.presence.fail("the disk is full")
        _store().wait(["heard"], PATIENCE)
        training.optimizer._transport.presence.recover()
        if on_device:
            training.optimizer._health.mark_recovered()  # as rank 0
        training.train(1)
    elif on_device:
        training.optimizer._transport.presence.device_mark(lambda: False)
        assert heard.arrived.wait(PATIENCE.total_seconds())
        with pytest.raises(RuntimeError) as caught:
            training.optimizer.step()
        error = str(caught.value)
        training.optimizer._health.mark_recovered()
        training.optimizer._transport.presence.device_mark(lambda: True)
        training.train(1)
    else:
        training.train(1)
    return heard.texts, error


@pytest.mark.parametrize("on_device", [False, True])
def test_the_failure_of_a_peer_is_told_at_once(pool: Pool, on_device: bool) -> None:
    (texts, error), (others, _) = pool.run(_failed_peer, 2, on_device)
    expected = "rank 1 has failed, and rank 0 waits for it: the disk is full"
    assert expected in texts[0] and len(texts) == 1 and others == []
    assert (expected in error) == on_device


def _forked(group: dist.ProcessGroup) -> int:
    training = Training(group, True, LIMIT)
    training.train(1)
    assert any(thread.name == "zerostep-watch" for thread in threading.enumerate())
    child = os.fork()
    if child == 0:
        presence = Presence((0, 1), 0)
        alone = stall_watch._watch is None
        watch(presence, "in a child", LIMIT)  # a worker may train something of its own
        os._exit(0 if alone and stall_watch._watch is not None else 1)
    _, status = os.waitpid(child, 0)
    training.train(1)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_no_watch(pool: Pool) -> None:
    assert pool.run(_forked, 2) == [0, 0]


def test_the_watch_ends_with_what_it_watches() -> None:
    presence = Presence((0, 1), 0)
    watch(presence, "a test", 0.08)
    thread = next(thread for thread in threading.enumerate() if thread.name == "zerostep-watch")
    del presence
    gc.collect()
    thread.join(10.0)
    assert not thread.is_alive()


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEROSTEP_STALL_SECONDS", raising=False)
    assert [stall_limit(given) for given in ("default", 5, "7.5", 0, None, "off")] == [60.0, 5.0, 7.5, None, None, None]
    monkeypatch.setenv("ZEROSTEP_STALL_SECONDS", "12")
    assert stall_limit("default") == 12.0
    monkeypatch.setenv("ZEROSTEP_STALL_SECONDS", "off")
    assert stall_limit("default") is None
    for wrong in (-1, "soon", float("nan")):
        with pytest.raises(ValueError, match="stall_seconds must be a number of seconds"):
            check_stall_seconds(wrong)


# Steps inside backward, and the numbers of the ranks of a mesh.


class Busy(torch.optim.SGD):
    """Waits, while `busy` is set, until somebody has said who is missing."""

    busy = False

    def step(self, closure: Any = None) -> Any:
        if self.busy:
            _store().clone().wait(["heard"], PATIENCE)
        return super().step(closure)


def _busy_in_backward(group: dist.ProcessGroup) -> list[str]:
    heard, model = Heard(), DDP(nn.Linear(4, 4), process_group=group)
    zero = zerostep.ZeroRedundancyOptimizer(
        model.parameters(), Busy, group, overlap_with_ddp=True, stall_seconds=LIMIT, lr=0.1
    )
    model.register_comm_hook(group, zerostep.hook_with_zero_step(allreduce_hook, model, zero))
    for step in range(3):
        zero.optim.busy = step == 2 and dist.get_rank(group) == 1  # type: ignore[attr-defined]
        model(torch.ones(2, 4)).sum().backward()
    return heard.texts


def test_an_update_inside_backward_is_a_phase(pool: Pool) -> None:
    first, second = pool.run(_busy_in_backward, 2)
    assert second == []
    assert len(first) == 1 and "in step 3, gather of bucket 0" in first[0], first
    assert "Not there: rank 1: in step 3, update of bucket 0, not waiting" in first[0]


def _one_of_a_mesh_ends(group: dist.ProcessGroup, directory: Path) -> None:
    torch.manual_seed(0)
    mesh, model, rank = init_device_mesh("cpu", (2, 2)), nn.Linear(8, 8), dist.get_rank(group)
    optimizer = zerostep.ShardedOptimizer(model, torch.optim.Adam, process_group=mesh)
    for step in range(4):
        if step == 2 and rank == 3:
            os._exit(3)
        optimizer.zero_grad()
        try:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        except RuntimeError as error:
            (directory / str(rank)).write_text(str(error))
            os._exit(1)  # as a program ends: the others wait for it, too


def test_errors_of_a_mesh_have_the_numbers_of_all_its_ranks(tmp_path: Path) -> None:
    """Rank 3 is number 1 of its row and of its column."""
    outcomes = run_fresh(_one_of_a_mesh_ends, 4, tmp_path, deadline=60)
    assert [outcome.exitcode for outcome in outcomes] == [1, 1, 1, 3]
    texts = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert "receiving from rank 3 failed" in texts[2] or "sending to rank 3 failed" in texts[2], texts[2]
    assert "the all-reduce of ranks 1, 3 failed" in texts[1], texts[1]
    # Rank 0 shares nothing with rank 3: the notes of the others say whom they have lost.
    assert "because it lost rank 3" in texts[0], texts[0]
