"""One side of a comparison: carry out a program on this rank, and write down all that the user can see."""

import copy
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim.lr_scheduler import ExponentialLR

from tests.fuzz.program import (
    AddGroup,
    AllReduce,
    Clip,
    CopyOptimizer,
    Differentiate,
    Drop,
    Evaluate,
    Freeze,
    Hand,
    Look,
    Op,
    Options,
    Pass,
    Program,
    RawState,
    ReadGrad,
    Reload,
    Step,
)
from tests.fuzz.variants import Side, Variant, make
from zerostep import ShardedOptimizer

BATCH = 3


@dataclass
class Record:
    """What a side has shown, in order: a label and tensors, numbers or truth values."""

    seen: list[tuple[str, Any]] = field(default_factory=list)

    def note(self, label: str, value: Any) -> None:
        """Add a value."""
        self.seen.append((label, value))


def execute(program: Program, variant: Variant | None, group: Any, meshes: dict[str, Any]) -> Record:
    """Carry out a program."""
    run = Run(program, make(program, variant, group, meshes), group)
    for number, op in enumerate(program.ops):
        run.apply(number, op)
    run.finish()
    return run.record


class Run:
    """One side while it runs."""

    def __init__(self, program: Program, side: Side, group: Any) -> None:
        self.program, self.side, self.group = program, side, group
        self.rank = dist.get_rank(group)
        self.record = Record()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if program.scaler else None
        self.scheduler = ExponentialLR(side.optimizer, 0.9) if program.schedule else None
        self.loss, self.unscaled, self.label = torch.zeros(()), False, ""

    def apply(self, number: int, op: Op) -> None:
        """One operation."""
        self.label, self.number = f"operation {number}, {op}", number
        getattr(self, f"do_{type(op).__name__.lower()}")(op)

    def note(self, what: str, value: Any) -> None:
        self.record.note(f"{what} at {self.label}", value)

    # ------------------------------------------------------------------ passes

    def batch(self, which: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(
            self.program.seed * 100_003 + self.number * 101 + which * 11 + (self.rank if rank is None else rank)
        )
        x = torch.randn(BATCH, self.program.width, generator=generator)
        return x, torch.randn(BATCH, self.program.width, generator=generator)

    def do_pass(self, op: Pass) -> None:
        with nullcontext() if op.sync else self.side.no_sync():
            loss = self.forward(self.side.model, op)
            self.note("loss", loss.detach().clone())
            self.loss = loss.detach().clone()
            loss = loss * math.inf if op.inf_rank == self.rank else loss
            loss = loss if self.scaler is None else self.scaler.scale(loss)
            loss.backward(retain_graph=op.twice or op.retain)
            if op.retain:
                self.differentiate(loss, op.uses[self.rank])
            if op.twice:
                loss.backward()

    def forward(self, model: Any, op: Pass) -> Tensor:
        x, target = self.batch(0)
        if op.checkpoint == "reentrant":
            x.requires_grad_(True)
        output = model(x, op.uses[self.rank], op.checkpoint, op.talk)
        return (output * target).sum() / BATCH + 0.5 * output.square().mean()

    def differentiate(self, loss: Tensor, use: tuple[int, ...]) -> None:
        params = [param for block in use for param in self.side.module.blocks[block].parameters()]
        params = [param for param in params if param.requires_grad]
        found = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        self.note("torch.autograd.grad", [grad for grad in found if grad is not None])

    def do_differentiate(self, op: Differentiate) -> None:
        loss = self.forward(self.side.module, Pass(op.uses))
        self.differentiate(loss, op.uses[self.rank])

    # ------------------------------------------------------------------ gradients

    def do_drop(self, op: Drop) -> None:
        if op.how == "some":
            for param in self.params_of(*op.blocks):
                param.grad = None
            return
        if op.how == "model":
            self.side.model.zero_grad()
        else:
            self.side.optimizer.zero_grad(set_to_none=op.how != "zeros")
        if self.scaler is not None and self.unscaled:
            self.scaler.update()
            self.unscaled = False

    def params_of(self, *blocks: int) -> Iterator[Any]:
        for block in blocks:
            for name, param in self.side.module.blocks[block].named_parameters():
                if name != "weight" or self.program.blocks[block].kind != "tied":  # that one is its target's
                    yield param

    def do_hand(self, op: Hand) -> None:
        generator = torch.Generator().manual_seed(op.seed)
        for param in self.params_of(op.block):
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)

    def do_clip(self, op: Clip) -> None:
        params, ours = self.side.params, isinstance(self.side.optimizer, ShardedOptimizer)
        self.unscale()
        if op.how == "value":
            clip_grad_value_(params, op.bound)
        elif op.how == "norm" or (op.how == "ours" and not ours):
            self.note("norm", clip_grad_norm_(params, op.bound, op.norm_type))
        elif op.how == "ours":
            self.note("norm", self.side.optimizer.clip_grad_norm_(op.bound, op.norm_type))
        elif ours:
            self.note("norm", self.side.optimizer.grad_norm(op.norm_type))
        else:
            self.note("norm", get_total_norm([p.grad for p in params if p.grad is not None], op.norm_type))

    def unscale(self) -> None:
        if self.scaler is not None and not self.unscaled:
            self.scaler.unscale_(self.side.optimizer)
            self.unscaled = True

    def do_readgrad(self, op: ReadGrad) -> None:
        grads = [param.grad for param in self.params_of(op.block) if param.grad is not None]
        if op.how == "edit":
            for grad in grads:
                grad.add_(0.5)
        else:
            self.note("sum of the gradient", [grad.sum() for grad in grads])

    # ------------------------------------------------------------------ around the step

    def do_allreduce(self, op: AllReduce) -> None:
        total = self.loss.clone()
        dist.all_reduce(total, group=self.group)
        self.note("sum of the losses", total)

    def do_freeze(self, op: Freeze) -> None:
        for param in self.params_of(op.block):
            param.requires_grad_(op.trainable)

    def do_options(self, op: Options) -> None:
        for group in self.side.optimizer.param_groups:
            group["lr"] *= op.factor
            group["weight_decay"] = op.weight_decay

    def do_addgroup(self, op: AddGroup) -> None:
        self.side.model.zero_grad()
        prefix = f"blocks.{self.program.left_out}."
        named = [(prefix + name, p) for name, p in self.side.module.blocks[self.program.left_out].named_parameters()]
        held = set(self.side.params)
        self.side.optimizer.add_param_group({"params": [(name, p) for name, p in named if p not in held], "lr": 0.02})

    def do_evaluate(self, op: Evaluate) -> None:
        x, _ = self.batch(0)
        with torch.no_grad():
            if op.how == "model":
                self.note("output", self.side.model(x, tuple(range(len(self.program.blocks)))))
            elif op.how == "block":
                self.note("output", self.side.module.blocks[op.block](x))
            else:
                self.side.synchronize()
                self.note("parameters", [param.detach().clone() for param in self.params_of(op.block)])

    def do_reload(self, op: Reload) -> None:
        if op.what == "model":
            state = {key: value.clone() for key, value in self.side.module.state_dict().items()}
            self.note("weights", list(state.values()))
            self.side.module.load_state_dict(state)
        else:
            state = copy.deepcopy(self.whole_state())
            self.note("state", entries(state))
            self.side.optimizer.load_state_dict(state)

    def whole_state(self) -> dict[str, Any]:
        optimizer = self.side.optimizer
        if self.side.variant is None:
            return optimizer.state_dict()
        found: dict[str, Any] = {}
        for to in range(optimizer.world_size):
            optimizer.consolidate_state_dict(to=to)
            if to == optimizer.rank:
                found = optimizer.state_dict()
        return found

    def do_look(self, op: Look) -> None:
        self.side.synchronize()
        self.note_params()

    def note_params(self) -> None:
        named = self.side.module.named_parameters()
        self.note("parameters", {name: param.detach().clone() for name, param in named})

    def do_step(self, op: Step) -> None:
        with self.side.no_sync() if op.inside else nullcontext():
            if self.scaler is None:
                self.side.optimizer.step()
            else:
                self.scaler.step(self.side.optimizer)
                self.scaler.update()
                self.unscaled = False
                self.note("scale", self.scaler.get_scale())
        if self.scheduler is not None:
            self.scheduler.step()
        named = self.side.module.named_parameters()
        held = set(self.side.params)
        self.note("has a gradient", {name: param.grad is not None for name, param in named if param in held})
        if self.side.variant is None or not self.side.variant.is_late:
            self.note_params()

    def do_copyoptimizer(self, op: CopyOptimizer) -> None:
        copy.deepcopy(self.side.optimizer)

    def do_rawstate(self, op: RawState) -> None:
        self.side.optimizer.state_dict()

    def finish(self) -> None:
        """The parameters and the optimizer's state at the end."""
        self.label = "the end"
        self.do_look(Look())
        self.note("state", entries(self.whole_state()))


def entries(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of the state of each parameter, by number and name."""
    items = ((f"{number}.{name}", x) for number, entry in state["state"].items() for name, x in entry.items())
    return {key: x.clone() if isinstance(x, Tensor) else x for key, x in items}
