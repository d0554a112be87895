"""A number for the bits of a tensor, which is another one if any bit is, or if two elements have changed places.

It is the sum of all words of the memory, each multiplied by an odd number of its own, modulo 2**64. A flipped bit
changes one product by an odd multiple of a power of two, which is never zero. All of it runs on the tensor's device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Words that are multiplied at a time: in host memory they stay in the cache, on an accelerator they cost few kernels.
_HOST_CHUNK, _ACCELERATOR_CHUNK = 1 << 16, 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16}
_MASK = (1 << 64) - 1


def digest(tensor: Tensor) -> Tensor:
    """A number for the bits of a tensor in the order of its elements, as a tensor without dimensions on its device."""
    words = _words(tensor)
    chunk = _HOST_CHUNK if words.device.type == "cpu" else _ACCELERATOR_CHUNK
    weights = _weights(words.device, chunk)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, part in enumerate(words.split(chunk) if words.numel() else ()):
        total += (part.to(torch.int64) * weights[: part.numel()]).sum() * _odd(number)
    return total


def combined(digests: list[Tensor]) -> Tensor:
    """One number for several, in their order."""
    return torch.stack([each * _odd(position) for position, each in enumerate(digests)]).sum()


def _words(tensor: Tensor) -> Tensor:
    """The memory as integers of at most 32 bits: products of larger ones would lose their high bits in a swap."""
    found = tensor.detach().resolve_conj().resolve_neg()
    found = (torch.view_as_real(found) if found.is_complex() else found).contiguous().view(-1)
    return found.view(_WORDS.get(found.element_size(), torch.int32))


def _odd(number: int) -> int:
    """An odd number of 64 bits that looks random, as a signed one: the finaliser of splitmix64."""
    value = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    value = (value ^ value >> 31) | 1
    return value - (1 << 64) if value >> 63 else value


@cache
def _weights(device: torch.device, count: int) -> Tensor:
    """Odd numbers of 64 bits that look random, all different."""
    value = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _odd(1 << 40)
    value = (value ^ (value >> 29)) * _odd(1 << 41)
    return (value ^ (value >> 32)) | 1
