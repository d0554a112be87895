"""Gathers of parameters that come into place when they are waited for, and not a moment earlier."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from torch import Tensor

from zerostep.comm.exchange import HostExchange


class LateGather:
    """A gather into a copy. Until `wait`, the parts of other ranks are not numbers."""

    def __init__(self, in_flight: Any, copy: Tensor, memory: Tensor, foreign: list[slice], on_wait: Callable[[], None]):
        # Through numpy: someone may wait where torch forbids to write, as inside of torch.func.grad().
        self._in_flight, self._copy, self._memory, self._foreign = in_flight, copy.numpy(), memory.numpy(), foreign
        self._on_wait = on_wait
        for part in foreign:
            self._memory[part] = math.nan

    def wait(self) -> None:
        """Let the parts of other ranks appear."""
        self._on_wait()
        self._in_flight.wait()
        for part in self._foreign:
            self._memory[part] = self._copy[part]


@contextmanager
def late_gathers(before_wait: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """All gathers in host memory are late; the list has one entry for each that was waited for."""
    real, waits = HostExchange.gather, list[int]()

    def on_wait() -> None:
        before_wait()
        waits.append(1)

    def gather(exchange: Any, memory: Tensor, bucket: Any) -> LateGather:
        copy = memory.clone()
        foreign = [slice(*cut) for rank, cut in enumerate(pairwise(bucket.cuts)) if rank != exchange._rank]
        return LateGather(real(exchange, copy, bucket), copy, memory, foreign, on_wait)

    with patch.object(HostExchange, "gather", gather):
        yield waits
