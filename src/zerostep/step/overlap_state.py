"""The optimizer's side of overlap mode: the leaves that its steps work on, and what can no longer be done."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerostep.plan.groups import Group, all_params
from zerostep.plan.ownership import Ownership
from zerostep.step.grad_snapshot import GradSnapshot
from zerostep.step.overlap_pipeline import GradientCallback, OverlapPipeline

__all__ = ["OverlapState"]

logger = logging.getLogger("zerostep")

_TOO_LATE = (
    "with overlap_with_ddp=True the parameters are updated inside backward(), with the gradients as DDP reduced them. "
    "Use overlap_with_ddp=False for it, or zerostep.ShardedOptimizer, or set_gradient_callback() for "
    "edits that need no sight of all gradients"
)


class OverlapState:
    """What an optimizer holds that steps inside backward."""

    pipeline: OverlapPipeline

    def __init__(self) -> None:
        self.leaf_of: dict[Tensor, Tensor] = {}
        self.snapshot = GradSnapshot()
        self.callback: GradientCallback | None = None

    def leaves(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with leaves in place of parameters: tensors of their own that share the parameters' memory."""
        for param in all_params(groups):
            if param not in self.leaf_of:
                self.leaf_of[param] = torch.nn.Parameter(param.detach(), requires_grad=param.requires_grad)
        return [{**group, "params": [self.leaf_of[param] for param in group["params"]]} for group in groups]

    def state(self, inner: Optimizer) -> dict[Tensor, Any]:
        """The live entries of the inner optimizer's state, keyed by the user's parameters."""
        return {param: inner.state[leaf] for param, leaf in self.leaf_of.items() if leaf in inner.state}

    def prepare(self, inner: Optimizer, outer_groups: Sequence[Group], owners: Ownership) -> None:
        """Plan anew what the buckets of DDP mean."""
        self.pipeline = OverlapPipeline(inner, outer_groups, self.leaf_of, owners)

    def begin(self, owners: Ownership) -> None:
        """The first bucket of an iteration has come."""
        self.refuse_changed_parameters(owners)
        self.pipeline.gradient_callback = self.callback

    def refuse_changed_parameters(self, owners: Ownership) -> None:
        """DDP does not follow either: it would wait for the gradients of frozen parameters, and ignore new ones."""
        if owners.trainability_changed():
            raise RuntimeError(
                "requires_grad of some parameters has changed, which overlap_with_ddp=True cannot follow: build the "
                "DDP module and the optimizer anew, or use overlap_with_ddp=False"
            )

    def refuse_step(self, scaled: bool) -> None:
        """What `step()` has to say."""
        if scaled:
            raise RuntimeError(f"GradScaler cannot be used: {_TOO_LATE}")
        self.refuse_edited_gradients()
        logger.warning("step() does nothing with overlap_with_ddp=True: backward() has already updated the parameters")

    def refuse_edited_gradients(self) -> None:
        """Gradients that were edited after backward went into no update: say so, once."""
        edited = self.snapshot.edited()
        self.snapshot.clear()
        if edited:
            raise RuntimeError(
                f"{len(edited)} gradients were edited after backward(), as clip_grad_norm_() does: {_TOO_LATE}"
            )
