"""Ranks that die, leave, stop or are slow."""

import os
import signal

import torch
import torch.distributed as dist

import zerostep
from tests.chaos.points import kill, slow, stop
from tests.chaos.registry import ALL, CLASSES, Told, scenario
from tests.chaos.stage import STEP, Stage, Training
from tests.helpers.checkpoints import whole_state
from tests.helpers.reference import assert_same_bits

WHAT = ("step <step>", "rank <victim>", "checkpoint")  # of a step that a lost rank has ended
DEAD = Told("", ends=-signal.SIGKILL, at_once=WHAT)
OURS = tuple(mode for mode in ALL if mode != "drop-in")  # where gradients are summed by us, or in a hook of ours
TIME_OUT = 8.0  # seconds, of a group; a survivor may wait that long for another one that has given up already
ONE_STEP = "the steps since the last checkpoint"
STALL = 1.0  # seconds
NO_ALARM = "has waited|Not there"


def _last_words(stage: Stage, training: Training) -> None:
    """The step of the fault, on every rank, and all that could be tried afterwards."""
    stage.raises(lambda: training.run(STEP, STEP + 1), "a step")
    stage.refuses(training)


@scenario(
    "killed-in-reduce",
    "F01",
    DEAD,
    modes=OURS,
    after="checkpoint",
    lost=ONE_STEP,
    warm=False,
)
def _killed_in_reduce(stage: Stage) -> None:
    stage.group_with(TIME_OUT)
    training = stage.trained()
    with stage.fault("reduce", kill):
        _last_words(stage, training)


@scenario(
    "killed-in-reduction-of-ddp",
    "F01",
    Told("(?i:connection|peer)", ends=-signal.SIGKILL),
    modes=("drop-in",),
    after="checkpoint",
    lost=ONE_STEP,
    warm=False,
)
def _killed_in_ddp(stage: Stage) -> None:
    """Between DDP and its peers: the optimizer has no part in it, and its state is that of the step before."""
    stage.group_with(TIME_OUT)
    training = stage.trained()
    with stage.fault("reduce", kill):
        stage.raises(lambda: training.run(STEP), "a step")
        stage.raises(lambda: zerostep.save(stage.series / "torn", training.optimizer), "a save without a rank")


@scenario(
    "killed-in-update",
    "F01",
    DEAD,
    after="checkpoint",
    lost=ONE_STEP,
    warm=False,
)
def _killed_in_update(stage: Stage) -> None:
    stage.group_with(TIME_OUT)
    training = stage.trained()
    with stage.fault("update", kill):
        _last_words(stage, training)


@scenario(
    "killed-in-gather",
    "F01",
    DEAD,
    after="checkpoint",
    lost=ONE_STEP,
    warm=False,
)
def _killed_in_gather(stage: Stage) -> None:
    stage.group_with(TIME_OUT)
    training = stage.trained()
    with stage.fault("gather", kill):
        _last_words(stage, training)


@scenario(
    "killed-between-buckets",
    "F01",
    DEAD,
    after="checkpoint",
    lost=ONE_STEP,
    warm=False,
)
def _killed_between_buckets(stage: Stage) -> None:
    stage.group_with(TIME_OUT)
    training = stage.trained()
    with stage.fault("bucket", kill, call=2):
        _last_words(stage, training)


@scenario(
    "killed-in-consolidation",
    "F25",
    Told("rank <victim>.*failed", ends=-signal.SIGKILL),
    modes=("drop-in", "hook", "bare"),
    after="checkpoint",
    lost=ONE_STEP,
    warm=False,
)
def _killed_in_consolidation(stage: Stage) -> None:
    """The receiver is told; a rank that only sends to it may be done by then, and finds out at the next step."""
    stage.group_with(TIME_OUT)
    training = stage.trained()
    with stage.fault("message", kill):
        stage.goes_on_or_raises(lambda: training.optimizer.consolidate_state_dict(to=0))
        stage.goes_on_or_raises(lambda: training.run(STEP))
    assert stage.report.notes
    if stage.rank == 0:
        stage.raises(training.optimizer.state_dict, "state_dict() of a half collected state")


@scenario(
    "leaves-the-loop-early",
    "F05",
    Told("", ends=0, at_once=WHAT),
    modes=OURS,
    after="checkpoint",
    lost=ONE_STEP,
    warm=False,
)
def _leaves_early(stage: Stage) -> None:
    stage.group_with(TIME_OUT)
    training = stage.trained()
    if stage.is_victim:
        stage.mark()
        os._exit(0)
    _last_words(stage, training)


