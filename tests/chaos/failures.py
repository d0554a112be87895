"""Errors inside a rank that lives: in an update, in a closure, in backward, from Ctrl-C, for lack of memory."""

import copy
import multiprocessing
import os
import resource
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import zerostep
from tests.chaos.points import FaultError, fail, interrupt, leave, run_out_of_memory
from tests.chaos.registry import ALL, BARE, CLASSES, IN_DDP, OVERLAP, SHARDED, Told, scenario
from tests.chaos.stage import STEP, Stage, Training, assert_same
from zerostep.comm import objects

REMEDY = "load the last checkpoint|restart from the last checkpoint"
ONE_STEP = "the steps since the last checkpoint"
# What others say of a failed update: the rank, the step, the phase, the cause and the remedy.
OTHERS = ("rank <victim>", "step <step>", "update", "a bad day", REMEDY)
FAILED = Told(REMEDY, victim=("a bad day", "step <step>", "rank <victim>", REMEDY), at_once=OTHERS)


def _step_that_fails(stage: Stage, training: Training) -> None:
    """One step is enough for every rank, or with `gather="forward"` the beginning of the next one."""
    stage.raises(lambda: training.run(STEP, STEP + 1), "a failed update")


@scenario(
    "update-raises",
    "F04",
    FAILED,
    modes=ALL,
    lost=ONE_STEP,
)
def _update_raises(stage: Stage) -> None:
    training = stage.trained()
    with stage.fault("update", fail):
        _step_that_fails(stage, training)
    stage.refuses(training)
    stage.recovers(training)


@scenario(
    "second-bucket-fails",
    "F04",
    FAILED,
    modes=(*OVERLAP, *SHARDED),
    lost=ONE_STEP,
    worlds=(2,),  # of three ranks one may own nothing of a second bucket,
)
def _second_bucket_fails(stage: Stage) -> None:
    """The first bucket has been updated and sent by then."""
    training = stage.trained()
    with stage.fault("update", fail, call=2):
        _step_that_fails(stage, training)
    stage.refuses(training)
    stage.recovers(training)


@scenario(
    "interrupted-in-update",
    "F04",
    FAILED,
    modes=ALL,
    lost=ONE_STEP,
)
def _interrupted(stage: Stage) -> None:
    training = stage.trained()
    with stage.fault("update", interrupt):
        _step_that_fails(stage, training)
    stage.refuses(training)
    stage.recovers(training)


@scenario(
    "exits-in-update",
    "F04",
    FAILED,
    modes=("drop-in", "hook", "bare", "ddp", "backward"),
    lost=ONE_STEP,
)
def _exits(stage: Stage) -> None:
    training = stage.trained()
    with stage.fault("update", leave):
        _step_that_fails(stage, training)
    stage.refuses(training)
    stage.recovers(training)


@scenario(
    "interrupted-and-going-on",
    "F04 F05",
    Told("StepMismatchError|failed|rank", victim="KeyboardInterrupt"),
    modes=("drop-in", *BARE, "ddp"),
    warm=False,
    after="checkpoint",
    lost=ONE_STEP,
)
def _goes_on_after_interrupt(stage: Stage) -> None:
    """A notebook: Ctrl-C inside the gather of one step, and the cell is run again."""
    stage.group_with(5.0)
    training = stage.trained()
    with stage.fault("gather", interrupt):
        if stage.is_victim:
            stage.raises(lambda: training.advance(STEP), "a step with Ctrl-C")
            stage.raises(lambda: training.advance(STEP + 1), "a step after Ctrl-C")
        else:
            stage.raises(lambda: training.run(STEP, STEP + 1), "steps beside one that was stopped")


