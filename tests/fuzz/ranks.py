"""Warm processes that carry out programs, one command at a time; a crew that has failed is thrown away."""

import faulthandler
import gc
import hashlib
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from tests.fuzz.compare import difference
from tests.fuzz.execute import Record, execute
from tests.fuzz.program import Program
from tests.fuzz.variants import VARIANTS
from tests.helpers.pool import HOST, LOOPBACK, PRELOAD
from zerostep.comm.exchange import HostExchange, PendingGather
from zerostep.plan.layout import Bucket

TIMEOUT = timedelta(seconds=60)
START = 60.0
DEADLINE = 8.0
QUICK = 1.2  # while a program is shrunk
GRACE = 2.0  # after the first error, for the other ranks to raise as well


@dataclass(frozen=True)
class Answer:
    """What one rank says about one side of a program."""

    error: str = ""
    difference: str = ""
    digest: str = ""  # of the parameters at the end


# The rank's side.


def serve(rank: int, world: int, port: int, stack: str, connection: Connection) -> None:
    """Meet the other ranks, then carry out commands until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(stack, os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what torch's C++ code warns of; errors travel by the connection
    store = TCPStore(HOST, port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    bench = Bench(world)
    connection.send(Answer())
    with suppress(EOFError, OSError):
        while True:
            program, variant = connection.recv()
            bench.answer(program, variant, connection)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Bench:
    """A rank: its groups, and the plain side of the last program."""

    def __init__(self, world: int) -> None:
        self.group = dist.group.WORLD
        ranks = torch.arange(world)
        self.meshes = {
            "rows": DeviceMesh("cpu", ranks.reshape(world, 1)),
            "columns": DeviceMesh("cpu", ranks.reshape(1, world)),
        }
        self.own = set(dist.distributed_c10d._world.pg_map)
        self.plain = Record()
        HostExchange.gather = _late(HostExchange.gather)  # type: ignore[method-assign]
        gc.collect()
        gc.freeze()
        self.runs = 0

    def answer(self, program: Program, variant: str | None, connection: Connection) -> None:
        """Carry out one side, say how it went, and clean up when all ranks have."""
        connection.send(self._attempt(program, variant))
        dist.barrier(self.group)
        self._clean()

    def _attempt(self, program: Program, variant: str | None) -> Answer:
        chosen = VARIANTS[variant] if variant is not None else None
        torch.manual_seed(0)
        try:
            record = execute(program, chosen, self.group, self.meshes)
        except Exception:
            return Answer(error=traceback.format_exc())
        if chosen is None:
            self.plain = record
            return Answer(digest=_digest(record))
        found = difference(record, self.plain, chosen.is_exact(program), chosen.is_late)
        return Answer(difference=found, digest=_digest(record))

    def _clean(self) -> None:
        self.runs += 1
        gc.collect()
        if self.runs % 50 == 1:
            gc.freeze()  # caches are not walked again
        for group in set(dist.distributed_c10d._world.pg_map) - self.own:
            dist.destroy_process_group(group)


def _digest(record: Record) -> str:
    """A digest of all parameters that were seen, to compare between ranks."""
    text = hashlib.sha256()
    for label, value in record.seen:
        if label.startswith("parameters at") and isinstance(value, dict):
            for tensor in value.values():
                text.update(tensor.numpy().tobytes())
    return text.hexdigest()


@dataclass(frozen=True)
class _Late:
    """A gather whose parts are not a number until they were waited for."""

    pending: PendingGather
    arrived: Tensor
    memory: Tensor
    others: list[tuple[int, int]]

    def wait(self) -> None:
        self.pending.wait()
        for start, stop in self.others:
            self.memory[start:stop].copy_(self.arrived[start:stop])


def _late(gather: Any) -> Any:
    """`HostExchange.gather` such that a parameter that is read too early is not a number, whatever the timing."""

    def late_gather(self: Any, memory: Tensor, bucket: Bucket) -> PendingGather:
        if not memory.is_floating_point():
            return gather(self, memory, bucket)
        memory = memory.data  # parameters share its memory, not its version
        arrived = memory.clone()
        others = [cut for rank, cut in enumerate(pairwise(bucket.cuts)) if rank != self._rank]
        for start, stop in others:
            memory[start:stop].fill_(float("nan"))
        return _Late(gather(self, arrived, bucket), arrived, memory, others)

    return late_gather


# The parent's side.


@dataclass(frozen=True)
class Verdict:
    """How one side of a program ended: `same`, `different`, `raised` by all ranks, or `hang`."""

    status: str
    detail: str = ""
    errors: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether this crew can be trusted no more."""
        return self.status in ("raised", "hang")


