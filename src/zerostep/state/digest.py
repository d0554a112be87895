"""Numbers for the bits of many tensors, each of which is another one if any bit is, or if two elements change places.

A tensor's words are taken in rows of 1024. Its number is the sum of all words, each multiplied by an odd number of its
place in the row and by one of its row, modulo 2**64. A flipped bit changes one product by an odd multiple of a power of
two, which is never zero. All of it runs on the tensors' device. Tensors that are small are packed, so that the number
of kernels depends on the number of bytes and not on the number of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

_ROW = 1024  # words
# Rows that are multiplied at a time: in host memory they stay in the cache, on an accelerator they cost few kernels
# and, with their products, 96 MiB.
_HOST_ROWS, _ACCELERATOR_ROWS = 1 << 6, 1 << 13
_WORDS = {1: torch.uint8, 2: torch.int16}
_BITS = {**_WORDS, 4: torch.int32, 8: torch.int64}
_MASK = (1 << 64) - 1


class Summand(NamedTuple):
    """A tensor, the number to which its own one is added, and an odd factor."""

    number: int
    tensor: Tensor
    factor: int = 1


def digest(tensor: Tensor) -> Tensor:
    """A number for the bits of a tensor in the order of its elements, as a tensor without dimensions on its device."""
    return digests([Summand(0, tensor)], 1, tensor.device)[0]


def digests(tensors: Iterable[Summand], count: int, device: torch.device) -> Tensor:
    """Numbers for the bits of tensors in the order of their elements, `count` of them, on `device`."""
    sums = _Sums(weighted=True)
    for number, tensor, factor in tensors:
        sums.add(number, _words(tensor), factor)
    return sums.finish(count, device)


def counts(flags: Iterable[Summand], count: int, device: torch.device) -> Tensor:
    """How many elements of flat boolean tensors are true, `count` numbers on `device`."""
    sums = _Sums(weighted=False)
    for number, tensor, factor in flags:
        sums.add(number, tensor.view(torch.uint8), factor)
    return sums.finish(count, device)


def odd(number: int) -> int:
    """An odd number of 64 bits that looks random, as a signed one: the finaliser of splitmix64."""
    value = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    value = (value ^ value >> 31) | 1
    return value - (1 << 64) if value >> 63 else value


def different_bits(one: Tensor, other: Tensor) -> Tensor:
    """Which elements have other bits: NaN is equal to itself here, and zero is not equal to minus zero."""
    bits = _BITS[one.element_size()]
    return one.view(bits) != other.view(bits)


def moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers on another device, in stream order. The host waits for them only if `device` is the host's."""
    if numbers.device == device:
        return numbers
    if device.type == "cpu":
        return numbers.cpu()
    # Only from pinned memory is the copy asynchronous: from any other it would block the host.
    return (numbers.pin_memory() if numbers.device.type == "cpu" else numbers).to(device, non_blocking=True)


@dataclass
class _Pack:
    """Words of several tensors that are summed together, and the rows that they fill."""

    words: list[Tensor] = field(default_factory=list)
    rows: int = 0

    def add(self, words: Tensor) -> None:
        self.words.append(words)
        self.rows += _rows(words)

    def matrix(self) -> Tensor:
        """All words in rows; copied, unless they are those of one tensor that fills its rows."""
        if len(self.words) == 1 and self.words[0].numel() == self.rows * _ROW:
            return self.words[0].view(-1, _ROW)
        zeros = self.words[0].new_zeros(_ROW)
        parts = [part for words in self.words for part in (words, zeros[: _rows(words) * _ROW - words.numel()])]
        return torch.cat(parts).view(-1, _ROW)


class _Piece(NamedTuple):
    """Rows of one tensor that are summed together, from row `first` of it on."""

    number: int
    first: int
    rows: int
    factor: int


class _Sums:
    """Sums of the rows of many tensors, one pack for each dtype and device, and what they are rows of."""

    def __init__(self, weighted: bool) -> None:
        self._weighted = weighted
        self._weights: dict[torch.device, Tensor] = {}
        self._packs: dict[tuple[torch.device, torch.dtype], tuple[_Pack, list[_Piece]]] = {}
        self._sums: list[Tensor] = []
        self._pieces: list[_Piece] = []

    def add(self, number: int, words: Tensor, factor: int) -> None:
        limit = _HOST_ROWS if words.device.type == "cpu" else _ACCELERATOR_ROWS
        for index, part in enumerate(words.split(limit * _ROW) if words.numel() else ()):
            key = words.device, words.dtype
            if key in self._packs and self._packs[key][0].rows + _rows(part) > limit:
                self._sum(*self._packs.pop(key))
            pack, pieces = self._packs.setdefault(key, (_Pack(), []))
            pack.add(part)
            pieces.append(_Piece(number, index * limit, _rows(part), factor))

    def _sum(self, pack: _Pack, pieces: Sequence[_Piece]) -> None:
        matrix = pack.matrix()
        self._sums.append((matrix * self._weights_on(matrix.device) if self._weighted else matrix).sum(dim=1))
        self._pieces += pieces

    def _weights_on(self, device: torch.device) -> Tensor:
        # Not kept for the next time: a copy that was made in another stream might not be there yet.
        if device not in self._weights:
            self._weights[device] = moved(_weights(), device)
        return self._weights[device]

    def finish(self, count: int, device: torch.device) -> Tensor:
        for pack in self._packs.values():
            self._sum(*pack)
        result = torch.zeros(count, dtype=torch.int64, device=device)
        if not self._sums:
            return result
        sums = torch.cat([moved(each, device) for each in self._sums])
        starts = accumulate((piece.rows for piece in self._pieces), initial=0)
        table = [(*piece, start) for piece, start in zip(self._pieces, starts, strict=False)]
        numbers, first, rows, factors, start = moved(torch.tensor(table), device).unbind(1)
        # The number of rows is known here: repeat_interleave would wait for the device to tell it.
        piece_of = torch.repeat_interleave(rows, output_size=sums.numel())
        if self._weighted:
            row = torch.arange(sums.numel(), device=device) + (first - start)[piece_of]
            sums = sums * _mixed(row) * factors[piece_of]
        return result.index_add_(0, numbers[piece_of], sums)


def _rows(words: Tensor) -> int:
    return -(-words.numel() // _ROW)


def _words(tensor: Tensor) -> Tensor:
    """The memory as integers of at most 32 bits: products of larger ones would lose their high bits in a swap."""
    found = tensor.detach().resolve_conj().resolve_neg()
    found = (torch.view_as_real(found) if found.is_complex() else found).contiguous().view(-1)
    return found.view(_WORDS.get(found.element_size(), torch.int32))


@cache
def _weights() -> Tensor:
    """The odd numbers of the places in a row, in host memory; no two of them are equal modulo 2**32."""
    return _mixed(torch.arange(_ROW) + (1 << 48))


def _mixed(value: Tensor) -> Tensor:
    """Odd numbers of 64 bits that look random, all different."""
    value = (value + 1) * odd(1 << 40)
    value = (value ^ (value >> 29)) * odd(1 << 41)
    return (value ^ (value >> 32)) | 1
