"""Equal values on all ranks before the first step: a broadcast from rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerostep.comm import stream
from zerostep.comm.mesh import Ranks
from zerostep.tensors import is_dense


def broadcast_values(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with those of rank 0, across the replicas and then inside each of them. A collective."""
    copies = [tensor.detach() if is_dense(tensor) else tensor.detach().contiguous() for tensor in tensors]
    with torch.no_grad():
        for transport in (ranks.replicas, ranks.shards):
            stream.broadcast(transport, copies, 0)
        for tensor, copy in zip(tensors, copies, strict=True):
            if not is_dense(tensor):
                _distinct(tensor.detach()).copy_(_distinct(copy, tensor))


def _distinct(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Each element of memory once: an expanded tensor shows some of them many times."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
