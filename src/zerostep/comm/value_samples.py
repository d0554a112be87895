"""A sample of every parameter's values, compared over the ranks: unnamed parameters of one shape in another order.

Facts such as shapes cannot tell such parameters apart. Their values can, because replicas are equal, or were made from
the same seed: the ranks then have the same samples in another order.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from zerostep.comm.agreement import short_list
from zerostep.comm.transport import Transport
from zerostep.dtensors import locals_of

logger = logging.getLogger("zerostep")

_MOST_ELEMENTS = 8
_VALUES_REMEDY = (
    "each step sends the owner's values to everyone, so the model would be a mixture of the ranks' own: wrap the model "
    "in DistributedDataParallel, or broadcast its parameters, before the first step"
)


class ValueSamples:
    """A number for each parameter, made of its shape, its dtype and the bits of up to eight of its elements.

    `titles` name the parameters in messages. Waits for the device: for construction, not for a training step.
    """

    def __init__(self, titles: Sequence[str], params: Sequence[Tensor]) -> None:
        self._titles = titles
        params = locals_of(params)
        samples = _to_host([_sample(param) for param in params])
        self._digests = [_digest(param, sample) for param, sample in zip(params, samples, strict=True)]

    def compare(self, transport: Transport, must_be_equal: bool, remedy: str = _VALUES_REMEDY) -> None:
        """Raise on all ranks if some have the same values in another order; a collective.

        With `must_be_equal`, rank 0 logs a warning if values differ in any other way, which ends with `remedy`.
        """
        together = _to_int(b"".join(digest.to_bytes(8, "little", signed=True) for digest in self._digests))
        if len({row[0] for row in transport.all_gather_ints([together])}) == 1:
            return
        rows = transport.all_gather_ints(self._digests)
        others = [rank for rank, row in enumerate(rows) if row != rows[0]]
        permuted = [rank for rank in others if sorted(rows[rank]) == sorted(rows[0])]
        if permuted:
            raise self._order_error(rows[0], rows[permuted[0]], permuted)
        if must_be_equal and transport.rank == 0:
            logger.warning("%s; %s", self._describe_values(rows), remedy)

    def _order_error(self, first: Sequence[int], other: Sequence[int], ranks: Sequence[int]) -> ValueError:
        moved = [index for index, (here, there) in enumerate(zip(first, other, strict=True)) if here != there]
        source = next(index for index in moved if first[index] == other[moved[0]])
        return ValueError(
            f"rank {short_list(ranks)} has the parameters of rank 0 in another order: its {self._titles[moved[0]]} has "
            f"the values of {self._titles[source]} of rank 0, and {len(moved)} parameters have changed places; pass "
            "them in the same order on every rank, or as (name, parameter) pairs, whose order is compared"
        )

    def _describe_values(self, rows: Sequence[Sequence[int]]) -> str:
        columns = list(zip(*rows, strict=True))
        differing = [index for index, column in enumerate(columns) if len(set(column)) > 1]
        first = columns[differing[0]]
        ranks = [rank for rank, digest in enumerate(first) if digest != first[0]]
        return (
            f"{self._titles[differing[0]]} has other values on rank {short_list(ranks)} than on rank 0, "
            f"as {len(differing)} of {len(columns)} parameters have on some rank"
        )


def _sample(param: Tensor) -> Tensor:
    """Up to eight evenly spaced elements, as bytes; none of a tensor without memory."""
    if param.device.type == "meta":
        return torch.empty(0, dtype=torch.uint8)
    flat = param.detach().reshape(-1)
    step = max(1, -(-flat.numel() // _MOST_ELEMENTS))
    return flat[::step].contiguous().view(torch.uint8)


def _to_host(samples: Sequence[Tensor]) -> list[bytes]:
    """The samples as bytes, with one copy from each device."""
    host = [b""] * len(samples)
    for device in {sample.device for sample in samples}:
        positions = [position for position, sample in enumerate(samples) if sample.device == device]
        together = torch.cat([samples[position] for position in positions]).cpu()
        sizes = [samples[position].numel() for position in positions]
        for position, part in zip(positions, together.split(sizes), strict=True):
            host[position] = part.numpy().tobytes()
    return host


def _digest(param: Tensor, sample: bytes) -> int:
    return _to_int(f"{tuple(param.shape)} {param.dtype} ".encode() + sample)


def _to_int(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