@scenario(
    "backward-raises-on-one-rank",
    "F04",
    Told("rank <victim>|StepMismatchError|(?i:timed? ?out|closed by peer|reset by peer)", victim="a bad day"),
    modes=("drop-in", "hook", "bare", "bare-forward", "ddp", "backward"),
    warm=False,
    after="checkpoint",
    lost=ONE_STEP,
)
def _backward_raises(stage: Stage) -> None:
    """The user's own code fails inside backward, and the rank does not go on; the others are told who is missing."""
    stage.group_with(5.0)
    training = stage.trained()

    def hook(grad: Tensor) -> None:
        raise FaultError("a bad day")

    if stage.is_victim:
        next(training.model.parameters()).register_hook(hook)
        stage.mark()
    stage.raises(lambda: training.run(STEP, STEP + 1), "backward")
    stage.meet("over")


# Closures.


@scenario("closure-raises-everywhere", "F32", Told("no batch", victim="no batch"), modes=("drop-in", *BARE, *IN_DDP))
def _closure_everywhere(stage: Stage) -> None:
    """Nothing was sent, so nothing is torn."""
    training = stage.trained()
    stage.raises(lambda: training.optimizer.step(_no_batch), "the closure")
    training.advance(STEP)
    stage.assert_like_undisturbed(training, STEP)


def _no_batch() -> float:
    raise FaultError("no batch")


CALLS = (
    "StepMismatchError",
    r"rank <victim> is in call 4 of step\(\)",
    "let a closure fail on all ranks",
    REMEDY,
)


@scenario(
    "closure-raises-on-one-rank",
    "F32",
    Told(CALLS, victim=("no batch", *CALLS)),
    modes=ALL,
    warm=False,
    after="checkpoint",
    lost=ONE_STEP,
)
def _closure_on_one_rank(stage: Stage) -> None:
    """One rank leaves out a step, and goes on with the next, which takes part in the others' present one."""
    stage.group_with(5.0)
    training = stage.trained()

    def closure() -> float:
        if stage.is_victim:
            stage.mark()
            raise FaultError("no batch")
        training.backward(STEP)
        return 0.0

    stage.goes_on_or_raises(lambda: training.optimizer.step(closure))
    if stage.is_victim or not stage.report.notes:
        stage.goes_on_or_raises(lambda: training.run(STEP + 1, STEP + 2))
    stage.meet("over")


# Memory.


@scenario(
    "no-memory-in-consolidation",
    "F26",
    Told(("no more memory", "rank <victim>"), victim="no more memory"),
    modes=("drop-in", "hook", "bare", "ddp"),
)
def _no_memory_in_consolidation(stage: Stage) -> None:
    """A rank cannot make its part; all are told, and the state is as it was."""
    training = stage.trained()
    failing = mock.patch.object(objects, "pack", lambda value: run_out_of_memory())
    stage.mark()
    if stage.is_victim:
        with failing:
            stage.raises(lambda: training.optimizer.consolidate_state_dict(to=0), "consolidating")
    else:
        stage.raises(lambda: training.optimizer.consolidate_state_dict(to=0), "consolidating")
    training.advance(STEP)
    stage.assert_like_undisturbed(training, STEP)


@scenario(
    "no-memory-at-the-receiver",
    "F26",
    Told("no more memory|rank <victim>", victim="no more memory"),
    modes=("drop-in", "hook", "bare", "ddp"),
    warm=False,
)
def _no_memory_at_the_receiver(stage: Stage) -> None:
    """The rank that collects everything cannot allocate; nobody waits for it for ever."""
    stage.group_with(5.0)
    training = stage.trained()
    call = lambda: training.optimizer.consolidate_state_dict(to=stage.victim)  # noqa: E731
    if stage.is_victim:
        stage.mark()
        with mock.patch.object(objects, "empty", lambda *_: run_out_of_memory()):
            stage.raises(call, "consolidating")
    else:
        stage.raises(call, "consolidating")
    training.advance(STEP)
    stage.assert_like_undisturbed(training, STEP)


