"""A training program as data: a model, an optimizer and a list of operations, the same on all ranks.

Programs can be compared, pickled, shrunk and printed. What they do is in `execute.py`, which of them plain DDP supports
in `rules.py`.
"""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Block:
    """A part of the model. `target` is the block whose weight a tied block uses."""

    kind: str  # linear, matrix, mlp, norm, embedding, held, double, tied, spare
    target: int = -1


@dataclass(frozen=True)
class Op:
    """An operation that all ranks carry out."""

    def __str__(self) -> str:
        shown = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value, it in shown if value != it)})"


@dataclass(frozen=True)
class Pass(Op):
    """A forward and a backward pass through some blocks; `uses` has the blocks of each rank."""

    uses: tuple[tuple[int, ...], ...]
    sync: bool = True
    twice: bool = False  # retain_graph=True and a second backward
    retain: bool = False  # retain_graph=True, and torch.autograd.grad() over the retained graph
    checkpoint: str = ""  # "", "plain" or "reentrant"
    talk: bool = False  # collectives of the model's own, in forward and in backward
    inf_rank: int = -1  # this rank's loss is infinite


@dataclass(frozen=True)
class Drop(Op):
    """Drop gradients: by `optimizer`, `model`, `zeros` (set_to_none=False) or `some`, those of `blocks` to None."""

    how: str
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Hand(Op):
    """Set the gradients of a block by hand, to the same numbers on all ranks."""

    block: int
    seed: int = 0


@dataclass(frozen=True)
class Clip(Op):
    """Clip by torch's `norm` or `value`, by the optimizer's own function (`ours`), or ask it for the norm (`ask`)."""

    how: str
    norm_type: float = 2.0
    bound: float = 0.5


@dataclass(frozen=True)
class Differentiate(Op):
    """`torch.autograd.grad` over parameters, by a forward pass of its own."""

    uses: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AllReduce(Op):
    """A collective of the user's: the last loss of all ranks."""


@dataclass(frozen=True)
class Freeze(Op):
    """Set requires_grad of a block's parameters."""

    block: int
    trainable: bool = False


@dataclass(frozen=True)
class Options(Op):
    """Change the learning rate and the weight decay of all groups."""

    factor: float
    weight_decay: float


@dataclass(frozen=True)
class AddGroup(Op):
    """Drop all gradients, and give the optimizer the block that was left out."""


@dataclass(frozen=True)
class Evaluate(Op):
    """Outputs under no_grad: of the `model`, of one `block` called directly; or `read` a block's parameters."""

    how: str
    block: int = 0


@dataclass(frozen=True)
class Reload(Op):
    """Take the state dict of the `optimizer` or of the `model`, and load it back."""

    what: str


@dataclass(frozen=True)
class Look(Op):
    """Wait for all parameters and compare them."""


@dataclass(frozen=True)
class Step(Op):
    """`optimizer.step()`, or the same through GradScaler; perhaps `inside` a no_sync block."""

    inside: bool = False


@dataclass(frozen=True)
class ReadGrad(Op):
    """Use the numbers of a gradient: `read` their sum, or `edit` them by adding."""

    block: int
    how: str = "read"


@dataclass(frozen=True)
class CopyOptimizer(Op):
    """`copy.deepcopy(optimizer)`."""


@dataclass(frozen=True)
class RawState(Op):
    """`optimizer.state_dict()` without consolidation."""


@dataclass(frozen=True)
class Program:
    """What all ranks do. `left_out` is a block that the optimizer gets later, or -1."""

    world: int
    blocks: tuple[Block, ...]
    ops: tuple[Op, ...]
    width: int = 5
    optimizer: str = "SGD"
    options: tuple[tuple[str, Any], ...] = ()
    groups: int = 1
    left_out: int = -1
    scaler: bool = False
    schedule: bool = False
    shared_memory: bool = False  # two parameters over one tensor
    seed: int = 0  # of the data and the initial values

    def __str__(self) -> str:
        blocks = ", ".join(f"{i}:{b.kind}{f'({b.target})' if b.target >= 0 else ''}" for i, b in enumerate(self.blocks))
        flags = [name for name in ("scaler", "schedule", "shared_memory") if getattr(self, name)]
        flags += [f"left_out={self.left_out}"] if self.left_out >= 0 else []
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        head = f"world={self.world} width={self.width} blocks=[{blocks}] {self.optimizer}({options}) "
        head += f"groups={self.groups} data={self.seed} {' '.join(flags)}".rstrip()
        return "\n".join([head, *(f"  {op}" for op in self.ops)])
