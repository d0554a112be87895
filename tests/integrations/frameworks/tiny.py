"""A tiny language model and random tokens, for the programs of these tests."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH = 32, 8


def model(seed: int = 0) -> nn.Module:
    """Return a GPT of two layers, with tied weights, without dropout: ranks need not draw the same random numbers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    built: nn.Module = GPT2LMHeadModel(config)
    return built


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens, the same in every run."""

    def __init__(self, count: int = 48, seed: int = 1) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def weights(module: nn.Module) -> Tensor:
    """Return a copy of all parameters, as one tensor."""
    return torch.cat([param.detach().flatten() for param in module.parameters()]).clone()


def difference(left: Tensor, right: Any) -> float:
    """Return the largest difference of two tensors of one shape."""
    return float((left - right).abs().max())
