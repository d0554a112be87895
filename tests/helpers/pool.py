"""Real Gloo ranks for tests: warm workers that outlive a test, and fresh ones for tests that kill them."""

import faulthandler
import gc
import logging
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

SIZE = 4
OFFSET = (1, 2)
WORLDS = (*(tuple(range(size)) for size in range(1, SIZE + 1)), OFFSET)
GRACE = 5.0
START = 60.0
SLICE = 0.5  # seconds between two looks at how the ranks get on
MOST = 10.0  # times a deadline, after which a rank is late on however busy a machine
GROUP_TIMEOUT = timedelta(seconds=30)
HOST = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
PRELOAD = ["tests.helpers.preload"]

T = TypeVar("T")
Ranks = tuple[int, ...]


class RankError(AssertionError):
    """At least one rank of a job failed; `errors` has the text of each by group rank."""

    def __init__(self, errors: Mapping[int, str], message: str) -> None:
        super().__init__(message)
        self.errors = dict(errors)


class DeadlineError(AssertionError):
    """No rank failed, but the group ranks in `ranks` did not answer in time."""

    def __init__(self, ranks: Sequence[int], message: str) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class Outcome:
    """How one rank of a fresh job ended: `exitcode` is negative for a signal, `error` says why there is no result."""

    rank: int
    result: Any
    error: str | None
    exitcode: int | None


@dataclass(frozen=True)
class Answer:
    """A message from a worker about a job: first that it begins, then its result or its error."""

    result: Any = None
    error: str | None = None
    begins: bool = False


@dataclass(frozen=True)
class Seat:
    """The settings that a worker starts with."""

    rank: int
    size: int
    worlds: tuple[Ranks, ...]
    port: int
    stack: Path


@dataclass(frozen=True)
class Job:
    """One call of `function(group, *args, **kwargs)` on the group of `ranks`."""

    number: int
    ranks: Ranks
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


# The worker's side.


def work(seat: Seat, connection: Connection) -> None:
    """Join the process group, then answer jobs until the other end of the connection closes."""
    bench = Bench(lambda: connection.send_bytes(pickle.dumps(Answer(begins=True))))
    connection.send_bytes(_attempt(bench.join, seat))
    with suppress(EOFError, OSError):
        while True:
            connection.send_bytes(_attempt(bench.run, connection.recv_bytes()))


def _attempt(call: Callable[[T], object], argument: T) -> bytes:
    # Plain bytes: sending tensors through multiprocessing would share their memory, which dies with the worker.
    try:
        return pickle.dumps(Answer(call(argument)))
    except BaseException:
        return pickle.dumps(Answer(error=traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _loads(message: bytes) -> Any:
    return pickle.loads(message)  # noqa: S301 - only ever from our own workers and to them


class Bench:
    """A worker's process group and subgroups, and the cleaning between its jobs."""

    groups: dict[Ranks, Any]

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin

    def join(self, seat: Seat) -> None:
        """Meet the other ranks and make the subgroups, in the same order everywhere."""
        _guard(seat)
        self.store = TCPStore(HOST, seat.port, is_master=False, timeout=GROUP_TIMEOUT)
        dist.init_process_group("gloo", store=self.store, rank=seat.rank, world_size=seat.size, timeout=GROUP_TIMEOUT)
        self.groups = {ranks: dist.new_group(list(ranks), timeout=GROUP_TIMEOUT) for ranks in seat.worlds}
        self.registry = dist.distributed_c10d._world
        self.own = set(self.registry.pg_map)
        gc.collect()
        gc.freeze()  # a collection between jobs must not walk all of torch

    def run(self, message: bytes) -> Any:
        """Clean up after the job before, which all its ranks have left by now, and do this one."""
        job: Job = _loads(message)
        self._clean()
        self._rename(job.number)
        self.begin()  # imports and cleaning are not part of the job's time
        with _kept_logging(), warnings.catch_warnings():
            return job.function(self.groups[job.ranks], *job.args, **job.kwargs)

    def _clean(self) -> None:
        gc.collect()
        gc.freeze()  # what this job's imports and caches left behind is not walked again either
        for group in set(self.registry.pg_map) - self.own:
            dist.destroy_process_group(group)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)

    def _rename(self, number: int) -> None:
        # torch names a new group by counting in each process, and finds its peers in the store by that name: ranks that
        # sat out a job would count differently, and a name used again would find the addresses of a group long closed.
        world = dist.distributed_c10d._get_default_group()
        self.registry.pg_map[world] = (self.registry.pg_map[world][0], PrefixStore(f"job{number}", self.store))
        self.registry.group_count = 1 + len(WORLDS)


def _guard(seat: Seat) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stack = os.open(seat.stack, os.O_WRONLY | os.O_CREAT)
    # Chained to the default action: the worker writes its stacks and ends, so its end says that the text is complete.
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True, chain=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _kept_logging() -> Iterator[None]:
    named = (logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger))
    saved = [(each, each.level, each.handlers[:], each.filters[:], each.propagate) for each in (logging.root, *named)]
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        for logger, level, handlers, filters, propagate in saved:
            logger.handlers, logger.filters, logger.propagate = handlers, filters, propagate
            if logger.level != level:  # setting it drops the caches of all loggers
                logger.setLevel(level)


