"""The model of a program: blocks that a forward pass may use or leave out."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.program import Block, Program

WORDS = 11


class Mlp(nn.Module):
    """Two layers, of an odd size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Words(nn.Module):
    """An embedding, looked up by the numbers of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table((x[:, 0].detach().abs() * 7).long() % WORDS)


class Holder(nn.Module):
    """Holds a parameter and is never called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))


class Held(nn.Module):
    """Reads a parameter of its child."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.holder, self.shift = Holder(width), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.holder.gain + self.shift


class Double(nn.Module):
    """A layer in float64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.double()).float()


class Tied(nn.Module):
    """Uses the weight of another block."""

    def __init__(self, width: int, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Spare(nn.Module):
    """Has a parameter that nothing uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(width, width), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Talk(torch.autograd.Function):
    """Adds the mean over the ranks, in both directions, as SyncBatchNorm's statistics travel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x + _mean(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] + _mean(grads[0], ctx.group), None


def _mean(x: Tensor, group: Any) -> Tensor:
    total = x.detach().mean(0)
    parts = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, total, group=group)
    return torch.stack(parts).mean(0)


class Model(nn.Module):
    """Blocks one after the other, each added to what it gets."""

    def __init__(self, program: Program, group: Any) -> None:
        super().__init__()
        self.group = group
        self.blocks = nn.ModuleList()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(program.seed)
            for block in program.blocks:
                self.blocks.append(self._make(block, program.width))
        if program.shared_memory:
            first = next(self.blocks[0].parameters())
            self.alias = nn.Parameter(first.detach())

    def _make(self, block: Block, width: int) -> nn.Module:
        kinds: dict[str, Any] = {"mlp": Mlp, "embedding": Words, "held": Held, "double": Double, "spare": Spare}
        if block.kind in ("linear", "matrix"):
            return nn.Linear(width, width, bias=block.kind == "linear")
        if block.kind == "norm":
            return nn.LayerNorm(width)
        if block.kind == "tied":
            target: Any = self.blocks[block.target]
            return Tied(width, target.weight)
        return kinds[block.kind](width)

    def forward(self, x: Tensor, use: Sequence[int], how: str = "", talk: bool = False) -> Tensor:
        """The output of the blocks in `use`."""
        for number in use:
            x = self._apply_block(number, x, how)
        return Talk.apply(x, self.group) if talk else x

    def _apply_block(self, number: int, x: Tensor, how: str) -> Tensor:
        block = self.blocks[number]
        if how:
            return x + checkpoint(block, x, use_reentrant=how == "reentrant").tanh()
        return x + block(x).tanh()
