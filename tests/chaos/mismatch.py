"""Ranks that do different things: other parameters, other options, other calls."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import zerostep
from tests.chaos.registry import ALL, BARE, CLASSES, DDP_WAITS, IN_DDP, OVERLAP, SHARDED, Told, scenario
from tests.chaos.stage import SAFE, STEP, Stage, Training, build, in_ddp
from tests.helpers.checkpoints import Known, whole_state
from zerostep import ShardedOptimizer

ONE_STEP = "the steps since the last checkpoint"
DISAGREE = ("ValueError: the ranks disagree on", "rank <victim>|rank 1|ranks 1", "on every rank")
REFUSED = Told(DISAGREE, victim=DISAGREE)
STEPS_DIFFER = "StepMismatchError"
TOLD = Told(STEPS_DIFFER, victim=STEPS_DIFFER)


# At construction: nothing is touched, all ranks raise the same.


def _refused(stage: Stage, call: Callable[[], object]) -> None:
    stage.mark()
    stage.raises(call, "building with a mismatch")


class Wide(nn.Module):
    """Four layers of one shape, and a buffer."""

    def __init__(self, buffer: torch.Tensor | None = None, names: str = "ab") -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(4)])
        for name in names:
            self.register_buffer(name, torch.zeros(3) if buffer is None or name == "a" else buffer)

    def forward(self, step: int) -> torch.Tensor:
        """A loss with gradients that differ between the layers."""
        generator = torch.Generator().manual_seed(step)
        terms = [(param * torch.randn(param.shape, generator=generator)).sum() for param in self.parameters()]
        return torch.stack(terms).sum()


def _in_other_order(stage: Stage, params: list[Any]) -> list[Any]:
    return params[::-1] if stage.is_victim else params


@scenario("order-differs-with-names", "F06", REFUSED, modes=CLASSES)
def _order_with_names(stage: Stage) -> None:
    model = Wide()
    params = _in_other_order(stage, list(model.named_parameters()))
    _refused(stage, lambda: stage.build(model=model, params=params))


ORDER = "ValueError: (rank <victim> has the parameters of rank 0 in another order|the ranks disagree on parameter 0)"


@scenario(
    "order-differs-without-names",
    "F06",
    Told(ORDER, victim=ORDER),
    modes=("drop-in", "hook", "bare", "ddp"),
)
def _order_without_names(stage: Stage) -> None:
    """Equal shapes: nothing but the values or the places in the model can tell them apart."""
    model = Wide()
    params = _in_other_order(stage, list(model.parameters()))
    _refused(stage, lambda: stage.build(model=model, params=params))


@scenario("parameter-too-many", "F07", REFUSED, modes=CLASSES)
def _too_many(stage: Stage) -> None:
    model = Wide()
    if stage.is_victim:
        model.register_parameter("more", nn.Parameter(torch.zeros(2)))
    _refused(stage, lambda: _only_optimizer(stage, model))


def _only_optimizer(stage: Stage, model: nn.Module) -> object:
    """Without DDP, which has checks of its own."""
    if stage.mode == "drop-in":
        return zerostep.ZeroRedundancyOptimizer(list(model.named_parameters()), AdamW, stage.group)
    return ShardedOptimizer(model, AdamW, process_group=stage.group)


@scenario("parameter-frozen-on-one-rank", "F07", REFUSED, modes=CLASSES)
def _frozen(stage: Stage) -> None:
    model = Wide()
    if stage.is_victim:
        next(model.parameters()).requires_grad_(False)
    _refused(stage, lambda: _only_optimizer(stage, model))


@scenario("parameter-of-other-dtype", "F07", REFUSED, modes=CLASSES)
def _other_dtype(stage: Stage) -> None:
    model = Wide()
    if stage.is_victim:
        model.layers[1].to(torch.float64)
    _refused(stage, lambda: _only_optimizer(stage, model))


@scenario("parameter-of-other-shape", "F07", REFUSED, modes=CLASSES)
def _other_shape(stage: Stage) -> None:
    """As many elements, in another shape: sizes alone would fit."""
    model = Wide()
    if stage.is_victim:
        model.layers[2].weight = nn.Parameter(torch.zeros(4, 9))
    _refused(stage, lambda: _only_optimizer(stage, model))


@scenario(
    "buffer-of-other-shape",
    "F07",
    REFUSED,
    modes=BARE,
)
def _buffer_shape(stage: Stage) -> None:
    _refused(stage, lambda: stage.build(model=Wide(torch.zeros(5) if stage.is_victim else None)))


@scenario(
    "buffer-of-other-dtype",
    "F07",
    REFUSED,
    modes=BARE,
)
def _buffer_dtype(stage: Stage) -> None:
    buffer = torch.zeros(3, dtype=torch.float64) if stage.is_victim else None
    _refused(stage, lambda: stage.build(model=Wide(buffer)))


@scenario(
    "buffers-in-other-order",
    "F07",
    REFUSED,
    modes=BARE,
)
def _buffer_order(stage: Stage) -> None:
    _refused(stage, lambda: stage.build(model=Wide(names="ba" if stage.is_victim else "ab")))


@scenario("options-differ-at-construction", "F09", REFUSED, modes=ALL)
def _options(stage: Stage) -> None:
    _refused(stage, lambda: stage.build(lr=0.5 if stage.is_victim else 0.1))


@scenario("class-differs-at-construction", "F09", REFUSED, modes=CLASSES)
def _class(stage: Stage) -> None:
    kind = torch.optim.Adam if stage.is_victim else AdamW
    model = Wide()
    if stage.mode == "drop-in":
        named = list(model.named_parameters())
        _refused(stage, lambda: zerostep.ZeroRedundancyOptimizer(named, kind, stage.group, lr=0.1))
    else:
        _refused(stage, lambda: ShardedOptimizer(model, kind, process_group=stage.group, lr=0.1))


@scenario(
    "ddp-over-another-group",
    "F28",
    Told("(?i:group)", victim="(?i:group)"),
    modes=("ddp", "hook"),
    worlds=(3,),
    warm=False,
)
def _other_group(stage: Stage) -> None:
    """Gradients would be averaged over other ranks than those that divide the optimizer."""
    inner = dist.new_group([0, 1])
    ddp = in_ddp(stage.group, Known())
    if stage.rank == 2:
        stage.report.note("not in the group")
        return

    def over_another() -> object:
        if stage.mode == "ddp":
            return ShardedOptimizer(ddp, AdamW, process_group=inner, lr=0.1)
        zero = zerostep.ZeroRedundancyOptimizer(ddp.parameters(), AdamW, inner, overlap_with_ddp=True, lr=0.1)
        return zerostep.hook_with_zero_step(torch.nn.Identity(), ddp, zero)

    _refused(stage, over_another)


@scenario("different-groups-added", "F08", REFUSED, modes=("drop-in", *BARE))
def _groups_added(stage: Stage) -> None:
    training = stage.trained()
    size = 3 if stage.is_victim else 2
    stage.mark()
    stage.raises(
        lambda: training.optimizer.add_param_group({"params": [("more", nn.Parameter(torch.zeros(size)))]}), "adding"
    )
    training.advance(STEP)
    stage.assert_like_undisturbed(training, STEP)


# Options that change later.


def _changed(stage: Stage, change: Callable[[Training], object]) -> None:
    """One rank changes something alone; all are told within the step, and in its successor if that is still running."""
    training = stage.trained()
    stage.mark()
    if stage.is_victim:
        change(training)
    stage.raises(lambda: training.run(STEP, STEP + 1), "a step with a difference between ranks")
    stage.recovers(training)


def _set_option(name: str, value: object) -> Callable[[Training], object]:
    def change(training: Training) -> None:
        for group in training.optimizer.param_groups:
            group[name] = value

    return change


@scenario(
    "learning-rate-changed-on-one-rank",
    "F09",
    TOLD,
    modes=ALL,
    lost=ONE_STEP,
)
def _lr_changed(stage: Stage) -> None:
    _changed(stage, _set_option("lr", 0.5))


@scenario(
    "betas-changed-on-one-rank",
    "F09",
    TOLD,
    modes=("drop-in", "hook", "bare", "ddp", "backward"),
    lost=ONE_STEP,
)
def _betas_changed(stage: Stage) -> None:
    _changed(stage, _set_option("betas", (0.5, 0.9)))


@scenario(
    "state-loaded-on-one-rank",
    "F20",
    TOLD,
    modes=("drop-in", *BARE, "ddp", "backward"),
    lost=ONE_STEP,
)
def _loaded_on_one_rank(stage: Stage) -> None:
    """`load_state_dict` is local, so one rank can be a step behind the others without knowing it."""
    training = stage.trained()
    state = whole_state(training.optimizer)
    training.advance(STEP)
    training.settle()
    stage.mark()
    if stage.is_victim:
        training.optimizer.load_state_dict(state)
    stage.raises(lambda: training.run(STEP + 1, STEP + 2), "a step")
    stage.recovers(training)


# Calls that only some ranks make. Whoever waits is told for whom.

MISSED = Told(("rank <victim>|StepMismatchError|ranks? .*<victim>",), victim="")


def _one_sided(stage: Stage, call: Callable[[Training], object], seconds: float = 4.0) -> None:
    """One rank makes a call that needs all; the others train on. Nobody may end by a signal or wait for ever."""
    stage.group_with(seconds)
    training = stage.trained(stall_seconds=1.0)
    with stage.warnings():
        stage.mark()
        if stage.is_victim:
            stage.goes_on_or_raises(lambda: call(training))
        stage.goes_on_or_raises(lambda: training.run(STEP, STEP + 1))
    stage.meet("over")


# The drop-in leaves gradients to DDP: the others wait there, and get DDP's own error. The one that waits for them in a
# call of ours reports them.
IN_DDP_ALONE = Told(DDP_WAITS, victim="Not there: ranks? 0")
_SIDED: dict[str, Any] = {
    "warm": False,
    "after": "checkpoint",
    "lost": ONE_STEP,
    "modes": ("drop-in", "bare", "ddp"),
    "told_in": {"drop-in": IN_DDP_ALONE},
}
# `latest` knows no optimizer, which would report. When its wait has ended, its rank goes on: if the others began to
# wait in DDP a little later, it comes in time for them, and they say nothing.
_LATEST = {**_SIDED, "told_in": {"drop-in": Told("", victim=DDP_WAITS)}}


@scenario("one-step-too-many", "F05", MISSED, **{**_SIDED, "modes": ("drop-in", *BARE, *IN_DDP)})
def _extra_step(stage: Stage) -> None:
    _one_sided(stage, lambda training: training.optimizer.step())


@scenario("one-step-left-out", "F05", MISSED, **{**_SIDED, "modes": ("drop-in", *BARE, *IN_DDP), "told_in": {}})
def _skipped_step(stage: Stage) -> None:
    """Backward on all ranks, and `step()` on all but one."""
    stage.group_with(4.0)
    training = stage.trained(stall_seconds=1.0)
    with stage.warnings():
        stage.goes_on_or_raises(lambda: training.backward(STEP))
        stage.mark()
        if not stage.is_victim:
            stage.goes_on_or_raises(training.update)
        stage.goes_on_or_raises(lambda: training.run(STEP + 1, STEP + 2))
    assert stage.is_victim or stage.report.notes, "nobody was told"
    stage.meet("over")


# The others wait for its last step: DDP's waits end in DDP's error, ours are reported, with the step it was seen in.
_ONE_EARLY = Told(("Not there: rank <victim>: outside of zerostep, after step 4",), victim="")
_LEFT_OUT = {
    **_SIDED,
    "modes": ("drop-in", "hook", *BARE, *IN_DDP, "backward"),
    "told_in": {"drop-in": Told(DDP_WAITS, victim="")},
}


@scenario("one-iteration-left-out", "F05", _ONE_EARLY, **_LEFT_OUT)
def _skipped_iteration(stage: Stage) -> None:
    """Neither backward nor `step()` on one rank: its next iteration is taken for the others' present one."""
    stage.group_with(4.0)
    training = stage.trained(stall_seconds=1.0)
    with stage.warnings():
        stage.mark()
        if not stage.is_victim:
            training.run(STEP)
        else:
            training.run(STEP + 1)
        training.run(STEP + 2)
        if not stage.is_victim:
            stage.goes_on_or_raises(lambda: training.run(STEP + 3))
            assert stage.report.notes, "nobody was told"
    stage.meet("over")