# Ranks that stop. Nobody can tell a stopped rank from a slow one, so it is told who is waited for.


@scenario(
    "stopped-and-continued",
    "F02",
    Told(("rank <victim>", "(?i:step) [23]"), victim=""),
    modes=ALL,
    warm=False,
)
def _stopped(stage: Stage) -> None:
    """Those that wait say so once; then the rank is let go on, and nothing was lost."""
    stage.tell_pid()
    training = stage.trained(stall_seconds=STALL)
    with stage.warnings(lambda _: stage.signal_victim(signal.SIGCONT)), stage.fault("update", stop):
        training.advance(STEP)
        training.settle()
    stage.meet("over")
    stage.assert_like_undisturbed(training, STEP)


@scenario(
    "stopped-until-the-time-out",
    "F02",
    Told(WHAT, ends=-signal.SIGKILL),
    modes=("drop-in", "hook", "bare", "bare-forward", "ddp", "backward"),
    after="checkpoint",
    lost=ONE_STEP,
    warm=False,
)
def _stopped_for_good(stage: Stage) -> None:
    stage.tell_pid()
    stage.group_with(6.0)
    training = stage.trained(stall_seconds=STALL)
    with stage.warnings(), stage.fault("update", stop):
        stage.raises(lambda: training.run(STEP, STEP + 1), "a step")
    stage.raises(training.optimizer.state_dict, "state_dict() of a torn state")
    stage.signal_victim(signal.SIGKILL)


@scenario(
    "slow-rank-below-the-limit",
    "F03",
    Told("", victim="", never=NO_ALARM),
    modes=("drop-in", "hook", "bare", "backward"),
)
def _slow(stage: Stage) -> None:
    training = stage.trained(stall_seconds=30.0)
    with stage.warnings(), stage.fault("update", slow(0.3)):
        training.advance(STEP)
    stage.assert_like_undisturbed(training, STEP)


@scenario(
    "slow-first-step",
    "F30",
    Told("", victim="", never=NO_ALARM),
    modes=("drop-in", "bare"),
)
def _slow_first_step(stage: Stage) -> None:
    """The first step may compile, import and allocate."""
    training = stage.build(stall_seconds=STALL)
    with stage.warnings(), stage.fault("update", slow(1.5 * STALL)):
        training.advance(1)
    stage.assert_like_undisturbed(training, 1)


@scenario(
    "long-evaluation",
    "F03 F30",
    Told("", victim="", never=NO_ALARM),
    modes=("drop-in", "bare-forward"),
)
def _evaluation(stage: Stage) -> None:
    """All ranks are away from the optimizer for longer than the limit: nobody waits for anybody."""
    training = stage.trained(stall_seconds=STALL)
    with stage.warnings():
        with torch.no_grad():
            slow(1.5 * STALL)()
            training.model(1)
        stage.meet("evaluated")
        training.model.load_state_dict(training.model.state_dict())
    assert not stage.report.notes


# Groups.


@scenario("group-destroyed", "F28", Told("", victim=""), modes=CLASSES, after="checkpoint", warm=False)
def _group_destroyed(stage: Stage) -> None:
    """The step is right, because the optimizer keeps its connections, or refused in words about the group."""
    training = stage.trained()
    expected = stage.undisturbed(STEP).values()
    training.backward(STEP)
    stage.meet("ready")
    dist.destroy_process_group()
    said = stage.goes_on_or_raises(training.update)
    if said:
        assert "group" in said, said
    else:
        assert_same_bits(training.values(), expected)


@scenario("not-a-member", "F28", Told("", victim="is not a member of the process group"), modes=CLASSES)
def _not_a_member(stage: Stage) -> None:
    others = [rank for rank in range(stage.world) if rank != stage.victim]
    group = dist.new_group([dist.get_process_group_ranks(stage.group)[rank] for rank in others])
    if stage.is_victim:
        stage.group = group
        stage.raises(stage.build, "building on a group without this rank")
    stage.meet("over")


@scenario("ranks-of-a-subgroup", "F28", Told(""), modes=ALL, worlds=(3,), warm=False)
def _subgroup(stage: Stage) -> None:
    """Ranks of the group are other numbers than those of the world; nothing may confuse them."""
    inner = dist.new_group([1, 2])
    if stage.rank == 0:
        return
    stage.group = inner
    training = stage.trained()
    training.advance(STEP)
    training.settle()
    assert whole_state(training.optimizer)["state"]
    alone = stage.undisturbed(STEP)
    training_values, expected = training.values(), alone.values()
    assert all(torch.equal(value, expected[key]) for key, value in training_values.items())