class Crew:
    """The ranks of one world."""

    def __init__(self, world: int) -> None:
        self.world, self.fresh = world, True
        self.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        self.directory = tempfile.TemporaryDirectory(prefix="fuzz-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, "tests.fuzz.execute", "torch._dynamo"])
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            seat = (rank, world, self.store.port, str(self._stack(rank)), theirs)
            process = context.Process(target=serve, args=seat, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)
        self._collect(START)

    def _stack(self, rank: int) -> Path:
        return Path(self.directory.name, f"{rank}.txt")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, program: Program, variant: str | None, deadline: float = DEADLINE) -> Verdict:
        """Carry out one side of a program; the plain side comes first."""
        for connection in self.connections:
            with suppress(OSError):
                connection.send((program, variant))
        limit = START if self.fresh else deadline
        self.fresh = False
        return self._verdict(self._collect(limit))

    def _collect(self, limit: float) -> dict[int, Answer]:
        pending: dict[Any, int] = {connection: rank for rank, connection in enumerate(self.connections)}
        answers: dict[int, Answer] = {}
        end = time.monotonic() + limit
        while pending and (ready := wait(list(pending), max(0.0, end - time.monotonic()))):
            for rank in [pending.pop(connection) for connection in ready]:
                try:
                    answers[rank] = self.connections[rank].recv()
                except (EOFError, OSError):
                    answers[rank] = Answer(error="the process died")
                if answers[rank].error:
                    end = min(end, time.monotonic() + GRACE)
        return answers

    def _verdict(self, answers: dict[int, Answer]) -> Verdict:
        silent = [rank for rank in range(self.world) if rank not in answers]
        errors = tuple(answers[rank].error if rank in answers else "" for rank in range(self.world))
        if silent:
            places = "; ".join(f"rank {rank} in {self._place(rank)}" for rank in silent)
            raised = "".join(f"; rank {rank} raised {last_line(text)}" for rank, text in enumerate(errors) if text)
            return Verdict("hang", places + raised, errors)
        if any(errors):
            only = "" if all(errors) else f"only ranks {[rank for rank, text in enumerate(errors) if text]}: "
            return Verdict("raised", only + last_line(next(filter(None, errors))), errors)
        found = [f"rank {rank}: {answers[rank].difference}" for rank in answers if answers[rank].difference]
        if found:
            return Verdict("different", min(found))
        if len({answer.digest for answer in answers.values()}) > 1:
            return Verdict("different", "parameters differ between ranks")
        return Verdict("same")

    def _place(self, rank: int) -> str:
        """Ends the process; the innermost line of the package's own code in its main thread."""
        process = self.processes[rank]
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            process.join(GRACE)
        text = self._stack(rank).read_text() if self._stack(rank).exists() else ""
        main = text.split("Current thread")[-1] if "Current thread" in text else text
        lines = re.findall(r'/zerostep/(\S+\.py)", line (\d+) in (\w+)', main)
        return f"{lines[0][0]}:{lines[0][1]} {lines[0][2]}" if lines else "code outside of zerostep"

    def close(self) -> None:
        """End the processes."""
        for process, connection in zip(self.processes, self.connections, strict=True):
            connection.close()
            process.kill()
            process.join()
        self.directory.cleanup()


def last_line(text: str) -> str:
    """The message of a traceback."""
    lines = [line for line in text.strip().splitlines() if re.match(r"[\w.]*(Error|Exception|Exit|died)", line)]
    return (lines or text.strip().splitlines() or [""])[-1][:300]