# In overlap mode a backward pass is a step: the others are done when the one with a step more waits for them.
_PASSES = {
    **_SIDED,
    "modes": (*BARE, *IN_DDP, "hook", "backward"),
    "told_in": {"hook": Told("", victim="Not there: ranks? 0")},
}


@scenario("one-backward-too-many", "F05", MISSED, **_PASSES)
def _extra_backward(stage: Stage) -> None:
    _one_sided(stage, lambda training: training.backward(STEP))


@scenario("group-added-on-one-rank", "F08", MISSED, **_SIDED)
def _add_group(stage: Stage) -> None:
    more = ("more", nn.Parameter(torch.zeros(2)))
    _one_sided(stage, lambda training: training.optimizer.add_param_group({"params": [more]}))


# In overlap mode the others wait for DDP's reduction, too, which the hook wraps.
_SAVED = {
    **_SIDED,
    "modes": ("drop-in", "hook", *BARE, "ddp", "backward"),
    "told_in": {"drop-in": IN_DDP_ALONE, "hook": IN_DDP_ALONE},
}


@scenario("saved-on-one-rank", "F05", MISSED, **_SAVED)
def _save_alone(stage: Stage) -> None:
    """The habit of plain DDP: only rank 0 saves."""
    _one_sided(stage, lambda training: zerostep.save(stage.series / "alone", training.optimizer, training.model))