@scenario(
    "address-space-used-up",
    "F26",
    Told("rank <victim>.*failed|failed.*rank <victim>|memory", victim="(?i:memory|alloc)"),
    modes=CLASSES,
    warm=False,
)
def _address_space(stage: Stage) -> None:
    """The system refuses the memory, at whatever place needs it first."""
    stage.group_with(5.0)
    training = stage.build(model=torch.nn.Linear(1024, 2048), params=None)
    training.optimizer.zero_grad()
    training.model(torch.ones(2, 1024)).sum().backward()
    training.update()
    if stage.is_victim:
        stage.mark()
        used = _pages(0) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
    stage.raises(lambda: training.optimizer.consolidate_state_dict(to=stage.victim), "consolidating")


@scenario(
    "no-memory-in-background-save",
    "F16 F26",
    Told(("no more memory|memory", "rank <victim>"), victim="no more memory"),
    modes=("drop-in", "hook", "bare", "ddp"),
    after="checkpoint",
)
def _no_memory_in_save(stage: Stage) -> None:
    training = stage.trained()

    def save() -> None:
        pending = zerostep.save(stage.series / "late", training.optimizer, training.model, wait=False)
        assert pending is not None
        pending.wait()

    with stage.fault("write", run_out_of_memory):
        stage.raises(save, "a save in the background")
    stage.meet("saved")
    assert not (stage.series / "late").exists()
    stage.goes_on_or_raises(lambda: training.advance(STEP))


# A process that does other things, too.


@scenario(
    "many-builds", "F29", Told("", victim=""), modes=("hook", "interleaved", "drop-in", "bare", "ddp"), worlds=(2,)
)
def _many_builds(stage: Stage) -> None:
    """Optimizers that are dropped leave neither sockets nor threads nor memory behind."""
    for _ in range(4):
        stage.undisturbed(1)
    before = _open_files(), _threads(), _resident()
    for _ in range(8):
        stage.undisturbed(1)
    files, threads, resident = _open_files(), _threads(), _resident()
    assert files <= before[0] + 8, f"{before[0]} and then {files} open files"
    # A group has two threads or more, so a group for each build would be 16. Computing starts some threads late, too.
    assert threads < before[1] + 12, f"{before[1]} and then {threads} threads"
    assert resident < before[2] + (16 << 20), f"{before[2]} and then {resident} bytes"


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _resident() -> int:
    return _pages(1) * os.sysconf("SC_PAGE_SIZE")


def _pages(column: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[column])


@scenario("workers-are-forked", "F31", Told("", victim=""), modes=("drop-in", "hook", "bare-forward", "ddp"))
def _forked_workers(stage: Stage) -> None:
    """A DataLoader forks while messages may be in flight."""
    training = stage.trained()
    data = TensorDataset(torch.arange(8.0))
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        for step, batch in enumerate(loader, STEP):
            assert batch[0].shape == (4,)
            training.advance(step)
    stage.assert_like_undisturbed(training, STEP + 1)


@scenario(
    "wrapped-and-scheduled",
    "F29",
    Told("cannot be copied or pickled", victim="cannot be copied or pickled"),
    modes=("drop-in", *BARE, *IN_DDP),
)
def _wrapped(stage: Stage) -> None:
    """A scheduler, a `step` that someone has put something around, and an attempt to copy the whole."""
    training = stage.trained()
    scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1.0)
    inner, calls = training.optimizer.step, list[str]()

    def counted(*args: object) -> object:
        calls.append("step")
        return inner(*args)

    training.optimizer.step = counted
    training.advance(STEP)
    scheduler.step()
    assert calls
    stage.raises(lambda: copy.deepcopy(training.optimizer), "a deep copy")
    del training.optimizer.step
    ours, theirs = training.whole(), stage.undisturbed(STEP).whole()
    for group in ours["optimizer"]["param_groups"]:
        group.pop("initial_lr", None)  # the scheduler's own
    assert_same(ours, theirs)
