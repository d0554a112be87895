"""Gradients that are not numbers, and bits that flip."""

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from tests.chaos.registry import ALL, BARE, IN_DDP, Told, scenario
from tests.chaos.stage import STEP, Stage, Training
from tests.helpers.checkpoints import bare

QUIET = Told("", victim="")
CLIPPED = (*BARE, *IN_DDP)


def _equal_everywhere(stage: Stage, training: Training) -> None:
    """Fail unless all ranks hold the same bits."""
    for key, value in training.values().items():
        mine = value.reshape(-1).view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(stage.world)]
        dist.all_gather(rows, mine, group=stage.group)
        assert all(torch.equal(row, mine) for row in rows), f"{key} differs between ranks"


@scenario("nan-on-one-rank", "F11", QUIET, modes=ALL, lost="the model, unless gradients are checked")
def _nan(stage: Stage) -> None:
    """As under plain DDP: the average is not a number on any rank, and nobody hangs or goes another way."""
    training = stage.trained()
    training.backward(STEP, factor=float("nan") if stage.is_victim else 1.0)
    training.update()
    training.settle()
    assert all(param.isnan().all() for param in training.model.parameters())
    _equal_everywhere(stage, training)


@scenario(
    "nan-refused-by-clipping",
    "F11",
    Told("which cannot be clipped", victim="which cannot be clipped"),
    modes=CLIPPED,
)
def _nan_clipped(stage: Stage) -> None:
    """One rank's loss is not a number, and all ranks refuse the step together."""
    training = stage.trained()
    stage.mark()
    training.backward(STEP, factor=float("nan") if stage.is_victim else 1.0)
    stage.raises(lambda: training.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True), "clipping")
    stage.recovers(training)


@scenario("inf-skipped-by-the-scaler", "F11", QUIET, modes=("drop-in", *CLIPPED))
def _inf_scaled(stage: Stage) -> None:
    """An overflow on one rank alone: all ranks skip the step and have the same scale."""
    training = stage.trained()
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    before = training.values()
    training.optimizer.zero_grad()
    scaler.scale(training.model(STEP) * (float("inf") if stage.is_victim else 1.0)).backward()
    scaler.step(training.optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    after = training.values()
    assert all(torch.equal(before[key], after[key]) for key in before if "norm" not in key)
    _equal_everywhere(stage, training)
    training.advance(STEP)


def _flip(training: Training) -> str:
    """Turn over one bit of the last parameter, behind everyone's back; its name."""
    training.settle()
    name, param = list(bare(training.model).named_parameters())[1]
    with torch.no_grad():
        param.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
    return name


@scenario("flipped-bit-is-healed-by-the-owner", "F12", QUIET, modes=("drop-in", "bare", "bare-forward", "ddp"))
def _flipped_bit(stage: Stage) -> None:
    """A bit of a parameter flips on a rank that does not own it: the owner's value replaces it in the next step."""
    training = stage.trained()
    owner = 0 if stage.mode != "drop-in" else _owner(training)
    if stage.rank == (1 if owner != 1 else 0):
        _flip(training)
    training.advance(STEP)
    stage.assert_like_undisturbed(training, STEP)


def _owner(training: Training) -> int:
    param = list(bare(training.model).parameters())[1]
    found: int = training.optimizer._param_to_rank[param]
    return found


AUDITED = Told(("AuditError", "rank <victim>|ranks? .*<victim>", "wide"), victim=("AuditError", "wide"))


@scenario(
    "flipped-bit-found-by-an-audit",
    "F12",
    AUDITED,
    modes=("drop-in", "hook", *BARE, *IN_DDP, "backward"),
)
def _audited(stage: Stage) -> None:
    training = stage.trained()
    training.optimizer.audit()
    stage.mark()
    if stage.is_victim:
        _flip(training)
    stage.raises(training.optimizer.audit, "an audit")
    stage.recovers(training)


@scenario(
    "flipped-bit-found-by-regular-audits",
    "F12",
    AUDITED,
    modes=("drop-in", "bare", "ddp"),  # parameters cannot be frozen in overlap mode
)
def _regularly_audited(stage: Stage) -> None:
    """The flip is after the last update of a parameter: frozen since, nobody's step would replace it."""
    training = stage.trained(audit_every=1)
    frozen = dict(bare(training.model).named_parameters())["wide.weight"]
    stage.mark()
    if stage.is_victim:
        _flip(training)
    frozen.requires_grad_(False)
    frozen.grad = None
    stage.raises(lambda: training.run(STEP, STEP + 1), "audited steps")