@scenario("loaded-on-one-rank", "F20", MISSED, **_SIDED)
def _load_alone(stage: Stage) -> None:
    path = stage.series / f"step-{SAFE}"
    _one_sided(stage, lambda training: zerostep.load(path, training.optimizer, training.model))


@scenario("latest-on-one-rank", "F20", MISSED, **_LATEST)
def _latest_alone(stage: Stage) -> None:
    _one_sided(stage, lambda training: zerostep.latest(stage.series, stage.group))


@scenario("consolidated-on-one-rank", "F05", MISSED, **_SIDED)
def _consolidate_alone(stage: Stage) -> None:
    _one_sided(stage, lambda training: training.optimizer.consolidate_state_dict(to=stage.victim))


# What may differ between ranks.


class Branches(nn.Module):
    """Two branches, of which a rank may use one alone."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.left, self.right = nn.Linear(30, 40), nn.Linear(30, 40)

    def forward(self, taken: str) -> torch.Tensor:
        """A loss of the branches taken."""
        parts = [getattr(self, name)(torch.ones(2, 30)).sum() for name in taken.split()]
        return torch.stack(parts).sum()


@scenario("parameter-unused-on-one-rank", "F10", Told("", victim=""), modes=("bare", "bare-forward", "backward"))
def _unused(stage: Stage) -> None:
    """All ranks end with the same parameters, of which the unused branch has the others' average."""
    model = Branches()
    training = build(stage.group, stage.mode, model)
    before = training.values()
    for _ in range(2):
        training.optimizer.zero_grad()
        training.model("left" if stage.is_victim else "left right").backward()
        training.update()
    after = training.values()
    assert all(not torch.equal(before[key], after[key]) for key in before)
    for key, value in after.items():
        rows = [torch.empty_like(value) for _ in range(stage.world)]
        dist.all_gather(rows, value, group=stage.group)
        assert all(torch.equal(row, value) for row in rows), key


