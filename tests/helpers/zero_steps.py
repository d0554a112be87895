"""Parameters, gradients and state for tests of single steps of `ZeroRedundancyOptimizer`."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.pool import OFFSET

MODES = pytest.mark.parametrize("views", [False, True], ids=["copied", "views"])
SEVERAL = pytest.mark.parametrize("world", [2, 3, 4, OFFSET], ids=str)


def make_params(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters of these shapes, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(tuple(shape), generator=generator, dtype=dtype)) for shape in shapes]


def set_gradients(params: Sequence[Tensor], seed: int) -> None:
    """Set gradients that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)


def numbered(params: Sequence[Tensor]) -> dict[str, Tensor]:
    """Copies of the parameters, keyed by their index."""
    return {str(number): param.detach().clone() for number, param in enumerate(params)}


def storages_of(params: Sequence[Tensor]) -> list[int]:
    return [param.untyped_storage().data_ptr() for param in params]