# The parent's side.


@dataclass(frozen=True)
class Worker:
    """A worker process seen from the parent."""

    process: ForkServerProcess
    connection: Connection
    stack: Path

    @classmethod
    def start(cls, seat: Seat) -> Self:
        """Fork a worker from the server that has torch loaded."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(seat, theirs), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours, seat.stack)

    def send(self, message: bytes) -> None:
        """Send a job; a worker that has died is found out when its answer is read."""
        with suppress(OSError):
            self.connection.send_bytes(message)

    def receive(self) -> Answer:
        """The answer that has arrived, or the word that none will."""
        try:
            answer: Answer = _loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(GRACE)
            return Answer(error=f"died with exit code {self.process.exitcode}")
        return answer

    def dump(self) -> str:
        """End the worker and return the Python stacks of its threads."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            self.process.join(GRACE)
        return self.stack.read_text() if self.stack.exists() else ""

    def kill(self) -> None:
        """End the worker at once."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class Timer:
    """Some seconds in which the ranks can work: the time for which they wait for a processor is not counted.

    On a busy machine all ranks may be ready to run and none does. A rank that waits for another one, for ever perhaps,
    is not ready to run, so that its time counts.
    """

    def __init__(self, workers: Sequence["Worker"], seconds: float) -> None:
        self._workers, self._seconds = workers, seconds
        self._began, self._delayed = time.monotonic(), _delays(workers)

    @property
    def left(self) -> float:
        """The seconds that are left, if the ranks get a processor at once from now on."""
        passed = time.monotonic() - self._began
        if passed > MOST * self._seconds:
            return 0.0
        delayed = _delays(self._workers)
        return self._seconds - passed + sum(delayed.get(rank, 0.0) - before for rank, before in self._delayed.items())

    @property
    def next_look(self) -> float:
        """How long to wait before the time is looked at again."""
        return min(SLICE, max(0.0, self._seconds + self._began - time.monotonic())) or SLICE

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() - self._began >= self._seconds and self.left <= 0.0


def _delays(workers: Sequence["Worker"]) -> dict[int, float]:
    """For how long the threads of each worker have waited for a processor; empty where the system does not say."""
    return {number: _delay(worker.process.pid) for number, worker in enumerate(workers)}


def _delay(pid: int | None) -> float:
    with suppress(OSError, IndexError):
        return sum(int(task.read_text().split()[1]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    return 0.0


class Crew:
    """Worker processes that form one world, and the store that they share."""

    def __init__(self, size: int, worlds: tuple[Ranks, ...]) -> None:
        # The store lives here: the port is free by construction, and any rank may die without taking it along.
        self.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT)
        self.directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self.workers: list[Worker] = []
        self.jobs = 0
        try:
            for rank in range(size):
                stack = Path(self.directory.name, f"{rank}.txt")
                self.workers.append(Worker.start(Seat(rank, size, worlds, self.store.port, stack)))
            self.results(tuple(range(size)), START)
        except BaseException:
            self.kill()
            raise

    def send(self, ranks: Ranks, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start a job on some ranks, or on none if it cannot be pickled."""
        message = pickle.dumps(Job(self.jobs, ranks, function, args, kwargs))
        self.jobs += 1
        for rank in ranks:
            self.workers[rank].send(message)

    def collect(self, ranks: Ranks, deadline: float, grace: float = math.inf) -> dict[int, Answer]:
        """The answers that come before the deadline, or within the grace that follows the first failure.

        The deadline counts from the moment when the last rank has begun.
        """
        pending: dict[Any, int] = {self.workers[rank].connection: rank for rank in ranks}
        answers: dict[int, Answer] = {}
        waiting, limit, timer = set(ranks), deadline, Timer(self.workers, START)
        while pending and not timer.over:
            for connection in wait(list(pending), timer.next_look):
                rank = pending[connection]
                answer = self.workers[rank].receive()
                if not answer.begins:
                    answers[pending.pop(connection)] = answer
                if rank in waiting and not (waiting := waiting - {rank}):
                    timer = Timer(self.workers, limit)
                if answer.error is not None and grace < timer.left:
                    limit, timer = min(limit, grace), Timer(self.workers, grace)
        return answers

    def results(self, ranks: Ranks, deadline: float) -> list[Any]:
        """The results of all ranks, or the error that says which rank failed or did not answer."""
        answers = self.collect(ranks, deadline, GRACE)
        if len(answers) == len(ranks) and all(answer.error is None for answer in answers.values()):
            return [answers[rank].result for rank in ranks]
        raise self._failure(ranks, answers, deadline)

    def _failure(self, ranks: Ranks, answers: Mapping[int, Answer], deadline: float) -> RankError | DeadlineError:
        errors = {ranks.index(rank): answer.error for rank, answer in answers.items() if answer.error is not None}
        silent = {index: self.workers[rank].dump() for index, rank in enumerate(ranks) if rank not in answers}
        parts = [f"rank {index} of {ranks} failed:\n{text}" for index, text in sorted(errors.items())]
        parts += [f"rank {index} of {ranks} did not answer:\n{text}" for index, text in silent.items()]
        if errors:
            return RankError(errors, "\n".join(parts))
        return DeadlineError(list(silent), "\n".join([f"no answer within {deadline} s", *parts]))

    def dismiss(self) -> None:
        """Let idle workers end by themselves, and kill those that do not."""
        for worker in self.workers:
            worker.connection.close()
        end = time.monotonic() + GRACE
        for worker in self.workers:
            worker.process.join(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End all workers at once."""
        for worker in self.workers:
            worker.kill()
        self.directory.cleanup()


class Pool:
    """Four warm ranks for a whole test run; a job that fails or hangs costs only a restart at the next one."""

    def __init__(self) -> None:
        self._crew: Crew | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., T], world: int | Ranks, *args: Any, deadline: float = 60.0, **kwargs: Any
    ) -> list[T]:
        """Call `function(group, *args, **kwargs)` on every rank of a world; the results come in rank order.

        `world` is a size from 1 to 4 or one of `WORLDS`; the function must be importable by its module and name.
        Raises `RankError` if a rank failed and `DeadlineError` if one did not answer.
        """
        __tracebackhide__ = True
        ranks = tuple(range(world)) if isinstance(world, int) else world
        if ranks not in WORLDS:
            raise ValueError(f"no group of {ranks}, only of {WORLDS}")
        crew = self._crew = self._crew or Crew(SIZE, WORLDS)
        crew.send(ranks, function, *args, **kwargs)
        try:
            return crew.results(ranks, deadline)
        except BaseException:
            self.close()  # ranks may be at different collectives now
            raise

    def close(self) -> None:
        """End the workers; the next job starts new ones."""
        if self._crew is not None:
            self._crew.kill()
        self._crew = None


def run_fresh(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    deadline: float = 60.0,
    kills: Mapping[int, float] | None = None,
    **kwargs: Any,
) -> list[Outcome]:
    """Do one job on processes of its own, any of which may be killed, and say how each rank ended.

    `kills` has ranks to kill from outside and the seconds from the start of the job. A rank that has not answered
    by the deadline is ended; its stacks are then its error.
    """
    ranks = tuple(range(world))
    crew = Crew(world, (ranks,))
    timers = [threading.Timer(delay, crew.workers[rank].process.kill) for rank, delay in (kills or {}).items()]
    try:
        crew.send(ranks, function, *args, **kwargs)
        for timer in timers:
            timer.start()
        answers = crew.collect(ranks, deadline)
        silent = {rank: Answer(error=crew.workers[rank].dump()) for rank in ranks if rank not in answers}
    finally:
        for timer in timers:
            timer.cancel()
        crew.dismiss()
    return [_outcome(rank, worker, {**answers, **silent}[rank]) for rank, worker in enumerate(crew.workers)]


def _outcome(rank: int, worker: Worker, answer: Answer) -> Outcome:
    return Outcome(rank, answer.result, answer.error, worker.process.exitcode)