@scenario("no-sync-on-one-rank", "F10", Told("", victim="inside no_sync"), modes=BARE)
def _no_sync(stage: Stage) -> None:
    """`step()` is refused inside the block; behind it, what has added up there is sent, and the result is right."""
    training = stage.trained()
    with training.optimizer.no_sync() if stage.is_victim else nullcontext():
        training.backward(STEP)
        if stage.is_victim:
            stage.raises(training.update, "step() inside no_sync()")
    training.update()
    stage.assert_like_undisturbed(training, STEP)


# Models that are moved or cast after the optimizer was built.


@scenario(
    "harmless-moves",
    "F29",
    Told("", victim=""),
    modes=ALL,
)
def _moves(stage: Stage) -> None:
    """`float()`, `cpu()` and `to()` of what is already so change nothing."""
    training = stage.trained()
    for move in (lambda model: model.float(), lambda model: model.cpu(), lambda model: model.to("cpu", torch.float32)):
        move(training.model)
    training.advance(STEP)
    stage.assert_like_undisturbed(training, STEP)


@scenario(
    "cast-after-construction",
    "F07",
    Told("(?i:dtype|bfloat16)", victim="(?i:dtype|bfloat16)"),
    modes=(*OVERLAP, *SHARDED),
    warm=False,
    after="checkpoint",
)
def _cast(stage: Stage) -> None:
    training = stage.trained()
    stage.mark()
    training.model.to(torch.bfloat16)
    stage.raises(lambda: training.run(STEP), "a step of a cast model")


