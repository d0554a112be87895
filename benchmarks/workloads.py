"""What the training step is measured on: models whose forward pass returns the loss, and their batches, as data.

The batches set how long computing takes against the traffic of 1 Gbit/s. They aim at what remains of a plain DDP step
when all communication is hidden, the bound: at two ranks about 0.72 (gpt), 0.82 (wide), 0.40 (tiny) and 0.59 (frozen).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.cases import SEED, OptimizerSpec
from zerostep.tools.demo import GPT, GPTShape

SHAPE = GPTShape(context=64, width=384, heads=6, layers=6)
WORDS, WIDTH, HIDDEN, CLASSES = 20_000, 400, 1000, 256
TENSORS, TENSOR_BLOCKS, LONGEST = 2000, 8, 1100
ADAMW = OptimizerSpec(AdamW, MappingProxyType({"lr": 1e-3}))


class Wide(nn.Module):
    """An embedding with four fifths of all parameters before a narrow MLP; its gradient comes last, and at once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        sizes = (WIDTH, HIDDEN, HIDDEN, WIDTH, CLASSES)
        self.blocks = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))

    def forward(self, words: Tensor) -> Tensor:
        """Return the loss of guessing each word's number modulo the classes."""
        hidden = self.table(words)
        for block in self.blocks:
            hidden = block(F.gelu(hidden))
        return F.cross_entropy(hidden, words % CLASSES)


class Vectors(nn.Module):
    """Many small tensors, each multiplied once with the front of every row of the input."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(0.02 * torch.randn(size) for size in sizes)

    def forward(self, rows: Tensor) -> Tensor:
        """Return one product per row and tensor."""
        return torch.stack([rows[:, : len(vector)] @ vector for vector in self.vectors])


class Tiny(nn.Module):
    """Two thousand tensors of about a thousand elements: what counts is the cost of each."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [LONGEST - 200 + 37 * place % 201 for place in range(TENSORS)]
        each = TENSORS // TENSOR_BLOCKS
        self.blocks = nn.ModuleList(Vectors(sizes[start : start + each]) for start in range(0, TENSORS, each))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the mean square distance of all products from one."""
        return torch.cat([block(rows) for block in self.blocks]).sub(1).square().mean()


def _gpt() -> nn.Module:
    return GPT(SHAPE)


def _half_frozen_gpt() -> nn.Module:
    model = GPT(SHAPE)
    for block in model.blocks[: SHAPE.layers // 2]:
        block.requires_grad_(False)
    return model


def _windows(size: int, random: torch.Generator) -> Tensor:
    return torch.randint(SHAPE.vocabulary, (size, SHAPE.context + 1), generator=random)


def _words(size: int, random: torch.Generator) -> Tensor:
    return torch.randint(WORDS, (size,), generator=random)


def _rows(size: int, random: torch.Generator) -> Tensor:
    return torch.randn(size, LONGEST, generator=random)


@dataclass(frozen=True)
class Workload:
    """A model, the batch each rank trains it on, and how often it is timed."""

    name: str
    title: str
    make: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Tensor]
    batch: int
    rounds: int
    optimizer: OptimizerSpec = ADAMW

    def model(self) -> nn.Module:
        """Build the model, with the same values at every call."""
        torch.manual_seed(SEED)
        return self.make()

    def data(self, rank: int) -> Tensor:
        """Return the batch a rank trains on, the same at every call."""
        return self.draw(self.batch, torch.Generator().manual_seed(SEED + rank))


WORKLOADS = (
    Workload(
        name="gpt",
        title="GPT of 10.8 million parameters, {} x 64 bytes per rank, AdamW",
        make=_gpt,
        draw=_windows,
        batch=13,
        rounds=6,
    ),
    Workload(
        name="wide",
        title="MLP of 9.9 million parameters, 81% in one embedding, {} words per rank, AdamW",
        make=Wide,
        draw=_words,
        batch=12288,
        rounds=3,  # of seconds each
    ),
    Workload(
        name="tiny",
        title="2,000 tensors of 900 to 1,100 elements, {} rows per rank, AdamW",
        make=Tiny,
        draw=_rows,
        batch=16,
        rounds=12,
    ),
    Workload(
        name="frozen",
        title="The GPT with half of its layers frozen, {} x 64 bytes per rank, AdamW",
        make=_half_frozen_gpt,
        draw=_windows,
        batch=6,
        rounds=6,
    ),
)


def workload_named(name: str) -> Workload:
    """Return the workload of that name."""
    return next(workload for workload in WORKLOADS if workload.name == name)
