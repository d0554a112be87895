"""A byte-level GPT, and training text that needs no download: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerostep.tools.errors import DemoError

_TEXT_BYTES = 1 << 20


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a byte-level GPT."""

    context: int = 64
    width: int = 160
    heads: int = 5
    layers: int = 4
    vocabulary: int = 256


class GPT(nn.Module):
    """A causal transformer whose forward pass takes windows of ``context + 1`` bytes and returns the loss."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Parameter(0.02 * torch.randn(shape.context, shape.width))
        self.blocks = nn.ModuleList(_block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(shape.context))

    def forward(self, window: Tensor) -> Tensor:
        """Return the mean cross-entropy of every next byte."""
        hidden = self.token(window[:, :-1]) + self.position
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def _block(shape: GPTShape) -> nn.Module:
    return nn.TransformerEncoderLayer(
        shape.width, shape.heads, 4 * shape.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


def text() -> Tensor:
    """Return a megabyte of source text, as bytes."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"".join(source.read_bytes() for source in sources)[:_TEXT_BYTES]
    if len(data) <= GPTShape().context:
        raise DemoError("the sources of the Python standard library, the demo's text, are not installed: install them")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def windows(source: Tensor, count: int, length: int, random: torch.Generator) -> Tensor:
    """Return `count` windows of `length` bytes from random places of the text."""
    starts = torch.randint(len(source) - length + 1, (count, 1), generator=random)
    return source[starts + torch.arange(length)].long()