# Incomplete states.

INCOMPLETE = Told("(?i:missing|no state|lacks|has no|complete)", victim="(?i:missing|no state|lacks|has no|complete)")


@scenario(
    "half-a-state-dict",
    "F22",
    INCOMPLETE,
    modes=("drop-in", "hook", *BARE, "ddp"),
)
def _half_state(stage: Stage) -> None:
    """Half of the moments would begin again at zero, silently."""
    training = stage.trained()
    state = whole_state(training.optimizer)
    keys = list(state["state"])
    half = {**state, "state": {key: state["state"][key] for key in keys[: len(keys) // 2]}}
    stage.raises(lambda: training.optimizer.load_state_dict(half), "half a state dict")
    training.advance(STEP)
    stage.assert_like_undisturbed(training, STEP)


@scenario(
    "half-a-state-dict-on-purpose",
    "F22",
    Told("", victim=""),
    modes=("drop-in", "bare"),
)
def _half_state_on_purpose(stage: Stage) -> None:
    training = stage.trained()
    state = whole_state(training.optimizer)
    keys = list(state["state"])
    half = {**state, "state": {key: state["state"][key] for key in keys[: len(keys) // 2]}}
    training.optimizer.load_state_dict(half, allow_missing=True)
    training.advance(STEP)


@scenario(
    "state-of-one-shard",
    "F22",
    INCOMPLETE,
    modes=("drop-in", "bare"),
)
def _one_shard(stage: Stage) -> None:
    """What one rank's inner optimizer holds, saved by someone who did not consolidate."""
    training = stage.trained()
    whole = whole_state(training.optimizer)
    mine = {key for key, entry in enumerate(training.optimizer.param_groups[0]["params"]) if key % stage.world == 0}
    shard = {**whole, "state": {key: value for key, value in whole["state"].items() if key in mine}}
    stage.raises(lambda: training.optimizer.load_state_dict(shard), "the state of one shard")
    training.advance(STEP)
    stage.assert_like_undisturbed(training, STEP)
