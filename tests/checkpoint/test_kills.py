"""`kill -9` at any point of a save: a checkpoint under its final name is complete and holds one step of one run."""

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

import zerostep
from tests.helpers.checkpoints import advance, assert_trained, make
from tests.helpers.pool import Pool, run_fresh
from zerostep.checkpoint import directory, tensor_file
from zerostep.checkpoint.directory import complete_in

DEADLINE = 30.0
SAFE = 2  # saves before the one that is killed
MOMENTS = ("before", "amid", "after")


@dataclass(frozen=True)
class Plan:
    """Who is killed, and when: at a point of the third save, or after some seconds."""

    kind: str
    wait: bool
    victims: tuple[int, ...]
    point: int = -1
    moment: str = "before"
    seconds: float = 0.0

    def __str__(self) -> str:
        """For the message of a test that fails."""
        return repr(self)


# The training that is killed.


class Points:
    """Counts everything that a save does to the disk on this rank, and ends the process at one of these points."""

    def __init__(self, plan: Plan | None) -> None:
        self.plan, self.armed, self.names = plan, False, list[str]()

    def around(self, act: Callable[..., Any], partly: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """`act`, which is one point."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            here = self.plan is not None and self.armed and len(self.names) == self.plan.point
            self.names += [act.__name__] * self.armed
            if here and self.plan is not None and self.plan.moment != "after":
                if self.plan.moment == "amid" and partly is not None:
                    partly(*args)
                _die()
            found = act(*args, **kwargs)
            if here:
                _die()
            return found

        return wrapped

    @contextmanager
    def watched(self) -> Iterator[None]:
        """All that `save` calls to change the disk, counted."""
        with ExitStack() as stack:
            for name in ("mkdir", "fsync", "rename", "unlink", "rmdir"):
                stack.enter_context(mock.patch.object(os, name, self.around(getattr(os, name))))
            for module, name, partly in (
                (tensor_file, "_write_all", _half_a_piece),
                (directory, "write_bytes", _half_a_text),
            ):
                stack.enter_context(mock.patch.object(module, name, self.around(getattr(module, name), partly)))
            yield


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _half_a_piece(file: Any, piece: memoryview) -> None:
    file.write(piece[: len(piece) // 2])


def _half_a_text(path: Path, text: bytes) -> None:
    path.write_bytes(text[: len(text) // 2])


def _doomed(group: ProcessGroup, root: Path, plan: Plan) -> None:
    """Train until the end; who survives a peer ends too, as a script does, and so tells those that wait for him."""
    with suppress(Exception):
        _train(group, root, plan)
    os._exit(1)


def _train(group: ProcessGroup, root: Path, plan: Plan) -> list[str]:
    """Save after every step, until the end comes; the points of the third save, if none was to be killed."""
    model, optimizer = make(group, plan.kind)
    points = Points(plan if dist.get_rank(group) in plan.victims and not plan.seconds else None)
    with points.watched():
        step, pending = 0, None
        while plan.seconds or step <= SAFE:
            step += 1
            advance(model, optimizer, step)
            points.armed = step > SAFE
            pending = zerostep.save(root / f"step-{step}", optimizer, model, extra=step, wait=plan.wait, keep=2)
            (root.parent / f"begun-{step}").touch()
            if step <= SAFE and pending is not None:
                pending.wait()
        if pending is not None:
            pending.wait()
    return points.names


# What is left.


def _resumed(group: ProcessGroup, root: Path, kind: str) -> tuple[int, int]:
    """Load the newest, compare it with what that step was, and go on: what the dead left behind is in nobody's way."""
    found = zerostep.latest(root, group)
    assert found is not None
    model, optimizer = make(group, kind)
    checkpoint = zerostep.load(found, optimizer, model)
    assert found.name == f"step-{checkpoint.step}"
    assert checkpoint.extra == checkpoint.step
    assert_trained(model, optimizer, checkpoint.step)
    return checkpoint.step, checkpoint.world_size


def _saves_again(group: ProcessGroup, root: Path, kind: str) -> None:
    model, optimizer = make(group, kind)
    found = zerostep.latest(root, group)
    assert found is not None
    step = zerostep.load(found, optimizer, model).step + 1
    advance(model, optimizer, step)
    zerostep.save(root / f"step-{step}", optimizer, model, extra=step, keep=2)
    dist.barrier(group)
    assert sorted(os.listdir(root)) == sorted([found.name, f"step-{step}"])
    zerostep.load(root / f"step-{step}", optimizer, model)
    assert_trained(model, optimizer, step)


def _kill(pool: Pool, root: Path, world: int, plan: Plan) -> int:
    """One run that is killed, and its resumption at two worlds; the step that was found."""
    series = root / "series"
    series.mkdir(parents=True)
    kills = dict.fromkeys(plan.victims, plan.seconds) if plan.seconds else None
    outcomes = run_fresh(_doomed, world, series, plan, deadline=DEADLINE, kills=kills)
    assert [outcomes[rank].exitcode for rank in plan.victims] == [-signal.SIGKILL] * len(plan.victims), plan
    assert all(outcome.exitcode in (1, -signal.SIGKILL) for outcome in outcomes), f"{plan}: {outcomes}"
    visible = {name for name in os.listdir(series) if not name.startswith(".")}
    assert visible == {path.name for path, _ in complete_in(series)}, (
        f"{plan}: not everything that has a name is complete"
    )
    begun = len(list(root.glob("begun-*")))
    if not begun and plan.seconds:
        return 0  # killed before there was anything
    try:
        step, size = pool.run(_resumed, 1, series, plan.kind)[0] if complete_in(series) else (0, world)
        if step:
            pool.run(_resumed, world, series, plan.kind)
            pool.run(_saves_again, world, series, plan.kind)
    except AssertionError as error:
        raise AssertionError(f"{plan}: {error}") from error
    # Whoever came back from a save, or from waiting for it, had a complete one.
    assert step >= (SAFE if not plan.seconds else begun - (not plan.wait)), plan
    assert size == world
    shutil.rmtree(root)
    return step


@cache
def _points(world: int, kind: str) -> list[list[str]]:
    """What the third save does to the disk on each rank."""
    with tempfile.TemporaryDirectory() as root:
        outcomes = run_fresh(_train, world, Path(root, "series"), Plan(kind, True, ()), deadline=DEADLINE)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    points: list[list[str]] = [outcome.result for outcome in outcomes]
    assert {"mkdir", "_write_all", "write_bytes", "fsync", "rename", "unlink", "rmdir"} <= set(points[0]), points
    assert all({"_write_all", "fsync"} <= set(names) for names in points), points
    return points


def _exact_plans(points: list[list[str]], kind: str) -> list[Plan]:
    """Every point of every rank, in each way."""
    return [
        Plan(kind, wait, (rank,), point, moment)
        for rank, names in enumerate(points)
        for point in range(len(names))
        for moment in MOMENTS
        for wait in (True, False)
    ]


def _last_plans(names: list[str], kind: str) -> list[Plan]:
    """Every other point of rank 0 from where all files are written: the manifest, the renames, the removal."""
    first = names.index("write_bytes")
    return [
        Plan(kind, point % 4 < 2, (0,), point, "amid" if point == first else "before")
        for point in range(first + (kind == "sharded"), len(names), 2)
    ]


def _timed_plans(draw: random.Random, world: int, kind: str, count: int) -> list[Plan]:
    """After a random time, a random rank or all of them."""
    everyone = tuple(range(world))
    return [
        Plan(kind, draw.random() < 0.5, draw.choice([everyone, *((rank,) for rank in everyone)]), seconds=seconds)
        for seconds in (draw.uniform(0.3, 1.5) for _ in range(count))
    ]


def _plans(world: int, kind: str, exact: int, timed: int, seed: int = 0) -> list[Plan]:
    """Kills at exact points, the last ones of rank 0 among them, and after random times."""
    draw, points = random.Random(f"{world} {kind} {seed}"), _points(world, kind)
    last = _last_plans(points[0], kind)
    return last + draw.sample(_exact_plans(points, kind), exact - len(last)) + _timed_plans(draw, world, kind, timed)


EACH_KIND = pytest.mark.parametrize("kind", ["zero", "sharded"])


@EACH_KIND
@pytest.mark.parametrize("number", range(10))
def test_a_killed_save_leaves_the_last_complete_one(pool: Pool, tmp_path: Path, number: int, kind: str) -> None:
    _kill(pool, tmp_path / "run", 2, _plans(2, kind, exact=8, timed=2)[number])


@pytest.mark.parametrize(("moment", "found"), [("before", SAFE), ("after", SAFE + 1)])
def test_a_checkpoint_exists_from_its_rename_on(pool: Pool, tmp_path: Path, moment: str, found: int) -> None:
    names = _points(2, "sharded")[0]
    rename = names.index("rename", names.index("write_bytes"))
    assert _kill(pool, tmp_path / "run", 2, Plan("sharded", True, (0,), rename, moment)) == found


@pytest.mark.parametrize("number", range(8))
def test_a_killed_save_on_a_mesh_leaves_the_last_complete_one(pool: Pool, tmp_path: Path, number: int) -> None:
    _kill(pool, tmp_path / "run", 4, _plans(4, "mesh", exact=7, timed=1)[number])


@pytest.mark.slow
@EACH_KIND
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("number", range(25))
def test_two_hundred_killed_saves_leave_the_last_complete_one(
    pool: Pool, tmp_path: Path, number: int, part: int, world: int, kind: str
) -> None:
    _kill(pool, tmp_path / "run", world, _plans(world, kind, exact=20, timed=5, seed=part)[number])
